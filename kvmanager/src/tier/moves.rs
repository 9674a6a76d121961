//! The pieces of a chunk cache that should move between tiers.

use kvchunk::{ChunkCacheManager, ChunkHash, PieceHeat, SleepUsage};

use super::{Tier, TierThresholds};
use crate::Result;

/// The pieces of a chunk cache that should move between device and host memory.
///
/// ```
/// use kvchunk::{ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, SleepUsage};
/// use kvmanager::{TierMoves, TierThresholds};
///
/// let cache = ChunkCacheManager::new(ChunkCacheConfig::default(), ChunkBlockPool::new(0..64, 16)?)?;
/// let moves = TierMoves::plan(&TierThresholds::default(), &cache, SleepUsage::default(), 4)?;
/// assert!(moves.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TierMoves {
    /// The sleeping pieces that leave host memory, coldest first.
    pub leave: Vec<ChunkHash>,
    /// The pieces that fall asleep, coldest first.
    pub sleep: Vec<ChunkHash>,
    /// The sleeping pieces that wake before a request asks for them, hottest first.
    pub wake: Vec<ChunkHash>,
}

impl TierMoves {
    /// Plans at most `most` moves between device and host:
    ///
    /// - The coldest pieces without holders fall asleep until the device is down to its threshold.
    /// - The coldest sleeping pieces leave until the host, which `host` describes, is down to its threshold with
    ///   those that fall asleep.
    /// - Sleeping pieces whose heat is above the threshold wake, hottest first, as long as the device stays at
    ///   or below its threshold.
    ///
    /// # Errors
    /// Returns the errors of [`TierThresholds::blocks_to_offload`].
    pub fn plan(
        thresholds: &TierThresholds,
        cache: &ChunkCacheManager,
        host: SleepUsage,
        most: usize,
    ) -> Result<Self> {
        let blocks = cache.pool().blocks().counts();
        let (mut used, total) = (blocks.total - blocks.free, blocks.total);
        let idle = cache.heats().into_iter().filter(|piece| piece.idle);
        let (asleep, awake): (Vec<PieceHeat>, Vec<_>) = idle.partition(|piece| piece.asleep);
        let mut sleep = Vec::new();
        for piece in awake.iter().take(most) {
            if thresholds.blocks_to_offload(Tier::Device, used, total)? == 0 {
                break;
            }
            used -= piece.chunk_hash.num_blocks.min(used);
            sleep.push(piece.chunk_hash);
        }
        let mut wake = Vec::new();
        for piece in asleep.iter().rev().take(most - sleep.len()) {
            let blocks = piece.chunk_hash.num_blocks;
            if thresholds.blocks_to_prefetch(piece.heat, blocks, used, total)? < blocks {
                break;
            }
            used += blocks;
            wake.push(piece.chunk_hash);
        }
        let leave = leaving(thresholds, &asleep[..asleep.len() - wake.len()], &sleep, host)?;
        Ok(Self { leave, sleep, wake })
    }

    /// Returns whether nothing should move.
    pub fn is_empty(&self) -> bool {
        self.leave.is_empty() && self.sleep.is_empty() && self.wake.is_empty()
    }

    /// Carries the moves out, and returns the number of pieces that have moved. Skips pieces that have changed since
    /// the plan was made, such as pieces that a request holds now.
    ///
    /// # Errors
    /// Returns the error of the sleep store if no piece could be put to sleep. The pieces stay where they are.
    pub fn carry_out(&self, cache: &ChunkCacheManager) -> kvchunk::Result<usize> {
        let left = cache.discard_sleeping_chunks(&self.leave);
        let slept = if self.sleep.is_empty() { 0 } else { cache.sleep_chunks(&self.sleep)? };
        // A piece that cannot wake now wakes when a request asks for it.
        let asleep = cache.wake_up_chunks(&self.wake).len();
        Ok(left + slept + self.wake.len() - asleep)
    }
}

/// Returns the coldest pieces of `asleep`, which is sorted by heat, that have to leave the host before the pieces
/// `sleep` can arrive.
fn leaving(
    thresholds: &TierThresholds,
    asleep: &[PieceHeat],
    sleep: &[ChunkHash],
    host: SleepUsage,
) -> Result<Vec<ChunkHash>> {
    let blocks = |pieces: &mut dyn Iterator<Item = usize>| pieces.sum::<usize>().max(1);
    // Sleeping pieces may be compressed, so the mean size of a block is the best estimate.
    let per_block = host.host_bytes / blocks(&mut asleep.iter().map(|piece| piece.chunk_hash.num_blocks));
    let arriving: usize = sleep.iter().map(|hash| hash.num_blocks * per_block).sum();
    let wanted = host.host_bytes + arriving;
    let over = wanted.saturating_sub(host.limit_bytes);
    let mut excess = over + thresholds.blocks_to_offload(Tier::Host, wanted - over, host.limit_bytes)?;
    let mut leave = Vec::new();
    for piece in asleep {
        if excess == 0 {
            break;
        }
        excess = excess.saturating_sub(piece.chunk_hash.num_blocks * per_block);
        leave.push(piece.chunk_hash);
    }
    Ok(leave)
}
