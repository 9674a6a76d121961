//! Wakes pieces, either on request or because a lookup found them.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::MutableBlocks;

use super::fall::guarded;
use super::store::SavedPiece;
use crate::cache::{
    AwakePiece, CacheState, ChunkCacheManager, ChunkWaiter, Flight, LockedState, PieceHold, PieceMemory,
    SharedCache, TenantId,
};
use crate::error::Result;
use crate::hash::{ChunkHash, ChunkPiece};
use crate::pool::ChunkBlockPool;

/// The reason why a piece was not woken.
#[derive(Debug, Clone, PartialEq)]
pub enum NotWoken {
    /// No piece has this hash.
    Unknown,
    /// There would be no room even if every piece without holders were evicted.
    NoRoom,
    /// The whole pool is asleep; see [`wake_pool`](crate::ChunkCacheManager::wake_pool).
    PoolAsleep,
    /// Another thread was still putting the piece to sleep or waking it when the wait timed out.
    Moving {
        /// The maximum time to wait, [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms).
        limit: Duration,
    },
    /// The saved contents cannot be read back. The piece is lost and will be recomputed.
    Lost(crate::Error),
}

impl fmt::Display for NotWoken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no chunk has this hash"),
            Self::NoRoom => {
                f.write_str("the chunk pool has no room, even after evicting all chunks without holders")
            }
            Self::PoolAsleep => f.write_str("the whole chunk pool is asleep; wake it first"),
            Self::Moving { limit } => {
                write!(
                    f,
                    "another thread is still moving it after {limit:?}; try again, or raise max_wait_ms"
                )
            }
            Self::Lost(error) => write!(f, "it could not be read back and is gone: {error}"),
        }
    }
}

/// A sleeping piece with the blocks that it will wake in.
pub(crate) struct Waking {
    slot: u32,
    tenant: TenantId,
    blocks: MutableBlocks,
    /// The piece's number in its tenant's eviction order.
    number: u32,
    saved: SavedPiece,
    flight: Arc<Flight>,
}

impl ChunkCacheManager {
    /// Wakes the given pieces. Returns the pieces that could not be woken, each with the reason.
    ///
    /// If other threads are moving some of the pieces, the call waits for them, for at most
    /// [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms) in total.
    pub fn wake_up_chunks(&self, hashes: &[ChunkHash]) -> Vec<(ChunkHash, NotWoken)> {
        let since = Instant::now();
        hashes.iter().filter_map(|hash| self.0.wake_up(hash, since).err().map(|why| (*hash, why))).collect()
    }

    // Decision: docs/decisions/chunks.md#a-hit-on-a-sleeping-piece-holds-it-at-once
    /// Wakes the piece if it is asleep and there is room, and returns a hold on it. Counts neither a hit nor
    /// a miss.
    pub(crate) fn wake_and_hold(&self, piece: &ChunkPiece<'_>) -> Option<PieceHold> {
        let now = self.0.clock.millis();
        let mut state = self.0.lock();
        let slot = state.find(piece)?;
        let waking = state.begin_waking(&self.0.pool, slot, now)?;
        drop(state);
        let now = self.0.clock.millis();
        self.0.wake(waking, |state, slot| self.0.hold(state, slot, Some(now), true)).ok().flatten()
    }
}

impl SharedCache {
    /// Wakes the piece with this hash if it is asleep. `since` is the time at which the caller started
    /// waiting.
    fn wake_up(&self, hash: &ChunkHash, since: Instant) -> std::result::Result<(), NotWoken> {
        loop {
            let now = self.clock.millis();
            let mut state = self.lock();
            let slot = state.index.slot_of(&hash.key).ok_or(NotWoken::Unknown)?;
            if !state.pool.is_awake() {
                return Err(NotWoken::PoolAsleep);
            }
            let moving = match state.index.at(slot).map(|entry| &entry.memory) {
                Some(PieceMemory::Moving(flight)) => Arc::clone(flight),
                Some(PieceMemory::Asleep(_)) => {
                    let waking = state.begin_waking(&self.pool, slot, now).ok_or(NotWoken::NoRoom)?;
                    drop(state);
                    return self.wake(waking, |_, _| ()).map_err(NotWoken::Lost);
                }
                Some(PieceMemory::Awake(_)) | None => return Ok(()),
            };
            drop(state);
            let limit = self.config.max_wait();
            if !ChunkWaiter(moving).wait_for(limit.saturating_sub(since.elapsed())) {
                return Err(NotWoken::Moving { limit });
            }
        }
    }

    /// Wakes a piece, without holding the lock during the copy. Then takes the lock, marks the piece as
    /// awake, and calls `then` with the piece's slot before it releases the lock, so that no other thread can
    /// put the piece back to sleep first.
    ///
    /// # Errors
    /// Returns the store's error if the contents are lost. The piece is removed in that case.
    pub(crate) fn wake<T>(
        &self,
        waking: Waking,
        then: impl FnOnce(&mut LockedState<'_>, u32) -> T,
    ) -> Result<T> {
        let since = Instant::now();
        let Waking { slot, tenant, blocks, number, saved, flight } = waking;
        let restored = guarded(|| saved.contents.restore(&blocks));
        if self.config.stats {
            self.wakes.record(since.elapsed());
        }
        let now = self.clock.millis();
        let mut state = self.lock();
        let woken = match restored {
            Ok(()) => {
                state.awaken(slot, blocks, number, now);
                Ok(then(&mut state, slot))
            }
            Err(error) => {
                state.lose(slot, tenant, blocks, number);
                Err(error)
            }
        };
        state.bury(slot);
        drop(state);
        flight.land();
        woken
    }
}

impl CacheState {
    /// Allocates blocks for a sleeping piece, and marks the piece as moving. Returns `None` if the piece is
    /// not asleep, if there is no room, or if the whole pool is asleep. In that case the piece is unchanged.
    pub(crate) fn begin_waking(&mut self, pool: &ChunkBlockPool, slot: u32, now: u64) -> Option<Waking> {
        if !self.pool.is_awake() {
            return None;
        }
        let entry = self.index.at(slot).filter(|entry| matches!(entry.memory, PieceMemory::Asleep(_)))?;
        let (tenant, needed) = (entry.tenant, entry.hash.num_blocks);
        let blocks = self.room(pool, tenant, needed, now)?;
        let Some(number) = self.account(tenant).order.admit() else {
            self.account(tenant).used -= needed;
            return None;
        };
        let flight = Arc::new(Flight::default());
        // Making room does not affect sleeping pieces, so this piece is still asleep.
        let entry = self.index.at_mut(slot)?;
        let PieceMemory::Asleep(saved) =
            std::mem::replace(&mut entry.memory, PieceMemory::Moving(Arc::clone(&flight)))
        else {
            return None;
        };
        self.account(tenant).sleeping_bytes -= saved.bytes;
        Some(Waking { slot, tenant, blocks, number, saved, flight })
    }

    /// Ends the move of a piece that is now awake and has no holder.
    fn awaken(&mut self, slot: u32, blocks: MutableBlocks, number: u32, now: u64) {
        let Some(entry) = self.index.at_mut(slot) else { return };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        account.order.assign(number, slot);
        account.order.insert(number, &entry.hash.key, now);
        account.idle += entry.hash.num_blocks;
        account.counted.woken += 1;
        (entry.awake_since, entry.last_accessed) = (now, now);
        let ids = blocks.ids().into();
        entry.memory = PieceMemory::Awake(AwakePiece { pinned: blocks.share().pin(), ids, number });
    }

    /// Removes a piece that could not be restored, and frees its blocks.
    fn lose(&mut self, slot: u32, tenant: TenantId, blocks: MutableBlocks, number: u32) {
        let account = self.account(tenant);
        account.counted.lost += 1;
        account.used -= blocks.len();
        account.order.retire(number);
        drop(blocks); // before a waiter asks for room
        if let Some(key) = self.index.at(slot).map(|entry| entry.hash.key) {
            self.account(tenant).known.damaged(&key);
        }
        self.remove(slot);
    }
}
