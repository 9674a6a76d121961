//! Operations on the sequences in the caches. Every list of slots has one entry per group of layers.

use std::sync::Arc;

use kvcore::{
    GroupInput, GroupKind, GroupedKvCache, KvArena, KvCache, KvPool, PagedKvCache, PromptKeys, Retention,
    SequenceId, SequenceInput, SequenceStart, Stream, SwappedSequence, WriteSlots,
};

use super::caches::{Caches, Sequences};
use crate::error::{Error, Result};

/// Calls a method that both kinds of sequence cache have.
macro_rules! either {
    ($caches:ident, $cache:ident => $call:expr) => {
        match &mut $caches.sequences {
            Sequences::Grouped($cache) => Ok($call?),
            Sequences::Static($cache) => Ok($call?),
        }
    };
}

impl Caches {
    /// Returns the cache of the first group of layers. Sequences have the same IDs and lengths in all groups.
    pub(crate) fn first(&self) -> &dyn KvCache {
        match &self.sequences {
            Sequences::Grouped(cache) => &cache.groups()[0].1,
            Sequences::Static(cache) => cache,
        }
    }

    /// Returns the sequences' paged caches, each with the kind of tokens that its layers attend to. A static
    /// cache has none.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (GroupKind, &PagedKvCache)> {
        let groups = match &self.sequences {
            Sequences::Grouped(cache) => cache.groups(),
            Sequences::Static(_) => &[],
        };
        groups.iter().map(|(kind, cache)| (*kind, cache))
    }

    /// Returns the grouped cache, for operations that a static cache does not support.
    ///
    /// # Errors
    /// Returns [`Error::NoChunks`] for a static cache.
    fn grouped(&mut self) -> Result<&mut GroupedKvCache> {
        match &mut self.sequences {
            Sequences::Grouped(cache) => Ok(cache),
            Sequences::Static(_) => Err(Error::NoChunks("use a paged cache")),
        }
    }

    /// Returns the sequences' arenas, one per group of layers.
    pub(crate) fn arenas(&self) -> &[KvArena] {
        match &self.sequences {
            Sequences::Grouped(cache) => cache.arenas(),
            Sequences::Static(cache) => std::slice::from_ref(cache.arena()),
        }
    }

    /// Returns the number of free and evictable blocks in the group that has the fewest; `usize::MAX` for a
    /// static cache.
    pub(crate) fn available(&self) -> usize {
        self.groups().map(|(_, cache)| cache.pool().counts().available()).min().unwrap_or(usize::MAX)
    }

    /// Returns the number of tokens per block.
    pub(crate) fn block_size(&self) -> usize {
        self.first().arena().layout().shape().block_size
    }

    /// Creates a sequence.
    pub(crate) fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        either!(self, cache => cache.create(start))
    }

    /// Creates a sequence that starts with the cached part of a prompt. Returns its ID and the number of
    /// cached tokens.
    pub(crate) fn create_with_prefix(&mut self, prompt: &PromptKeys) -> Result<(SequenceId, usize)> {
        either!(self, cache => cache.create_with_prefix(prompt))
    }

    /// Creates a sequence that starts with the cached part of a prompt and has slots for up to `piece` more
    /// tokens. Changes nothing on failure. Returns the sequence's ID, the number of cached tokens, and the
    /// slots.
    pub(crate) fn admit(
        &mut self,
        prompt: &PromptKeys,
        piece: usize,
    ) -> Result<(SequenceId, usize, Vec<WriteSlots>)> {
        match &mut self.sequences {
            Sequences::Grouped(cache) => Ok(cache.admit(prompt, piece)?),
            Sequences::Static(cache) => {
                let id = cache.create(SequenceStart::default())?;
                let slots = cache.grow(id, piece.min(prompt.tokens().len()));
                let slots = slots.inspect_err(|_| drop(cache.free(id)))?;
                Ok((id, 0, vec![slots]))
            }
        }
    }

    /// Reserves slots for `tokens` more tokens of a sequence.
    pub(crate) fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<Vec<WriteSlots>> {
        match &mut self.sequences {
            Sequences::Grouped(cache) => Ok(cache.grow(id, tokens)?),
            Sequences::Static(cache) => Ok(vec![cache.grow(id, tokens)?]),
        }
    }

    /// Reserves slots for more tokens of several sequences. On failure, changes nothing.
    pub(crate) fn grow_batch(
        &mut self,
        batch: &[(SequenceId, usize)],
        slots: &mut Vec<WriteSlots>,
    ) -> Result<()> {
        match &mut self.sequences {
            Sequences::Grouped(cache) => Ok(cache.grow_batch(batch, slots)?),
            Sequences::Static(cache) => {
                slots.resize_with(1, WriteSlots::default);
                Ok(cache.grow_batch(batch, &mut slots[0])?)
            }
        }
    }

    /// Returns the slots of a sequence's last `tokens` tokens with a permit that covers only this sequence,
    /// or `None` for a static cache.
    pub(crate) fn last_slots(&self, id: SequenceId, tokens: usize) -> Option<Result<Vec<WriteSlots>>> {
        let in_group = |(_, cache): (_, &PagedKvCache)| {
            let len = cache.len(id)?;
            Ok(cache.write_slots(id, len.saturating_sub(tokens)..len)?)
        };
        let slots: Result<Vec<_>> = self.groups().map(in_group).collect();
        Some(slots).filter(|slots| slots.as_ref().map_or(true, |slots| !slots.is_empty()))
    }

    /// Sets the segment of an input's own sequence in all groups but the first. Decode steps reuse the memory
    /// of the list.
    pub(crate) fn set_others(&self, id: SequenceId, input: &mut SequenceInput) -> Result<()> {
        let Sequences::Grouped(cache) = &self.sequences else { return Ok(()) };
        let others = &cache.groups()[1..];
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
    pub(crate) fn commit(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        either!(self, cache => cache.commit(id, tokens))
    }

    /// Frees a sequence's blocks that neither `token` nor any later token attends to.
    pub(crate) fn free_before(&mut self, id: SequenceId, token: usize) -> Result<()> {
        if let Sequences::Grouped(cache) = &mut self.sequences {
            cache.free_before(id, token)?;
        }
        Ok(())
    }

    /// Removes all tokens after the first `len`.
    pub(crate) fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        either!(self, cache => cache.truncate(id, len))
    }

    /// Ends a sequence and frees its blocks.
    pub(crate) fn free(&mut self, id: SequenceId) -> Result<()> {
        either!(self, cache => cache.free(id))
    }

    /// Creates a second sequence that shares all tokens and blocks so far. Returns `None` for a static cache.
    pub(crate) fn fork(&mut self, id: SequenceId) -> Result<Option<SequenceId>> {
        match &mut self.sequences {
            Sequences::Grouped(cache) => Ok(Some(cache.fork(id)?)),
            Sequences::Static(_) => Ok(None),
        }
    }

    /// Makes the next token's slot writable in each of the given sequences, by copying the last block if it
    /// is shared.
    pub(crate) fn copy_on_write(&mut self, ids: &[SequenceId], stream: &dyn Stream) -> Result<()> {
        self.grouped()?.copy_on_write(ids, stream)?;
        Ok(())
    }

    /// Sets the eviction priority that a sequence's shared blocks have once nothing holds them, and how long
    /// it lasts, counted from now.
    pub(crate) fn retain(&self, id: SequenceId, retention: Retention) -> Result<()> {
        Ok(self.groups().try_for_each(|(_, cache)| cache.retain(id, retention))?)
    }

    /// Copies a sequence to the pools in `to`, one per group, and frees its own blocks.
    pub(crate) fn swap_out(
        &mut self,
        id: SequenceId,
        stream: &dyn Stream,
        to: &[KvPool],
    ) -> Result<Vec<SwappedSequence>> {
        Ok(self.grouped()?.swap_out(id, stream, to)?)
    }

    /// Restores a swapped sequence under a new ID.
    pub(crate) fn swap_in(&mut self, swapped: &[SwappedSequence], stream: &dyn Stream) -> Result<SequenceId> {
        Ok(self.grouped()?.swap_in(swapped, stream)?)
    }
}
