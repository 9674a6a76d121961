//! The tiers of the chunk cache: chunks that nobody needs move to host memory before the device is full, and hot
//! ones come back before a request asks for them.

use std::sync::Arc;

use kvchunk::{ArenaSleep, ChunkCacheManager, SleepUsage};
use kvmanager::{Tier, TierMoves, TierThresholds};

/// The largest number of pieces that move after a step, so that a step never waits for many copies.
const MOST_MOVES: usize = 4;

/// The time until pieces are looked through again if none had to move, in milliseconds. Looking through ten thousand
/// pieces takes about a millisecond.
const PAUSE: u64 = 50;

/// The host memory below the chunk cache.
#[derive(Debug, Clone)]
pub(super) struct ChunkTiers {
    store: Arc<ArenaSleep>,
    thresholds: TierThresholds,
    /// The time before which pieces are looked through only if the device is too full in another way than before.
    next: u64,
    /// The number of blocks that were in use when nothing could move.
    quiet: usize,
}

impl ChunkTiers {
    pub(super) fn new(store: Arc<ArenaSleep>, thresholds: TierThresholds) -> Self {
        Self { store, thresholds, next: 0, quiet: 0 }
    }

    /// Returns the use of host memory.
    pub(super) fn usage(&self) -> SleepUsage {
        self.store.usage()
    }

    /// Moves a few pieces if the thresholds ask for it. `now` is the time in milliseconds.
    pub(super) fn tend(&mut self, chunks: &ChunkCacheManager, now: u64) {
        let (blocks, host) = (chunks.pool().blocks().counts(), self.usage());
        let used = blocks.total - blocks.free;
        let crowded = self.thresholds.blocks_to_offload(Tier::Device, used, blocks.total) != Ok(0);
        let due = now >= self.next;
        let look = if crowded { due || used != self.quiet } else { due && host.pieces > 0 };
        if !look || !chunks.is_pool_awake() {
            return;
        }
        match TierMoves::plan(&self.thresholds, chunks, host, MOST_MOVES) {
            // A piece that the store has no room for stays where it is.
            Ok(moves) if !moves.is_empty() && moves.carry_out(chunks).is_ok_and(|moved| moved > 0) => {}
            _ => (self.next, self.quiet) = (now + PAUSE, used),
        }
    }
}
