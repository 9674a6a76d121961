//! Sequences by the caller's own numbers, a layer at a time, read back as dense tensors.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::device::{Device, token_major};
use super::{Error, LayerViews, PagedKvCache, Result, SequenceId, SequenceStart, StaticKvCache};
use crate::backend::Backend;
use crate::tensor::TensorView;

/// Most blocks of a sequence unless it is configured.
pub const DEFAULT_MAX_BLOCKS: usize = 64;

#[derive(Debug)]
struct Named {
    id: SequenceId,
    /// Tokens written in each layer.
    written: Vec<usize>,
}

/// A paged cache whose sequences are appended to layer by layer.
///
/// All layers of a sequence share its blocks: the layer that comes first with a token takes the room, the
/// others write to the same slots, so that the length advances once per token. For engines that attend
/// over dense tensors; those that read blocks in place use [`PagedKvCache`] itself.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     BlockOrder, BlockPool, DType, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache, PagedSequences,
///     allocate_tensor,
/// };
///
/// let backend = CpuBackend::new();
/// let shape = KvShape {
///     num_layers: 2, num_blocks: 8, block_size: 4, k_heads: 2, v_heads: 2, k_dim: 3, v_dim: 3,
///     format: DType::F32.into(), order: BlockOrder::HeadMajor,
/// };
/// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// let cache = PagedKvCache::new(arena, BlockPool::new(0..8)?)?;
/// let mut sequences = PagedSequences::new(backend.clone(), cache)?;
///
/// let id = sequences.create(None)?;
/// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2, 5, 3])?;
/// for layer in 0..2 {
///     sequences.append(id, layer, &rows, &rows)?;
/// }
/// assert_eq!(sequences.len(id)?, 5);
/// assert_eq!(sequences.read(id, 1)?.0.shape(), [2, 5, 3]);
/// sequences.delete(id)?;
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedSequences {
    device: Device,
    cache: PagedKvCache,
    sequences: BTreeMap<u64, Named>,
    max_blocks: usize,
}

impl PagedSequences {
    /// Sequences of at most [`DEFAULT_MAX_BLOCKS`] blocks in `cache`, whose memory is `backend`'s.
    pub fn new(backend: Arc<dyn Backend>, cache: PagedKvCache) -> Result<Self> {
        Ok(Self {
            device: Device::new(backend)?,
            cache,
            sequences: BTreeMap::new(),
            max_blocks: DEFAULT_MAX_BLOCKS,
        })
    }

    /// Another limit to the blocks of a sequence.
    #[must_use]
    pub fn max_blocks(mut self, blocks: usize) -> Self {
        self.max_blocks = blocks;
        self
    }

    /// A new sequence: under the caller's number, or under the smallest above all in use.
    ///
    /// # Errors
    /// [`Error::SequenceExists`] for a number in use.
    pub fn create(&mut self, number: Option<u64>) -> Result<u64> {
        let next = || self.sequences.last_key_value().map_or(0, |(last, _)| last.wrapping_add(1));
        let number = number.unwrap_or_else(next);
        if self.sequences.contains_key(&number) {
            return Err(Error::SequenceExists(number));
        }
        let id = self.cache.create(SequenceStart::default())?;
        let layers = self.cache.arena().layout().shape().num_layers;
        self.sequences.insert(number, Named { id, written: vec![0; layers] });
        Ok(number)
    }

    fn named(&self, number: u64) -> Result<&Named> {
        self.sequences.get(&number).ok_or(Error::UnknownSequence(number))
    }

    /// Tokens written in one layer.
    pub fn layer_len(&self, number: u64, layer: usize) -> Result<usize> {
        let written = &self.named(number)?.written;
        written.get(layer).copied().ok_or(Error::range("layer", layer, written.len()))
    }

    /// Tokens of a sequence: those of the layer that is furthest.
    pub fn len(&self, number: u64) -> Result<usize> {
        self.cache.len(self.named(number)?.id)
    }

    /// Whether a sequence has no token.
    pub fn is_empty(&self, number: u64) -> Result<bool> {
        Ok(self.len(number)? == 0)
    }

    /// Live sequences.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Writes new rows `[heads, tokens, dim]` of one layer behind those it has.
    ///
    /// # Errors
    /// [`Error::SequenceTooLong`], [`Error::OutOfBlocks`], a layer or shape that does not fit; the sequence
    /// is as before then.
    pub fn append(&mut self, number: u64, layer: usize, k: &TensorView, v: &TensorView) -> Result<()> {
        let start = self.layer_len(number, layer)?;
        self.write(number, layer, k, v, start)
    }

    /// Writes rows of one layer at `start`, which forgets what the layer had from there on, and returns
    /// all it has now: `([k_heads, len, k_dim], [v_heads, len, v_dim])`.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`Error::OutOfRange`] for a start that would leave a hole.
    pub fn update(
        &mut self,
        number: u64,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> Result<LayerViews> {
        let held = self.layer_len(number, layer)?;
        if start > held {
            return Err(Error::range("start of the update", start, held + 1));
        }
        self.write(number, layer, k, v, start)?;
        self.read(number, layer)
    }

    fn write(
        &mut self,
        number: u64,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> Result<()> {
        let id = self.named(number)?.id;
        let (k, v) = (token_major(k)?, token_major(v)?);
        let end = start.saturating_add(k.shape()[0]);
        let blocks = self.cache.arena().layout().blocks_for(end);
        if blocks > self.max_blocks {
            return Err(Error::SequenceTooLong { sequence: number, blocks, limit: self.max_blocks });
        }
        let before = self.cache.len(id)?;
        if end > before {
            self.cache.grow(id, end - before)?;
        }
        let slots = self.cache.slots(id, start..end)?;
        if let Err(error) = self.cache.write(id, self.device.stream(), layer, k, v, &slots) {
            self.cache.truncate(id, before)?;
            return Err(error);
        }
        if let Some(named) = self.sequences.get_mut(&number) {
            named.written[layer] = end;
        }
        Ok(())
    }

    /// Copies all rows of one layer: `([k_heads, len, k_dim], [v_heads, len, v_dim])`.
    pub fn read(&self, number: u64, layer: usize) -> Result<LayerViews> {
        self.read_first(number, layer, self.layer_len(number, layer)?)
    }

    fn read_first(&self, number: u64, layer: usize, len: usize) -> Result<LayerViews> {
        let held = self.layer_len(number, layer)?;
        if len > held {
            return Err(Error::range("tokens to read", len, held + 1));
        }
        let slots = self.cache.slots(self.named(number)?.id, 0..len)?;
        self.device.read(self.cache.arena(), layer, Arc::clone(slots.slots()))
    }

    /// Ends a sequence; its blocks are free at once.
    pub fn delete(&mut self, number: u64) -> Result<()> {
        let named = self.sequences.remove(&number).ok_or(Error::UnknownSequence(number))?;
        self.cache.free(named.id)
    }

    /// The cache under the sequences.
    pub fn cache(&self) -> &PagedKvCache {
        &self.cache
    }

    /// One sequence with the interface of a dense cache.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn single(&mut self, number: u64) -> Result<SingleSequence<'_>> {
        self.named(number)?;
        Ok(SingleSequence { sequences: self, number })
    }
}

/// What engines for one sequence ask of a cache; a dense one and a paged one answer with the same bytes.
pub trait DenseKv {
    /// The first `len` tokens of a layer: `([k_heads, len, k_dim], [v_heads, len, v_dim])`.
    fn layer_kv(&self, layer: usize, len: usize) -> Result<LayerViews>;

    /// Writes rows `[heads, tokens, dim]` of a layer at `start` and returns all it has now.
    fn update(&mut self, layer: usize, k: &TensorView, v: &TensorView, start: usize) -> Result<LayerViews>;
}

/// One sequence of a [`PagedSequences`]; made by [`PagedSequences::single`].
#[derive(Debug)]
pub struct SingleSequence<'a> {
    sequences: &'a mut PagedSequences,
    number: u64,
}

impl DenseKv for SingleSequence<'_> {
    fn layer_kv(&self, layer: usize, len: usize) -> Result<LayerViews> {
        self.sequences.read_first(self.number, layer, len)
    }

    fn update(&mut self, layer: usize, k: &TensorView, v: &TensorView, start: usize) -> Result<LayerViews> {
        self.sequences.update(self.number, layer, k, v, start)
    }
}

/// A static cache of one entry with the interface of a dense cache. Its results are views.
#[derive(Debug)]
pub struct DenseSequence {
    device: Device,
    cache: StaticKvCache,
}

impl DenseSequence {
    /// A sequence in a cache of one batch entry, whose memory is `backend`'s.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a cache of another batch size.
    pub fn new(backend: Arc<dyn Backend>, cache: StaticKvCache) -> Result<Self> {
        crate::error::same("batch entries of a single sequence", 1, cache.max_batch())?;
        Ok(Self { device: Device::new(backend)?, cache })
    }
}

impl DenseKv for DenseSequence {
    fn layer_kv(&self, layer: usize, len: usize) -> Result<LayerViews> {
        let (k, v) = self.cache.views(layer)?;
        Ok((k.select(0, 0)?.slice(1, 0, len)?, v.select(0, 0)?.slice(1, 0, len)?))
    }

    fn update(&mut self, layer: usize, k: &TensorView, v: &TensorView, start: usize) -> Result<LayerViews> {
        let (k, v) = (k.unsqueeze(0)?, v.unsqueeze(0)?);
        let (k, v) = self.cache.update(self.device.stream(), layer, &k, &v, &[start])?;
        Ok((k.select(0, 0)?, v.select(0, 0)?))
    }
}
