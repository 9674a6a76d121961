//! The merge of pieces that ranks computed, by layer and along the sequence.

use crate::error::{same, too_large};
use crate::ranks::{PiecePlace, PrefillPlan, RankCache, ReceivedMatrix};
use crate::{Error, Result};
use kvcore::{Backend, Communicator, CopyTensor, MemoryKind, Stream, TensorView, Transfer, allocate_tensor};

/// K and V of one stage and one chunk, `[layers, batch, tokens, heads, dim]`, with any strides.
///
/// [`RankCache::piece`] takes a piece from a cache, and [`PieceMerger::exchange`] sends it to the other stages. To
/// send a piece by other means, send its [`PiecePlace`] and the bytes of its contiguous views.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Place of the piece in the cache.
    pub place: PiecePlace,
    /// Keys.
    pub k: TensorView,
    /// Values.
    pub v: TensorView,
}

/// A merger that fills a cache with the pieces of a [`PrefillPlan`], in any order of arrival.
///
/// A chunk is *sealed* as soon as all of its stages have arrived: readers may use it, and nothing
/// overwrites it. The [length](RankCache::len) of a layer always covers only the chunks that have arrived
/// without a gap, so an attend never reads missing tokens.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{Backend, BlockOrder, DType, KvArena, KvLayout, KvShape, MemoryKind, allocate_tensor};
/// use kvmanager::{Error, Piece, PieceMerger, PrefillPlan, RankCache};
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
///     let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2, 1, 3, 1, 2])?;
///     let piece = Piece { place: plan.place(stage, chunk)?, k: rows.clone(), v: rows };
///     merger.accept(stream.as_ref(), &piece)?;
///     assert!(matches!(
///         merger.accept(stream.as_ref(), &piece),           // a piece comes once
///         Err(Error::DuplicatePiece { .. } | Error::LatePiece { .. })
///     ));
/// }
/// assert_eq!(merger.finish()?.get_data(3)?.0.shape(), [1, 6, 1, 2]);
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug)]
pub struct PieceMerger {
    cache: RankCache,
    plan: PrefillPlan,
    received: ReceivedMatrix,
}

impl PieceMerger {
    /// Creates a merger to which no piece has arrived. `cache` must be empty and have exactly the layers of
    /// the plan.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Mismatch`] if the layers differ from the plan's or the cache holds tokens, and
    /// [`kvcore::Error::TooLarge`] if the prompt exceeds the capacity of the cache.
    pub fn new(cache: RankCache, plan: PrefillPlan) -> Result<Self> {
        same("first layer of the cache", plan.layers().start, cache.layers().start)?;
        same("end of the layers of the cache", plan.layers().end, cache.layers().end)?;
        for layer in cache.layers() {
            same("tokens in the cache before a merge", 0, cache.len(layer)?)?;
        }
        if plan.num_tokens() > cache.capacity() {
            return Err(too_large("tokens of the plan", plan.num_tokens(), cache.capacity()));
        }
        let received = ReceivedMatrix::new(plan.num_chunks(), plan.num_stages())?;
        Ok(Self { cache, plan, received })
    }

    /// Enqueues the copy of a piece to its place. The memory of the piece MUST belong to the stream's
    /// backend. It MUST have been written before on this stream, or before an event that this stream waits
    /// for.
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::OutOfRange`] if the plan does not have the stage or chunk.
    /// - Returns [`Error::LatePiece`] for a sealed chunk, and therefore for every piece after the last one.
    /// - Returns [`Error::DuplicatePiece`] if the piece has arrived before.
    /// - Returns [`kvcore::Error::Mismatch`] if the layers or tokens differ from the plan's, or if the shape
    ///   differs.
    /// - Returns [`kvcore::Error::DTypeMismatch`] if the element type differs from the cache's.
    ///
    /// In these cases nothing has changed.
    pub fn accept(&mut self, stream: &dyn Stream, piece: &Piece) -> Result<()> {
        let copies = self.copies(piece)?;
        copies.iter().try_for_each(|copy| stream.copy_tensor(copy))?;
        let PiecePlace { stage, chunk, ref layers, .. } = piece.place;
        self.received.record(chunk, stage)?;
        let len = self.plan.tokens_before(self.received.chunks_in_a_row(stage)?);
        layers.clone().try_for_each(|layer| self.cache.set_len(layer, len))
    }

    // Decision: docs/decisions/managers.md#stages-exchange-pieces-they-do-not-gather-them
    /// Sends the piece of this rank to the ranks of all other stages, receives theirs of the same chunk, and
    /// accepts all of them. Rank `r` of the communicator is stage `r` of the plan. All ranks MUST exchange the
    /// same chunks in the same order.
    ///
    /// The pieces travel as contiguous copies, in device memory that is allocated for the call. All work is
    /// enqueued on `stream`, under the rules of [`accept`](Self::accept) and of [`Communicator`]: a rank that
    /// goes on without the exchange must [abort](Communicator::abort), so that the others do not wait for it.
    ///
    /// # Errors
    /// - Returns the errors of [`accept`](Self::accept), and [`kvcore::Error::Mismatch`] if the ranks are not the
    ///   stages of the plan or the piece is of another stage than this rank.
    /// - Returns [`Error::LatePiece`] or [`Error::DuplicatePiece`] if a piece of another stage has arrived before.
    /// - Returns [`kvcore::Error::Allocation`] if there is no memory for the copies, and the errors of
    ///   [`Communicator::run`].
    ///
    /// In these cases nothing has changed. If the device fails later, while pieces are copied to their places, the
    /// pieces before the failure have arrived.
    pub fn exchange(
        &mut self,
        communicator: &dyn Communicator,
        backend: &dyn Backend,
        stream: &dyn Stream,
        own: &Piece,
    ) -> Result<()> {
        same("ranks of a pipeline", self.plan.num_stages(), communicator.ranks())?;
        same("stage of this rank", communicator.rank(), own.place.stage)?;
        self.copies(own)?;
        let others = |stage: &usize| *stage != own.place.stage;
        let stages = (0..self.plan.num_stages()).filter(others);
        let empty = stages.map(|stage| self.room(backend, self.plan.place(stage, own.place.chunk)?));
        let pieces = empty.collect::<Result<Vec<Piece>>>()?;
        let (k, v) = (own.k.contiguous(backend, stream)?, own.v.contiguous(backend, stream)?);
        let to = |piece: &Piece| [(&k, piece.place.stage), (&v, piece.place.stage)];
        let sends: Vec<Transfer> = pieces.iter().flat_map(to).collect();
        let mut receives: Vec<Transfer> = Vec::new();
        for Piece { place, k, v } in &pieces {
            receives.extend([(k, place.stage), (v, place.stage)]);
        }
        communicator.exchange(stream, &sends, &receives)?;
        [own].into_iter().chain(&pieces).try_for_each(|piece| self.accept(stream, piece))
    }

    /// Returns a piece without contents, in new memory, that could be accepted.
    fn room(&self, backend: &dyn Backend, place: PiecePlace) -> Result<Piece> {
        let (k, v) = self.cache.region(&place)?;
        let dense =
            |view: &TensorView| allocate_tensor(backend, MemoryKind::Device, view.dtype(), view.shape());
        let piece = Piece { k: dense(&k)?, v: dense(&v)?, place };
        self.copies(&piece)?;
        Ok(piece)
    }

    /// Checks a piece, and returns the copies that put it in its place.
    fn copies(&self, piece: &Piece) -> Result<[CopyTensor; 2]> {
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
        Ok(copies)
    }

    /// Returns the record of the pieces that have arrived.
    pub fn received(&self) -> &ReceivedMatrix {
        &self.received
    }

    /// Returns the cache, as far as it has been filled.
    pub fn cache(&self) -> &RankCache {
        &self.cache
    }

    /// Returns the cache if all pieces have arrived.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Mismatch`] with the number of pieces that have arrived.
    /// [`received`](Self::received) tells the missing ones.
    pub fn finish(&self) -> Result<&RankCache> {
        same("pieces received", self.received.total(), self.received.received())?;
        Ok(&self.cache)
    }

    /// Returns the cache in its current state: complete, or to be [reset](RankCache::reset) for another
    /// prompt.
    pub fn into_cache(self) -> RankCache {
        self.cache
    }
}
