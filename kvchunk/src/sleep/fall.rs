//! Moves cold pieces from blocks into a store.

use std::sync::Arc;
use std::time::Duration;

use super::cold::ColdRule;
use super::store::{SavedPiece, SleepStore};
use crate::cache::{
    AwakePiece, CacheState, ChunkCacheManager, Flight, PieceMemory, SharedCache, StoredPiece, TenantId,
};
use crate::error::{Error, Result};
use crate::hash::ChunkHash;

impl ChunkCacheManager {
    /// Puts the pieces that are cold according to `rule` to sleep, and returns the number of pieces that were
    /// put to sleep. The blocks of these pieces become free. A later hit on a sleeping piece wakes it.
    ///
    /// If the store fails after some pieces have been put to sleep, the other pieces stay awake and keep
    /// their eviction order, and the call succeeds.
    ///
    /// # Errors
    /// Returns [`Error::NoSleep`] if the cache has no sleep store. Returns the store's error, such as
    /// [`Error::SleepFull`], if no piece could be put to sleep.
    pub fn sleep_cold_chunks(&self, rule: ColdRule) -> Result<usize> {
        self.sleep_cold_where(rule, |_| true)
    }

    /// Puts one tenant's cold pieces to sleep, like [`sleep_cold_chunks`](Self::sleep_cold_chunks).
    ///
    /// # Errors
    /// Returns the errors of [`sleep_cold_chunks`](Self::sleep_cold_chunks).
    pub fn sleep_cold_chunks_of(&self, tenant: TenantId, rule: ColdRule) -> Result<usize> {
        self.sleep_cold_where(rule, |of| of == tenant)
    }

    /// Puts the given pieces to sleep, and returns the number of pieces that were put to sleep. Pieces that are
    /// held, asleep or unknown are skipped.
    ///
    /// # Errors
    /// Returns the errors of [`sleep_cold_chunks`](Self::sleep_cold_chunks).
    pub fn sleep_chunks(&self, hashes: &[ChunkHash]) -> Result<usize> {
        let slots = {
            let state = self.0.lock();
            hashes
                .iter()
                .filter_map(|hash| Some((state.index.slot_of(&hash.key)?, hash.key)))
                .collect::<Vec<_>>()
        };
        let each = slots.into_iter();
        self.sleep_each(
            each.map(|(slot, key)| (slot, move |entry: &StoredPiece, _, _| entry.hash.key == key)),
        )
    }

    fn sleep_cold_where(&self, rule: ColdRule, of: impl Fn(TenantId) -> bool) -> Result<usize> {
        let slots = self.0.lock().index.slots();
        let is_cold = |entry: &StoredPiece, awake, idle| {
            of(entry.tenant) && rule.is_cold(awake, idle, entry.access_count)
        };
        self.sleep_each((0..slots).map(|slot| (slot, &is_cold)))
    }

    /// Puts the pieces to sleep that are in one of these slots and are cold according to the slot's rule.
    fn sleep_each<F: Fn(&StoredPiece, Duration, Duration) -> bool>(
        &self,
        slots: impl Iterator<Item = (u32, F)>,
    ) -> Result<usize> {
        let store = self.0.sleep.as_ref().ok_or(Error::NoSleep)?;
        let now = self.0.clock.millis();
        let mut slept = 0;
        for (slot, is_cold) in slots {
            match self.0.sleep_slot(slot, now, store.as_ref(), is_cold) {
                Ok(true) => slept += 1,
                Ok(false) => {}
                Err(error) if slept == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(slept)
    }
}

/// Runs a store's code, and treats a panic as a failure. A panic would otherwise leave other requests waiting
/// forever.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    caught.unwrap_or_else(|_| Err(Error::StorePanicked))
}

impl SharedCache {
    // Decision: docs/decisions/chunks.md#sleep-copies-use-the-computing-stream
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
            let contents = store.save(&awake.ids)?;
            let (bytes, exact) = (contents.bytes(), contents.is_exact());
            Ok(SavedPiece { contents, bytes, exact })
        });
        let mut state = self.lock();
        let result = match saved {
            Ok(saved) => {
                state.arrive(slot, awake, saved);
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
}

impl CacheState {
    // Decision: docs/decisions/chunks.md#a-piece-that-falls-asleep-keeps-its-eviction-order
    /// Starts putting the piece in `slot`, which must not have holders, to sleep. The piece keeps its blocks
    /// until the move ends. It also keeps its rank in the eviction order, but is not evicted in the meantime.
    pub(crate) fn depart(&mut self, slot: u32, flight: &Arc<Flight>) -> Option<AwakePiece> {
        let entry = self.index.at_mut(slot).filter(|entry| entry.is_evictable())?;
        match std::mem::replace(&mut entry.memory, PieceMemory::Moving(Arc::clone(flight))) {
            PieceMemory::Awake(awake) => {
                let account = &mut self.accounts[entry.tenant.0 as usize];
                account.order.depart(awake.number);
                account.idle -= entry.hash.num_blocks;
                Some(awake)
            }
            other => {
                entry.memory = other;
                None
            }
        }
    }

    /// Ends the move of a departed piece that stays awake after all. Its rank in the eviction order is
    /// unchanged.
    pub(crate) fn stay(&mut self, slot: u32, awake: AwakePiece) {
        let Some(entry) = self.index.at_mut(slot) else { return };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        account.order.stay(awake.number);
        account.idle += entry.hash.num_blocks;
        entry.memory = PieceMemory::Awake(awake);
    }

    /// Ends the move of a departed piece that is now asleep, and frees its blocks.
    pub(crate) fn arrive(&mut self, slot: u32, awake: AwakePiece, saved: SavedPiece) {
        let Some(entry) = self.index.at_mut(slot) else { return };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        account.order.arrive(awake.number);
        account.used -= entry.hash.num_blocks;
        account.sleeping_bytes += saved.bytes;
        account.counted.slept += 1;
        // Decision: docs/decisions/chunks.md#a-piece-that-slept-quantised-stays-approximate
        entry.exact &= saved.exact;
        entry.memory = PieceMemory::Asleep(saved);
        drop(awake); // frees the blocks
    }
}
