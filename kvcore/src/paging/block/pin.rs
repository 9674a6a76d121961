//! Pins: claims that keep blocks cached while they have no holder.

use super::BlockPool;
use super::guard::{Ids, SharedBlocks};
use crate::base::BlockId;

// Decision: docs/decisions/paging.md#a-claim-keeps-an-idle-block
/// A claim that keeps blocks cached while they have no holder: the pool does not evict the blocks, and they
/// do not expire. Dropping the claim releases the blocks. A block may have any number of claims.
///
/// ```
/// use kvcore::BlockPool;
/// let pool = BlockPool::new(0..4)?;
/// let system_prompt = pool.allocate(2)?.share();
/// let pinned = system_prompt.pin();
/// drop(system_prompt);                           // no holder is left, yet the blocks stay
/// assert!(pool.allocate(3).is_err());
/// assert_eq!(pinned.share().len(), 2);
/// drop(pinned);
/// assert_eq!(pool.counts().free, 4);
/// # Ok::<(), kvcore::Error>(())
/// ```
///
/// # Drop behaviour
/// Blocks without holders stay cached if they have a key, and become free otherwise. For blocks with holders,
/// this happens when the last holder is dropped.
#[derive(Debug)]
#[must_use = "dropping the claim releases blocks without holders"]
pub struct PinnedBlocks {
    pool: BlockPool,
    ids: Ids,
}

impl PinnedBlocks {
    pub(super) fn new(held: &SharedBlocks) -> Self {
        let (pool, ids) = (held.pool.clone(), held.ids.clone());
        let mut walk = pool.0.walk();
        for &id in &ids {
            let (shard, block) = walk.shard(id);
            shard.pin(block);
        }
        drop(walk);
        Self { pool, ids }
    }

    /// Returns a guard that adds a holder to every block.
    pub fn share(&self) -> SharedBlocks {
        let mut walk = self.pool.0.walk();
        for &id in &self.ids {
            let (shard, block) = walk.shard(id);
            shard.hold(block);
        }
        drop(walk);
        SharedBlocks { pool: self.pool.clone(), ids: self.ids.clone() }
    }

    /// Returns the blocks, in order.
    pub fn ids(&self) -> &[BlockId] {
        &self.ids
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns whether no blocks are pinned.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

impl Drop for PinnedBlocks {
    fn drop(&mut self) {
        let (moment, mut walk) = (self.pool.0.moment(), self.pool.0.walk());
        for &id in self.ids.iter().rev() {
            let (shard, block) = walk.shard(id);
            shard.unpin(block, &moment);
        }
    }
}
