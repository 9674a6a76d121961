//! Putting pieces to sleep and waking them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::MutableBlocks;

use super::flight::Flight;
use super::sleep::{ColdRule, NotWoken, SleepStore};
use super::state::{Awake, CacheState, Dormant, PieceMemory, StoredPiece};
use super::tenant::TenantId;
use super::{ChunkCacheManager, LockedState, PieceHold, SharedCache};
use crate::error::{Error, Result};
use crate::hash::{ChunkHash, ChunkPiece};
use crate::pool::ChunkBlockPool;

/// A sleeping piece with the blocks that it will wake in.
pub(crate) struct Waking {
    slot: u32,
    tenant: TenantId,
    blocks: MutableBlocks,
    /// The piece's number in the eviction order of its tenant.
    number: u32,
    dormant: Dormant,
    flight: Arc<Flight>,
}

impl ChunkCacheManager {
    /// Puts the pieces that `rule` calls cold to sleep, and returns their number. Their blocks become free. A
    /// later hit wakes them.
    ///
    /// If the store fails after some pieces fell asleep, the other pieces stay awake and keep their order of
    /// eviction. In that case the call succeeds.
    ///
    /// # Errors
    /// Returns [`Error::NoSleep`] if the cache has no place to sleep. Returns the store's error, such as
    /// [`Error::SleepFull`], if no piece could be put to sleep.
    pub fn sleep_cold_chunks(&self, rule: ColdRule) -> Result<usize> {
        self.sleep_cold_where(rule, |_| true)
    }

    /// Puts the cold pieces of one tenant to sleep. Otherwise equal to
    /// [`sleep_cold_chunks`](Self::sleep_cold_chunks).
    ///
    /// # Errors
    /// Returns the errors of [`sleep_cold_chunks`](Self::sleep_cold_chunks).
    pub fn sleep_cold_chunks_of(&self, tenant: TenantId, rule: ColdRule) -> Result<usize> {
        self.sleep_cold_where(rule, |of| of == tenant)
    }

    fn sleep_cold_where(&self, rule: ColdRule, of: impl Fn(TenantId) -> bool) -> Result<usize> {
        let store = self.0.sleep.as_ref().ok_or(Error::NoSleep)?;
        let now = self.0.clock.millis();
        let slots = self.0.lock().index.slots();
        let mut slept = 0;
        for slot in 0..slots {
            match self.0.sleep_slot(slot, now, store.as_ref(), |entry, awake, idle| {
                of(entry.tenant) && rule.is_cold(awake, idle, entry.access_count)
            }) {
                Ok(true) => slept += 1,
                Ok(false) => {}
                Err(error) if slept == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(slept)
    }

    /// Wakes the given pieces. Returns those that could not be woken, each with the reason.
    ///
    /// If other threads are moving some of the pieces, the call waits for them, no longer than
    /// [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms) for all pieces together.
    pub fn wake_up_chunks(&self, hashes: &[ChunkHash]) -> Vec<(ChunkHash, NotWoken)> {
        let since = Instant::now();
        hashes.iter().filter_map(|hash| self.0.wake_up(hash, since).err().map(|why| (*hash, why))).collect()
    }
}

impl ChunkCacheManager {
    /// Wakes the piece if it sleeps and there is room, and holds it as soon as it is awake. Nothing is counted
    /// as a hit or a miss.
    pub(crate) fn wake_and_hold(&self, piece: &ChunkPiece<'_>) -> Option<PieceHold> {
        let now = self.0.clock.millis();
        let mut state = self.0.lock();
        let slot = state.find(piece)?;
        let waking = state.begin_waking(&self.0.pool, slot, now)?;
        drop(state);
        let now = self.0.clock.millis();
        self.0.wake(waking, |state, slot| self.0.hold(state, slot, now, true)).ok().flatten()
    }
}

/// Runs code of a store, and takes a panic for a failure, so that nobody waits for ever.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    caught.unwrap_or_else(|_| Err(Error::Damaged("the store panicked".to_owned())))
}

impl SharedCache {
    fn sleep_slot(
        &self,
        slot: u32,
        now: u64,
        store: &dyn SleepStore,
        is_cold: impl Fn(&StoredPiece, Duration, Duration) -> bool,
    ) -> Result<bool> {
        let flight = Arc::new(Flight::default());
        let mut state = self.lock();
        let cold = state.index.at(slot).is_some_and(|entry| {
            let since = |then: u64| Duration::from_millis(now.saturating_sub(then));
            is_cold(entry, since(entry.awake_since), since(entry.last_accessed))
        });
        let cold = cold && state.pool.is_awake();
        let Some(awake) = cold.then(|| state.depart(slot, &flight)).flatten() else { return Ok(false) };
        drop(state);
        let saved = guarded(|| {
            let saved = store.save(&awake.ids)?;
            let (bytes, exact) = (saved.bytes(), saved.is_exact());
            Ok(Dormant { saved, bytes, exact })
        });
        let mut state = self.lock();
        let result = match saved {
            Ok(dormant) => {
                state.arrive(slot, awake, dormant);
                Ok(true)
            }
            Err(error) => {
                state.stay(slot, awake);
                Err(error)
            }
        };
        state.bury(slot);
        drop(state);
        flight.land();
        result
    }

    /// Wakes the piece under a hash, unless it is awake. The caller began to wait at `since`.
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
            if !super::ChunkWaiter(moving).wait_for(limit.saturating_sub(since.elapsed())) {
                return Err(NotWoken::Moving { limit });
            }
        }
    }

    /// Wakes a piece, and copies it without the lock. Calls `then` with the piece's slot under the same lock
    /// under which the piece became awake, so that nothing can have put it back to sleep.
    ///
    /// # Errors
    /// Returns the store's error if the contents are lost. In that case the piece is forgotten.
    pub(crate) fn wake<T>(
        &self,
        waking: Waking,
        then: impl FnOnce(&mut LockedState<'_>, u32) -> T,
    ) -> Result<T> {
        let since = Instant::now();
        let Waking { slot, tenant, blocks, number, dormant, flight } = waking;
        let restored = guarded(|| dormant.saved.restore(&blocks));
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
    /// Makes room for a sleeping piece, which is moving from now on. Returns `None` if the piece does not
    /// sleep, if there is no room, or if the whole pool sleeps. In that case nothing has changed for the
    /// piece.
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
        // Making room touches no sleeping piece, so this one is still there and asleep.
        let entry = self.index.at_mut(slot)?;
        let PieceMemory::Asleep(dormant) =
            std::mem::replace(&mut entry.memory, PieceMemory::Moving(Arc::clone(&flight)))
        else {
            return None;
        };
        self.account(tenant).sleeping_bytes -= dormant.bytes;
        Some(Waking { slot, tenant, blocks, number, dormant, flight })
    }

    /// Ends the move of a piece that is awake now and has no holder.
    fn awaken(&mut self, slot: u32, blocks: MutableBlocks, number: u32, now: u64) {
        let Some(entry) = self.index.at_mut(slot) else { return };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        account.order.assign(number, slot);
        account.order.insert(number, &entry.hash.key, now);
        account.idle += entry.hash.num_blocks;
        account.counted.woken += 1;
        (entry.awake_since, entry.last_accessed) = (now, now);
        let ids = blocks.ids().into();
        entry.memory = PieceMemory::Awake(Awake { pinned: blocks.share().pin(), ids, number });
    }

    /// Ends the move of a piece that could not be restored: it is forgotten, and its blocks are free.
    fn lose(&mut self, slot: u32, tenant: TenantId, blocks: MutableBlocks, number: u32) {
        let account = self.account(tenant);
        account.counted.lost += 1;
        account.used -= blocks.len();
        account.order.retire(number);
        drop(blocks); // before a waiter asks for room
        self.remove(slot);
    }
}
