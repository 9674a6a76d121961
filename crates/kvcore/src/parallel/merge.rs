//! Pieces that ranks computed, put together: by layer and along the sequence.

use super::{PiecePlace, PrefillPlan, RankCache, ReceivedMatrix};
use crate::base::{Error, Result, same};
use crate::device::{CopyTensor, Stream, TensorView};

/// K and V of one stage and one chunk, `[layers, batch, heads, tokens, dim]`, of any strides.
///
/// [`RankCache::piece`] cuts one out of a cache. Over a wire go its [`PiecePlace`] and the bytes of
/// its contiguous views.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Where it belongs.
    pub place: PiecePlace,
    /// Keys.
    pub k: TensorView,
    /// Values.
    pub v: TensorView,
}

/// Fills a cache with the pieces of a [`PrefillPlan`], in whatever order they arrive.
///
/// A chunk is *sealed* as soon as all of its stages have arrived: readers may use it, and nothing
/// overwrites it any more. A layer's [length](RankCache::len) is always that of the chunks that have
/// arrived without a gap, so that an attend never reads what is missing.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     Backend, BlockOrder, DType, Error, KvArena, KvLayout, KvShape, MemoryKind, Piece, PieceMerger,
///     PrefillPlan, RankCache, allocate_tensor,
/// };
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let plan = PrefillPlan::even(4, 2, 6, 3)?;                // 4 layers on 2 stages, 2 chunks of 3 tokens
/// let shape = KvShape {
///     num_layers: 4, num_blocks: 1, block_size: 6, k_heads: 1, v_heads: 1, k_dim: 2, v_dim: 2,
///     format: DType::F32.into(), order: BlockOrder::HeadMajor,
/// };
/// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// let mut merger = PieceMerger::new(RankCache::new(arena, 0)?, plan.clone())?;
/// for (stage, chunk) in [(1, 1), (0, 0), (1, 0), (0, 1)] {
///     let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2, 1, 1, 3, 2])?;
///     let piece = Piece { place: plan.place(stage, chunk)?, k: rows.clone(), v: rows };
///     merger.accept(stream.as_ref(), &piece)?;
///     assert!(matches!(
///         merger.accept(stream.as_ref(), &piece),           // a piece comes once
///         Err(Error::DuplicatePiece { .. } | Error::LatePiece { .. })
///     ));
/// }
/// assert_eq!(merger.finish()?.get_data(3)?.0.shape(), [1, 1, 6, 2]);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct PieceMerger {
    cache: RankCache,
    plan: PrefillPlan,
    received: ReceivedMatrix,
}

impl PieceMerger {
    /// Nothing has arrived; `cache` is empty and has all layers of the plan.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for other layers than the plan's or a cache that holds tokens,
    /// [`Error::OutOfRange`] for a prompt longer than the cache's capacity.
    pub fn new(cache: RankCache, plan: PrefillPlan) -> Result<Self> {
        same("first layer of the cache", plan.layers().start, cache.layers().start)?;
        same("end of the layers of the cache", plan.layers().end, cache.layers().end)?;
        for layer in cache.layers() {
            same("tokens in the cache before a merge", 0, cache.len(layer)?)?;
        }
        if plan.num_tokens() > cache.capacity() {
            return Err(Error::range("tokens of the plan", plan.num_tokens(), cache.capacity() + 1));
        }
        let received = ReceivedMatrix::new(plan.num_chunks(), plan.num_stages())?;
        Ok(Self { cache, plan, received })
    }

    /// Enqueues the copy of a piece to its place. Its memory belongs to the stream's backend and must
    /// have been written before on this stream, or before an event that this stream waits for.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a stage or chunk that the plan does not have; [`Error::LatePiece`] for
    /// a sealed chunk, hence for every piece after the last one; [`Error::DuplicatePiece`];
    /// [`Error::Mismatch`] for other layers or tokens than the plan has there and for another shape;
    /// [`Error::DTypeMismatch`]. Nothing has changed then.
    pub fn accept(&mut self, stream: &dyn Stream, piece: &Piece) -> Result<()> {
        let PiecePlace { stage, chunk, ref layers, ref tokens } = piece.place;
        let place = self.plan.place(stage, chunk)?;
        if self.received.is_chunk_complete(chunk)? {
            return Err(Error::LatePiece { chunk, stage });
        }
        if self.received.is_received(chunk, stage)? {
            return Err(Error::DuplicatePiece { chunk, stage });
        }
        same("first layer of the piece", place.layers.start, layers.start)?;
        same("end of the layers of the piece", place.layers.end, layers.end)?;
        same("first token of the piece", place.tokens.start, tokens.start)?;
        same("end of the tokens of the piece", place.tokens.end, tokens.end)?;
        let (k, v) = self.cache.region(&place)?;
        let copies =
            [CopyTensor { src: piece.k.clone(), dst: k }, CopyTensor { src: piece.v.clone(), dst: v }];
        copies.iter().try_for_each(CopyTensor::check)?;
        copies.iter().try_for_each(|copy| stream.copy_tensor(copy))?;
        self.received.record(chunk, stage)?;
        let len = self.plan.tokens_before(self.received.chunks_in_a_row(stage)?);
        place.layers.into_iter().try_for_each(|layer| self.cache.set_len(layer, len))
    }

    /// What has arrived.
    pub fn received(&self) -> &ReceivedMatrix {
        &self.received
    }

    /// The cache as far as it has been filled.
    pub fn cache(&self) -> &RankCache {
        &self.cache
    }

    /// The cache once everything has arrived.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the number of pieces that have arrived; which ones are missing is in
    /// [`received`](Self::received).
    pub fn finish(&self) -> Result<&RankCache> {
        same("pieces received", self.received.total(), self.received.received())?;
        Ok(&self.cache)
    }

    /// The cache as it is: finished, or to be [reset](RankCache::reset) for another prompt.
    pub fn into_cache(self) -> RankCache {
        self.cache
    }
}
