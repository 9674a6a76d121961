//! The division of a prefill's layers into pipeline stages, and of its tokens into chunks.

use kvcore::RankInfo;
use std::ops::Range;

use crate::error::{CoreError, range, same};
use crate::{Error, Result};

/// The position of a piece in a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PiecePlace {
    /// The layers of the piece's stage.
    pub layers: Range<usize>,
    /// The tokens of the piece's chunk, as indices into the prompt.
    pub tokens: Range<usize>,
}

// Decision: docs/decisions/managers.md#the-grid-of-a-merge-is-known-in-advance
/// The grid of a chunked prefill in a pipeline. Every stage computes its own layers for every chunk.
///
/// ```
/// use kvmanager::PrefillPlan;
/// let plan = PrefillPlan::even(36, 3, 21, 7)?;
/// let place = plan.place(1, 2)?;                   // stage 1, chunk 2
/// assert_eq!((place.layers, place.tokens), (12..24, 14..21));
/// assert_eq!((plan.num_layers(), plan.num_tokens()), (36, 21));
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillPlan {
    stages: Vec<Range<usize>>,
    chunks: Vec<Range<usize>>,
}

impl PrefillPlan {
    /// Creates a plan from the layers of each stage and the tokens of each chunk. The first range of each
    /// list must start at 0.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Zero`] if there are no stages or no chunks, or if a stage or chunk is empty.
    /// Returns [`kvcore::Error::Mismatch`] if a stage or chunk does not begin where the previous one ends (a
    /// gap or an overlap).
    pub fn new(stages: Vec<Range<usize>>, chunks: Vec<Range<usize>>) -> Result<Self> {
        consecutive(["stages", "layers of a stage", "first layer of a stage"], &stages)?;
        consecutive(["chunks", "tokens of a chunk", "first token of a chunk"], &chunks)?;
        Ok(Self { stages, chunks })
    }

    /// Creates a plan in which the stages divide the layers as in [`RankInfo::layers`], and every chunk
    /// except the last has `chunk_len` tokens. The last chunk may be shorter.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Uneven`] if there are fewer layers than stages, and [`kvcore::Error::Zero`]
    /// if there are no stages, no tokens, or no tokens per chunk.
    pub fn even(num_layers: usize, stages: usize, tokens: usize, chunk_len: usize) -> Result<Self> {
        if chunk_len == 0 {
            return Err(Error::Core(CoreError::Zero { what: "tokens of a chunk" }));
        }
        let stage = |rank| RankInfo::pipeline(rank, stages)?.layers(num_layers);
        let chunk = |i: usize| i * chunk_len..tokens.min((i + 1).saturating_mul(chunk_len));
        Self::new(
            (0..stages).map(stage).collect::<kvcore::Result<_>>()?,
            (0..tokens.div_ceil(chunk_len)).map(chunk).collect(),
        )
    }

    /// Returns the number of stages of the pipeline.
    pub fn num_stages(&self) -> usize {
        self.stages.len()
    }

    /// Returns the number of chunks of the prompt.
    pub fn num_chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Returns the number of tokens of the prompt.
    pub fn num_tokens(&self) -> usize {
        self.chunks.last().map_or(0, |chunk| chunk.end)
    }

    /// Returns the total number of layers in all stages.
    pub fn num_layers(&self) -> usize {
        self.stages.last().map_or(0, |stage| stage.end)
    }

    /// Returns the number of tokens in the first `chunks` chunks.
    pub(super) fn tokens_before(&self, chunks: usize) -> usize {
        self.chunks.get(chunks).map_or(self.num_tokens(), |chunk| chunk.start)
    }

    /// Returns the position of the piece of a stage and chunk.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if the plan does not have the stage or chunk.
    pub fn place(&self, stage: usize, chunk: usize) -> Result<PiecePlace> {
        let layers = self.stages.get(stage).ok_or(range("stage", stage, self.stages.len()))?;
        let tokens = self.chunks.get(chunk).ok_or(range("chunk", chunk, self.chunks.len()))?;
        Ok(PiecePlace { layers: layers.clone(), tokens: tokens.clone() })
    }
}

/// Checks that no range is empty, and that the ranges follow one another starting at 0. `what` gives the
/// names of the list, of a range's extent, and of a range's start for errors.
fn consecutive(what: [&'static str; 3], ranges: &[Range<usize>]) -> Result<()> {
    if ranges.is_empty() {
        return Err(Error::Core(CoreError::Zero { what: what[0] }));
    }
    let mut next = 0;
    for range in ranges {
        same(what[2], next, range.start)?;
        if range.is_empty() {
            return Err(Error::Core(CoreError::Zero { what: what[1] }));
        }
        next = range.end;
    }
    Ok(())
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, clippy::reversed_empty_ranges, reason = "ranges are the data")]
mod tests {
    use super::*;

    #[test]
    fn even_plans_cover_every_layer_and_token_once() {
        let plan = PrefillPlan::even(7, 3, 10, 4).unwrap();
        assert_eq!(plan, PrefillPlan::new(vec![0..3, 3..5, 5..7], vec![0..4, 4..8, 8..10]).unwrap());
        assert_eq!((plan.num_stages(), plan.num_chunks(), plan.num_tokens()), (3, 3, 10));
        assert_eq!([0, 1, 3].map(|n| plan.tokens_before(n)), [0, 4, 10]);
        assert_eq!(PrefillPlan::even(1, 1, 5, usize::MAX).unwrap().num_chunks(), 1);
    }

    #[test]
    fn gaps_overlaps_and_empty_cuts_are_refused() {
        let new = PrefillPlan::new;
        let mismatch = |what, expected, got| Err(Error::Core(CoreError::mismatch(what, expected, got)));
        assert_eq!(new(vec![0..2, 3..4], vec![0..1]), mismatch("first layer of a stage", 2, 3));
        assert_eq!(new(vec![0..2, 1..4], vec![0..1]), mismatch("first layer of a stage", 2, 1));
        assert_eq!(new(vec![0..2], vec![0..5, 6..7]), mismatch("first token of a chunk", 5, 6));
        assert_eq!(new(vec![0..2], vec![0..5, 4..7]), mismatch("first token of a chunk", 5, 4));
        assert_eq!(new(vec![0..2], vec![1..5]), mismatch("first token of a chunk", 0, 1));
        for (stages, chunks, what) in [
            (vec![], vec![0..1], "stages"),
            (vec![0..1], vec![], "chunks"),
            (vec![0..0], vec![0..1], "layers of a stage"),
            (vec![0..1], vec![0..3, 3..2], "tokens of a chunk"),
        ] {
            assert_eq!(new(stages, chunks), Err(Error::Core(CoreError::Zero { what })));
        }
        assert!(matches!(PrefillPlan::even(4, 0, 8, 2), Err(Error::Core(CoreError::Zero { .. }))));
        assert!(matches!(PrefillPlan::even(4, 2, 0, 2), Err(Error::Core(CoreError::Zero { .. }))));
        assert!(matches!(PrefillPlan::even(4, 2, 8, 0), Err(Error::Core(CoreError::Zero { .. }))));
        assert!(matches!(PrefillPlan::even(2, 3, 8, 2), Err(Error::Core(CoreError::Uneven { .. }))));
        assert_eq!(new(vec![4..5], vec![0..1]), mismatch("first layer of a stage", 0, 4));
    }

    #[test]
    fn places_outside_the_grid_are_errors() {
        let plan = PrefillPlan::even(4, 2, 8, 4).unwrap();
        assert_eq!(
            plan.place(2, 0),
            Err(Error::Core(CoreError::OutOfRange { what: "stage", value: 2, limit: 2 }))
        );
        assert_eq!(
            plan.place(0, 2),
            Err(Error::Core(CoreError::OutOfRange { what: "chunk", value: 2, limit: 2 }))
        );
    }
}
