//! The position plan: the logical order and the positions of a chunked prompt's parts.

use crate::config::{ComputeMode, PositionStrategy, ReuseCell};
use crate::error::{Error, Result};
use crate::prompt::ChunkedPrompt;

/// The positions where one chunk is stored and used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkPlace {
    /// The logical index of the chunk's first token.
    pub logical_start: usize,
    /// The position that the chunk's first key is rotated to when it is stored.
    pub stored_start: i64,
    /// The position of the chunk's first token in this prompt.
    pub used_start: i64,
    /// The number of tokens in the chunk.
    pub len: usize,
    /// The mode in which the chunk is computed, which is never [`ComputeMode::Slots`].
    pub mode: ComputeMode,
    /// The number of tokens that the chunk sees before it while it is computed: those of the system prompt and
    /// of decoys.
    pub seen: usize,
}

impl ChunkPlace {
    /// Returns the distance from the stored position to the position where the chunk is used.
    pub fn offset(&self) -> i64 {
        self.used_start - self.stored_start
    }
}

/// The positions of all parts of a prompt. The separator has no position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PositionPlan {
    /// The places of the chunks, in the prompt's order.
    pub chunks: Vec<ChunkPlace>,
    /// The logical index of the question's first token.
    pub question_logical: usize,
    /// The position of the question's first token.
    pub question_position: i64,
    /// The number of positions that the prompt needs, starting at 0. Chunks behind long decoys may be computed at
    /// higher positions than the question's.
    pub end: usize,
}

impl PositionPlan {
    /// Plans the positions of all parts of `prompt`. If the mode has slots, the chunks are planned in the slots
    /// 0, 1, 2 and so on; [`in_slots`](Self::in_slots) plans them in others, which changes nothing else.
    ///
    /// # Errors
    /// - Returns [`Error::TooLong`] if the prompt needs a position that is not below `max_positions`. The limit
    ///   applies to the highest position, not to the number of tokens.
    /// - Returns [`Error::FewDecoys`] if the prompt has fewer decoys than the mode needs.
    /// - Returns [`Error::FewSlots`] if the prompt has more chunks than the mode has slots.
    pub fn new(prompt: &ChunkedPrompt, cell: ReuseCell, max_positions: usize) -> Result<Self> {
        if let ComputeMode::Slots(slots) = cell.mode
            && prompt.chunks().len() > slots as usize
        {
            return Err(Error::FewSlots { slots, chunks: prompt.chunks().len() });
        }
        let system = prompt.system().len();
        // Decision: docs/decisions/chunks.md#decoys-keep-their-positions-in-one-pass
        // With overlapped and absolute positions, decoys keep their positions, although the question does not see
        // them. A chunk thus keeps its distance to everything that it has seen.
        let decoys: usize = prompt.decoys_in(cell.mode)?.iter().map(Vec::len).sum();
        let chunks = places(prompt, cell, decoys, 0..)?;
        let logical = system + prompt.chunks().iter().map(Vec::len).sum::<usize>();
        let longest = prompt.chunks().iter().map(Vec::len).max().unwrap_or(0);
        let question_position = match cell.strategy {
            PositionStrategy::Overlapped => (system + decoys + longest) as i64,
            PositionStrategy::Sequential => logical as i64,
            PositionStrategy::Absolute => (logical + decoys) as i64,
        };
        let asked = question_position as usize + prompt.question().len();
        let end = asked.max(system + decoys + longest);
        let plan = Self { chunks, question_logical: logical, question_position, end };
        plan.check(max_positions)?;
        Ok(plan)
    }

    /// Returns this plan with the chunks in other slots. `slots` contains one slot per chunk.
    pub(crate) fn in_slots(self, prompt: &ChunkedPrompt, cell: ReuseCell, slots: Vec<u32>) -> Result<Self> {
        let decoys = prompt.decoys_in(cell.mode)?.iter().map(Vec::len).sum();
        Ok(Self { chunks: places(prompt, cell, decoys, slots)?, ..self })
    }

    /// Checks that all positions are below `max_positions`.
    pub(crate) fn check(&self, max_positions: usize) -> Result<()> {
        if self.end > max_positions {
            return Err(Error::TooLong { largest: self.end as i64 - 1, limit: max_positions });
        }
        Ok(())
    }
}

/// Returns the places of the chunks in their slots. `decoys` is the number of tokens in all decoys of the mode.
fn places(
    prompt: &ChunkedPrompt,
    cell: ReuseCell,
    decoys: usize,
    slots: impl IntoIterator<Item = u32>,
) -> Result<Vec<ChunkPlace>> {
    let system = prompt.system().len();
    let mut logical_start = system;
    let place = |(tokens, slot): (&Vec<u32>, u32)| {
        let mode = cell.mode.in_slot(slot);
        let own: usize = prompt.decoys_in(mode)?.iter().map(Vec::len).sum();
        let seen = mode.seen(system) + own;
        let used_start = match cell.strategy {
            PositionStrategy::Overlapped => (system + own) as i64,
            PositionStrategy::Sequential => logical_start as i64,
            PositionStrategy::Absolute => (logical_start + decoys) as i64,
        };
        let stored_start = match cell.strategy {
            PositionStrategy::Absolute => used_start,
            PositionStrategy::Overlapped | PositionStrategy::Sequential => seen as i64,
        };
        let place = ChunkPlace { logical_start, stored_start, used_start, len: tokens.len(), mode, seen };
        logical_start += tokens.len();
        Ok(place)
    };
    prompt.chunks().iter().zip(slots).map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt() -> ChunkedPrompt {
        ChunkedPrompt::new(vec![0; 3], vec![vec![1; 5], vec![2; 8]], vec![3; 2]).unwrap()
    }

    #[test]
    fn overlapped_chunks_start_after_the_system_prompt() {
        let cell = ReuseCell::OVERLAPPED_ALONE;
        let plan = PositionPlan::new(&prompt(), cell, 100).unwrap();
        assert!(plan.chunks.iter().all(|c| c.used_start == 3 && c.offset() == 3));
        assert_eq!((plan.question_position, plan.question_logical), (11, 16));
        let sink = ReuseCell { mode: ComputeMode::Sink(2), ..cell };
        let plan = PositionPlan::new(&prompt(), sink, 64).unwrap();
        assert!(plan.chunks.iter().all(|chunk| (chunk.stored_start, chunk.used_start) == (2, 3)));
        let cell = ReuseCell::OVERLAPPED_WITH_SYSTEM;
        assert!(PositionPlan::new(&prompt(), cell, 100).unwrap().chunks.iter().all(|c| c.offset() == 0));
    }

    #[test]
    fn sequential_chunks_follow_one_another() {
        let cell = ReuseCell::SEQUENTIAL_WITH_SYSTEM;
        let plan = PositionPlan::new(&prompt(), cell, 100).unwrap();
        assert_eq!(plan.chunks.iter().map(ChunkPlace::offset).collect::<Vec<_>>(), [0, 5]);
        assert_eq!((plan.question_position, plan.question_logical), (16, 16));
    }

    #[test]
    fn absolute_chunks_are_stored_where_they_are_used() {
        for mode in [ComputeMode::Alone, ComputeMode::WithSystem] {
            let cell = ReuseCell { mode, strategy: PositionStrategy::Absolute };
            let plan = PositionPlan::new(&prompt(), cell, 100).unwrap();
            assert_eq!(
                plan.chunks.iter().map(|c| (c.stored_start, c.offset())).collect::<Vec<_>>(),
                [(3, 0), (8, 0)]
            );
            assert_eq!(plan.question_position, 16);
        }
    }

    #[test]
    fn decoys_keep_their_positions_in_one_pass_and_take_no_place_in_the_order() {
        let prompt = prompt().with_decoys([vec![4; 6], vec![5; 2], vec![6; 9]].into()).unwrap();
        let plan = |strategy| {
            let plan = PositionPlan::new(&prompt, ReuseCell { mode: ComputeMode::Behind(2), strategy }, 100)
                .unwrap();
            let places =
                plan.chunks.iter().map(|c| (c.logical_start, c.stored_start, c.used_start)).collect();
            let places: Vec<(usize, i64, i64)> = places;
            (places, plan.question_logical, plan.question_position)
        };
        assert_eq!(plan(PositionStrategy::Overlapped), (vec![(3, 11, 11), (8, 11, 11)], 16, 19));
        assert_eq!(plan(PositionStrategy::Sequential), (vec![(3, 11, 3), (8, 11, 8)], 16, 16));
        assert_eq!(plan(PositionStrategy::Absolute), (vec![(3, 11, 11), (8, 16, 16)], 16, 24));
        let cell = ReuseCell { mode: ComputeMode::Behind(4), strategy: PositionStrategy::Overlapped };
        assert_eq!(
            PositionPlan::new(&prompt, cell, 100),
            Err(Error::FewDecoys { mode: ComputeMode::Behind(4), given: 3 })
        );
    }

    #[test]
    fn slots_change_what_chunks_see_and_neither_their_order_nor_the_question() {
        let prompt = prompt().with_decoys([vec![4; 6], vec![5; 2], vec![6; 9]].into()).unwrap();
        let plan = |mode, strategy| PositionPlan::new(&prompt, ReuseCell { mode, strategy }, 100).unwrap();
        let slots = |strategy, slots: [u32; 2]| {
            let cell = ReuseCell { mode: ComputeMode::Slots(2), strategy };
            let plan = plan(cell.mode, strategy).in_slots(&prompt, cell, slots.into()).unwrap();
            let places: Vec<_> =
                plan.chunks.iter().map(|c| (c.mode, c.seen, c.stored_start, c.used_start)).collect();
            (places, plan.question_logical, plan.question_position)
        };
        let (two, three) = (ComputeMode::Behind(2), ComputeMode::Behind(3));
        for (strategy, first, second, question) in [
            (PositionStrategy::Overlapped, [(11, 11), (20, 20)], [(11, 11), (20, 20)], 28),
            (PositionStrategy::Sequential, [(11, 3), (20, 3)], [(11, 8), (20, 8)], 16),
            (PositionStrategy::Absolute, [(20, 20), (20, 20)], [(25, 25), (25, 25)], 33),
        ] {
            // Each place as (stored, used), in the slots 0 and 1.
            let place = |mode, seen, (stored, used): (i64, i64)| (mode, seen, stored, used);
            let in_order = vec![place(two, 11, first[0]), place(three, 20, second[1])];
            assert_eq!(slots(strategy, [0, 1]), (in_order, 16, question), "{strategy:?}");
            let swapped = vec![place(three, 20, first[1]), place(two, 11, second[0])];
            assert_eq!(slots(strategy, [1, 0]), (swapped, 16, question), "{strategy:?}");
            assert_eq!(plan(ComputeMode::Slots(2), strategy).chunks[1].mode, three);
        }
        let cell = |mode| ReuseCell { mode, strategy: PositionStrategy::Sequential };
        let few = PositionPlan::new(&prompt, cell(ComputeMode::Slots(1)), 100);
        assert_eq!(few, Err(Error::FewSlots { slots: 1, chunks: 2 }));
        let few = PositionPlan::new(&prompt, cell(ComputeMode::Slots(3)), 100);
        assert_eq!(few, Err(Error::FewDecoys { mode: ComputeMode::Slots(3), given: 3 }));
    }

    #[test]
    fn a_chunk_behind_long_decoys_needs_more_positions_than_the_question() {
        let prompt = prompt().with_decoys([vec![4; 6], vec![5; 2]].into()).unwrap();
        let cell = ReuseCell { mode: ComputeMode::Behind(2), strategy: PositionStrategy::Sequential };
        let plan = PositionPlan::new(&prompt, cell, 19).unwrap();
        assert_eq!((plan.question_position + 2, plan.end), (18, 3 + 8 + 8));
        assert_eq!(PositionPlan::new(&prompt, cell, 18), Err(Error::TooLong { largest: 18, limit: 18 }));
    }

    #[test]
    fn the_limit_applies_to_the_largest_position_not_to_the_number_of_tokens() {
        let cell = |strategy| ReuseCell { mode: ComputeMode::Alone, strategy };
        let p = prompt();
        assert_eq!(p.total_tokens(), 18);
        assert!(PositionPlan::new(&p, cell(PositionStrategy::Overlapped), 13).is_ok());
        assert_eq!(
            PositionPlan::new(&p, cell(PositionStrategy::Overlapped), 12),
            Err(Error::TooLong { largest: 12, limit: 12 })
        );
        assert!(PositionPlan::new(&p, cell(PositionStrategy::Sequential), 17).is_err());
    }
}
