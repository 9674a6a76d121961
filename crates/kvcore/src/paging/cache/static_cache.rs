//! The static cache: one contiguous run of slots per batch entry, allocated once.

use std::collections::HashMap;

use super::{CacheKind, Error, KvCache, LayerViews, Places, Result, SequenceId, SequenceStart, SlotMapping};
use crate::base::{BlockId, product, same};
use crate::device::{KvArena, Scatter, Segment, Stream, TensorView};

/// K `[num_layers, max_batch, k_heads, max_len, k_dim]` and V alike, with a length per layer and entry.
///
/// In terms of an arena it is a paged cache with one block per batch entry: `num_blocks` is the batch and
/// `block_size` the longest length. The same kernels therefore serve both, and a
/// [`segment`](Self::entry_segment) of it goes into the same `attend`.
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
/// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F16, &[3, 4, 20, 8])?;
/// let (k, _) = cache.update(stream.as_ref(), 0, &rows, &rows, &[0, 0, 0])?;
/// assert_eq!(k.shape(), [3, 4, 20, 8]);
/// assert_eq!(k.storage().address(), cache.arena().k().address());    // a view, not a copy
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct StaticKvCache {
    arena: KvArena,
    /// Tokens held, `[num_layers][max_batch]`.
    lengths: Vec<usize>,
    /// Which entry each sequence has.
    sequences: HashMap<SequenceId, (usize, SequenceStart)>,
    next: u64,
}

impl StaticKvCache {
    /// A cache over an arena whose blocks are batch entries.
    ///
    /// # Errors
    /// [`Error::Overflow`] for more lengths than can be counted.
    pub fn new(arena: KvArena) -> Result<Self> {
        let s = arena.layout().shape();
        let lengths = vec![0; product("lengths", &[s.num_layers, s.num_blocks])?];
        Ok(Self { arena, lengths, sequences: HashMap::new(), next: 0 })
    }

    /// Batch entries.
    pub fn max_batch(&self) -> usize {
        self.arena.layout().shape().num_blocks
    }

    /// Tokens that an entry can hold.
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

    /// Tokens of one entry in one layer.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a layer or an entry past the last.
    pub fn entry_len(&self, layer: usize, batch: usize) -> Result<usize> {
        Ok(self.lengths[self.index(layer, batch)?])
    }

    /// The batch entry of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn entry(&self, id: SequenceId) -> Result<usize> {
        self.sequences.get(&id).map(|&(batch, _)| batch).ok_or(Error::UnknownSequence(id.0))
    }

    /// Writes new tokens of one layer at `starts[b]` of each entry, and returns views of everything
    /// up to the longest entry's new end: `([batch, k_heads, len, k_dim], [.., v_dim])`.
    ///
    /// `k` and `v` are head-major: `[batch, heads, new, dim]`. Nothing is copied but the new rows.
    ///
    /// # Errors
    /// A layer out of range, a batch that is not the cache's, a start past the entry's end (it would
    /// leave a hole), an end past [`max_len`](Self::max_len). The cache is as before then.
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
            same("rank of [batch, heads, new, dim]", 4, view.shape().len())?;
            same("batch", self.max_batch(), view.shape()[0])?;
        }
        same("new tokens of V", k.shape()[2], v.shape()[2])?;
        same("starts", self.max_batch(), starts.len())?;
        let new = k.shape()[2];
        for (batch, &start) in starts.iter().enumerate() {
            let held = self.entry_len(layer, batch)?;
            if start > held {
                return Err(Error::range("start of the update", start, held + 1));
            }
            self.check_end(start.saturating_add(new))?;
        }
        let mut ops = Vec::with_capacity(starts.len());
        for (batch, &start) in starts.iter().enumerate() {
            let rows = |view: &TensorView| view.select(0, batch)?.permute(&[1, 0, 2]);
            let slots = self.slots(batch, start, new).slots().clone();
            let op = Scatter { arena: self.arena.clone(), layer, k: rows(k)?, v: rows(v)?, slots };
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
            return Err(Error::range("length of a static cache", end, self.max_len() + 1));
        }
        Ok(())
    }

    fn slots(&self, batch: usize, start: usize, new: usize) -> SlotMapping {
        let first = (batch * self.max_len() + start) as i64;
        (first..first + new as i64).collect::<Vec<_>>().into()
    }

    /// Views of one layer up to the longest entry: `([batch, k_heads, len, k_dim], [.., v_dim])`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a layer past the last.
    pub fn views(&self, layer: usize) -> Result<LayerViews> {
        let first = self.index(layer, 0)?;
        let len = self.lengths[first..first + self.max_batch()].iter().copied().max().unwrap_or(0);
        self.arena.layer_views(layer, len)
    }

    /// An entry's tokens in one layer as a segment of an attend over [`arena`](Self::arena).
    ///
    /// # Errors
    /// As [`entry_len`](Self::entry_len).
    pub fn entry_segment(&self, layer: usize, batch: usize) -> Result<Segment> {
        let len = self.entry_len(layer, batch)?;
        Ok(Segment::new([BlockId(batch as u32)].into(), len, 0, 0))
    }

    /// The memory under the cache.
    pub fn arena(&self) -> &KvArena {
        &self.arena
    }

    /// Forgets all tokens and ends all sequences.
    pub fn reset(&mut self) {
        self.lengths.fill(0);
        self.sequences.clear();
    }

    /// Says that every entry holds `len` tokens in one layer, whose rows were written by a copy.
    pub(crate) fn set_layer_len(&mut self, layer: usize, len: usize) -> Result<()> {
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

    /// Takes the first batch entry that no sequence has.
    fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        let taken = |batch| self.sequences.values().any(|&(other, _)| other == batch);
        let entries = self.max_batch();
        let full = Error::range("sequences of a static cache", self.sequences.len() + 1, entries + 1);
        let batch = (0..entries).find(|&batch| !taken(batch)).ok_or(full)?;
        let id = SequenceId(self.next);
        self.next += 1;
        self.set_len(batch, 0);
        self.sequences.insert(id, (batch, start));
        Ok(id)
    }

    fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<SlotMapping> {
        let (batch, start) = (self.entry(id)?, self.len(id)?);
        let end = start.saturating_add(tokens);
        self.check_end(end)?;
        self.set_len(batch, end);
        Ok(self.slots(batch, start, tokens))
    }

    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        let (batch, held) = (self.entry(id)?, self.len(id)?);
        if len > held {
            return Err(Error::range("length to truncate to", len, held + 1));
        }
        self.set_len(batch, len);
        Ok(())
    }

    fn free(&mut self, id: SequenceId) -> Result<()> {
        let batch = self.entry(id)?;
        self.sequences.remove(&id);
        self.set_len(batch, 0);
        Ok(())
    }

    /// Tokens in the first layer; [`grow`](KvCache::grow) counts in all of them at once.
    fn len(&self, id: SequenceId) -> Result<usize> {
        self.entry_len(0, self.entry(id)?)
    }

    fn segment(&self, id: SequenceId) -> Result<Segment> {
        let &(batch, start) = self.sequences.get(&id).ok_or(Error::UnknownSequence(id.0))?;
        let len = self.entry_len(0, batch)?;
        Ok(Segment::new([BlockId(batch as u32)].into(), len, start.logical, start.position))
    }

    fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        places: Places<'_>,
    ) -> Result<LayerViews> {
        match places {
            Places::Starts(starts) => self.update(stream, layer, k, v, starts),
            Places::Slots(_) => Err(Error::WrongCache { cache: "static", given: "slots" }),
        }
    }

    fn reset(&mut self) {
        self.reset();
    }

    fn as_static(&self) -> Option<&StaticKvCache> {
        Some(self)
    }
}
