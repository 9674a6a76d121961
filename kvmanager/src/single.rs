//! One sequence behind the interface of a dense cache, over paged or dense storage.

use crate::error::same;
use crate::{PagedSequences, Result};
use kvcore::{LayerViews, StaticKvCache, Stream, TensorView};
/// The interface of a cache for one sequence. Dense and paged implementations return equal bytes.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{Backend, BlockOrder, BlockPool, DType, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache, StaticKvCache, allocate_tensor};
/// use kvmanager::{DenseKv, DenseSequence, PagedSequences};
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
/// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[5, 2, 3])?;
/// for kv in [&mut dense as &mut dyn DenseKv, &mut paged] {
///     let (k, _) = kv.update(stream.as_ref(), 0, &rows, &rows, 0)?;
///     assert_eq!(k.shape(), [5, 2, 3]);
///     assert_eq!(kv.layer_kv(stream.as_ref(), 0, 4)?.0.shape(), [4, 2, 3]);
/// }
/// # Ok::<(), kvmanager::Error>(())
/// ```
pub trait DenseKv {
    /// Returns the first `len` tokens of a layer: `([len, k_heads, k_dim], [len, v_heads, v_dim])`.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if `layer` is past the last layer, and
    /// [`kvcore::Error::TooLarge`] if `len` exceeds the layer's tokens.
    fn layer_kv(&self, stream: &dyn Stream, layer: usize, len: usize) -> Result<LayerViews>;

    /// Writes rows `[tokens, heads, dim]` of a layer at `start`. Returns all rows that the layer has
    /// afterwards.
    ///
    /// # Errors
    /// Returns an error if the layer or a shape does not fit, if `start` would leave a gap, or if there is
    /// no room. In these cases nothing has changed.
    fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> Result<LayerViews>;
}

/// One sequence of a [`PagedSequences`], created by [`PagedSequences::single`].
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

/// A static cache of one entry behind the interface of a dense cache. Its results are views.
#[derive(Debug)]
pub struct DenseSequence {
    cache: StaticKvCache,
}

impl DenseSequence {
    /// Creates the sequence of a cache with one batch entry.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Mismatch`] if the cache has another batch size.
    pub fn new(cache: StaticKvCache) -> Result<Self> {
        same("batch entries of a single sequence", 1, cache.max_batch())?;
        Ok(Self { cache })
    }
}

impl DenseKv for DenseSequence {
    fn layer_kv(&self, _stream: &dyn Stream, layer: usize, len: usize) -> Result<LayerViews> {
        let (k, v) = self.cache.views(layer)?;
        Ok((k.select(0, 0)?.slice(0, 0, len)?, v.select(0, 0)?.slice(0, 0, len)?))
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
