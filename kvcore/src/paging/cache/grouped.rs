//! The grouped cache, in which layers that attend to different tokens have separate block pools.

use std::ops::Range;

use smallvec::SmallVec;

use super::paged::Sequence;
use super::{Error, GroupKind, PagedKvCache, Result, SequenceId, SequenceStart, SwappedSequence};
use crate::base::same;
use crate::device::{KvArena, Stream, WriteSlots};
use crate::paging::{BlockKey, KvPool, MutableBlocks, PoolCounts, PromptKeys};

// Decision: docs/decisions/paging.md#each-kind-of-layer-has-its-own-group
// Decision: docs/decisions/paging.md#a-grouped-cache-has-one-cache-per-group
/// A cache for models whose layers are divided into groups. Each group has a kind, a pool, and an arena that
/// contains only the group's layers.
///
/// Each group is a [`PagedKvCache`], and a sequence has the same ID in all groups. Calls that allocate blocks
/// either succeed in every group or change nothing. A prefix is found up to the point where every group has
/// the blocks that its kind needs: all blocks of the prefix in a full group, but only the blocks inside the
/// next token's window in a group with a window. [`free_before`](Self::free_before) frees the blocks that
/// have left each group's window, so a group with a window holds a limited number of blocks, however long its
/// sequences are. Heads and dimensions may differ by group. The [order](PagedKvCache#order) of the paged
/// cache applies to every arena.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     BlockOrder, BlockPool, DType, GroupKind, GroupedKvCache, KeyScope, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache,
///     PromptKeys,
/// };
///
/// let backend = CpuBackend::new();
/// let group = |kind, num_layers, heads| {
///     let shape = KvShape {
///         num_layers, num_blocks: 8, block_size: 4, k_heads: heads, v_heads: heads, k_dim: 8, v_dim: 8,
///         format: DType::F32.into(), order: BlockOrder::TokenMajor,
///     };
///     let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
///     Ok::<_, kvcore::Error>((kind, PagedKvCache::new(arena, BlockPool::new(0..8)?)?))
/// };
/// let window = GroupKind::SlidingWindow { window: 6 };
/// let mut cache = GroupedKvCache::new(vec![group(GroupKind::Full, 1, 4)?, group(window, 5, 1)?])?;
/// let tokens: Vec<u32> = (0..20).collect();
/// let prompt = PromptKeys::new(KeyScope::new("model", b"weights").root(), &tokens, 4);
/// let (first, _, slots) = cache.admit(&prompt, 20)?;
/// assert_eq!(slots.iter().map(|slots| slots.len()).collect::<Vec<_>>(), [20, 20]); // in each group
/// cache.commit(first, &tokens)?;
/// assert_eq!(cache.free_before(first, 20)?, 3);                                         // tokens up to 11 have left the window of 20
///
/// let (second, cached) = cache.create_with_prefix(&prompt)?;
/// let held = cache.groups().iter().map(|(_, group)| Ok(group.blocks(second)?.len()));
/// assert_eq!((cached, held.collect::<kvcore::Result<Vec<_>>>()?), (16, vec![4, 2]));
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct GroupedKvCache {
    groups: Vec<(GroupKind, PagedKvCache)>,
    arenas: Vec<KvArena>,
}

impl GroupedKvCache {
    /// Creates a cache from the caches of the groups, which must never have had a sequence. The pool of a group with
    /// a window should evict the first blocks of a prompt first
    /// ([`PoolConfig::chains`](crate::PoolConfig::chains)).
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if there are no groups or a window is 0, and [`Error::Mismatch`] if the
    /// groups' block sizes differ, or if a group has had sequences.
    pub fn new(groups: Vec<(GroupKind, PagedKvCache)>) -> Result<Self> {
        let Some(block_size) = groups.first().map(|(_, group)| group.block_size()) else {
            return Err(Error::Zero { what: "groups of layers" });
        };
        for (kind, group) in &groups {
            same("block size of a group of layers", block_size, group.block_size())?;
            same("sequences of a group before it joins others", 0, group.next as usize)?;
            if *kind == (GroupKind::SlidingWindow { window: 0 }) {
                return Err(Error::Zero { what: "window" });
            }
        }
        let arenas = groups.iter().map(|(_, group)| group.arena().clone()).collect();
        Ok(Self { groups, arenas })
    }

    /// Returns the groups with their kinds. Sequences can be read through the groups, but changed only
    /// through this cache.
    pub fn groups(&self) -> &[(GroupKind, PagedKvCache)] {
        &self.groups
    }

    /// Returns the groups' arenas, in group order.
    pub fn arenas(&self) -> &[KvArena] {
        &self.arenas
    }

    /// Creates a sequence without a shared prefix.
    ///
    /// # Errors
    /// Returns the errors of [`PagedKvCache::create`].
    pub fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        let sequences = self.groups.iter().map(|(_, group)| group.empty(start)).collect::<Result<_>>()?;
        Ok(self.insert(sequences))
    }

    /// Creates a sequence for a prompt, like [`PagedKvCache::create_with_prefix`]. Returns the sequence's ID
    /// and the number of prompt tokens that are cached in every group.
    ///
    /// # Errors
    /// Returns the errors of [`PagedKvCache::create_with_prefix`].
    pub fn create_with_prefix(&mut self, prompt: &PromptKeys) -> Result<(SequenceId, usize)> {
        if let Some(group) = self.single() {
            return group.create_with_prefix(prompt);
        }
        self.groups[0].1.check_prompt(prompt)?;
        let (id, cached, _) = self.begin(prompt, |group, found| {
            let shared = group.pool().lookup_chain(&prompt.findable()[found.clone()]);
            let sequence = group.begun(prompt, found.start, shared)?;
            Ok((sequence.table.len(), sequence, ()))
        })?;
        Ok((id, cached))
    }

    /// Creates a sequence for a prompt, with slots for a first piece of up to `piece` tokens, like
    /// [`PagedKvCache::admit`]. Returns the sequence's ID, the number of cached tokens, and the slots in each
    /// group.
    ///
    /// # Errors
    /// Returns [`Error::OutOfBlocks`] for the first group without enough blocks, in which case nothing
    /// changes in any group. Returns the other errors of [`PagedKvCache::admit`].
    pub fn admit(
        &mut self,
        prompt: &PromptKeys,
        piece: usize,
    ) -> Result<(SequenceId, usize, Vec<WriteSlots>)> {
        if let Some(group) = self.single() {
            return group.admit(prompt, piece).map(|(id, cached, slots)| (id, cached, vec![slots]));
        }
        self.groups[0].1.check_prompt(prompt)?;
        let (found, all) =
            (self.found(prompt.findable()), prompt.tokens().len().div_ceil(prompt.block_size()));
        let missing = (all - found).min(piece.div_ceil(prompt.block_size()));
        for (kind, group) in &self.groups {
            let needed = needed_of(*kind, found, prompt.block_size());
            group.pool().check_room(&prompt.findable()[needed], missing)?;
        }
        self.begin(prompt, |group, found| group.admitted(prompt, found, piece))
    }

    /// Begins a sequence in all groups, or in none. `each` gets a group, and the range of blocks that the
    /// group needs from the longest cached prefix. It returns the number of cached tokens, the group's
    /// sequence, and any further result.
    fn begin<T>(
        &mut self,
        prompt: &PromptKeys,
        each: impl Fn(&PagedKvCache, Range<usize>) -> Result<(usize, Sequence, T)>,
    ) -> Result<(SequenceId, usize, Vec<T>)> {
        let (mut keys, block_size) = (prompt.findable(), prompt.block_size());
        loop {
            let blocks = self.found(keys);
            let (mut sequences, mut beside, mut whole) = (Vec::new(), Vec::new(), true);
            for (kind, group) in &self.groups {
                let (cached, sequence, more) = each(group, needed_of(*kind, blocks, block_size))?;
                whole &= cached == blocks * block_size;
                sequences.push(sequence);
                beside.push(more);
            }
            if whole {
                return Ok((self.insert(sequences), blocks * block_size, beside));
            }
            // Another user of a group's pool took a block in the meantime.
            keys = &keys[..blocks.saturating_sub(1)];
        }
    }

    /// Returns the group if there is only one and its layers attend to all earlier tokens. The group can then
    /// be used as a paged cache, which looks up a prefix only once.
    fn single(&mut self) -> Option<&mut PagedKvCache> {
        match self.groups.as_mut_slice() {
            [(GroupKind::Full | GroupKind::Latent, group)] => Some(group),
            _ => None,
        }
    }

    /// Returns the number of blocks in the longest prefix for which every group has the blocks that it needs.
    fn found(&self, keys: &[BlockKey]) -> usize {
        let mut blocks = keys.len();
        loop {
            let before = blocks;
            for (kind, group) in &self.groups {
                blocks = longest(*kind, group, &keys[..blocks]);
            }
            if blocks == before {
                return blocks;
            }
        }
    }

    /// Adds a sequence to every group. The IDs match, because all groups have had the same number of
    /// sequences.
    fn insert(&mut self, sequences: Vec<Sequence>) -> SequenceId {
        let ids = self.groups.iter_mut().zip(sequences).map(|((_, group), sequence)| group.insert(sequence));
        ids.fold(SequenceId(0), |_, id| id)
    }

    /// Reserves slots for `tokens` more tokens in every group, and returns the slots of each group.
    ///
    /// # Errors
    /// Returns the errors of [`grow_batch`](Self::grow_batch).
    pub fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<Vec<WriteSlots>> {
        let mut slots = Vec::new();
        self.grow_batch(&[(id, tokens)], &mut slots)?;
        Ok(slots)
    }

    /// Reserves slots for more tokens of several sequences, like [`PagedKvCache::grow_batch`], in all groups
    /// or in none. Replaces the contents of `slots` with the slots of each group.
    ///
    /// # Errors
    /// Returns the errors of [`PagedKvCache::grow_batch`]. Nothing changes in these cases.
    pub fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut Vec<WriteSlots>) -> Result<()> {
        let missing = self.groups.iter_mut().map(|(_, group)| group.missing_of(batch));
        let missing: SmallVec<[usize; 4]> = missing.collect::<Result<_>>()?;
        for ((_, group), &asked) in self.groups.iter().zip(&missing).filter(|(_, asked)| **asked > 0) {
            let PoolCounts { free, evictable, total, .. } = group.pool().counts();
            if free + evictable < asked {
                return Err(Error::OutOfBlocks { asked, free, evictable, total });
            }
        }
        let fresh = self.groups.iter().zip(missing).map(|((_, group), n)| group.pool().allocate(n));
        let fresh: SmallVec<[MutableBlocks; 4]> = fresh.collect::<Result<_>>()?;
        slots.resize_with(self.groups.len(), WriteSlots::default);
        for (((_, group), fresh), slots) in self.groups.iter_mut().zip(fresh).zip(slots) {
            group.supply_batch(batch, fresh, slots)?;
        }
        Ok(())
    }

    /// Records tokens in every group, like [`PagedKvCache::commit`].
    ///
    /// # Errors
    /// Returns the errors of [`PagedKvCache::commit`].
    pub fn commit(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        self.groups.iter_mut().try_for_each(|(_, group)| group.commit(id, tokens))
    }

    /// Frees, in each group, the blocks that `token` and later tokens do not attend to. Returns the total
    /// number of freed blocks.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn free_before(&mut self, id: SequenceId, token: usize) -> Result<usize> {
        self.groups.iter_mut().map(|(kind, group)| group.free_before(id, kind.first_needed(token))).sum()
    }

    /// Removes the tokens past `len` in every group, or in none.
    ///
    /// # Errors
    /// Returns the errors of [`PagedKvCache::truncate`], and [`Error::TokenFreed`] if `len` is in a block
    /// that has left a group's window.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        self.groups.iter().try_for_each(|(_, group)| group.get(id)?.table.check_truncate(len))?;
        self.groups.iter_mut().try_for_each(|(_, group)| group.truncate(id, len))
    }

    /// Creates a second sequence over the same tokens, like [`PagedKvCache::fork`].
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let twins = self.groups.iter_mut().map(|(_, group)| group.twin(id)).collect::<Result<_>>()?;
        Ok(self.insert(twins))
    }

    /// Makes the slot of each sequence's next token writable in every group, like
    /// [`PagedKvCache::copy_on_write`]. Returns the number of copies.
    ///
    /// # Errors
    /// Returns the errors of [`PagedKvCache::copy_on_write`]. Copies that were already enqueued are kept.
    pub fn copy_on_write(&mut self, ids: &[SequenceId], stream: &dyn Stream) -> Result<usize> {
        self.groups.iter_mut().map(|(_, group)| group.copy_on_write(ids, stream)).sum()
    }

    /// Ends a sequence in every group.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.groups.iter_mut().try_for_each(|(_, group)| group.free(id))
    }

    /// Copies a sequence to other memory, which must have a pool for each group, and frees the sequence in
    /// this cache, like [`PagedKvCache::swap_out`]. Affects either all groups or none.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the number of pools differs from the number of groups, and the errors
    /// of [`PagedKvCache::swap_out`]. The sequence is unchanged in these cases.
    pub fn swap_out(
        &mut self,
        id: SequenceId,
        stream: &dyn Stream,
        to: &[KvPool],
    ) -> Result<Vec<SwappedSequence>> {
        same("pools to swap to, one for each group", self.groups.len(), to.len())?;
        let copies = self
            .groups
            .iter()
            .zip(to)
            .map(|((_, group), to)| group.copy_out(id, stream, to.arena(), to.blocks()));
        let swapped = copies.collect::<Result<_>>()?;
        self.free(id)?;
        Ok(swapped)
    }

    /// Restores a swapped sequence under a new ID, like [`PagedKvCache::swap_in`]. Affects either all groups
    /// or none.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the number of parts differs from the number of groups, and the errors
    /// of [`PagedKvCache::swap_in`]. Nothing changes in these cases.
    pub fn swap_in(&mut self, swapped: &[SwappedSequence], stream: &dyn Stream) -> Result<SequenceId> {
        same("parts of a swapped sequence, one for each group", self.groups.len(), swapped.len())?;
        let parts = || self.groups.iter().map(|(_, group)| group).zip(swapped);
        parts().try_for_each(|(group, swapped)| {
            let keys = swapped.keys(group.block_size());
            let known = group.pool().cached_prefix(keys);
            group.pool().check_room(&keys[..known], swapped.blocks().len() - known)
        })?;
        let sequences =
            parts().map(|(group, swapped)| group.restore(swapped, stream)).collect::<Result<_>>()?;
        Ok(self.insert(sequences))
    }

    /// Checks the pool of every group. Returns a description of the first inconsistency as `Err`.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.groups.iter().try_for_each(|(_, group)| group.pool().check_invariants())
    }
}

/// Returns the range of blocks, among a prompt's first `blocks` blocks, that the next token needs.
fn needed_of(kind: GroupKind, blocks: usize, block_size: usize) -> Range<usize> {
    kind.first_needed(blocks * block_size) / block_size..blocks
}

/// Returns the number of blocks in the longest prefix for which a group has the blocks that it needs.
fn longest(kind: GroupKind, group: &PagedKvCache, keys: &[BlockKey]) -> usize {
    let mut blocks = keys.len();
    loop {
        let needed = needed_of(kind, blocks, group.block_size());
        if needed.start == 0 {
            return group.pool().cached_prefix(&keys[..blocks]);
        }
        // Every prefix that ends after the missing block and at or before `blocks` needs the missing block.
        match needed.rev().find(|&i| group.pool().cached_prefix(&keys[i..=i]) == 0) {
            Some(missing) => blocks = missing,
            None => return blocks,
        }
    }
}
