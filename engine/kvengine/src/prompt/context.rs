//! The context of a question: the documents as the question's tokens see them.

use std::sync::Arc;

use kvchunk::ContextScaling;
use kvcore::{MergeGroup, Segment, SequenceInput, SequenceStart, WriteSlots};

/// Returns the segment of a request's own sequence, whose tokens follow a context that ends at `start`. Every sequence
/// starts at the position 0 of its cache, so that a question is found in the same way as an ordinary prompt.
pub(crate) fn behind(start: SequenceStart, segment: Segment) -> Segment {
    Segment {
        logical_start: start.logical + segment.logical_start,
        stored_start: start.position + segment.stored_start,
        ..segment
    }
}

/// The segments that a question and its answer see before their own sequence.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    segments: Arc<[Segment]>,
    groups: Arc<[MergeGroup]>,
}

impl Context {
    /// Creates a context from the segments of a prompt's system prompt and documents. Applies the request's
    /// scaling. A system prompt without tokens is left out.
    pub(super) fn scaled(scaling: ContextScaling, segments: &Arc<[Segment]>) -> Self {
        let segments = match &scaling.apply(segments) {
            all if all.first().is_some_and(|system| system.len == 0) => all[1..].into(),
            all => Arc::clone(all),
        };
        Self { segments, groups: scaling.groups() }
    }

    /// Returns the context's segments, followed by the request's own sequence.
    fn followed_by(&self, sequence: Segment) -> Arc<[Segment]> {
        self.segments.iter().cloned().chain([sequence]).collect()
    }

    /// Returns an input for `tokens`, which follow the first `before` tokens of a sequence. The tokens see
    /// the context and their own sequence, which begins at `start` and is stored in the segment `sequence`.
    pub(crate) fn input(
        &self,
        start: SequenceStart,
        before: usize,
        tokens: &[u32],
        slots: WriteSlots,
        sequence: Segment,
    ) -> SequenceInput {
        let (logical, position) = (start.logical + before, start.position + before as i64);
        let segments = self.followed_by(sequence);
        let input = SequenceInput::new(tokens.to_vec(), logical, position, slots, segments);
        SequenceInput { groups: Arc::clone(&self.groups), ..input }
    }

    /// Returns `question` with its context replaced by this context. The question's own sequence stays the
    /// same.
    pub(super) fn of_question(&self, question: &SequenceInput) -> SequenceInput {
        let segments = match question.segments.last() {
            Some(sequence) => self.followed_by(sequence.clone()),
            None => Arc::clone(&self.segments),
        };
        SequenceInput { segments, groups: Arc::clone(&self.groups), ..question.clone() }
    }
}

impl Default for Context {
    fn default() -> Self {
        Self { segments: Arc::default(), groups: [MergeGroup::default()].into() }
    }
}
