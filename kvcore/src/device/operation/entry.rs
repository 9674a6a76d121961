//! The enum of all operations, through which all work on a stream is enqueued.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{
    ApplyRope, Attend, AttendMass, AttendMla, CopyBlocks, CopyTensor, Dequantize, Gather, Quantize,
    RotateKeys, Scatter, SwapBlocks,
};
use crate::base::Result;
use crate::device::{Counters, KvArena, Storage, Stream, TensorView};

/// Handles to the memory that an operation touches. The list is short enough to be stored inline.
#[derive(Default)]
pub(super) struct Storages<'a>(SmallVec<[&'a Arc<dyn Storage>; 8]>);

impl<'a> Storages<'a> {
    pub(super) fn arena(&mut self, arena: &'a KvArena) {
        self.0.extend(arena.storages());
    }

    pub(super) fn view(&mut self, view: &'a TensorView) {
        self.0.push(view.storage());
    }
}

// Decision: docs/decisions/device.md#checked-is-the-proof-of-a-check
/// An operation that has passed its check. Only [`Operation::checked`] creates values of this type. Kernels
/// rely on the check for memory safety.
#[derive(Debug, Clone, Copy)]
pub struct Checked<'a>(Operation<'a>);

impl<'a> Checked<'a> {
    /// Returns the checked operation.
    pub fn operation(self) -> Operation<'a> {
        self.0
    }
}

/// Returns 1, for operations whose calls are counted instead of their bytes.
fn once<T>(_: &T) -> usize {
    1
}

/// Defines [`Operation`], and a method of `dyn Stream` for each operation.
macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident: $method:ident, $counter:ident += $amount:path;)*) => {
        // Decision: docs/decisions/device.md#an-operation-is-borrowed
        /// Any operation of the backend contract, by reference. Cheap to copy. Only a backend that defers
        /// work clones the descriptor.
        ///
        /// To add an operation, add a descriptor, a line to the list below, and a kernel to each backend.
        ///
        /// ```
        /// # use kvbackend_cpu::CpuBackend;
        /// use kvcore::{Backend, CopyTensor, DType, MemoryKind, Operation, allocate_tensor};
        ///
        /// let backend = CpuBackend::new();
        /// let tensor = || allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[4]);
        /// let copy = CopyTensor { src: tensor()?, dst: tensor()? };
        /// let operation = Operation::from(&copy);
        /// assert_eq!((operation.name(), operation.bytes()), ("copy_tensor", 16));
        /// backend.stream()?.run(operation)?;
        /// # Ok::<(), kvcore::Error>(())
        /// ```
        #[derive(Debug, Clone, Copy)]
        pub enum Operation<'a> {
            $($(#[$doc])* $variant(&'a $variant),)*
        }

        $(impl<'a> From<&'a $variant> for Operation<'a> {
            fn from(descriptor: &'a $variant) -> Self {
                Self::$variant(descriptor)
            }
        })*

        impl<'a> Operation<'a> {
            /// Returns the operation's name, as used in errors, capabilities and profiles.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant(_) => stringify!($method),)* }
            }

            /// Checks shapes, element types, ranges and write permits against each other.
            ///
            /// # Errors
            /// Returns the errors of the descriptor's own `check`.
            pub fn check(self) -> Result<()> {
                match self { $(Self::$variant(descriptor) => descriptor.check(),)* }
            }

            /// Returns the number of bytes that the operation writes, or the number it reads if it only reads
            /// the cache.
            pub fn bytes(self) -> usize {
                match self { $(Self::$variant(descriptor) => descriptor.bytes(),)* }
            }

            /// Returns every storage that the operation reads or writes.
            pub fn storages(self) -> impl Iterator<Item = &'a Arc<dyn Storage>> {
                let mut storages = Storages::default();
                match self { $(Self::$variant(descriptor) => descriptor.storages(&mut storages),)* }
                storages.0.into_iter()
            }

            /// Checks the operation and returns the proof that [`Stream::launch`] requires.
            ///
            /// # Errors
            /// Returns the errors of [`check`](Self::check).
            pub fn checked(self) -> Result<Checked<'a>> {
                self.check().map(|()| Checked(self))
            }

            /// Adds the operation to a backend's counters.
            pub(crate) fn count(self, counters: &Counters) {
                match self {
                    $(Self::$variant(descriptor) => Counters::add(&counters.$counter, $amount(descriptor)),)*
                }
            }
        }

        impl dyn Stream + '_ {
            $($(#[$doc])*
            ///
            /// # Errors
            /// Returns the errors of [`Stream::run`].
            pub fn $method(&self, operation: &$variant) -> Result<()> {
                self.run(Operation::$variant(operation))
            })*
        }
    };
}

// Decision: docs/decisions/device.md#one-enum-holds-every-operation
operations! {
    /// Writes new K and V rows to cache slots.
    Scatter: scatter, scatter_bytes += Scatter::bytes;
    /// Reads cache slots into contiguous rows, optionally rotating the keys.
    Gather: gather, gather_bytes += Gather::bytes;
    /// Copies whole blocks within one arena, in all layers.
    CopyBlocks: copy_blocks, block_copy_bytes += CopyBlocks::bytes;
    /// Copies whole blocks from one arena to another, in all layers.
    SwapBlocks: swap_blocks, block_copy_bytes += SwapBlocks::bytes;
    /// Copies a tensor with any strides into another tensor of the same shape.
    CopyTensor: copy_tensor, tensor_copy_bytes += CopyTensor::bytes;
    /// Applies a rotary embedding to rows in place.
    ApplyRope: rope, rope_bytes += ApplyRope::bytes;
    /// Copies cached blocks of one layer and rotates the keys by a distance.
    RotateKeys: rotate_keys, block_copy_bytes += RotateKeys::bytes;
    /// Computes grouped-query attention over segments.
    Attend: attend, attend_calls += once;
    /// Computes attention over cached latents.
    AttendMla: attend_mla, attend_calls += once;
    /// Sums the softmax weights that a sequence's rows give to each token before them.
    AttendMass: attend_mass, mass_calls += once;
    /// Quantises blocks of a dense arena into a quantised arena.
    Quantize: quantize, quantize_bytes += Quantize::bytes;
    /// Dequantises blocks of a quantised arena into a dense arena.
    Dequantize: dequantize, dequantize_bytes += Dequantize::bytes;
}
