//! The kernels that a stream runs: reference kernels or fast kernels.

use std::sync::Arc;

use kvcore::{KvArena, LayerRopes, Operation, Result, SlotMapping};

use crate::fast::Fast;
use crate::foreign::{ForeignCache, ForeignLoad};
use crate::reference;

/// The kernels of a backend. Each one assumes that its operation has been checked.
#[derive(Debug, Clone)]
pub(crate) enum KernelTable {
    Reference,
    Fast(Arc<Fast>),
}

/// Work that a stream runs later: a kernel with its operation, or a host access.
pub(crate) type QueuedWork = Box<dyn FnOnce() -> Result<()> + Send>;

/// Maps each operation to its kernel, which has the same name in `reference` and in `Fast`.
macro_rules! kernels {
    ($($operation:ident: $kernel:ident),* $(,)?) => {
        impl KernelTable {
            /// Runs an operation immediately.
            pub(crate) fn run(&self, operation: Operation<'_>) -> Result<()> {
                match (self, operation) {
                    $((Self::Reference, Operation::$operation(op)) => reference::$kernel(op),
                    (Self::Fast(fast), Operation::$operation(op)) => fast.$kernel(op),)*
                }
            }

            /// Returns a closure that runs a copy of the operation.
            pub(crate) fn deferred(&self, operation: Operation<'_>) -> QueuedWork {
                let kernels = self.clone();
                match operation {
                    $(Operation::$operation(op) => {
                        let op = op.clone();
                        Box::new(move || kernels.run(Operation::$operation(&op)))
                    })*
                }
            }
        }
    };
}

kernels! {
    Scatter: scatter,
    Gather: gather,
    CopyBlocks: copy_blocks,
    SwapBlocks: swap_blocks,
    CopyTensor: copy_tensor,
    ApplyRope: rope,
    RotateKeys: rotate_keys,
    Attend: attend,
    AttendMla: attend_mla,
    AttendMass: attend_mass,
    Quantize: quantize,
    Dequantize: dequantize,
}

/// The kernels that copy between an arena and another engine's cache. They are not part of the backend
/// contract, because caches with such layouts exist only in host memory.
impl KernelTable {
    pub(crate) fn load_foreign(
        &self,
        cache: &ForeignCache,
        arena: &KvArena,
        loads: &[ForeignLoad],
        ropes: &LayerRopes,
    ) -> Result<()> {
        match self {
            Self::Reference => reference::load_foreign(cache, arena, loads, ropes),
            Self::Fast(fast) => fast.load_foreign(cache, arena, loads, ropes),
        }
    }

    pub(crate) fn save_foreign(
        &self,
        cache: &ForeignCache,
        arena: &KvArena,
        to: &SlotMapping,
        from: &SlotMapping,
    ) -> Result<()> {
        match self {
            Self::Reference => reference::save_foreign(cache, arena, to, from),
            Self::Fast(fast) => fast.save_foreign(cache, arena, to, from),
        }
    }
}
