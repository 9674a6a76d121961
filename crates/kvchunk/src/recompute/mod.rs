//! Recompute strategies: which tokens of reused chunks are computed anew, under full attention.
//!
//! A chunk that was computed apart knows nothing of the chunks before it. A strategy chooses tokens whose
//! KV is computed again with everything before them in sight; the others stay as they are stored.
//!
//! | strategy | tokens | source, and what differs |
//! |---|---|---|
//! | [`Recompute::None`] | none | Block-Attention (Sun et al., 2024), PromptCache: reuse as it is |
//! | [`Recompute::Link`] | the first k of each chunk but the first | EPIC's LegoLink (Hu et al., 2024). There a chunk is computed alone and its first tokens, which act as attention sinks, are recomputed; here the same, in both modes. In *alone* mode the first chunk is linked too, since it has not seen the system prompt |
//! | [`Recompute::Blend`] | the share r whose KV deviates most | CacheBlend (Yao et al., 2024). There the deviation of V is taken at layer 1 and tokens are chosen anew on the way down; here once, at a layer and of K, V or both as one likes. Layers before it are computed for all tokens |
//! | [`Recompute::Random`] | the share r, drawn | none: what choosing well must beat |
//! | [`Recompute::Full`] | all | ordinary full attention at the positions of the cell |
//!
//! Recomputed tokens go into blocks of the request's own; see
//! [`AssembledPrompt::copy_on_write`](crate::AssembledPrompt::copy_on_write).

use std::fmt;
use std::ops::Range;

use crate::assembly::ChunkSpan;

mod deviation;
mod strategy;

pub use deviation::{DeviationCheck, DeviationOf, Deviations};
pub use strategy::Recompute;

/// Chooses the tokens to compute anew.
///
/// ```
/// use kvchunk::{ChunkSpan, Deviations, RecomputeStrategy, TokenSelection};
///
/// /// The last token of every chunk.
/// #[derive(Debug)]
/// struct Ends;
///
/// impl RecomputeStrategy for Ends {
///     fn name(&self) -> String {
///         "ends".to_owned()
///     }
///     fn select(&self, chunks: &[ChunkSpan], _: Option<&Deviations>) -> TokenSelection {
///         TokenSelection::new(chunks.iter().map(|chunk| vec![chunk.tokens as u32 - 1]))
///     }
/// }
///
/// let chunk = ChunkSpan { tokens: 7, logical_start: 3, position: 3, is_full: false };
/// assert_eq!(Ends.select(&[chunk], None).chunks()[0], [6]);
/// ```
pub trait RecomputeStrategy: Send + Sync + fmt::Debug {
    /// Its name, as users write it.
    fn name(&self) -> String;

    /// Where the strategy looks at deviations before it chooses. The model then computes all tokens up to
    /// there.
    fn check(&self) -> Option<DeviationCheck> {
        None
    }

    /// Chooses. `deviations` are there if [`check`](Self::check) asked for them.
    fn select(&self, chunks: &[ChunkSpan], deviations: Option<&Deviations>) -> TokenSelection;
}

/// Tokens of a prompt's chunks, by their index in the chunk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenSelection(Vec<Vec<u32>>);

impl TokenSelection {
    /// A selection: for each chunk its tokens, in any order.
    pub fn new(chunks: impl IntoIterator<Item = Vec<u32>>) -> Self {
        let sorted = |mut tokens: Vec<u32>| {
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        Self(chunks.into_iter().map(sorted).collect())
    }

    /// For each chunk its tokens, rising.
    pub fn chunks(&self) -> &[Vec<u32>] {
        &self.0
    }

    /// Tokens of all chunks.
    pub fn len(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    /// Whether nothing is selected.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Selected tokens of a part of a chunk, counted from the part's start.
    pub(crate) fn within(&self, chunk: usize, part: Range<usize>) -> Vec<u32> {
        let tokens = self.0.get(chunk).map_or(&[][..], Vec::as_slice);
        let inside = tokens.iter().filter(|&&token| part.contains(&(token as usize)));
        inside.map(|&token| token - part.start as u32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_sorted_and_cut() {
        let selection = TokenSelection::new([vec![5, 1, 5, 3], vec![]]);
        assert_eq!((selection.len(), selection.is_empty()), (3, false));
        assert_eq!(selection.within(0, 2..6), [1, 3]);
        assert_eq!(selection.within(1, 0..9), [] as [u32; 0]);
        assert_eq!(selection.within(7, 0..9), [] as [u32; 0]);
    }
}
