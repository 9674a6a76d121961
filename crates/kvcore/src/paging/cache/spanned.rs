//! Blocks that span devices: each holds some of the layers, all under the same block numbers.

use std::ops::Range;
use std::sync::Arc;

use super::{Error, Result, SlotMapping};
use crate::base::{BlockId, KvLayout, KvShape, MemoryKind};
use crate::device::{Backend, CopyBlocks, KvArena, Scatter, Stream, TensorView};

/// Which layers a device takes, and how much memory it gives for them.
#[derive(Debug, Clone)]
pub struct Placement {
    /// The device.
    pub backend: Arc<dyn Backend>,
    /// Layers, following those of the placement before.
    pub layers: usize,
    /// Bytes for K, V and their scales of these layers.
    pub budget: usize,
}

/// One device's part.
#[derive(Debug)]
pub struct SpannedPart {
    /// Layers of the model.
    pub layers: Range<usize>,
    /// Their keys and values; its layer 0 is the first of them.
    pub arena: KvArena,
    /// A stream of the device.
    pub stream: Arc<dyn Stream>,
}

/// Keys and values of a model whose layers lie on several devices.
///
/// Every device has the same number of blocks, so one [`crate::BlockPool`] and one block table serve all of them:
/// block `b` of a sequence holds the same tokens everywhere. The number of blocks is what the device with
/// the least room for its layers can have.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{BlockOrder, DType, KvShape, Placement, SpannedArena};
///
/// let shape = KvShape {
///     num_layers: 6, num_blocks: 1, block_size: 16, k_heads: 2, v_heads: 2, k_dim: 8, v_dim: 8,
///     format: DType::F32.into(), order: BlockOrder::TokenMajor,
/// };
/// let per_layer = 16 * 2 * (8 + 8) * 4;
/// let spanned = SpannedArena::allocate(&shape, &[
///     Placement { backend: CpuBackend::new(), layers: 4, budget: 4 * per_layer * 10 },
///     Placement { backend: CpuBackend::new(), layers: 2, budget: 2 * per_layer * 7 },
/// ])?;
/// assert_eq!(spanned.num_blocks(), 7);
/// let (part, layer) = spanned.part(5)?;
/// assert_eq!((part.layers.clone(), layer), (4..6, 1));
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct SpannedArena {
    parts: Vec<SpannedPart>,
    num_blocks: usize,
}

impl SpannedArena {
    /// Allocates each device's layers. `shape` is of the whole model; its number of blocks is ignored.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the placements' layers are not the model's, [`Error::Zero`] for no placement
    /// or one without layers, [`Error::Overflow`], [`Error::NotEnoughMemory`] for one whose budget holds no block, and what a backend
    /// refuses; memory allocated before is freed.
    pub fn allocate(shape: &KvShape, placements: &[Placement]) -> Result<Self> {
        if placements.is_empty() {
            return Err(Error::Zero { what: "placements" });
        }
        let layers = placements.iter().try_fold(0usize, |sum, p| sum.checked_add(p.layers));
        let layers = layers.ok_or(Error::Overflow { what: "layers of all placements" })?;
        crate::base::same("layers of all placements", shape.num_layers, layers)?;
        let of = |placement: &Placement| KvShape { num_layers: placement.layers, ..shape.clone() };
        let mut num_blocks = usize::MAX;
        for placement in placements {
            let layout = KvLayout::within_budget(&of(placement), placement.budget)?;
            num_blocks = num_blocks.min(layout.shape().num_blocks);
        }
        let mut parts = Vec::with_capacity(placements.len());
        let mut first = 0;
        for placement in placements {
            let layout = KvLayout::new(KvShape { num_blocks, ..of(placement) })?;
            let backend = placement.backend.as_ref();
            let arena = KvArena::allocate(backend, MemoryKind::Device, Arc::new(layout))?;
            let layers = first..first + placement.layers;
            first = layers.end;
            parts.push(SpannedPart { layers, arena, stream: backend.stream()? });
        }
        Ok(Self { parts, num_blocks })
    }

    /// Blocks, the same on every device.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The devices' parts, in the order of layers.
    pub fn parts(&self) -> &[SpannedPart] {
        &self.parts
    }

    /// The part that holds a layer of the model, and the layer's number there.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn part(&self, layer: usize) -> Result<(&SpannedPart, usize)> {
        let limit = self.parts.last().map_or(0, |part| part.layers.end);
        let part = self.parts.iter().find(|part| part.layers.contains(&layer));
        part.map(|part| (part, layer - part.layers.start)).ok_or(Error::range("layer", layer, limit))
    }

    /// Writes rows `[rows, heads, dim]`, which lie on the layer's device, to slots of a layer, in the order of
    /// the part's stream: it must wait for an event of the stream that made the rows.
    ///
    /// # Errors
    /// As [`Scatter::check`]; a layer out of range.
    pub fn write(&self, layer: usize, k: TensorView, v: TensorView, slots: &SlotMapping) -> Result<()> {
        let (part, layer) = self.part(layer)?;
        let arena = part.arena.clone();
        part.stream.scatter(&Scatter { arena, layer, k, v, slots: Arc::clone(slots.slots()) })
    }

    /// Copies blocks on every device: what a fork needs before it writes.
    ///
    /// # Errors
    /// As [`CopyBlocks::check`]; nothing is copied anywhere then.
    pub fn copy_blocks(&self, pairs: &Arc<[(BlockId, BlockId)]>) -> Result<()> {
        let copy = |part: &SpannedPart| CopyBlocks { arena: part.arena.clone(), pairs: Arc::clone(pairs) };
        self.parts.iter().try_for_each(|part| copy(part).check())?;
        self.parts.iter().try_for_each(|part| part.stream.copy_blocks(&copy(part)))
    }

    /// Waits for every device.
    pub fn synchronize(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.stream.synchronize())
    }
}
