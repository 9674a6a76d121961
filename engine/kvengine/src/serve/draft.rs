//! Drafts: tokens that are guessed ahead of an answer, since an answer that quotes its documents repeats them. (Prompt lookup
//! decoding, Saxena, 2023.)
//!
//! A decode step computes the last token and the guesses behind it. From the logits of each row the next token is chosen as always,
//! and the first that is not the guess ends the step: what was stored behind it is rolled back.

use std::ops::Range;

use kvmodel::LogitRows;

use super::live::Live;
use crate::engine::Engine;
use crate::error::Result;

/// The numbers of last tokens that are looked up, the first first. A single token says too little about the next.
const RUNS: [usize; 2] = [3, 2];

/// Returns up to `most` of the tokens that followed the last ones where they stood before: in the answer and its question, from the
/// latest place on, or else in the `context` before them.
pub(super) fn guess<'a>(context: &'a [u32], tokens: &'a [u32], most: usize) -> &'a [u32] {
    for run in RUNS.into_iter().filter(|&run| run <= tokens.len()) {
        let last = &tokens[tokens.len() - run..];
        // Not the last tokens themselves.
        let earlier = tokens[..tokens.len() - 1].windows(run).rposition(|window| window == last);
        if let Some(at) = earlier {
            return first(&tokens[at + run..], most);
        }
        if let Some(at) = context.windows(run).rposition(|window| window == last) {
            return first(&context[at + run..], most);
        }
    }
    &[]
}

fn first(tokens: &[u32], most: usize) -> &[u32] {
    &tokens[..tokens.len().min(most)]
}

impl Engine {
    /// Guesses what follows the last token of a sample, up to `most` tokens. Returns the number of guesses.
    pub(super) fn draft(&self, live: &mut Live, branch: usize, most: usize) -> usize {
        let most = live.request.lookup.min(most);
        live.branches[branch].draft.clear();
        if most == 0 || live.request.beams.is_some() || live.request.forced.is_some() {
            return 0;
        }
        let longest = self.longest() as i64;
        let it = &mut live.branches[branch];
        // The token that is chosen without a guess is one of the answer, too, and every guess has a position.
        let room = live.request.max_new_tokens.saturating_sub(it.answer().len() + 1);
        let places = (longest - it.start.position - it.tokens.len() as i64).max(0) as usize;
        let guessed = guess(&live.text, &it.tokens, most.min(room).min(places));
        it.draft.extend_from_slice(guessed);
        it.draft.len()
    }

    /// Chooses tokens from the logits behind a sample's last token and behind each guess, as long as the guesses are right, and rolls
    /// the others back.
    pub(super) fn verify(
        &mut self,
        live: &mut Live,
        branch: usize,
        rows: &LogitRows,
        range: Range<usize>,
    ) -> Result<()> {
        let draft = std::mem::take(&mut live.branches[branch].draft);
        let mut right = 0;
        live.branches[branch].drafted += draft.len();
        for (i, row) in range.enumerate() {
            let Some(logits) = rows.row(row) else { break };
            self.choose(live, branch, logits);
            let it = &mut live.branches[branch];
            if it.over || draft.get(i) != it.tokens.last() {
                break;
            }
            right += 1;
            it.accepted += 1;
        }
        let it = &mut live.branches[branch];
        let first = it.computed - 1;
        it.computed += right;
        it.draft = draft;
        it.draft.clear();
        let Some(own) = it.own else { return Ok(()) };
        self.caches.truncate(own, it.computed)?;
        self.caches.commit(own, &it.tokens[first..it.computed])?;
        self.let_go_behind(&live.branches[branch])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_place_of_the_longest_run_is_continued() {
        let context = [1, 2, 3, 4, 5, 2, 3, 9];
        assert_eq!(guess(&context, &[7, 2, 3], 2), [9], "the latest of a run of two");
        assert_eq!(guess(&context, &[1, 2, 3], 2), [4, 5], "a run of three comes first");
        assert_eq!(guess(&context, &[2, 3, 8, 8, 2, 3], 9), [8, 8, 2, 3], "the answer before its context");
        assert_eq!(guess(&context, &[6, 6, 6], 4), [6], "a run may overlap itself");
        assert!(guess(&context, &[3], 4).is_empty(), "one token says too little");
        assert!(guess(&context, &[3, 9], 4).is_empty(), "nothing follows");
        assert!(guess(&[], &[], 4).is_empty());
    }
}
