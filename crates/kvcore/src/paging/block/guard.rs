//! Blocks in one state, held together. Moving a guard is the only way from state to state.
//!
//! A guard holds any number of blocks of one pool, so that a step costs one lock for all of them and
//! no allocation for a few.

use smallvec::SmallVec;

use super::event::KvEvent;
use super::pin::PinnedBlocks;
use super::{BlockPool, Retention};
use crate::base::{BlockId, Error, Result, same};
use crate::paging::BlockKey;

pub(super) type Ids = SmallVec<[BlockId; 4]>;

/// A step that was refused, with the blocks it was asked of, unchanged.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Rejected<T> {
    /// Why.
    pub error: Error,
    /// What was to make the step.
    pub blocks: T,
}

impl<T> From<Rejected<T>> for Error {
    /// Drops the blocks, as their guard says.
    fn from(rejected: Rejected<T>) -> Self {
        rejected.error
    }
}

impl<T> From<Box<Rejected<T>>> for Error {
    /// Drops the blocks, as their guard says.
    fn from(rejected: Box<Rejected<T>>) -> Self {
        rejected.error
    }
}

/// Blocks being filled; nobody else sees them.
///
/// # Drop behaviour
/// The blocks return to the free list; what was written to them is forgotten.
#[derive(Debug)]
#[must_use = "dropping the guard frees the blocks"]
pub struct MutableBlocks {
    pub(super) pool: BlockPool,
    pub(super) ids: Ids,
}

/// Filled blocks that are not shared yet.
///
/// # Drop behaviour
/// The blocks return to the free list.
#[derive(Debug)]
#[must_use = "dropping the guard frees the blocks"]
pub struct CompleteBlocks {
    pool: BlockPool,
    ids: Ids,
}

/// Filled blocks that any number of holders read; never written again.
///
/// # Drop behaviour
/// One holder fewer on each block, the last block first, so that a pool evicts the end of a prefix
/// before its beginning. A block that loses its last holder is cached if a key or a pin
/// ([`PinnedBlocks`]) claims it, else free.
#[derive(Debug)]
#[must_use = "dropping the guard lets the blocks go"]
pub struct SharedBlocks {
    pub(super) pool: BlockPool,
    pub(super) ids: Ids,
}

/// What all guards can do.
macro_rules! guard {
    ($guard:ident) => {
        impl $guard {
            /// The physical blocks, in order.
            pub fn ids(&self) -> &[BlockId] {
                &self.ids
            }

            /// Number of blocks.
            pub fn len(&self) -> usize {
                self.ids.len()
            }

            /// Whether no block is held.
            pub fn is_empty(&self) -> bool {
                self.ids.is_empty()
            }

            /// The pool of the blocks.
            pub fn pool(&self) -> &BlockPool {
                &self.pool
            }

            /// A guard of no blocks, to append to.
            pub fn none(pool: &BlockPool) -> Self {
                Self { pool: pool.clone(), ids: Ids::new() }
            }

            /// Keeps the first `at` blocks and gives the others.
            ///
            /// # Errors
            /// [`Error::OutOfRange`] for more blocks than there are.
            pub fn split_off(&mut self, at: usize) -> Result<Self> {
                if at > self.ids.len() {
                    return Err(Error::range("blocks to keep", at, self.ids.len() + 1));
                }
                Ok(Self { pool: self.pool.clone(), ids: self.ids.drain(at..).collect() })
            }

            /// Adds blocks at the end.
            ///
            /// # Errors
            /// [`Error::ForeignBlock`] for blocks of another pool, which are given back.
            pub fn append(&mut self, mut other: Self) -> Result<(), Rejected<Self>> {
                match other.ids.first() {
                    Some(&block) if !self.pool.same_pool(&other.pool) => {
                        let range = self.pool.range();
                        let error = Error::ForeignBlock { block, start: range.start, end: range.end };
                        Err(Rejected { error, blocks: other })
                    }
                    _ => {
                        self.ids.append(&mut other.ids);
                        Ok(())
                    }
                }
            }
        }
    };
}

guard!(MutableBlocks);
guard!(CompleteBlocks);
guard!(SharedBlocks);

/// Frees blocks that were not shared. The last one is the next to be taken again.
fn discard(pool: &BlockPool, ids: &[BlockId]) {
    if !ids.is_empty() {
        let (now, mut walk) = (pool.0.now(), pool.0.walk());
        for &id in ids {
            let (shard, block) = walk.shard(id);
            shard.discard(block, now, &pool.0.rules);
        }
    }
}

impl MutableBlocks {
    /// Takes `n` more blocks; all or none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; nothing has changed then.
    pub fn allocate(&mut self, n: usize) -> Result<()> {
        self.pool.take(&mut self.ids, n, 0)
    }

    /// Declares the blocks filled.
    pub fn complete(mut self) -> CompleteBlocks {
        let (pool, ids) = (self.pool.clone(), std::mem::take(&mut self.ids));
        let mut walk = pool.0.walk();
        for &id in &ids {
            let (shard, block) = walk.shard(id);
            shard.complete(block);
        }
        drop(walk);
        CompleteBlocks { pool, ids }
    }
}

/// What blocks can do that are not shared: be shared, or be dropped.
macro_rules! unshared {
    ($guard:ident) => {
        impl $guard {
            /// Shares the blocks, as filled ones, under `keys`, one each, of which each is the child of the
            /// one before and the first is the child of `parent`. Where the pool knows a key already, the
            /// guard returned holds the known block, and this one is freed (see [`super::Duplicates`]):
            /// compare ids to learn which.
            ///
            /// # Errors
            /// [`Error::Mismatch`] for another number of keys; the blocks are given back.
            pub fn register(
                mut self,
                parent: Option<BlockKey>,
                keys: &[BlockKey],
            ) -> Result<SharedBlocks, Rejected<Self>> {
                match same("keys of the blocks", self.ids.len(), keys.len()) {
                    Ok(()) => {
                        let mut shared = share(&self.pool, std::mem::take(&mut self.ids));
                        shared.enter_keys(0, parent, keys);
                        Ok(shared)
                    }
                    Err(error) => Err(Rejected { error, blocks: self }),
                }
            }

            /// Shares the blocks, as filled ones, without keys: they are freed with their last holder, unless
            /// they are pinned.
            pub fn share(mut self) -> SharedBlocks {
                share(&self.pool, std::mem::take(&mut self.ids))
            }
        }

        impl Drop for $guard {
            fn drop(&mut self) {
                discard(&self.pool, &self.ids);
            }
        }
    };
}

unshared!(MutableBlocks);
unshared!(CompleteBlocks);

/// Gives filled blocks their first holder.
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
    /// Gives the blocks from `start` on, which have no keys yet, their keys; see
    /// [`CompleteBlocks::register`]. Blocks that have a key keep it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for more keys than blocks, [`Error::Aliased`] if a block is among them twice, which
    /// appending guards to each other makes possible; nothing has changed then.
    pub fn register(&mut self, start: usize, parent: Option<BlockKey>, keys: &[BlockKey]) -> Result<()> {
        let end = start.saturating_add(keys.len());
        if end > self.ids.len() {
            return Err(Error::range("end of the blocks to register", end, self.ids.len() + 1));
        }
        let mut sorted: Ids = self.ids[start..end].into();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(Error::Aliased { what: "blocks to register" });
        }
        self.enter_keys(start, parent, keys);
        Ok(())
    }

    fn enter_keys(&mut self, start: usize, parent: Option<BlockKey>, keys: &[BlockKey]) {
        let handle = self.pool.clone();
        let pool = &*handle.0;
        // Places whose key another block has, and places whose block has a key.
        let (mut known, mut keyed): (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>) = Default::default();
        let ids = &self.ids[start..][..keys.len()];
        let mut walk = pool.walk();
        let mut from = 0;
        while from < ids.len() {
            let (shard, block) = walk.shard(ids[from]);
            if shard.has_key(block) {
                keyed.push(from);
                from += 1;
                continue;
            }
            // As many blocks as are in this shard and have no key.
            let more = ids[from + 1..].iter().take_while(|&&id| {
                pool.shard_of(id) == pool.shard_of(ids[from]) && !shard.has_key(pool.local(id))
            });
            let run = from..from + 1 + more.count();
            let mut entered: SmallVec<[bool; 64]> = SmallVec::from_elem(true, run.len());
            let index = |i: usize| ids[run.start + i].0 - pool.rules.first;
            pool.index.enter(&keys[run.clone()], index, |i, _| entered[i] = false);
            for (i, entered) in run.clone().zip(entered) {
                if entered { shard.set_key(pool.local(ids[i]), keys[i]) } else { known.push(i) }
            }
            from = run.end;
        }
        drop(walk);
        known.retain(|i| !self.merge(start + *i, &keys[*i]));
        if let Some(events) = &pool.rules.events {
            known.extend(keyed);
            known.sort_unstable();
            let mut from = 0;
            for &to in known.iter().chain([&keys.len()]) {
                if from < to {
                    let parent = if from == 0 { parent } else { Some(keys[from - 1]) };
                    let blocks = self.ids[start + from..start + to].into();
                    events.record(KvEvent::Stored { parent, keys: keys[from..to].into(), blocks });
                }
                from = to + 1;
            }
        }
    }

    /// Exchanges the block at `place` for the one that is known under `key`, or enters it after all if
    /// that one has gone meanwhile; `true` in the latter case. A known block of another key with the same first
    /// word stays where it is, and this one without a key.
    fn merge(&mut self, place: usize, key: &BlockKey) -> bool {
        let (handle, own) = (self.pool.clone(), self.ids[place]);
        let (pool, now) = (&*handle.0, handle.0.now());
        loop {
            let mut walk = pool.walk();
            let (shard, block) = walk.shard(own);
            let mut other = None;
            let index = |_| own.0 - pool.rules.first;
            pool.index.enter(std::slice::from_ref(key), index, |_, known| other = Some(known));
            let Some(other) = other else {
                shard.set_key(block, *key);
                return true;
            };
            let other = BlockId(other + pool.rules.first);
            let (shard, block) = walk.shard(other);
            if shard.hold_keyed(block, key, now, &pool.rules, &pool.index) {
                let (shard, block) = walk.shard(own);
                shard.let_go(block, now, &pool.rules);
                self.ids[place] = other;
                return false;
            }
            if shard.collides(block, key) {
                return false;
            }
            // The known block has gone since the index named it.
        }
    }

    /// Takes the last block back to fill it further, if nobody else holds it and it has neither a key nor a
    /// pin: the last of several forks needs no copy.
    pub fn reclaim_last(&mut self) -> Option<MutableBlocks> {
        let id = *self.ids.last()?;
        let mut walk = self.pool.0.walk();
        let (shard, block) = walk.shard(id);
        let alone = shard.reclaim(block);
        drop(walk);
        alone.then(|| {
            self.ids.pop();
            MutableBlocks { pool: self.pool.clone(), ids: [id].into_iter().collect() }
        })
    }

    /// A claim on the same blocks that outlives their holders.
    pub fn pin(&self) -> PinnedBlocks {
        PinnedBlocks::new(self)
    }

    /// Says how much these blocks are wanted once nobody holds them; for pools whose eviction policy
    /// looks at it ([`super::PriorityLru`]), others ignore it.
    pub fn retain(&self, retention: Retention) {
        let (now, mut walk) = (self.pool.0.now(), self.pool.0.walk());
        for &id in &self.ids {
            let (shard, block) = walk.shard(id);
            shard.retain(block, retention, now);
        }
    }

    /// Lets the blocks from `len` on go, the last one first.
    pub fn truncate(&mut self, len: usize) {
        let from = len.min(self.ids.len());
        let_go(&self.pool, &self.ids[from..]);
        self.ids.truncate(len);
    }

    /// Holders of one block now, this one included.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a place past the end.
    pub fn holders(&self, place: usize) -> Result<usize> {
        let id = *self.ids.get(place).ok_or(Error::range("block of the guard", place, self.ids.len()))?;
        let mut walk = self.pool.0.walk();
        let (shard, block) = walk.shard(id);
        Ok(shard.meta[block as usize].holders as usize)
    }
}

impl Clone for SharedBlocks {
    /// One more holder of each block.
    fn clone(&self) -> Self {
        let mut walk = self.pool.0.walk();
        for &id in &self.ids {
            let (shard, block) = walk.shard(id);
            shard.hold(block);
        }
        Self { pool: self.pool.clone(), ids: self.ids.clone() }
    }
}

fn let_go(pool: &BlockPool, ids: &[BlockId]) {
    if !ids.is_empty() {
        let (now, mut walk) = (pool.0.now(), pool.0.walk());
        for &id in ids.iter().rev() {
            let (shard, block) = walk.shard(id);
            shard.let_go(block, now, &pool.0.rules);
        }
    }
}

impl Drop for SharedBlocks {
    fn drop(&mut self) {
        let_go(&self.pool, &self.ids);
    }
}
