//! The chains of a pool's blocks: which blocks follow a block, and which blocks wait for the ones that follow.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::paging::sync::Mutex;

/// The place before the first block of a chain.
pub(super) const NO_BLOCK: u32 = u32::MAX;

/// Set in the cell of a block that waits. The other bits are the number of blocks that follow.
const WAITS: u32 = 1 << 31;

// Decision: docs/decisions/paging.md#a-block-waits-for-the-blocks-that-follow-it
/// The chains of all shards. Blocks are identified by their index in the pool.
///
/// If a block is evicted although others follow it, its cell still counts them. The next contents of the block then
/// wait for them, too.
#[derive(Debug)]
pub(super) struct Chains {
    /// A cell for each block. Empty if the pool's blocks do not wait. A block enters and leaves the waiting state
    /// only under the lock of its shard.
    cells: Box<[AtomicU32]>,
    /// For each shard, the blocks that nothing follows any more. A block may have stopped waiting since. These
    /// locks are leaves.
    due: Box<[Mutex<Vec<u32>>]>,
    shift: u32,
}

impl Chains {
    /// Creates the chains of `blocks` blocks, in shards of `1 << shift` blocks.
    pub(super) fn new(blocks: usize, shift: u32, enabled: bool) -> Self {
        let (cells, shards) = if enabled { (blocks, ((blocks - 1) >> shift) + 1) } else { (0, 0) };
        Self {
            cells: (0..cells).map(|_| AtomicU32::new(0)).collect(),
            due: (0..shards).map(|_| Mutex::new(Vec::new())).collect(),
            shift,
        }
    }

    /// Counts one more block that follows `block`.
    pub(super) fn follow(&self, block: u32) {
        if let Some(cell) = self.cells.get(block as usize) {
            cell.fetch_add(1, Relaxed);
        }
    }

    /// Counts one block less that follows `block`.
    pub(super) fn unfollow(&self, block: u32) {
        if let Some(cell) = self.cells.get(block as usize)
            && cell.fetch_sub(1, Relaxed) == WAITS | 1
        {
            self.due[(block >> self.shift) as usize].lock().push(block);
        }
    }

    /// Makes a block wait if others follow it. Returns whether it waits.
    pub(super) fn wait(&self, block: u32) -> bool {
        let Some(cell) = self.cells.get(block as usize).filter(|cell| cell.load(Relaxed) > 0) else {
            return false;
        };
        // The last block that follows may have left since.
        cell.fetch_or(WAITS, Relaxed) > 0 || !self.resume(block)
    }

    /// Ends the wait of a block. Returns whether it waited.
    pub(super) fn resume(&self, block: u32) -> bool {
        self.waits(block) && self.cells[block as usize].fetch_and(!WAITS, Relaxed) & WAITS > 0
    }

    /// Returns whether a block waits.
    pub(super) fn waits(&self, block: u32) -> bool {
        self.cells.get(block as usize).is_some_and(|cell| cell.load(Relaxed) & WAITS > 0)
    }

    /// Returns the block that stopped being followed last among those of the shard that starts at block `first`, and
    /// ends its wait.
    pub(super) fn pop_due(&self, first: u32) -> Option<u32> {
        let mut due = self.due.get((first >> self.shift) as usize)?.lock();
        std::iter::from_fn(|| due.pop()).find(|&block| {
            let cell = &self.cells[block as usize];
            cell.compare_exchange(WAITS, 0, Relaxed, Relaxed).is_ok()
        })
    }

    /// Checks a block's cell against the number of blocks that follow it.
    pub(super) fn check(&self, block: usize, followers: u32) -> Result<(), String> {
        match self.cells.get(block).map(|cell| cell.load(Relaxed) & !WAITS) {
            Some(kept) if kept != followers => {
                Err(format!("{followers} blocks follow block {block} of the pool, and {kept} were counted"))
            }
            _ => Ok(()),
        }
    }
}
