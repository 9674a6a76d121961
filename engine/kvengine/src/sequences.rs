//! The sequences of an engine: what the scheduler does with them, in a cache of any kind.

use std::sync::Arc;

use kvcore::{
    GroupInput, GroupKind, GroupedKvCache, KvArena, KvCache, KvPool, PagedKvCache, PromptKeys, Retention,
    SequenceId, SequenceInput, SequenceStart, Stream, SwappedSequence, WriteSlots,
};

use crate::caches::Caches;
use crate::error::{Error, Result};

/// The cache of sequences, as one for all layers or as one for each group of layers.
enum SequencesMut<'a> {
    Uniform(&'a mut dyn KvCache),
    Grouped(&'a mut GroupedKvCache),
}

use SequencesMut::{Grouped, Uniform};

impl Caches {
    /// Returns the cache that holds sequences; of a grouped cache that of its first group, whose sequences have the ids and lengths of
    /// all.
    pub(crate) fn sequences(&self) -> &dyn KvCache {
        match self {
            Self::Paged { main, .. } => main,
            Self::Static(cache) => cache,
            Self::Grouped(cache) => &cache.groups()[0].1,
        }
    }

    fn sequences_mut(&mut self) -> SequencesMut<'_> {
        match self {
            Self::Paged { main, .. } => Uniform(main),
            Self::Static(cache) => Uniform(cache),
            Self::Grouped(cache) => Grouped(cache),
        }
    }

    /// Returns the paged caches of sequences, each with the tokens that its layers attend to: several for a grouped cache, none for a
    /// static one.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (GroupKind, &PagedKvCache)> {
        let (one, several) = match self {
            Self::Paged { main, kind, .. } => (Some((*kind, main)), [].as_slice()),
            Self::Static(_) => (None, [].as_slice()),
            Self::Grouped(cache) => (None, cache.groups()),
        };
        one.into_iter().chain(several.iter().map(|(kind, cache)| (*kind, cache)))
    }

    /// Returns the arenas of sequences, one for each group of layers.
    pub(crate) fn arenas(&self) -> &[KvArena] {
        match self {
            Self::Grouped(cache) => cache.arenas(),
            Self::Paged { .. } | Self::Static(_) => std::slice::from_ref(self.sequences().arena()),
        }
    }

    /// Returns the number of blocks of sequences that are free or can be evicted, of the group that has fewest; all for a static cache.
    pub(crate) fn available(&self) -> usize {
        self.groups().map(|(_, cache)| cache.pool().counts().available()).min().unwrap_or(usize::MAX)
    }

    /// Returns the number of tokens in a block.
    pub(crate) fn block_size(&self) -> usize {
        self.sequences().arena().layout().shape().block_size
    }

    /// Creates a sequence.
    pub(crate) fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        Ok(match self.sequences_mut() {
            Uniform(cache) => cache.create(start)?,
            Grouped(cache) => cache.create(start)?,
        })
    }

    /// Creates a sequence at the start of a prompt. Returns its id and the number of tokens that are cached.
    pub(crate) fn create_with_prefix(&mut self, prompt: &PromptKeys) -> Result<(SequenceId, usize)> {
        Ok(match self.sequences_mut() {
            Uniform(cache) => cache.create_with_prefix(prompt)?,
            Grouped(cache) => cache.create_with_prefix(prompt)?,
        })
    }

    /// Creates a sequence at the start of a prompt with slots for a first piece, or changes nothing. Returns its id, the number of
    /// tokens that are cached, and the slots in each group.
    pub(crate) fn admit(
        &mut self,
        prompt: &PromptKeys,
        piece: usize,
    ) -> Result<(SequenceId, usize, Vec<WriteSlots>)> {
        match self {
            Self::Paged { main, .. } => {
                let (id, cached, slots) = main.admit(prompt, piece)?;
                Ok((id, cached, vec![slots]))
            }
            Self::Grouped(cache) => Ok(cache.admit(prompt, piece)?),
            Self::Static(cache) => {
                let id = cache.create(SequenceStart::default())?;
                let slots = cache.grow(id, piece.min(prompt.tokens().len()));
                let slots = slots.inspect_err(|_| drop(cache.free(id)))?;
                Ok((id, 0, vec![slots]))
            }
        }
    }

    /// Reserves slots for more tokens of a sequence in each group.
    pub(crate) fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<Vec<WriteSlots>> {
        Ok(match self.sequences_mut() {
            Uniform(cache) => vec![cache.grow(id, tokens)?],
            Grouped(cache) => cache.grow(id, tokens)?,
        })
    }

    /// Reserves slots for more tokens of several sequences in each group, or changes nothing.
    pub(crate) fn grow_batch(
        &mut self,
        batch: &[(SequenceId, usize)],
        slots: &mut Vec<WriteSlots>,
    ) -> Result<()> {
        match self.sequences_mut() {
            Uniform(cache) => {
                slots.resize_with(1, WriteSlots::default);
                cache.grow_batch(batch, &mut slots[0])?;
            }
            Grouped(cache) => cache.grow_batch(batch, slots)?,
        }
        Ok(())
    }

    /// Returns the slots of the last tokens of a sequence in each group with a permit of their own, or `None` for a static cache.
    pub(crate) fn last_slots(&self, id: SequenceId, tokens: usize) -> Option<Result<Vec<WriteSlots>>> {
        let of = |(_, cache): (_, &PagedKvCache)| {
            let len = cache.len(id)?;
            Ok(cache.write_slots(id, len.saturating_sub(tokens)..len)?)
        };
        let slots: Result<Vec<_>> = self.groups().map(of).collect();
        Some(slots).filter(|slots| slots.as_ref().map_or(true, |slots| !slots.is_empty()))
    }

    /// Sets what an input attends to of its own sequence in the groups after the first. The lists of a decode step stay.
    pub(crate) fn set_others(&self, id: SequenceId, input: &mut SequenceInput) -> Result<()> {
        let Self::Grouped(cache) = self else { return Ok(()) };
        let others = &cache.groups()[1..];
        input.others.resize_with(others.len(), GroupInput::default);
        for ((_, cache), other) in others.iter().zip(&mut input.others) {
            let own = cache.segment(id)?;
            other.slots = WriteSlots::default();
            match Arc::get_mut(&mut other.segments) {
                Some([last]) => *last = own,
                _ => other.segments = [own].into(),
            }
        }
        Ok(())
    }

    /// Records tokens that were written.
    pub(crate) fn commit(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        match self.sequences_mut() {
            Uniform(cache) => cache.commit(id, tokens)?,
            Grouped(cache) => cache.commit(id, tokens)?,
        }
        Ok(())
    }

    /// Lets go of what `token` and later tokens of a sequence do not attend to.
    pub(crate) fn let_go(&mut self, id: SequenceId, token: usize) -> Result<()> {
        match self {
            Self::Paged { main, kind, .. } => main.let_go(id, kind.first_needed(token))?,
            Self::Grouped(cache) => cache.let_go(id, token)?,
            Self::Static(_) => 0,
        };
        Ok(())
    }

    /// Removes the tokens past `len`.
    pub(crate) fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        match self.sequences_mut() {
            Uniform(cache) => cache.truncate(id, len)?,
            Grouped(cache) => cache.truncate(id, len)?,
        }
        Ok(())
    }

    /// Ends a sequence.
    pub(crate) fn free(&mut self, id: SequenceId) -> Result<()> {
        match self.sequences_mut() {
            Uniform(cache) => cache.free(id)?,
            Grouped(cache) => cache.free(id)?,
        }
        Ok(())
    }

    /// Creates a second sequence over the same tokens, or returns `None` for a static cache.
    pub(crate) fn fork(&mut self, id: SequenceId) -> Result<Option<SequenceId>> {
        Ok(match self {
            Self::Paged { main, .. } => Some(main.fork(id)?),
            Self::Grouped(cache) => Some(cache.fork(id)?),
            Self::Static(_) => None,
        })
    }

    /// Makes the next token's slot of forked sequences writable.
    pub(crate) fn copy_on_write(&mut self, ids: &[SequenceId], stream: &dyn Stream) -> Result<()> {
        match self {
            Self::Paged { main, .. } => main.copy_on_write(ids, stream)?,
            Self::Grouped(cache) => cache.copy_on_write(ids, stream)?,
            Self::Static(_) => 0,
        };
        Ok(())
    }

    /// Sets the worth of the blocks that a sequence shares.
    pub(crate) fn retain(&self, id: SequenceId, retention: Retention) -> Result<()> {
        Ok(self.groups().try_for_each(|(_, cache)| cache.retain(id, retention))?)
    }

    /// Copies a sequence to other memory, which has a pool for each group, and frees it here.
    pub(crate) fn swap_out(
        &mut self,
        id: SequenceId,
        stream: &dyn Stream,
        to: &[KvPool],
    ) -> Result<Vec<SwappedSequence>> {
        match (self, to) {
            (Self::Paged { main, .. }, [to]) => {
                Ok(vec![main.swap_out(id, stream, to.arena(), to.blocks())?])
            }
            (Self::Grouped(cache), to) => Ok(cache.swap_out(id, stream, to)?),
            (_, to) => Err(not_one("pools to swap to", to.len())),
        }
    }

    /// Restores a swapped sequence under a new id.
    pub(crate) fn swap_in(&mut self, swapped: &[SwappedSequence], stream: &dyn Stream) -> Result<SequenceId> {
        match (self, swapped) {
            (Self::Paged { main, .. }, [swapped]) => Ok(main.swap_in(swapped, stream)?),
            (Self::Grouped(cache), swapped) => Ok(cache.swap_in(swapped, stream)?),
            (_, swapped) => Err(not_one("parts of a swapped sequence", swapped.len())),
        }
    }
}

/// Returns the error for a list with one item a group, given to a cache of one group.
fn not_one(what: &'static str, got: usize) -> Error {
    kvcore::Error::Mismatch { what, expected: 1, got }.into()
}
