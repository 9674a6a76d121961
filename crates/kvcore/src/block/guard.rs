//! One block in one state. Moving a guard is the only way from state to state.

use std::mem::ManuallyDrop;

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

/// Takes a guard apart without running its `Drop`.
macro_rules! dismantle {
    ($guard:expr) => {{
        let guard = ManuallyDrop::new($guard);
        // SAFETY: `guard` is never used or dropped again, so `pool` has one owner: the copy.
        (unsafe { std::ptr::read(&raw const guard.pool) }, guard.index)
    }};
}

impl MutableBlock {
    pub(super) fn new(pool: BlockPool, index: u32) -> Self {
        Self { pool, index }
    }

    /// The physical block.
    pub fn id(&self) -> BlockId {
        self.pool.id(self.index)
    }

    pub(super) fn is_of(&self, pool: &BlockPool) -> bool {
        self.pool.same_pool(pool)
    }

    /// Declares the block filled.
    pub fn complete(self) -> CompleteBlock {
        let (pool, index) = dismantle!(self);
        pool.0.state.lock().complete(index);
        CompleteBlock { pool, index }
    }
}

impl Drop for MutableBlock {
    fn drop(&mut self) {
        self.pool.0.state.lock().discard(self.index);
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

    fn hold(self, key: Option<BlockKey>) -> SharedBlock {
        let (pool, index) = dismantle!(self);
        let index = pool.0.state.lock().hold_first(index, key);
        SharedBlock { pool, index }
    }
}

impl Drop for CompleteBlock {
    fn drop(&mut self) {
        self.pool.0.state.lock().discard(self.index);
    }
}

impl SharedBlock {
    pub(super) fn new(pool: BlockPool, index: u32) -> Self {
        Self { pool, index }
    }

    pub(super) fn into_index(self) -> (BlockPool, u32) {
        dismantle!(self)
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
