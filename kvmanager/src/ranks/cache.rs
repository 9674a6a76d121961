//! The cache of one rank, which holds either keys or values of some layers, for the tokens of the prompt so
//! far.

use kvcore::{Backend, CopyTensor, DType, MemoryKind, Stream, TensorView, allocate_tensor};
use std::ops::Range;

use crate::error::{CoreError, same, too_large};
use crate::ranks::{PiecePlace, PrefillPlan, ReceivedMatrix};
use crate::{Error, Result};

// Decision: docs/decisions/managers.md#a-rank-cache-holds-keys-or-values-not-both
/// A cache of either keys or values of consecutive layers: `[layers, batch, heads, capacity, dim]`.
///
/// A pipeline stage appends the chunks that it computes to a cache of its own layers. A cache of all layers
/// merges the pieces of all stages, either as whole chunks with [`merge_from_ranks`](Self::merge_from_ranks),
/// or one by one and in any order after a call to [`expect`](Self::expect). All memory is allocated up front.
/// Copies run in the order of the caller's streams.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
/// use kvmanager::{Error, PrefillPlan, RankCache};
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let mut cache = RankCache::new(backend.as_ref(), DType::F32, [4, 1, 2, 6, 8])?;   // 4 layers, 6 tokens
/// let piece = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2, 1, 2, 3, 8])?;
///
/// cache.merge_from_ranks(stream.as_ref(), &[piece.clone(), piece.clone()])?;        // 2 stages, 3 tokens
/// assert_eq!(cache.get_data()?.shape(), [4, 1, 2, 3, 8]);
///
/// cache.expect(PrefillPlan::even(4, 2, 6, 3)?)?;                                    // 2 stages, 2 chunks of 3 tokens
/// for (stage, chunk) in [(1, 1), (0, 0), (1, 0), (0, 1)] {
///     cache.accept(stream.as_ref(), stage, chunk, &piece)?;
///     assert!(matches!(                                                             // a piece is accepted once
///         cache.accept(stream.as_ref(), stage, chunk, &piece),
///         Err(Error::DuplicatePiece { .. } | Error::LatePiece { .. })
///     ));
/// }
/// assert_eq!(cache.len(), 6);
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug)]
pub struct RankCache {
    data: TensorView,
    /// Number of tokens that every layer holds.
    len: usize,
    merge: Option<(PrefillPlan, ReceivedMatrix)>,
}

/// The layer axis of a cache, and of the tensors passed to it.
const LAYERS: usize = 0;
/// The token axis of a cache, and of the tensors passed to it.
const TOKENS: usize = 3;

impl RankCache {
    /// Allocates an empty cache of the shape `[layers, batch, heads, capacity, dim]`.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Zero`] if an extent is 0, [`kvcore::Error::Overflow`] if the size exceeds the
    /// address space, and [`kvcore::Error::Allocation`] if there is not enough memory.
    pub fn new(backend: &dyn Backend, dtype: DType, shape: [usize; 5]) -> Result<Self> {
        let names = ["layers", "batch", "heads", "capacity", "dim"];
        if let Some((what, _)) = names.into_iter().zip(shape).find(|(_, extent)| *extent == 0) {
            return Err(Error::Core(CoreError::Zero { what }));
        }
        let data = allocate_tensor(backend, MemoryKind::Device, dtype, &shape)?;
        Ok(Self { data, len: 0, merge: None })
    }

    /// Returns the number of layers.
    pub fn num_layers(&self) -> usize {
        self.data.shape()[LAYERS]
    }

    /// Returns the number of tokens that a layer can hold.
    pub fn capacity(&self) -> usize {
        self.data.shape()[TOKENS]
    }

    /// Returns the number of tokens that every layer holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether [`len`](Self::len) is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a view `[layers, batch, heads, len, dim]` of the tokens so far, without copying. Until the
    /// cache is full, there are gaps between heads; [`TensorView::contiguous`] creates a copy without gaps.
    ///
    /// # Errors
    /// Returns the errors of [`TensorView::slice`], which cannot occur for this view.
    pub fn get_data(&self) -> Result<TensorView> {
        Ok(self.data.slice(TOKENS, 0, self.len)?)
    }

    /// Removes all tokens, and ends the current merge, if any. The memory stays allocated.
    pub fn reset(&mut self) {
        self.len = 0;
        self.merge = None;
    }

    /// Appends tensors `[layers, batch, heads, tokens, dim]` one after another along the token axis. If any
    /// of them cannot be appended, appends none.
    ///
    /// # Errors
    /// The cache is unchanged in these cases:
    /// - [`kvcore::Error::Mismatch`] if an extent or the element type differs from the cache's, or if there
    ///   is an incomplete merge.
    /// - [`kvcore::Error::TooLarge`] if the number of tokens would exceed the capacity.
    pub fn append_sequence(&mut self, stream: &dyn Stream, tensors: &[TensorView]) -> Result<()> {
        self.check_merged()?;
        let mut end = self.len;
        let mut copies = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let start = end;
            end = end.saturating_add(extent(tensor, TOKENS)?);
            copies.push(self.copy(tensor, 0..self.num_layers(), start..end)?);
        }
        run(stream, &copies)?;
        self.len = end;
        Ok(())
    }

    /// Merges the layers of all ranks for the next tokens. `tensors[r]` must be `[layers of rank r, batch,
    /// heads, tokens, dim]`, and the ranks must be in the order of their layers. All tensors hold the same
    /// tokens, so the length grows by the number of tokens in one tensor. In a merge that
    /// [`expect`](Self::expect) began, the tensors must be the pieces of the first incomplete chunk.
    ///
    /// # Errors
    /// The cache is unchanged in these cases:
    /// - [`kvcore::Error::Mismatch`] if the ranks' layers do not add up to the cache's layers, or if another
    ///   extent or the element type differs.
    /// - [`kvcore::Error::TooLarge`] if the number of tokens would exceed the capacity.
    /// - [`Error::DuplicatePiece`] if one of the pieces has already arrived.
    // Decision: docs/decisions/managers.md#merging-ranks-never-lengthens-the-sequence
    pub fn merge_from_ranks(&mut self, stream: &dyn Stream, tensors: &[TensorView]) -> Result<()> {
        if let Some((plan, received)) = self.merge.as_ref().filter(|(_, received)| !received.is_complete()) {
            same("ranks of the merge", plan.num_stages(), tensors.len())?;
            let chunk = received.chunks_in_a_row();
            let pieces = tensors.iter().enumerate();
            let copies = pieces.map(|(stage, piece)| self.piece(stage, chunk, piece));
            run(stream, &copies.collect::<Result<Vec<_>>>()?)?;
            return (0..tensors.len()).try_for_each(|stage| self.record(stage, chunk));
        }
        let tokens = tensors.first().map_or(Ok(0), |tensor| extent(tensor, TOKENS))?;
        let end = self.len.saturating_add(tokens);
        let mut layers: Range<usize> = 0..0;
        let mut copies = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            layers = layers.end..layers.end.saturating_add(extent(tensor, LAYERS)?);
            if layers.end > self.num_layers() {
                break;
            }
            copies.push(self.copy(tensor, layers.clone(), self.len..end)?);
        }
        same("layers of all ranks", self.num_layers(), layers.end)?;
        run(stream, &copies)?;
        self.len = end;
        Ok(())
    }

    /// Empties the cache, and begins a merge of a plan's pieces, which may arrive in any order.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Mismatch`] if the plan's layers differ from the cache's, and
    /// [`kvcore::Error::TooLarge`] if the prompt exceeds the capacity. In these cases, the cache is
    /// unchanged.
    pub fn expect(&mut self, plan: PrefillPlan) -> Result<()> {
        same("layers of the plan", self.num_layers(), plan.num_layers())?;
        if plan.num_tokens() > self.capacity() {
            return Err(too_large("tokens of the plan", plan.num_tokens(), self.capacity()));
        }
        let received = ReceivedMatrix::new(plan.num_chunks(), plan.num_stages())?;
        (self.len, self.merge) = (0, Some((plan, received)));
        Ok(())
    }

    /// Copies a piece `[layers of the stage, batch, heads, tokens of the chunk, dim]` to its position in the
    /// cache. The tokens of a chunk become readable when the pieces of all stages have arrived for this chunk
    /// and for all earlier chunks.
    ///
    /// # Errors
    /// The cache is unchanged in these cases:
    /// - [`kvcore::Error::OutOfRange`] if there is no plan, or if the plan does not have this stage or chunk.
    /// - [`Error::LatePiece`] if the chunk is already complete.
    /// - [`Error::DuplicatePiece`] if the piece has already arrived.
    /// - [`kvcore::Error::Mismatch`] if an extent differs from the plan's or the cache's, or if the element
    ///   type differs from the cache's.
    pub fn accept(
        &mut self,
        stream: &dyn Stream,
        stage: usize,
        chunk: usize,
        piece: &TensorView,
    ) -> Result<()> {
        run(stream, &[self.piece(stage, chunk, piece)?])?;
        self.record(stage, chunk)
    }

    /// Returns the record of arrived pieces of the last merge, if a merge has begun since the last reset.
    pub fn received(&self) -> Option<&ReceivedMatrix> {
        self.merge.as_ref().map(|(_, received)| received)
    }

    /// Checks a piece, and returns the operation that copies it to its position in the cache.
    fn piece(&self, stage: usize, chunk: usize, piece: &TensorView) -> Result<CopyTensor> {
        let none = CoreError::OutOfRange { what: "chunk", value: chunk as i128, limit: 0 };
        let (plan, received) = self.merge.as_ref().ok_or(none)?;
        let PiecePlace { layers, tokens } = plan.place(stage, chunk)?;
        if received.is_chunk_complete(chunk)? {
            return Err(Error::LatePiece { chunk, stage });
        }
        if received.is_received(chunk, stage)? {
            return Err(Error::DuplicatePiece { chunk, stage });
        }
        self.copy(piece, layers, tokens)
    }

    fn record(&mut self, stage: usize, chunk: usize) -> Result<()> {
        if let Some((plan, received)) = &mut self.merge {
            received.record(chunk, stage)?;
            self.len = plan.tokens_before(received.chunks_in_a_row());
        }
        Ok(())
    }

    fn check_merged(&self) -> Result<()> {
        match self.received() {
            Some(received) => same("pieces received", received.total(), received.received()),
            None => Ok(()),
        }
    }

    /// Checks a tensor, and returns the operation that copies it to a region of the cache.
    fn copy(&self, tensor: &TensorView, layers: Range<usize>, tokens: Range<usize>) -> Result<CopyTensor> {
        if tokens.end > self.capacity() {
            return Err(too_large("tokens of the cache", tokens.end, self.capacity()));
        }
        let dst =
            self.data.slice(LAYERS, layers.start, layers.end)?.slice(TOKENS, tokens.start, tokens.end)?;
        let copy = CopyTensor { src: tensor.clone(), dst };
        copy.check()?;
        Ok(copy)
    }
}

/// Returns the extent of one axis of a tensor `[layers, batch, heads, tokens, dim]`.
fn extent(tensor: &TensorView, axis: usize) -> Result<usize> {
    same("rank of [layers, batch, heads, tokens, dim]", 5, tensor.shape().len())?;
    Ok(tensor.shape()[axis])
}

fn run(stream: &dyn Stream, copies: &[CopyTensor]) -> Result<()> {
    Ok(copies.iter().try_for_each(|copy| stream.copy_tensor(copy))?)
}
