//! The chains of a pool's blocks: which blocks follow a block, and which blocks wait for the ones that follow.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::paging::sync::Mutex;

/// The place before the first block of a chain.
pub(super) const NO_BLOCK: u32 = u32::MAX;

/// The bits of a cell that count the blocks that follow, and the bits of a link with the index of a block. A pool
/// has at most as many blocks.
const COUNT: u32 = (1 << 24) - 1;
/// The lowest bit of a cell's round.
const NEXT_ROUND: u32 = 1 << 24;
/// The bits of a cell, and of a link to its block, that change if the contents of the block leave before the blocks
/// that follow.
const ROUND: u32 = 127 << 24;
/// Set in the cell of a block that waits.
const WAITS: u32 = 1 << 31;

// Decision: docs/decisions/paging.md#a-block-waits-for-the-blocks-that-follow-it
/// The chains of all shards. Blocks are identified by their index in the pool.
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

    /// Counts one more block that follows `block`, which may be [`NO_BLOCK`]. Returns the link to `block`.
    pub(super) fn follow(&self, block: u32) -> u32 {
        let cell = self.cells.get(block as usize);
        cell.map_or(NO_BLOCK, |cell| block | (cell.fetch_add(1, Relaxed) & ROUND))
    }

    /// Returns the block that a link leads to, if the block still has its contents.
    pub(super) fn linked(&self, link: u32) -> Option<u32> {
        let (block, round) = (link & COUNT, link & ROUND);
        let cell = self.cells.get(block as usize).filter(|_| link != NO_BLOCK)?;
        (cell.load(Relaxed) & ROUND == round).then_some(block)
    }

    /// Counts one block less that follows the block that a link leads to.
    pub(super) fn unfollow(&self, link: u32) {
        let Some(block) = self.linked(link) else { return };
        let fewer = |cell: u32| (cell & ROUND == link & ROUND && cell & COUNT > 0).then(|| cell - 1);
        let before = self.cells[block as usize].fetch_update(Relaxed, Relaxed, fewer);
        if before.is_ok_and(|cell| cell & !ROUND == WAITS | 1) {
            let mut due = self.due[(block >> self.shift) as usize].lock();
            if due.last() != Some(&block) {
                due.push(block);
            }
        }
    }

    /// Records that the contents of a block have left. Links to it lead nowhere from now on.
    pub(super) fn leave(&self, block: u32) {
        if let Some(cell) = self.cells.get(block as usize).filter(|cell| cell.load(Relaxed) & COUNT > 0) {
            let next = |cell: u32| Some(cell.wrapping_add(NEXT_ROUND) & ROUND);
            let _ = cell.fetch_update(Relaxed, Relaxed, next);
        }
    }

    /// Makes a block wait if others follow it. Returns whether it waits.
    pub(super) fn wait(&self, block: u32) -> bool {
        let Some(cell) = self.cells.get(block as usize).filter(|cell| cell.load(Relaxed) & COUNT > 0) else {
            return false;
        };
        // The last block that follows may have left since.
        cell.fetch_or(WAITS, Relaxed) & COUNT > 0 || !self.resume(block)
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
            let ends = |cell: u32| (cell & !ROUND == WAITS).then_some(cell & !WAITS);
            self.cells[block as usize].fetch_update(Relaxed, Relaxed, ends).is_ok()
        })
    }

    /// Checks a block's cell against the number of blocks that follow it.
    pub(super) fn check(&self, block: usize, followers: u32) -> Result<(), String> {
        match self.cells.get(block).map(|cell| cell.load(Relaxed) & COUNT) {
            Some(kept) if kept != followers => {
                Err(format!("{followers} blocks follow block {block} of the pool, and {kept} were counted"))
            }
            _ => Ok(()),
        }
    }
}
