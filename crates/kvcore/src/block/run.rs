//! Runs: blocks that belong together (the blocks of a chunk) held and retained under one lock.

use std::sync::Arc;

use super::{BlockId, BlockPool, MutableBlock};
use crate::error::{Error, Result};

/// A hold on every block of a run.
///
/// # Drop behaviour
/// One holder fewer on each block, as for a [`super::SharedBlock`].
#[derive(Debug)]
#[must_use = "dropping the guard lets the blocks go"]
pub struct SharedRun {
    pool: BlockPool,
    ids: Arc<[BlockId]>,
}

/// A claim that keeps a run's blocks cached while they have no holder.
///
/// The pool does not evict retained blocks: whoever retains them decides, by dropping the claim.
///
/// # Drop behaviour
/// Blocks without holders become free; held ones follow when their last holder goes.
#[derive(Debug)]
#[must_use = "dropping the claim frees blocks that nobody holds"]
pub struct RetainedRun {
    pool: BlockPool,
    ids: Arc<[BlockId]>,
}

impl SharedRun {
    /// Completes and shares blocks that were filled together.
    ///
    /// # Errors
    /// [`Error::Zero`] for no block, [`Error::ForeignBlock`] when they are of several pools; the
    /// blocks are freed then.
    pub fn from_filled(pool: &BlockPool, blocks: Vec<MutableBlock>) -> Result<Self> {
        if blocks.is_empty() {
            return Err(Error::Zero { what: "blocks of a run" });
        }
        let range = pool.range();
        if let Some(stray) = blocks.iter().find(|b| !b.is_of(pool)) {
            return Err(Error::ForeignBlock { block: stray.id(), start: range.start, end: range.end });
        }
        let ids = blocks.iter().map(MutableBlock::id).collect();
        let mut state = pool.0.state.lock();
        for block in blocks {
            let index = block.into_index();
            state.complete(index);
            state.hold_first(index, None);
        }
        drop(state);
        Ok(Self { pool: pool.clone(), ids })
    }

    /// The blocks in order.
    pub fn ids(&self) -> &Arc<[BlockId]> {
        &self.ids
    }

    /// A claim on the same blocks that outlives their holders.
    pub fn retain(&self) -> RetainedRun {
        let mut state = self.pool.0.state.lock();
        for id in self.ids.iter() {
            state.retain(id.0 - self.pool.0.range.start);
        }
        RetainedRun { pool: self.pool.clone(), ids: Arc::clone(&self.ids) }
    }
}

impl Drop for SharedRun {
    fn drop(&mut self) {
        let mut state = self.pool.0.state.lock();
        for id in self.ids.iter().rev() {
            state.let_go(id.0 - self.pool.0.range.start);
        }
    }
}

impl RetainedRun {
    /// A new hold on every block.
    pub fn share(&self) -> SharedRun {
        let mut state = self.pool.0.state.lock();
        for id in self.ids.iter() {
            state.hold(id.0 - self.pool.0.range.start);
        }
        SharedRun { pool: self.pool.clone(), ids: Arc::clone(&self.ids) }
    }

    /// The blocks in order.
    pub fn ids(&self) -> &Arc<[BlockId]> {
        &self.ids
    }

    /// Whether any block has a holder.
    pub fn is_held(&self) -> bool {
        let state = self.pool.0.state.lock();
        self.ids.iter().any(|id| state.meta[(id.0 - self.pool.0.range.start) as usize].holders > 0)
    }
}

impl Drop for RetainedRun {
    fn drop(&mut self) {
        let mut state = self.pool.0.state.lock();
        for id in self.ids.iter().rev() {
            state.unretain(id.0 - self.pool.0.range.start);
        }
    }
}
