//! The arena and the pool of a cache, for code that allocates blocks outside the cache's sequences.

use super::{Error, Result};
use crate::device::KvArena;
use crate::paging::BlockPool;

/// An arena, and the pool that allocates its blocks. Clones refer to the same blocks.
///
/// Use it to allocate blocks outside the sequences of a [`PagedKvCache`](crate::PagedKvCache), for example
/// for a system prompt or the pieces of a document. A `KvPool` does not borrow the cache, so another thread
/// may use the cache at the same time.
#[derive(Debug, Clone)]
pub struct KvPool {
    arena: KvArena,
    blocks: BlockPool,
}

impl KvPool {
    /// Combines an arena with a pool over all or some of its blocks.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if the pool has blocks that are not in the arena.
    pub fn new(arena: KvArena, blocks: BlockPool) -> Result<Self> {
        let (end, limit) = (blocks.range().end as usize, arena.layout().shape().num_blocks);
        if end > limit {
            return Err(Error::too_large("last block of the pool", end, limit));
        }
        Ok(Self { arena, blocks })
    }

    /// Returns the arena of the keys and values.
    pub fn arena(&self) -> &KvArena {
        &self.arena
    }

    /// Returns the pool that allocates the blocks.
    pub fn blocks(&self) -> &BlockPool {
        &self.blocks
    }

    /// Returns the number of tokens per block.
    pub fn block_size(&self) -> usize {
        self.arena.layout().shape().block_size
    }
}
