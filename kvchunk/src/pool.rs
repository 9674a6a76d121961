//! The chunk pool: the blocks of an arena that hold chunks.

use std::ops::Range;

use kvcore::{BlockPool, MutableBlocks};

use crate::error::{Error, Result};

/// The block pool for chunks.
///
/// The chunk pool shares the arena and the block IDs with the main pool, so one `attend` can read both. The
/// two pools never exchange blocks. If the chunk pool has no room for a piece, the piece is computed into
/// blocks of the *main* pool, only for its request, and is freed when the request ends.
///
/// ```
/// use kvchunk::ChunkBlockPool;
/// let pool = ChunkBlockPool::new(0..100, 16)?;
/// let first = pool.allocate_blocks(10)?;
/// let second = pool.allocate_blocks(20)?;
/// assert_eq!((first.len(), second.len()), (10, 20));
/// drop(first);                                   // freed: no call can free a block twice
/// assert_eq!(pool.num_free_blocks(), 80);
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ChunkBlockPool {
    blocks: BlockPool,
    block_size: usize,
}

impl ChunkBlockPool {
    /// Creates a pool over the blocks of an arena in `range`, with `block_size` tokens per block.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if the block size is 0, and [`kvcore::Error::Zero`] if the range is empty.
    pub fn new(range: Range<u32>, block_size: usize) -> Result<Self> {
        Self::over(BlockPool::new(range)?, block_size)
    }

    /// Creates a pool over an existing [`BlockPool`]. The eviction policy of `blocks` has no effect, because
    /// the chunk cache pins the blocks of chunks and evicts whole pieces itself.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if the block size is 0.
    pub fn over(blocks: BlockPool, block_size: usize) -> Result<Self> {
        if block_size == 0 {
            return Err(Error::Zero { what: "block_size" });
        }
        Ok(Self { blocks, block_size })
    }

    /// Splits an arena's blocks into the main pool's range, which comes first, and the chunk pool's range.
    /// The chunk pool gets the fraction `share` of all blocks, rounded down, but each pool gets at least one
    /// block.
    ///
    /// # Errors
    /// Returns [`Error::NotAShare`] if `share` is not above 0 and below 1. Returns
    /// [`Error::NoRoomForTwoPools`] if there are fewer than two blocks, or more than a `u32` can count.
    pub fn split(num_blocks: usize, share: f64) -> Result<(Range<u32>, Range<u32>)> {
        if !(share > 0.0 && share < 1.0) {
            return Err(Error::NotAShare { what: "memory_share", value: share });
        }
        let all = u32::try_from(num_blocks).ok().filter(|&all| all >= 2);
        let all = all.ok_or(Error::NoRoomForTwoPools { blocks: num_blocks })?;
        let main = all - ((f64::from(all) * share) as u32).clamp(1, all - 1);
        Ok((0..main, main..all))
    }

    /// Allocates `n` blocks, or none on failure.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfBlocks`] if fewer than `n` blocks are free.
    pub fn allocate_blocks(&self, n: usize) -> Result<MutableBlocks> {
        Ok(self.blocks.allocate(n)?)
    }

    /// Returns the number of free blocks.
    pub fn num_free_blocks(&self) -> usize {
        self.blocks.counts().free
    }

    /// Returns the number of tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns the underlying block pool, which tracks the state of every block.
    pub fn blocks(&self) -> &BlockPool {
        &self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_split_and_both_pools_have_a_block() {
        assert_eq!(ChunkBlockPool::split(100, 0.15).unwrap(), (0..85, 85..100));
        assert_eq!(ChunkBlockPool::split(2, 0.01).unwrap(), (0..1, 1..2));
        assert_eq!(ChunkBlockPool::split(3, 0.99).unwrap(), (0..1, 1..3));
        for (blocks, share) in
            [(1, 0.5), (0, 0.5), (100, 0.0), (100, 1.0), (100, f64::NAN), (usize::MAX, 0.5)]
        {
            assert!(ChunkBlockPool::split(blocks, share).is_err(), "{blocks} {share}");
        }
    }

    #[test]
    fn blocks_are_taken_all_or_none() {
        let pool = ChunkBlockPool::new(10..14, 16).unwrap();
        let held = pool.allocate_blocks(3).unwrap();
        assert!(pool.allocate_blocks(2).is_err());
        assert_eq!(pool.num_free_blocks(), 1);
        drop(held);
        assert_eq!(pool.num_free_blocks(), 4);
        assert!(matches!(ChunkBlockPool::new(0..4, 0), Err(Error::Zero { what: "block_size" })));
        assert!(ChunkBlockPool::new(4..4, 16).is_err());
    }
}
