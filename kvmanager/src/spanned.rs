//! Blocks that span devices: each device holds some of the layers, under one set of block numbers.

use crate::error::{CoreError, range, same};
use crate::{Error, Result};
use kvcore::{
    Backend, CopyBlocks, KvArena, KvLayout, KvShape, MemoryKind, Scatter, Stream, TensorView, WritePairs,
    WriteSlots,
};
use std::ops::Range;
use std::sync::Arc;

/// The layers that a device holds, and its memory budget for them.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Backend of the device.
    pub backend: Arc<dyn Backend>,
    /// Number of layers, which follow those of the previous placement.
    pub layers: usize,
    /// Bytes for K, V and their scales of these layers.
    pub budget: usize,
}

/// The part of one device.
#[derive(Debug)]
pub struct SpannedPart {
    /// The part's layers, numbered as in the model.
    pub layers: Range<usize>,
    /// Keys and values of these layers. Layer 0 of the arena is the first of them.
    pub arena: KvArena,
    /// A stream of the device.
    pub stream: Arc<dyn Stream>,
}

/// The keys and values of a model whose layers lie on several devices.
///
/// Every device has the same number of blocks, so one [`kvcore::BlockPool`] and one block table serve all of
/// them: block `b` of a sequence holds the same tokens on every device. The device whose budget holds the
/// fewest blocks of its layers determines the number of blocks.
///
/// An engine needs it that runs the first layers of a model on one device of a process and the later layers on
/// another, and moves the hidden states in between. An engine with one device takes a [`KvArena`], as `kvmodel`
/// does.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{BlockOrder, DType, KvShape};
/// use kvmanager::{Placement, SpannedArena};
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
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug)]
pub struct SpannedArena {
    parts: Vec<SpannedPart>,
    num_blocks: usize,
}

impl SpannedArena {
    /// Allocates the layers of each device. `shape` describes the whole model; its number of blocks is
    /// ignored.
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::Mismatch`] if the placements do not add up to the model's layers.
    /// - Returns [`kvcore::Error::Zero`] if there is no placement, or a placement without layers.
    /// - Returns [`kvcore::Error::Overflow`] if a size does not fit the address space.
    /// - Returns [`kvcore::Error::NotEnoughMemory`] if a placement's budget does not hold one block.
    /// - Returns the errors of the backends.
    ///
    /// In these cases memory that was already allocated is freed.
    pub fn allocate(shape: &KvShape, placements: &[Placement]) -> Result<Self> {
        if placements.is_empty() {
            return Err(Error::Core(CoreError::Zero { what: "placements" }));
        }
        let layers = placements.iter().try_fold(0usize, |sum, p| sum.checked_add(p.layers));
        let layers = layers.ok_or(Error::Core(CoreError::Overflow { what: "layers of all placements" }))?;
        same("layers of all placements", shape.num_layers, layers)?;
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

    /// Returns the number of blocks, which is equal on all devices.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Returns the parts of the devices, in the order of layers.
    pub fn parts(&self) -> &[SpannedPart] {
        &self.parts
    }

    /// Returns the part that holds a layer of the model, and the layer's number in that part.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if `layer` is past the last layer.
    pub fn part(&self, layer: usize) -> Result<(&SpannedPart, usize)> {
        let limit = self.parts.last().map_or(0, |part| part.layers.end);
        let part = self.parts.iter().find(|part| part.layers.contains(&layer));
        part.map(|part| (part, layer - part.layers.start)).ok_or(range("layer", layer, limit))
    }

    /// Writes rows `[rows, heads, dim]` to slots of a layer, in the order of the part's stream. The rows
    /// MUST lie on the layer's device, and the part's stream MUST wait for an event of the stream that
    /// computed the rows.
    ///
    /// # Errors
    /// Returns the errors of [`Scatter::check`], and [`kvcore::Error::OutOfRange`] if `layer` is past the last
    /// layer.
    pub fn write(&self, layer: usize, k: TensorView, v: TensorView, slots: &WriteSlots) -> Result<()> {
        let (part, layer) = self.part(layer)?;
        let arena = part.arena.clone();
        Ok(part.stream.scatter(&Scatter { arena, layer, k, v, slots: slots.clone(), rotation: None })?)
    }

    /// Copies blocks on every device, as a fork needs before it writes.
    ///
    /// # Errors
    /// Returns the errors of [`CopyBlocks::check`]; in these cases nothing is copied on any device. Also
    /// returns the errors of the streams.
    pub fn copy_blocks(&self, pairs: &WritePairs) -> Result<()> {
        let copy = |part: &SpannedPart| CopyBlocks { arena: part.arena.clone(), pairs: pairs.clone() };
        self.parts.iter().try_for_each(|part| copy(part).check())?;
        Ok(self.parts.iter().try_for_each(|part| part.stream.copy_blocks(&copy(part)))?)
    }

    /// Waits for every device.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.parts.iter().try_for_each(|part| part.stream.synchronize())?)
    }
}
