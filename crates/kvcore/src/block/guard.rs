//! One block in one state. Moving a guard is the only way from state to state.

use super::{BlockId, BlockPool};
use crate::key::BlockKey;

/// A block being filled; nobody else sees it.
///
/// # Drop behaviour
/// The block returns to the free list; what was written to it is forgotten.
#[derive(Debug)]
#[must_use = "dropping the guard frees the block"]
pub struct MutableBlock {
    pool: BlockPool,
    index: u32,
    /// Whether the guard still stands for the block; a step to the next state passes it on.
    live: bool,
}

/// A filled block that is not shared yet.
///
/// # Drop behaviour
/// The block returns to the free list.
#[derive(Debug)]
#[must_use = "dropping the guard frees the block"]
pub struct CompleteBlock {
    pool: BlockPool,
    index: u32,
    live: bool,
}

/// A filled block that any number of holders read; never written again.
///
/// # Drop behaviour
/// One holder fewer. With the last one gone the block is cached if a key or a
/// [`super::RetainedRun`] claims it, else free.
#[derive(Debug)]
#[must_use = "dropping the guard lets the block go"]
pub struct SharedBlock {
    pool: BlockPool,
    index: u32,
}

impl MutableBlock {
    pub(super) fn new(pool: BlockPool, index: u32) -> Self {
        Self { pool, index, live: true }
    }

    /// The physical block.
    pub fn id(&self) -> BlockId {
        self.pool.id(self.index)
    }

    pub(super) fn is_of(&self, pool: &BlockPool) -> bool {
        self.pool.same_pool(pool)
    }

    /// Gives the block up to whoever moves it on.
    pub(super) fn into_index(mut self) -> u32 {
        self.live = false;
        self.index
    }

    /// Declares the block filled.
    pub fn complete(self) -> CompleteBlock {
        let pool = self.pool.clone();
        let index = self.into_index();
        pool.0.state.lock().complete(index);
        CompleteBlock { pool, index, live: true }
    }
}

impl Drop for MutableBlock {
    fn drop(&mut self) {
        if self.live {
            self.pool.0.state.lock().discard(self.index);
        }
    }
}

impl CompleteBlock {
    /// The physical block.
    pub fn id(&self) -> BlockId {
        self.pool.id(self.index)
    }

    /// Shares the block under `key`. If the pool knows that key already, the guard returned is of
    /// the known block, and this one is freed: compare ids to learn which.
    pub fn register(self, key: BlockKey) -> SharedBlock {
        self.hold(Some(key))
    }

    /// Shares the block without a key: it is freed with its last holder, unless something retains it.
    pub fn share(self) -> SharedBlock {
        self.hold(None)
    }

    fn hold(mut self, key: Option<BlockKey>) -> SharedBlock {
        self.live = false;
        let pool = self.pool.clone();
        let index = pool.0.state.lock().hold_first(self.index, key);
        SharedBlock { pool, index }
    }
}

impl Drop for CompleteBlock {
    fn drop(&mut self) {
        if self.live {
            self.pool.0.state.lock().discard(self.index);
        }
    }
}

impl SharedBlock {
    pub(super) fn new(pool: BlockPool, index: u32) -> Self {
        Self { pool, index }
    }

    /// The physical block.
    pub fn id(&self) -> BlockId {
        self.pool.id(self.index)
    }

    /// Holders now, this one included.
    pub fn holders(&self) -> usize {
        self.pool.0.state.lock().meta[self.index as usize].holders as usize
    }
}

impl Clone for SharedBlock {
    /// One more holder.
    fn clone(&self) -> Self {
        self.pool.0.state.lock().hold(self.index);
        Self { pool: self.pool.clone(), index: self.index }
    }
}

impl Drop for SharedBlock {
    fn drop(&mut self) {
        self.pool.0.state.lock().let_go(self.index);
    }
}
