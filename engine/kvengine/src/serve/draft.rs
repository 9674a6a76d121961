//! Drafts: guesses for an answer's next tokens, which are correct where the answer quotes its documents.
//! (Prompt lookup decoding, Saxena, 2023.)
//!
//! A decode step computes the last token and the guesses after it. A token is chosen from each row's logits
//! as usual. The first choice that differs from its guess ends the step, and the KV of this guess and of all
//! later guesses is rolled back.

use std::ops::Range;

use kvmodel::LogitRows;

use super::live::LiveRequest;
use crate::error::Result;
use crate::runner::Runner;

/// The numbers of last tokens to look up, in the order in which they are tried. A single token does not
/// predict the next token well enough.
const RUNS: [usize; 2] = [3, 2];

/// Returns up to `most` tokens that followed an earlier occurrence of the last tokens of `tokens`: the latest
/// occurrence in `tokens` itself or, if there is none, in `context`, which precedes `tokens`.
fn guess<'a>(context: &'a [u32], tokens: &'a [u32], most: usize) -> &'a [u32] {
    for run in RUNS.into_iter().filter(|&run| run <= tokens.len()) {
        let last = &tokens[tokens.len() - run..];
        // The last tokens themselves are excluded from the search.
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

impl LiveRequest {
    /// Guesses up to `most` tokens after a sample's last token. Returns the number of guesses.
    pub(super) fn draft(&mut self, runner: &Runner, branch: usize, most: usize) -> usize {
        let most = self.request.lookup.min(most);
        let branch = &mut self.branches[branch];
        branch.draft.clear();
        // What may follow a guess is not known before the guess is chosen.
        let chosen_otherwise = self.request.beams.is_some() || self.request.forced.is_some();
        if most == 0 || chosen_otherwise || self.request.constraint.is_some() {
            return 0;
        }
        // The answer also needs room for the token chosen without a guess, and every guess needs a position.
        let room = self.request.max_new_tokens.saturating_sub(branch.answer().len() + 1);
        let positions = (runner.longest() as i64 - branch.end()).max(0) as usize;
        let guessed = guess(&self.quotable, &branch.tokens, most.min(room).min(positions));
        branch.draft.extend_from_slice(guessed);
        branch.draft.len()
    }

    /// Chooses tokens from the logits after a sample's last token and after each guess, until a guess is
    /// wrong. Rolls back the wrong guess and all later guesses.
    pub(super) fn verify(
        &mut self,
        runner: &mut Runner,
        branch: usize,
        rows: &LogitRows,
        range: Range<usize>,
    ) -> Result<()> {
        let mut right = 0;
        self.branches[branch].drafted += self.branches[branch].draft.len();
        for (i, row) in range.enumerate() {
            let Some(logits) = rows.row(row) else { break };
            self.choose(runner, branch, logits)?;
            let branch = &mut self.branches[branch];
            if branch.over || branch.draft.get(i) != branch.tokens.last() {
                break;
            }
            right += 1;
            branch.accepted += 1;
        }
        let branch = &mut self.branches[branch];
        let first = branch.computed - 1;
        branch.computed += right;
        branch.draft.clear();
        let Some(sequence) = branch.sequence else { return Ok(()) };
        runner.caches.sequences.truncate(sequence, branch.computed)?;
        runner.caches.sequences.commit(sequence, &branch.tokens[first..branch.computed])?;
        branch.free_before_window(runner)
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
