//! One sequence behind the interface of a dense cache, paged or dense underneath.

use super::{LayerViews, PagedSequences, Result, StaticKvCache};
use crate::device::{Stream, TensorView};

/// What engines for one sequence ask of a cache; a dense one and a paged one answer with the same bytes.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     Backend, BlockOrder, BlockPool, DType, DenseKv, DenseSequence, KvArena, KvLayout, KvShape, MemoryKind,
///     PagedKvCache, PagedSequences, StaticKvCache, allocate_tensor,
/// };
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let arena = |num_blocks, block_size| {
///     let shape = KvShape {
///         num_layers: 1, num_blocks, block_size, k_heads: 2, v_heads: 2, k_dim: 3, v_dim: 3,
///         format: DType::F32.into(), order: BlockOrder::HeadMajor,
///     };
///     KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))
/// };
/// let mut dense = DenseSequence::new(StaticKvCache::new(arena(1, 32)?)?)?;
/// let cache = PagedKvCache::new(arena(8, 4)?, BlockPool::new(0..8)?)?;
/// let mut sequences = PagedSequences::new(backend.clone(), cache);
/// let id = sequences.create(None)?;
/// let mut paged = sequences.single(id)?;
///
/// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2, 5, 3])?;
/// for kv in [&mut dense as &mut dyn DenseKv, &mut paged] {
///     let (k, _) = kv.update(stream.as_ref(), 0, &rows, &rows, 0)?;
///     assert_eq!(k.shape(), [2, 5, 3]);
///     assert_eq!(kv.layer_kv(stream.as_ref(), 0, 4)?.0.shape(), [2, 4, 3]);
/// }
/// # Ok::<(), kvcore::Error>(())
/// ```
pub trait DenseKv {
    /// The first `len` tokens of a layer: `([k_heads, len, k_dim], [v_heads, len, v_dim])`.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a layer past the last or more tokens than it has.
    fn layer_kv(&self, stream: &dyn Stream, layer: usize, len: usize) -> Result<LayerViews>;

    /// Writes rows `[heads, tokens, dim]` of a layer at `start` and returns all it has now.
    ///
    /// # Errors
    /// A layer or shape that does not fit, a start that would leave a hole, no room; nothing has changed
    /// then.
    fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> Result<LayerViews>;
}

/// One sequence of a [`PagedSequences`]; made by [`PagedSequences::single`].
#[derive(Debug)]
pub struct SingleSequence<'a> {
    sequences: &'a mut PagedSequences,
    number: u64,
}

impl<'a> SingleSequence<'a> {
    pub(super) fn new(sequences: &'a mut PagedSequences, number: u64) -> Self {
        Self { sequences, number }
    }
}

impl DenseKv for SingleSequence<'_> {
    fn layer_kv(&self, stream: &dyn Stream, layer: usize, len: usize) -> Result<LayerViews> {
        self.sequences.read_first(stream, self.number, layer, len)
    }

    fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> Result<LayerViews> {
        self.sequences.update(stream, self.number, layer, k, v, start)
    }
}

/// A static cache of one entry with the interface of a dense cache. Its results are views.
#[derive(Debug)]
pub struct DenseSequence {
    cache: StaticKvCache,
}

impl DenseSequence {
    /// A sequence in a cache of one batch entry.
    ///
    /// # Errors
    /// [`crate::Error::Mismatch`] for a cache of another batch size.
    pub fn new(cache: StaticKvCache) -> Result<Self> {
        crate::base::same("batch entries of a single sequence", 1, cache.max_batch())?;
        Ok(Self { cache })
    }
}

impl DenseKv for DenseSequence {
    fn layer_kv(&self, _stream: &dyn Stream, layer: usize, len: usize) -> Result<LayerViews> {
        let (k, v) = self.cache.views(layer)?;
        Ok((k.select(0, 0)?.slice(1, 0, len)?, v.select(0, 0)?.slice(1, 0, len)?))
    }

    fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> Result<LayerViews> {
        let (k, v) = (k.unsqueeze(0)?, v.unsqueeze(0)?);
        let (k, v) = self.cache.update(stream, layer, &k, &v, &[start])?;
        Ok((k.select(0, 0)?, v.select(0, 0)?))
    }
}
