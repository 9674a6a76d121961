//! The context of a question: the documents as its tokens see them.

use std::sync::Arc;

use kvchunk::ContextScaling;
use kvcore::{MergeGroup, Segment, SequenceInput, SequenceStart, WriteSlots};

/// The segments that the tokens of a question and its answer see before their own sequence.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    segments: Arc<[Segment]>,
    groups: Arc<[MergeGroup]>,
}

impl Context {
    /// Returns the segments of a prompt's documents with the weights of a request.
    pub(super) fn scaled(scaling: ContextScaling, segments: &Arc<[Segment]>) -> Self {
        Self { segments: scaling.apply(segments), groups: scaling.groups() }
    }

    /// Returns the segments of the context, followed by that of the own sequence.
    fn followed_by(&self, sequence: Segment) -> Arc<[Segment]> {
        self.segments.iter().cloned().chain([sequence]).collect()
    }

    /// Returns the tokens after the first `before` of a sequence as an input that sees the context and its
    /// own sequence. The sequence begins at `start`, and lies in the segment `sequence`.
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

    /// Returns a question that sees this context in place of its own, and its own sequence as before.
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
