//! Which kernels a stream runs.

use std::sync::Arc;

use kvcore::{
    ApplyRope, Attend, AttendMla, CopyBlocks, CopyTensor, Dequantize, Gather, Quantize, Result, RotateKeys,
    Scatter, SwapBlocks,
};

use crate::fast::Fast;
use crate::reference;

/// The kernels of a backend. Each trusts that its operation has been checked.
#[derive(Debug, Clone)]
pub(crate) enum KernelTable {
    Reference,
    Fast(Arc<Fast>),
}

/// A method for each kernel.
macro_rules! either {
    ($($name:ident: $op:ty),* $(,)?) => {
        impl KernelTable {
            $(pub(crate) fn $name(&self, op: &$op) -> Result<()> {
                match self {
                    Self::Reference => reference::$name(op),
                    Self::Fast(fast) => fast.$name(op),
                }
            })*
        }
    };
}

either! {
    scatter: Scatter,
    gather: Gather,
    copy_blocks: CopyBlocks,
    swap_blocks: SwapBlocks,
    rope: ApplyRope,
    rotate_keys: RotateKeys,
    attend: Attend,
    attend_mla: AttendMla,
    quantize: Quantize,
    dequantize: Dequantize,
    copy_tensor: CopyTensor,
}
