//! Addresses and strides of rows in pools and tensors, in bytes, as declared in `places.cuh`.

use bytemuck::{Pod, Zeroable};
use kvcore::{DType, Error, KvArena, KvPlane, PlaneStrides, Result, TensorView, WritePairs};

use crate::driver::NAME;
use crate::queue::Lowering;

/// The meaning of a launch's items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ItemKind {
    /// Row `i` of the source is copied to slot `list[i]`.
    RowsToSlots = 0,
    /// Slot `list[i]` is copied to row `i` of the destination.
    SlotsToRows = 1,
    /// A block of the source is copied to a block of the destination.
    Pairs = 2,
    /// Row `i` of the source is copied to row `i` of the destination.
    Rows = 3,
}

/// The items of a launch: slots or pairs of blocks, which are listed on the device, or rows.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Items {
    list: u64,
    kind: u32,
    pub(super) count: u32,
    block_size: u32,
    pad: u32,
}

impl Items {
    pub(super) fn new(kind: ItemKind, list: u64, count: usize, block_size: usize) -> Result<Self> {
        let count = u32::try_from(count).map_err(|_| Error::Overflow { what: "rows of one operation" })?;
        Ok(Self { list, kind: kind as u32, count, block_size: block_size as u32, pad: 0 })
    }

    /// Describes the items for a list of `count` slots.
    pub(super) fn slots(arena: &KvArena, kind: ItemKind, list: u64, count: usize) -> Result<Self> {
        let slots = arena.layout().num_slots();
        if u32::try_from(slots).is_err() {
            let what = format!("a pool of {slots} slots, more than 2^32; use several pools");
            return Err(Error::Unsupported { backend: NAME, what });
        }
        Self::new(kind, list, count, arena.layout().shape().block_size)
    }

    /// Uploads pairs of blocks, and describes them as items.
    pub(super) fn pairs(to: &mut Lowering<'_>, pairs: &WritePairs, block_size: usize) -> Result<Self> {
        let list = to.pairs(pairs)?;
        Self::new(ItemKind::Pairs, list, pairs.len(), block_size)
    }
}

/// One side of a copy or a conversion. All values are in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Side {
    pub(super) address: u64,
    pub(super) layer: i64,
    pub(super) outer: i64,
    pub(super) token: i64,
}

/// Returns the size of `elements` elements in bytes. The elements must fill whole bytes.
pub(super) fn bytes_of(dtype: DType, elements: usize) -> i64 {
    (elements * dtype.bits() / 8) as i64
}

/// The addresses of rows in a pool's plane, in its scales, or in a tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Region {
    pub(super) side: Side,
    /// The stride between heads, in bytes.
    pub(super) head: i64,
}

impl Region {
    fn strided(address: u64, dtype: DType, strides: PlaneStrides, layer: usize) -> Self {
        let bytes = |elements| bytes_of(dtype, elements);
        Self {
            side: Side {
                address: address + bytes(strides.layer * layer) as u64,
                layer: bytes(strides.layer),
                outer: bytes(strides.block),
                token: bytes(strides.token),
            },
            head: bytes(strides.head),
        }
    }

    /// Describes a plane's rows, starting at layer `layer`.
    pub(super) fn plane(plane: &KvPlane, layer: usize) -> Self {
        Self::strided(plane.storage.address(), plane.format.storage_dtype(), plane.strides, layer)
    }

    /// Describes a plane's scales, starting at layer `layer`. Returns `None` if the plane has no scales.
    pub(super) fn scales(plane: &KvPlane, layer: usize) -> Option<Self> {
        plane
            .scales
            .map(|(storage, scales)| Self::strided(storage.address(), scales.dtype, scales.strides, layer))
    }

    /// Describes the rows of a view `[rows, heads, dim]`.
    pub(super) fn rows(view: &TensorView) -> Self {
        let bytes = |elements| bytes_of(view.dtype(), elements);
        let address = view.storage().address() + bytes(view.offset()) as u64;
        Self {
            side: Side { address, layer: 0, outer: bytes(view.strides()[0]), token: 0 },
            head: bytes(view.strides()[1]),
        }
    }
}

/// Returns the exponent of the largest power of two, at most 16, that divides all given numbers.
pub(super) fn unit_log(places: impl IntoIterator<Item = i64>) -> u32 {
    let bits = places.into_iter().fold(16, |bits, place| bits | place);
    bits.trailing_zeros()
}

impl Side {
    /// Returns the address and the strides. Their common divisor limits the width of memory accesses.
    pub(super) fn places(&self) -> [i64; 4] {
        [self.address.cast_signed(), self.layer, self.outer, self.token]
    }
}

/// The maximum number of blocks per grid.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

/// Returns the number of thread blocks for `work` items. Kernels loop if there are more items than the blocks
/// can process at once.
pub(super) fn blocks(work: u64, per_block: u64) -> u32 {
    work.div_ceil(per_block.max(1)).min(MOST_BLOCKS) as u32
}

/// Returns an element type's constant in `element.cuh`.
pub(super) fn element_kind(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::F8E4M3 => 3,
        DType::F8E5M2 => 4,
        DType::I8 => 5,
        DType::I4 => 6,
        _ => 0,
    }
}
