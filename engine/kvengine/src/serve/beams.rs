//! The state of a beam search: log-probability sums, continuations, and complete answers.

use crate::request::{BeamSearch, FinishReason};

// Decision: docs/decisions/models.md#beams-are-sent-after-the-search-has-ended
/// The state of a request's beam search.
#[derive(Debug, Default)]
pub(super) struct Beams {
    /// For each branch, the sum of its tokens' log-probabilities.
    pub(super) sums: Vec<f32>,
    /// For each branch, its likeliest next tokens with their log-probabilities; `None` until its logits are
    /// computed.
    pub(super) next: Vec<Option<Vec<(u32, f32)>>>,
    /// The complete answers that are kept, best first.
    pub(super) ended: Vec<EndedBeam>,
}

/// A possible next token of a beam.
#[derive(Debug, Clone, Copy)]
pub(super) struct Continuation {
    /// The branch to continue.
    pub(super) branch: usize,
    pub(super) token: u32,
    /// The sum of the log-probabilities, including this token.
    pub(super) sum: f32,
}

/// A complete answer.
#[derive(Debug)]
pub(super) struct EndedBeam {
    pub(super) tokens: Vec<u32>,
    pub(super) score: f32,
    pub(super) finish: FinishReason,
}

impl Beams {
    /// Discards the continuations, because the branches' sequences have been freed.
    pub(super) fn forget(&mut self) {
        self.next.iter_mut().for_each(|next| *next = None);
    }

    /// Removes all continuations, and returns the `most` likeliest ones over all branches, likeliest first.
    pub(super) fn take_continuations(&mut self, most: usize) -> Vec<Continuation> {
        let mut continuations = Vec::new();
        for (branch, (next, sum)) in self.next.iter_mut().zip(&self.sums).enumerate() {
            let next = next.take().unwrap_or_default().into_iter();
            continuations.extend(next.map(|(token, p)| Continuation { branch, token, sum: sum + p }));
        }
        continuations.sort_by(|a, b| b.sum.total_cmp(&a.sum));
        continuations.truncate(most);
        continuations
    }

    /// Adds a complete answer. Keeps only the best `width` answers.
    pub(super) fn add(&mut self, ended: EndedBeam, width: usize) {
        let at = self.ended.partition_point(|known| known.score >= ended.score);
        self.ended.insert(at, ended);
        self.ended.truncate(width);
    }

    /// Returns true if no answer with `length` or more tokens and a sum of at most `best` can replace a kept
    /// answer.
    pub(super) fn is_done(&self, best: f32, length: usize, search: BeamSearch) -> bool {
        self.ended.len() >= search.width
            && self.ended.last().is_some_and(|worst| worst.score >= score(best, length, search))
    }
}

/// Returns the score of an answer with `length` tokens, whose log-probabilities add up to `sum`.
pub(super) fn score(sum: f32, length: usize, search: BeamSearch) -> f32 {
    sum / (length.max(1) as f32).powf(search.length_penalty)
}
