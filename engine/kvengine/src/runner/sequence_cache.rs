//! The interface of the caches that can hold an engine's sequences. Every list of slots has one entry per
//! group of layers.

use std::fmt;
use std::sync::Arc;

use kvcore::{
    GroupInput, GroupKind, GroupedKvCache, KvArena, KvCache, PagedKvCache, PromptKeys, Retention, SequenceId,
    SequenceInput, SequenceStart, WriteSlots,
};

use crate::error::{Error, Result};

/// A cache of sequences. The default implementations of its methods suit a cache without pools, which cannot
/// share blocks between sequences.
pub(crate) trait SequenceCache: Send + Sync + fmt::Debug {
    /// Returns the cache of the first group of layers. Sequences have the same IDs and lengths in all groups.
    fn first(&self) -> &dyn KvCache;

    /// Returns the arenas, one per group of layers.
    fn arenas(&self) -> &[KvArena];

    /// Returns the paged caches, each with the kind of tokens that its layers attend to.
    fn groups(&self) -> &[(GroupKind, PagedKvCache)] {
        &[]
    }

    /// Returns the grouped cache, for operations that only a cache with pools supports.
    ///
    /// # Errors
    /// Returns [`Error::NoChunks`] for a cache without pools.
    fn grouped(&mut self) -> Result<&mut GroupedKvCache> {
        Err(Error::NoChunks("use a paged cache"))
    }

    /// Returns the maximum number of tokens per sequence, or `usize::MAX` if the cache sets no limit.
    fn longest(&self) -> usize {
        self.first().max_len()
    }

    /// Returns the number of free and evictable blocks in the group that has the fewest; `usize::MAX` for a
    /// cache without pools.
    fn available(&self) -> usize {
        self.groups().iter().map(|(_, cache)| cache.pool().counts().available()).min().unwrap_or(usize::MAX)
    }

    /// Returns the number of tokens per block.
    fn block_size(&self) -> usize {
        self.first().arena().layout().shape().block_size
    }

    /// Creates a sequence.
    fn create(&mut self, start: SequenceStart) -> Result<SequenceId>;

    /// Creates a sequence that starts with the cached part of a prompt. Returns its ID and the number of
    /// cached tokens.
    fn create_with_prefix(&mut self, _prompt: &PromptKeys) -> Result<(SequenceId, usize)> {
        Ok((self.create(SequenceStart::default())?, 0))
    }

    /// Creates a sequence that starts with the cached part of a prompt and has slots for up to `piece` more
    /// tokens. Changes nothing on failure. Returns the sequence's ID, the number of cached tokens, and the
    /// slots.
    fn admit(&mut self, prompt: &PromptKeys, piece: usize) -> Result<(SequenceId, usize, Vec<WriteSlots>)> {
        let id = self.create(SequenceStart::default())?;
        let slots = self.grow(id, piece.min(prompt.tokens().len()));
        let slots = slots.inspect_err(|_| drop(self.free(id)))?;
        Ok((id, 0, slots))
    }

    /// Reserves slots for `tokens` more tokens of a sequence.
    fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<Vec<WriteSlots>> {
        let mut slots = Vec::new();
        self.grow_batch(&[(id, tokens)], &mut slots)?;
        Ok(slots)
    }

    /// Reserves slots for more tokens of several sequences. On failure, changes nothing.
    fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut Vec<WriteSlots>) -> Result<()>;

    /// Returns the slots of a sequence's last `tokens` tokens with a permit that covers only this sequence,
    /// or `None` for a cache without pools.
    fn last_slots(&self, id: SequenceId, tokens: usize) -> Option<Result<Vec<WriteSlots>>> {
        let in_group = |(_, cache): &(_, PagedKvCache)| {
            let len = cache.len(id)?;
            Ok(cache.write_slots(id, len.saturating_sub(tokens)..len)?)
        };
        (!self.groups().is_empty()).then(|| self.groups().iter().map(in_group).collect())
    }

    /// Sets the segment of an input's own sequence in all groups but the first. Decode steps reuse the memory
    /// of the list.
    fn set_others(&self, id: SequenceId, input: &mut SequenceInput) -> Result<()> {
        let [_, others @ ..] = self.groups() else { return Ok(()) };
        input.others.resize_with(others.len(), GroupInput::default);
        for ((_, cache), other) in others.iter().zip(&mut input.others) {
            let segment = cache.segment(id)?;
            other.slots = WriteSlots::default();
            match Arc::get_mut(&mut other.segments) {
                Some([last]) => *last = segment,
                _ => other.segments = [segment].into(),
            }
        }
        Ok(())
    }

    /// Records tokens whose keys and values were written.
    fn commit(&mut self, _id: SequenceId, _tokens: &[u32]) -> Result<()> {
        Ok(())
    }

    /// Frees a sequence's blocks that neither `token` nor any later token attends to.
    fn free_before(&mut self, _id: SequenceId, _token: usize) -> Result<()> {
        Ok(())
    }

    /// Removes all tokens after the first `len`.
    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()>;

    /// Ends a sequence and frees its blocks.
    fn free(&mut self, id: SequenceId) -> Result<()>;

    /// Sets the eviction priority that a sequence's shared blocks have once nothing holds them, and how long
    /// it lasts, counted from now.
    fn retain(&self, id: SequenceId, retention: Retention) -> Result<()> {
        Ok(self.groups().iter().try_for_each(|(_, cache)| cache.retain(id, retention))?)
    }
}
