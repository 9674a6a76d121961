//! Recompute strategies select which tokens of reused chunks are recomputed with full attention.
//!
//! A chunk that was computed on its own has not seen the preceding chunks. A strategy selects tokens whose KV
//! is recomputed while they see everything before them. All other tokens keep their stored KV.
//!
//! | strategy | tokens | source |
//! |---|---|---|
//! | [`Recompute::None`] | none | Block-Attention (Sun et al., 2024), PromptCache |
//! | [`Recompute::Link`] | the first k of each chunk except the first | EPIC's LegoLink (Hu et al., 2024) |
//! | [`Recompute::Blend`] | the fraction r whose KV deviates most | CacheBlend (Yao et al., 2024) |
//! | [`Recompute::Question`] | the share r to which the question attends most | `ProphetKV` (2026) |
//! | [`Recompute::Joint`] | the share r with the largest error in the question's attention | this crate |
//! | [`Recompute::Random`] | the share r, drawn at random | this crate, as a baseline |
//! | [`Recompute::Full`] | all | ordinary full attention at the positions of the cell |
//!
//! Differences from the sources:
//!
//! - EPIC computes chunks alone and recomputes their first tokens, which act as attention sinks.
//!   [`Recompute::Link`] does this in both modes. In *alone* mode, it also recomputes the first tokens of the
//!   first chunk, because that chunk has not seen the system prompt.
//! - CacheBlend takes the deviation of V at layer 1 and chooses tokens again at later layers.
//!   [`Recompute::Blend`] chooses once, at a configurable layer, and compares K, V or both. The layers before
//!   that one are computed for all tokens.
//! - `ProphetKV` weighs the layers of a first pass by how their attention is spread. [`Recompute::Question`]
//!   sums the attention of all layers except the first third, or of all layers starting at a given layer, and
//!   recomputes the question together with the chosen tokens.
//! - [`Recompute::Joint`] weighs each token by its attention times the root of its deviation. To first order,
//!   this is the error that the token adds to the question's attention.
//!
//! Recomputed tokens go into the request's own blocks; see
//! [`AssembledPrompt::copy_on_write`](crate::AssembledPrompt::copy_on_write).

use std::fmt;
use std::ops::Range;

mod evidence;
mod strategy;

pub use evidence::{AttentionCheck, DeviationCheck, DeviationOf, Evidence, Findings, TokenScores};
pub use strategy::Recompute;

/// One chunk of an assembled prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSpan {
    /// The number of tokens in the chunk.
    pub tokens: usize,
    /// The logical index of the chunk's first token.
    pub logical_start: usize,
    /// The position of the chunk's first token in this prompt.
    pub position: i64,
    /// True if the chunk's KV already matches full attention. This is the case for the first chunk in
    /// with-system mode, if its bytes are exact and it is used at the position for which it was computed.
    pub is_full: bool,
}

/// A strategy that selects the tokens to recompute.
///
/// # Contract
/// Equal inputs must give equal choices, in every process that shares a cache or a disk. An engine may ask for the same
/// choice several times: before it computes a question in the same pass as the chunks, again once the chunks are stored,
/// and again after a preemption. What it computes behind the chunks is kept under keys that cover the choice. If a second
/// choice differs from the first, these keys describe other tokens than those that were recomputed, and later requests
/// find wrong keys and values. A random strategy must therefore draw from a fixed seed, as [`Recompute::Random`] does. A
/// strategy must not depend on a clock, on earlier calls, or on the order of a hash map.
///
/// ```
/// use kvchunk::{ChunkSpan, Findings, RecomputeStrategy, TokenSelection};
///
/// /// The last token of every chunk.
/// #[derive(Debug)]
/// struct Ends;
///
/// impl RecomputeStrategy for Ends {
///     fn name(&self) -> String {
///         "ends".to_owned()
///     }
///     fn select(&self, chunks: &[ChunkSpan], _: &Findings) -> TokenSelection {
///         TokenSelection::new(chunks.iter().map(|chunk| vec![chunk.tokens as u32 - 1]))
///     }
/// }
///
/// let chunk = ChunkSpan { tokens: 7, logical_start: 3, position: 3, is_full: false };
/// assert_eq!(Ends.select(&[chunk], &Findings::default()).chunks()[0], [6]);
/// ```
pub trait RecomputeStrategy: Send + Sync + fmt::Debug {
    /// Returns the strategy's name, by which users select it.
    fn name(&self) -> String;

    /// Returns the evidence that the strategy needs to select tokens. By default, it needs none.
    fn evidence(&self) -> Evidence {
        Evidence::default()
    }

    /// Selects the tokens to recompute. `found` contains the requested [`evidence`](Self::evidence). Equal inputs must
    /// give equal choices; see the contract of this trait.
    fn select(&self, chunks: &[ChunkSpan], found: &Findings) -> TokenSelection;
}

/// Selected tokens of a prompt's chunks, by their index in the chunk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenSelection(Vec<Vec<u32>>);

impl TokenSelection {
    /// Creates a selection from one list of token indices per chunk. The indices may be in any order.
    pub fn new(chunks: impl IntoIterator<Item = Vec<u32>>) -> Self {
        let sorted = |mut tokens: Vec<u32>| {
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        Self(chunks.into_iter().map(sorted).collect())
    }

    /// Returns one list per chunk, with its selected tokens in ascending order.
    pub fn chunks(&self) -> &[Vec<u32>] {
        &self.0
    }

    /// Returns the total number of selected tokens.
    pub fn len(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    /// Returns whether no tokens are selected.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the selected tokens in `part` of a chunk, as indices relative to the start of the part.
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
