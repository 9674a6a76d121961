//! Sequences with IDs that the caller chooses. They are written layer by layer and read back as dense
//! tensors.

use kvcore::{Backend, LayerViews, PagedKvCache, SequenceId, SequenceStart, Stream, TensorView};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{CoreError, range, same, too_large};
use crate::rows::read_rows;
use crate::{BlockManager, Error, Result};

/// Default maximum number of blocks per sequence.
pub const DEFAULT_MAX_BLOCKS: usize = 64;

#[derive(Debug)]
struct Named {
    id: SequenceId,
    /// Number of tokens written to each layer.
    written: Vec<usize>,
}

/// A set of sequences in the blocks of a [`BlockManager`]. Tokens are appended layer by layer.
///
/// All layers of a sequence share its blocks. The first layer to which a token is appended allocates the
/// token's slot, and the other layers write to the same slot, so the length grows only once per token. Copies
/// of rows run in the order of the caller's streams, as described at [`PagedKvCache`](PagedKvCache#order).
/// Use this type for engines that attend over dense tensors. Engines that read blocks in place should use
/// [`PagedKvCache`] itself.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{Backend, BlockOrder, DType, KvShape, MemoryKind, allocate_tensor};
/// use kvmanager::{BlockManager, PagedSequences};
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let shape = KvShape {
///     num_layers: 2, num_blocks: 8, block_size: 4, k_heads: 2, v_heads: 2, k_dim: 3, v_dim: 3,
///     format: DType::F32.into(), order: BlockOrder::HeadMajor,
/// };
/// let manager = BlockManager::new(backend.clone(), shape)?;
/// let mut sequences = PagedSequences::new(&manager)?;
///
/// let id = sequences.create(None)?;
/// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[5, 2, 3])?;
/// for layer in 0..2 {
///     sequences.append(stream.as_ref(), id, layer, &rows, &rows)?;
/// }
/// assert_eq!((sequences.len(id)?, manager.counts().free), (5, 6));
/// assert_eq!(sequences.read(stream.as_ref(), id, 1, 5)?.0.shape(), [5, 2, 3]);
/// sequences.delete(id)?;
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedSequences {
    backend: Arc<dyn Backend>,
    cache: PagedKvCache,
    sequences: BTreeMap<u64, Named>,
    max_blocks: usize,
}

impl PagedSequences {
    /// Creates an empty set of sequences that allocate their blocks from `manager`. A sequence can have at
    /// most [`DEFAULT_MAX_BLOCKS`] blocks.
    ///
    /// # Errors
    /// Returns the errors of [`PagedKvCache::new`].
    pub fn new(manager: &BlockManager) -> Result<Self> {
        let (backend, pool) = manager.parts();
        let cache = PagedKvCache::new(manager.arena().clone(), pool.clone())?;
        let backend = Arc::clone(backend);
        Ok(Self { backend, cache, sequences: BTreeMap::new(), max_blocks: DEFAULT_MAX_BLOCKS })
    }

    /// Sets the maximum number of blocks per sequence.
    #[must_use]
    pub fn max_blocks(mut self, blocks: usize) -> Self {
        self.max_blocks = blocks;
        self
    }

    /// Creates a sequence with the ID `number`, and returns the ID. If `number` is `None`, the ID is the
    /// largest ID in use plus 1, or 0 if there are no sequences.
    ///
    /// # Errors
    /// Returns [`Error::SequenceExists`] if the ID is in use.
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
        self.sequences.get(&number).ok_or(Error::Core(CoreError::UnknownSequence(number)))
    }

    /// Returns the number of tokens written to one layer of a sequence.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::UnknownSequence`] if there is no such sequence, and
    /// [`kvcore::Error::OutOfRange`] if `layer` is past the last layer.
    pub fn layer_len(&self, number: u64, layer: usize) -> Result<usize> {
        let written = &self.named(number)?.written;
        written.get(layer).copied().ok_or(range("layer", layer, written.len()))
    }

    /// Returns the number of tokens in a sequence, which is the length of its longest layer.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::UnknownSequence`] if there is no such sequence.
    pub fn len(&self, number: u64) -> Result<usize> {
        Ok(self.cache.len(self.named(number)?.id)?)
    }

    /// Appends rows `[tokens, heads, dim]` of new tokens to one layer of a sequence.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::UnknownSequence`] if there is no such sequence, [`Error::SequenceTooLong`] if
    /// the sequence would exceed its maximum number of blocks, [`kvcore::Error::OutOfBlocks`] if there are
    /// not enough blocks, and an error if the layer or a shape does not fit. The sequence is unchanged in
    /// these cases.
    pub fn append(
        &mut self,
        stream: &dyn Stream,
        number: u64,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
    ) -> Result<()> {
        let start = self.layer_len(number, layer)?;
        self.write(stream, number, layer, k, v, start)
    }

    /// Replaces token `start` and all later tokens of one layer with new rows. Returns copies of all rows of
    /// the layer, as `([len, k_heads, k_dim], [len, v_heads, v_dim])`. Blocks past the end of the longest
    /// layer are freed.
    ///
    /// ```
    /// # use kvbackend_cpu::CpuBackend;
    /// # use kvcore::{Backend, BlockOrder, DType, KvShape, MemoryKind, allocate_tensor};
    /// # use kvmanager::{BlockManager, PagedSequences};
    /// # let backend = CpuBackend::new();
    /// # let stream = backend.stream()?;
    /// # let shape = KvShape {
    /// #     num_layers: 1, num_blocks: 8, block_size: 4, k_heads: 2, v_heads: 2, k_dim: 3, v_dim: 3,
    /// #     format: DType::F32.into(), order: BlockOrder::HeadMajor,
    /// # };
    /// # let manager = BlockManager::new(backend.clone(), shape)?;
    /// # let mut sequences = PagedSequences::new(&manager)?;
    /// let id = sequences.create(None)?;
    /// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[6, 2, 3])?;
    /// sequences.append(stream.as_ref(), id, 0, &rows, &rows)?;
    /// // The last four of six tokens were wrong: three other tokens replace them.
    /// let new = rows.slice(0, 0, 3)?;
    /// let (k, _) = sequences.update(stream.as_ref(), id, 0, &new, &new, 2)?;
    /// assert_eq!((k.shape(), sequences.len(id)?), (&[5, 2, 3][..], 5));
    /// # Ok::<(), kvmanager::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`append`](Self::append), [`kvcore::Error::TooLarge`] if `start` would leave a
    /// gap, and the errors of [`read`](Self::read). If copying the rows fails, the tokens have already been
    /// replaced.
    pub fn update(
        &mut self,
        stream: &dyn Stream,
        number: u64,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> Result<LayerViews> {
        let held = self.layer_len(number, layer)?;
        if start > held {
            return Err(too_large("start of the update", start, held));
        }
        self.write(stream, number, layer, k, v, start)?;
        self.read(stream, number, layer, self.layer_len(number, layer)?)
    }

    fn write(
        &mut self,
        stream: &dyn Stream,
        number: u64,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> Result<()> {
        let id = self.named(number)?.id;
        same("rank of [rows, heads, dim]", 3, k.shape().len())?;
        let end = start.saturating_add(k.shape()[0]);
        let blocks = self.cache.arena().layout().blocks_for(end);
        if blocks > self.max_blocks {
            return Err(Error::SequenceTooLong { sequence: number, blocks, limit: self.max_blocks });
        }
        let before = self.cache.len(id)?;
        if end > before {
            self.cache.grow(id, end - before)?;
        }
        let slots = self.cache.write_slots(id, start..end)?;
        if let Err(error) = self.cache.write(id, stream, layer, k.clone(), v.clone(), &slots) {
            self.cache.truncate(id, before)?;
            return Err(error.into());
        }
        let Some(named) = self.sequences.get_mut(&number) else { return Ok(()) };
        named.written[layer] = end;
        // Decision: docs/decisions/managers.md#a-sequence-is-as-long-as-its-longest-layer
        let furthest = named.written.iter().copied().max().unwrap_or(end);
        Ok(self.cache.truncate(id, furthest)?)
    }

    /// Copies the first `len` rows of one layer, and returns `([len, k_heads, k_dim], [len, v_heads,
    /// v_dim])`.
    ///
    /// # Errors
    /// Returns the errors of [`layer_len`](Self::layer_len), [`kvcore::Error::TooLarge`] if the layer has
    /// fewer than `len` tokens, and the errors of the backend.
    pub fn read(&self, stream: &dyn Stream, number: u64, layer: usize, len: usize) -> Result<LayerViews> {
        let held = self.layer_len(number, layer)?;
        if len > held {
            return Err(too_large("tokens to read", len, held));
        }
        let slots = self.cache.slots(self.named(number)?.id, 0..len)?;
        read_rows(self.backend.as_ref(), stream, self.cache.arena(), layer, slots.slots())
    }

    /// Deletes a sequence, and frees its blocks immediately.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::UnknownSequence`] if there is no such sequence.
    pub fn delete(&mut self, number: u64) -> Result<()> {
        let named = self.sequences.remove(&number).ok_or(Error::Core(CoreError::UnknownSequence(number)))?;
        Ok(self.cache.free(named.id)?)
    }
}
