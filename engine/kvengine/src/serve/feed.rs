//! The plan for a step: the tokens that each request contributes to a pass.

use kvcore::{SequenceId, SequenceInput, WriteSlots};

use super::live::ServiceRank;
use crate::error::Error;

/// The tokens that one request contributes to a pass.
#[derive(Debug)]
pub(super) struct Feed {
    pub(super) rank: ServiceRank,
    /// The sample that the tokens belong to, or `None` for document tokens.
    pub(super) branch: Option<usize>,
    pub(super) tokens: usize,
    /// The input, until it is moved to the batch; `None` for a sample's tokens until they have slots.
    pub(super) input: Option<SequenceInput>,
}

/// The inputs of a step, the requests that have failed in it, and memory that is reused.
#[derive(Debug, Default)]
pub(super) struct StepPlan {
    pub(super) feeds: Vec<Feed>,
    /// The input of each feed.
    pub(super) batch: Vec<SequenceInput>,
    /// The slots for all inputs that have no slots of their own, one entry per group of layers.
    pub(super) slots: Vec<WriteSlots>,
    /// Inputs in other RoPE regimes, for later passes of the step.
    pub(super) later: Vec<(Feed, SequenceInput)>,
    /// The sequences that grow in the pass, each with its number of new tokens. The memory is reused.
    pub(super) grown: Vec<(SequenceId, usize)>,
    /// The growing sequences that may share their last block. The memory is reused.
    pub(super) forked: Vec<SequenceId>,
    pub(super) failed: Vec<(ServiceRank, Error)>,
    /// The number of tokens that blends computed during planning.
    pub(super) blended: usize,
}

impl StepPlan {
    /// Removes a request from the pass.
    pub(super) fn remove(&mut self, rank: ServiceRank) {
        self.feeds.retain(|feed| feed.rank != rank);
    }

    pub(super) fn has_failed(&self, rank: ServiceRank) -> bool {
        self.failed.iter().any(|(failed, _)| *failed == rank)
    }

    /// Replaces the inputs of the pass with the inputs that were kept for a later pass because their RoPE
    /// regime differs.
    pub(super) fn next_pass(&mut self) {
        self.feeds.clear();
        self.batch.clear();
        for (feed, input) in self.later.drain(..) {
            self.feeds.push(feed);
            self.batch.push(input);
        }
    }
}
