//! Guards, each of which holds blocks in the same state. Blocks change state only through their guard.
//!
//! A guard holds any number of blocks from one pool. A state change covers all of these blocks at once, and a
//! guard with few blocks allocates no heap memory.

use std::sync::Arc;

use smallvec::SmallVec;

use super::event::KvEvent;
use super::pin::PinnedBlocks;
use super::{BlockPool, Retention};
use crate::base::{BlockId, Error, Result, SlotMapping, same};
use crate::device::{Permits, WritePairs, WriteSlots};
use crate::paging::BlockKey;

pub(super) type Ids = SmallVec<[BlockId; 4]>;

/// A rejected state change, with the unchanged blocks.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Rejected<T> {
    /// The reason for the rejection.
    pub error: Error,
    /// The unchanged blocks.
    pub blocks: T,
}

impl<T> From<Rejected<T>> for Error {
    /// Returns the error and drops the blocks.
    fn from(rejected: Rejected<T>) -> Self {
        rejected.error
    }
}

impl<T> From<Box<Rejected<T>>> for Error {
    /// Returns the error and drops the blocks.
    fn from(rejected: Box<Rejected<T>>) -> Self {
        rejected.error
    }
}

/// Blocks being filled. No other guard holds them.
///
/// # Drop behaviour
/// The blocks become free, and their contents are lost.
#[derive(Debug)]
#[must_use = "dropping the guard frees the blocks"]
pub struct MutableBlocks {
    pub(super) pool: BlockPool,
    pub(super) ids: Ids,
    /// Issues permits to write to the blocks. A permit becomes void, at the latest, when one of its blocks
    /// leaves the guard.
    pub(super) permits: Permits,
}
/// Filled blocks that any number of holders can read. They are never written while they are shared.
///
/// # Drop behaviour
/// Each block loses one holder, the last block first, so that the pool evicts the end of a prefix before its
/// beginning. A block that loses its last holder becomes cached if it has a key or a pin ([`PinnedBlocks`]),
/// and free otherwise.
#[derive(Debug)]
#[must_use = "dropping the guard lets the blocks go"]
pub struct SharedBlocks {
    pub(super) pool: BlockPool,
    pub(super) ids: Ids,
}

/// Defines the methods that all guards have.
macro_rules! guard {
    ($guard:ident) => {
        impl $guard {
            /// Returns the physical blocks, in order.
            pub fn ids(&self) -> &[BlockId] {
                &self.ids
            }

            /// Returns the number of blocks.
            pub fn len(&self) -> usize {
                self.ids.len()
            }

            /// Returns whether the guard holds no blocks.
            pub fn is_empty(&self) -> bool {
                self.ids.is_empty()
            }

            /// Returns the pool that the blocks belong to.
            pub fn pool(&self) -> &BlockPool {
                &self.pool
            }

            /// Creates an empty guard to append to.
            pub fn none(pool: &BlockPool) -> Self {
                Self::over(pool.clone(), Ids::new())
            }

            /// Keeps the first `at` blocks, and returns a guard with the rest.
            ///
            /// # Errors
            /// Returns [`Error::TooLarge`] if `at` exceeds the number of blocks.
            pub fn split_off(&mut self, at: usize) -> Result<Self> {
                if at > self.ids.len() {
                    return Err(Error::too_large("blocks to keep", at, self.ids.len()));
                }
                if at < self.ids.len() {
                    self.lose();
                }
                Ok(Self::over(self.pool.clone(), self.ids.drain(at..).collect()))
            }

            /// Appends the blocks of `other`. The permits of `other` become void.
            ///
            /// # Errors
            /// Returns [`Error::ForeignBlock`] if the blocks belong to another pool. The error then contains
            /// `other`.
            pub fn append(&mut self, mut other: Self) -> Result<(), Rejected<Self>> {
                match other.ids.first() {
                    Some(&block) if !self.pool.same_pool(&other.pool) => {
                        let range = self.pool.range();
                        let error = Error::ForeignBlock { block, start: range.start, end: range.end };
                        Err(Rejected { error, blocks: other })
                    }
                    _ => {
                        other.lose();
                        self.ids.append(&mut other.ids);
                        Ok(())
                    }
                }
            }
        }
    };
}

guard!(MutableBlocks);
guard!(SharedBlocks);

/// Frees blocks that were not shared. The last block will be the next one to be allocated.
pub(super) fn discard(pool: &BlockPool, ids: &[BlockId]) {
    if !ids.is_empty() {
        let (moment, mut walk) = (pool.0.moment(), pool.0.walk());
        for &id in ids {
            let (shard, block) = walk.shard(id);
            shard.discard(block, &moment);
        }
    }
}

impl MutableBlocks {
    pub(super) fn over(pool: BlockPool, ids: Ids) -> Self {
        Self { pool, ids, permits: Permits::default() }
    }

    /// Voids all permits. Must be called before blocks leave the guard.
    pub(super) fn lose(&self) {
        self.permits.void(self.ids.len());
    }

    /// Removes the first `n` blocks from the guard and returns them. Permits that include any of these blocks
    /// become void, and all other permits stay valid.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if `n` exceeds the number of blocks.
    pub(super) fn take_first(&mut self, n: usize) -> Result<Self> {
        if n > self.ids.len() {
            return Err(Error::too_large("blocks to share", n, self.ids.len()));
        }
        self.permits.void_first(n);
        Ok(Self::over(self.pool.clone(), self.ids.drain(..n).collect()))
    }

    /// Allocates `n` more blocks, or none on failure.
    ///
    /// # Errors
    /// Returns [`Error::OutOfBlocks`] if there are too few free and evictable blocks. Nothing changes in that
    /// case.
    pub fn allocate(&mut self, n: usize) -> Result<()> {
        self.pool.take(&mut self.ids, n, 0)
    }
}

impl MutableBlocks {
    /// Shares the filled blocks under `keys`, one key per block. Each key must be the child of the previous
    /// key, and the first key must be the child of `parent`. If the pool already has a block under a key, the
    /// returned guard holds that block instead, and this guard's block is freed, unless the pool keeps
    /// duplicates (see [`super::Duplicates`]). Compare the IDs to find out which blocks were replaced.
    /// Permits to write to the blocks become void.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the number of keys differs from the number of blocks. The error
    /// contains the unchanged guard.
    pub fn register(
        mut self,
        parent: Option<BlockKey>,
        keys: &[BlockKey],
    ) -> Result<SharedBlocks, Rejected<Self>> {
        match same("keys of the blocks", self.ids.len(), keys.len()) {
            Ok(()) => {
                self.lose();
                let mut shared = share(&self.pool, std::mem::take(&mut self.ids));
                shared.enter_keys(0, parent, keys);
                Ok(shared)
            }
            Err(error) => Err(Rejected { error, blocks: self }),
        }
    }

    /// Shares the filled blocks without keys. They become free when their last holder is dropped, unless they
    /// are pinned. Permits to write to the blocks become void.
    pub fn share(mut self) -> SharedBlocks {
        self.lose();
        share(&self.pool, std::mem::take(&mut self.ids))
    }

    /// Returns `slots` with a permit to write to them. All slots must be in this guard's blocks, which have
    /// `block_size` tokens each. Negative slots are padding.
    ///
    /// # Errors
    /// Returns [`Error::NotOwned`] if a slot is in another block, and [`Error::Zero`] if `block_size` is 0.
    ///
    /// ```
    /// use kvcore::{BlockId, BlockPool, Error, SlotMapping};
    /// let pool = BlockPool::new(0..8)?;
    /// let blocks = pool.allocate(2)?;
    /// let slots = SlotMapping::in_blocks(blocks.ids(), 16, 0..20)?;
    /// let writable = blocks.write_slots(16, slots)?;
    /// assert_eq!(writable.len(), 20);
    /// assert_eq!(blocks.write_slots(16, [7 * 16]).unwrap_err(), Error::NotOwned { block: BlockId(7) });
    /// let shared = blocks.share();
    /// assert_eq!(writable.check(), Err(Error::PermitVoid { what: "slots" }));
    /// # drop(shared);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn write_slots(&self, block_size: usize, slots: impl Into<SlotMapping>) -> Result<WriteSlots> {
        if block_size == 0 {
            return Err(Error::Zero { what: "block_size" });
        }
        let slots = slots.into();
        let blocks = slots
            .iter()
            .filter(|&&slot| slot >= 0)
            .map(|&slot| BlockId(u32::try_from(slot / block_size as i64).unwrap_or(u32::MAX)));
        let first = self.first_of(blocks)?;
        Ok(self.permits.slots(first, block_size, slots))
    }

    /// Returns `pairs`, each `(source, destination)`, with a permit to write to the destinations, which must
    /// all be in this guard.
    ///
    /// # Errors
    /// Returns [`Error::NotOwned`] if a destination is not in this guard.
    pub fn write_pairs(&self, pairs: impl Into<Arc<[(BlockId, BlockId)]>>) -> Result<WritePairs> {
        let pairs = pairs.into();
        let first = self.first_of(pairs.iter().map(|&(_, destination)| destination))?;
        Ok(self.permits.pairs(first, pairs))
    }

    /// Checks that all of `blocks` are in the guard, and returns the lowest index among them, or the number
    /// of blocks in the guard if `blocks` is empty. Blocks are usually given in the guard's order, so the
    /// search for a block starts at the previous block.
    fn first_of(&self, blocks: impl Iterator<Item = BlockId>) -> Result<usize> {
        let (mut at, mut first) = (0, self.ids.len());
        for block in blocks {
            let (before, from) = self.ids.split_at(at);
            let ahead = from.iter().chain(before).position(|&id| id == block);
            at = (at + ahead.ok_or(Error::NotOwned { block })?) % self.ids.len();
            first = first.min(at);
        }
        Ok(first)
    }
}

impl Drop for MutableBlocks {
    fn drop(&mut self) {
        self.lose();
        discard(&self.pool, &self.ids);
    }
}

/// Shares filled blocks, with the returned guard as their first holder.
fn share(pool: &BlockPool, ids: Ids) -> SharedBlocks {
    let mut walk = pool.0.walk();
    for &id in &ids {
        let (shard, block) = walk.shard(id);
        shard.share(block);
    }
    drop(walk);
    SharedBlocks { pool: pool.clone(), ids }
}

impl SharedBlocks {
    fn over(pool: BlockPool, ids: Ids) -> Self {
        Self { pool, ids }
    }

    /// Does nothing: shared blocks have no permits to void.
    #[expect(clippy::unused_self, reason = "both guards are made by one macro")]
    fn lose(&self) {}

    /// Sets the keys of the blocks starting at `start`; see [`MutableBlocks::register`]. Blocks that already
    /// have a key keep it.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if there are more keys than blocks starting at `start`. Returns
    /// [`Error::Twice`] if one of these blocks occurs twice, which is possible after guards were appended.
    /// Nothing changes in these cases.
    pub fn register(&mut self, start: usize, parent: Option<BlockKey>, keys: &[BlockKey]) -> Result<()> {
        let end = start.saturating_add(keys.len());
        if end > self.ids.len() {
            return Err(Error::too_large("end of the blocks to register", end, self.ids.len()));
        }
        let mut sorted: Ids = self.ids[start..end].into();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Twice { what: "block to register", number: u64::from(pair[0].0) });
        }
        self.enter_keys(start, parent, keys);
        Ok(())
    }

    fn enter_keys(&mut self, start: usize, parent: Option<BlockKey>, keys: &[BlockKey]) {
        let handle = self.pool.clone();
        let pool = &*handle.0;
        // Indices of keys that already have another block, and indices of blocks that already have a key.
        let (mut known, mut keyed): (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>) = Default::default();
        let parent_block = pool.block_of(parent);
        let mut before = parent_block;
        let ids = &self.ids[start..][..keys.len()];
        let mut walk = pool.walk();
        let mut from = 0;
        while from < ids.len() {
            let (shard, block) = walk.shard(ids[from]);
            if shard.has_key(block) {
                keyed.push(from);
                before = ids[from].0 - pool.rules.first;
                from += 1;
                continue;
            }
            // The next blocks, as long as they are in this shard and have no key.
            let more = ids[from + 1..].iter().take_while(|&&id| {
                pool.shard_of(id) == pool.shard_of(ids[from]) && !shard.has_key(pool.local(id))
            });
            let run = from..from + 1 + more.count();
            let index = |i: usize| ids[run.start + i].0 - pool.rules.first;
            let mut entered: SmallVec<[u32; 64]> = (0..run.len()).map(index).collect();
            pool.index.enter(&keys[run.clone()], index, |i, known| entered[i] = known);
            for (i, entered) in run.clone().zip(entered) {
                if entered == ids[i].0 - pool.rules.first {
                    shard.set_key(pool.local(ids[i]), keys[i], before);
                } else {
                    known.push(i);
                }
                before = entered;
            }
            from = run.end;
        }
        drop(walk);
        known.retain(|&mut i| {
            let before = i.checked_sub(1).map(|i| self.ids[start + i].0 - pool.rules.first);
            let registered = self.merge(start + i, &keys[i], before.unwrap_or(parent_block));
            if i + 1 < keys.len() {
                let (mut walk, next) = (pool.walk(), self.ids[start + i + 1]);
                let (shard, block) = walk.shard(next);
                shard.relink(block, self.ids[start + i].0 - pool.rules.first);
            }
            !registered
        });
        if let Some(events) = &pool.rules.events {
            known.extend(keyed);
            known.sort_unstable();
            let mut from = 0;
            for &to in known.iter().chain([&keys.len()]) {
                if from < to {
                    let parent = if from == 0 { parent } else { Some(keys[from - 1]) };
                    let blocks = self.ids[start + from..start + to].into();
                    events.push(KvEvent::Stored { parent, keys: keys[from..to].into(), blocks });
                }
                from = to + 1;
            }
            events.deliver();
        }
    }

    /// Replaces the block at `place` with the block already known under `key`. If the known block is gone,
    /// registers the block at `place` instead and returns `true`. If the known block's key matches `key` only
    /// in its first word, both blocks stay, and the block at `place` gets no key. `before` is the index in the pool of
    /// the block that it follows.
    fn merge(&mut self, place: usize, key: &BlockKey, before: u32) -> bool {
        let (handle, own) = (self.pool.clone(), self.ids[place]);
        let (pool, moment) = (&*handle.0, handle.0.moment());
        loop {
            let mut walk = pool.walk();
            let (shard, block) = walk.shard(own);
            let mut other = None;
            let index = |_| own.0 - pool.rules.first;
            pool.index.enter(std::slice::from_ref(key), index, |_, known| other = Some(known));
            let Some(other) = other else {
                shard.set_key(block, *key, before);
                return true;
            };
            let other = BlockId(other + pool.rules.first);
            let (shard, block) = walk.shard(other);
            if shard.hold_keyed(block, key, &moment) {
                shard.relink(block, before);
                let (shard, block) = walk.shard(own);
                shard.drop_holder(block, &moment);
                self.ids[place] = other;
                return false;
            }
            if shard.collides(block, key) {
                return false;
            }
            // The known block was freed after the index returned it, so try again.
        }
    }

    /// Makes the last block mutable again, so that it can be filled further. Returns `None` if the block has
    /// another holder, a key or a pin. The last remaining fork can therefore fill the block without copying
    /// it.
    pub fn reclaim_last(&mut self) -> Option<MutableBlocks> {
        let id = *self.ids.last()?;
        let mut walk = self.pool.0.walk();
        let (shard, block) = walk.shard(id);
        let alone = shard.reclaim(block);
        drop(walk);
        alone.then(|| {
            self.ids.pop();
            MutableBlocks::over(self.pool.clone(), [id].into_iter().collect())
        })
    }

    /// Pins the blocks, so that the pool keeps them even when they no longer have a holder.
    pub fn pin(&self) -> PinnedBlocks {
        PinnedBlocks::new(self)
    }

    /// Sets the priority with which these blocks are kept once they have no holder. Only eviction policies
    /// with priorities ([`super::PriorityLru`]) use it.
    pub fn retain(&self, retention: Retention) {
        let (now, mut walk) = (self.pool.0.now(), self.pool.0.walk());
        for &id in &self.ids {
            let (shard, block) = walk.shard(id);
            shard.retain(block, retention, now);
        }
    }

    /// Releases the blocks starting at index `len`, in reverse order.
    pub fn truncate(&mut self, len: usize) {
        let from = len.min(self.ids.len());
        drop_holders(&self.pool, &self.ids[from..]);
        self.ids.truncate(len);
    }

    /// Releases the first `n` blocks.
    pub(super) fn drop_first(&mut self, n: usize) {
        let n = n.min(self.ids.len());
        drop_holders(&self.pool, &self.ids[..n]);
        self.ids.drain(..n);
    }

    /// Returns the current number of a block's holders, including this guard.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if `place` is past the end of the guard.
    pub fn holders(&self, place: usize) -> Result<usize> {
        let id = *self.ids.get(place).ok_or(Error::range("block of the guard", place, self.ids.len()))?;
        let mut walk = self.pool.0.walk();
        let (shard, block) = walk.shard(id);
        Ok(shard.meta[block as usize].holders as usize)
    }
}

impl Clone for SharedBlocks {
    /// Adds a holder to each block.
    fn clone(&self) -> Self {
        let mut walk = self.pool.0.walk();
        for &id in &self.ids {
            let (shard, block) = walk.shard(id);
            shard.hold(block);
        }
        Self { pool: self.pool.clone(), ids: self.ids.clone() }
    }
}

fn drop_holders(pool: &BlockPool, ids: &[BlockId]) {
    if !ids.is_empty() {
        let (moment, mut walk) = (pool.0.moment(), pool.0.walk());
        for &id in ids.iter().rev() {
            let (shard, block) = walk.shard(id);
            shard.drop_holder(block, &moment);
        }
    }
}

impl Drop for SharedBlocks {
    fn drop(&mut self) {
        drop_holders(&self.pool, &self.ids);
    }
}
