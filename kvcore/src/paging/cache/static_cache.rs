//! The static cache: one contiguous run of slots per batch entry, allocated once.

use std::collections::HashMap;
use std::sync::Arc;

use super::{CacheKind, Error, KvCache, LayerViews, Result, SequenceId, SequenceStart};
use crate::base::{BlockId, product, same};
use crate::device::{KvArena, Permits, Scatter, Segment, Stream, TensorView, WriteSlots};

// Decision: docs/decisions/paging.md#a-static-cache-is-a-paged-cache-with-one-block-per-entry
/// A cache that stores K as `[num_layers, max_batch, k_heads, max_len, k_dim]`, V likewise, and a length for
/// each layer and entry.
///
/// In its arena, a static cache looks like a paged cache with one block per batch entry: `num_blocks` is the
/// batch size, and `block_size` is the maximum length. Both caches therefore use the same kernels, and one
/// `attend` can use [segments](Self::entry_segment) of both.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     Backend, BlockOrder, DType, KvArena, KvLayout, KvShape, MemoryKind, StaticKvCache, allocate_tensor,
/// };
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let shape = KvShape {
///     num_layers: 2, num_blocks: 3, block_size: 100, k_heads: 4, v_heads: 4, k_dim: 8, v_dim: 8,
///     format: DType::F16.into(), order: BlockOrder::HeadMajor,
/// };
/// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// let mut cache = StaticKvCache::new(arena)?;                       // a batch of 3, 100 tokens each
/// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F16, &[3, 20, 4, 8])?;
/// let (k, _) = cache.update(stream.as_ref(), 0, &rows, &rows, &[0, 0, 0])?;
/// assert_eq!(k.shape(), [3, 20, 4, 8]);
/// assert_eq!(k.storage().address(), cache.arena().k().address());    // a view, not a copy
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct StaticKvCache {
    arena: KvArena,
    /// Number of stored tokens per layer and entry, `[num_layers][max_batch]`.
    lengths: Vec<usize>,
    /// Each sequence's batch entry and start.
    sequences: HashMap<SequenceId, (usize, SequenceStart)>,
    next: u64,
    /// Issues permits to write to each entry's slots.
    permits: Vec<Permits>,
    /// For each entry, a list that contains only the entry's block. The entry's segments share this list.
    blocks: Vec<Arc<[BlockId]>>,
    /// Buffer for a batch's slots, reused between batches.
    minted: Vec<i64>,
}

impl StaticKvCache {
    /// Creates a cache over an arena whose blocks are batch entries.
    ///
    /// # Errors
    /// Returns [`Error::Overflow`] if the number of lengths does not fit in the address space.
    pub fn new(arena: KvArena) -> Result<Self> {
        let s = arena.layout().shape();
        let lengths = vec![0; product("lengths", &[s.num_layers, s.num_blocks])?];
        let permits = (0..s.num_blocks).map(|_| Permits::default()).collect();
        let blocks = (0..s.num_blocks).map(|batch| [BlockId(batch as u32)].into()).collect();
        let (sequences, minted) = (HashMap::new(), Vec::new());
        Ok(Self { arena, lengths, sequences, next: 0, permits, blocks, minted })
    }

    /// Returns the number of batch entries.
    pub fn max_batch(&self) -> usize {
        self.arena.layout().shape().num_blocks
    }

    /// Returns the maximum number of tokens per entry.
    pub fn max_len(&self) -> usize {
        self.arena.layout().shape().block_size
    }

    fn index(&self, layer: usize, batch: usize) -> Result<usize> {
        let layers = self.arena.layout().shape().num_layers;
        if layer >= layers {
            return Err(Error::range("layer", layer, layers));
        }
        if batch >= self.max_batch() {
            return Err(Error::range("batch entry", batch, self.max_batch()));
        }
        Ok(layer * self.max_batch() + batch)
    }

    /// Returns the number of tokens that one entry has in one layer.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the layer or the entry does not exist.
    pub fn entry_len(&self, layer: usize, batch: usize) -> Result<usize> {
        Ok(self.lengths[self.index(layer, batch)?])
    }

    /// Returns the batch entry of a sequence.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn entry(&self, id: SequenceId) -> Result<usize> {
        self.sequences.get(&id).map(|&(batch, _)| batch).ok_or(Error::UnknownSequence(id.0))
    }

    /// Writes the new tokens of each entry `b` in one layer, starting at index `starts[b]`. Returns views of
    /// all tokens up to the end of the longest entry: `([batch, len, k_heads, k_dim], [.., v_dim])`.
    ///
    /// `k` and `v` hold the new rows of each entry, `[batch, new, heads, dim]`, in the form that
    /// [`write`](crate::PagedKvCache::write) accepts for a sequence. Only the new rows are copied.
    ///
    /// # Errors
    /// Returns an error in the following cases, without changing the cache.
    /// - The layer is out of range.
    /// - The batch size or the shape of the rows does not match the cache.
    /// - A start is past the end of its entry, which would leave a gap.
    /// - The new tokens would end past [`max_len`](Self::max_len).
    pub fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        starts: &[usize],
    ) -> Result<LayerViews> {
        self.index(layer, 0)?;
        for view in [k, v] {
            same("rank of [batch, new, heads, dim]", 4, view.shape().len())?;
            same("batch", self.max_batch(), view.shape()[0])?;
        }
        same("new tokens of V", k.shape()[1], v.shape()[1])?;
        same("starts", self.max_batch(), starts.len())?;
        let new = k.shape()[1];
        for (batch, &start) in starts.iter().enumerate() {
            let held = self.entry_len(layer, batch)?;
            if start > held {
                return Err(Error::too_large("start of the update", start, held));
            }
            self.check_end(start.saturating_add(new))?;
        }
        let mut ops = Vec::with_capacity(starts.len());
        for (batch, &start) in starts.iter().enumerate() {
            let slots = self.slots(batch, start, new);
            let op = Scatter::new(&self.arena, layer, k.select(0, batch)?, v.select(0, batch)?, &slots);
            op.check()?;
            ops.push(op);
        }
        ops.iter().try_for_each(|op| stream.scatter(op))?;
        for (batch, &start) in starts.iter().enumerate() {
            let at = self.index(layer, batch)?;
            self.lengths[at] = start + new;
        }
        self.views(layer)
    }

    fn check_end(&self, end: usize) -> Result<()> {
        if end > self.max_len() {
            return Err(Error::too_large("length of a static cache", end, self.max_len()));
        }
        Ok(())
    }

    /// Returns the slots of an entry's new tokens. The permit is valid until the entry is truncated or freed.
    fn slots(&self, batch: usize, start: usize, new: usize) -> WriteSlots {
        let first = batch * self.max_len() + start;
        let slots: Arc<[i64]> = (first..first + new).map(|slot| slot as i64).collect();
        self.permits[batch].slots(0, self.max_len(), slots)
    }

    /// Returns views of one layer's tokens up to the end of the longest entry: `([batch, len, k_heads,
    /// k_dim], [.., v_dim])`. The views are for reading only; see [`LayerViews`].
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the layer does not exist.
    pub fn views(&self, layer: usize) -> Result<LayerViews> {
        let first = self.index(layer, 0)?;
        let len = self.lengths[first..first + self.max_batch()].iter().copied().max().unwrap_or(0);
        self.arena.layer_views(layer, len)
    }

    /// Returns the tokens of one entry in one layer as a segment for an `attend` over [`arena`](Self::arena).
    ///
    /// # Errors
    /// Returns the errors of [`entry_len`](Self::entry_len).
    pub fn entry_segment(&self, layer: usize, batch: usize) -> Result<Segment> {
        let len = self.entry_len(layer, batch)?;
        Ok(Segment::new(Arc::clone(&self.blocks[batch]), len, 0, 0))
    }

    /// Returns the arena of the cache.
    pub fn arena(&self) -> &KvArena {
        &self.arena
    }

    /// Removes all tokens and ends all sequences.
    pub fn reset(&mut self) {
        self.lengths.fill(0);
        self.sequences.clear();
        self.permits.iter().for_each(|entry| entry.void(1));
    }

    /// Sets the length of every entry in one layer, after other code has copied rows into the cache.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the layer does not exist, and [`Error::TooLarge`] if `len` exceeds
    /// [`max_len`](Self::max_len).
    pub fn set_layer_len(&mut self, layer: usize, len: usize) -> Result<()> {
        let first = self.index(layer, 0)?;
        self.check_end(len)?;
        let entries = self.max_batch();
        self.lengths[first..first + entries].fill(len);
        Ok(())
    }

    fn set_len(&mut self, batch: usize, len: usize) {
        let entries = self.max_batch();
        for layer in self.lengths.chunks_exact_mut(entries) {
            layer[batch] = len;
        }
    }
}

impl KvCache for StaticKvCache {
    fn kind(&self) -> CacheKind {
        CacheKind::Static
    }

    fn arena(&self) -> &KvArena {
        self.arena()
    }

    fn max_len(&self) -> usize {
        self.max_len()
    }

    fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Creates a sequence in the first free batch entry.
    fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        let taken = |batch| self.sequences.values().any(|&(other, _)| other == batch);
        let entries = self.max_batch();
        let full = Error::too_large("sequences of a static cache", self.sequences.len() + 1, entries);
        let batch = (0..entries).find(|&batch| !taken(batch)).ok_or(full)?;
        let id = SequenceId(self.next);
        self.next += 1;
        self.set_len(batch, 0);
        self.sequences.insert(id, (batch, start));
        Ok(id)
    }

    fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<WriteSlots> {
        let mut slots = WriteSlots::default();
        self.grow_batch(&[(id, tokens)], &mut slots)?;
        Ok(slots)
    }

    fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut WriteSlots) -> Result<()> {
        for (at, &(id, tokens)) in batch.iter().enumerate() {
            self.check_end(self.len(id)?.saturating_add(tokens))?;
            if batch[..at].iter().any(|&(other, _)| other == id) {
                return Err(Error::Twice { what: "sequence of a batch", number: id.0 });
            }
        }
        let mut minted = std::mem::take(&mut self.minted);
        minted.clear();
        for &(id, tokens) in batch {
            let (entry, start) = (self.entry(id)?, self.len(id)?);
            self.set_len(entry, start + tokens);
            let first = entry * self.max_len() + start;
            minted.extend((first..first + tokens).map(|slot| slot as i64));
        }
        let owner = |&(id, _): &(SequenceId, usize)| Some((&self.permits[self.entry(id).ok()?], 0));
        slots.refill_batch(self.max_len(), minted.iter().copied(), batch.iter().filter_map(owner));
        self.minted = minted;
        Ok(())
    }

    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        let (batch, held) = (self.entry(id)?, self.len(id)?);
        if len > held {
            return Err(Error::too_large("length to truncate to", len, held));
        }
        self.set_len(batch, len);
        self.permits[batch].void(1);
        Ok(())
    }

    fn free(&mut self, id: SequenceId) -> Result<()> {
        let batch = self.entry(id)?;
        self.sequences.remove(&id);
        self.set_len(batch, 0);
        self.permits[batch].void(1);
        Ok(())
    }

    /// Returns the number of tokens in the first layer. [`grow`](KvCache::grow) adds tokens to all layers
    /// at once.
    fn len(&self, id: SequenceId) -> Result<usize> {
        self.entry_len(0, self.entry(id)?)
    }

    fn segment(&self, id: SequenceId) -> Result<Segment> {
        let &(batch, start) = self.sequences.get(&id).ok_or(Error::UnknownSequence(id.0))?;
        let len = self.entry_len(0, batch)?;
        Ok(Segment::new(Arc::clone(&self.blocks[batch]), len, start.logical, start.position))
    }

    fn reset(&mut self) {
        self.reset();
    }

    fn as_static(&self) -> Option<&StaticKvCache> {
        Some(self)
    }
}
