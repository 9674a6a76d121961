//! Putting pieces to sleep and waking them.

use std::sync::Arc;
use std::time::Duration;

use kvcore::BlockKey;

use super::flight::Flight;
use super::sleep::{ColdRule, NotWoken, SleepStore};
use super::state::{Entry, Place};
use super::tenant::TenantId;
use super::{ChunkCacheManager, Shared};
use crate::error::{Error, Result};
use crate::hash::ChunkHash;

/// What came of waking a piece.
pub(super) enum Woken {
    /// It is awake, or was no longer asleep.
    Awake,
    /// Somebody else moves it.
    Moving(Arc<Flight>),
    NotWoken(NotWoken),
}

impl Woken {
    /// Whether asking the cache again gives another answer than "it sleeps and there is no room".
    pub(super) fn may_look_again(&self) -> bool {
        !matches!(self, Self::NotWoken(NotWoken::NoRoom | NotWoken::PoolAsleep))
    }
}

impl ChunkCacheManager {
    /// Puts pieces that `rule` calls cold to sleep; returns how many. Their blocks are free then. A hit
    /// wakes them.
    ///
    /// # Errors
    /// [`Error::NoSleep`] for a cache without a place to sleep. The store's error, for instance when it is
    /// full, if no piece could be put to sleep; else what fitted sleeps and the rest stays awake.
    pub fn sleep_cold_chunks(&self, rule: ColdRule) -> Result<usize> {
        self.sleep_cold_where(rule, |_| true)
    }

    /// The same with the pieces of one tenant.
    ///
    /// # Errors
    /// As [`sleep_cold_chunks`](Self::sleep_cold_chunks).
    pub fn sleep_cold_chunks_of(&self, tenant: TenantId, rule: ColdRule) -> Result<usize> {
        self.sleep_cold_where(rule, |of| of == tenant)
    }

    fn sleep_cold_where(&self, rule: ColdRule, of: impl Fn(TenantId) -> bool) -> Result<usize> {
        let store = self.0.sleep.as_ref().ok_or(Error::NoSleep)?;
        let now = self.0.clock.millis();
        let slots = self.0.state.lock().entries.len() as u32;
        let mut slept = 0;
        for slot in 0..slots {
            match self.0.sleep_slot(slot, now, store.as_ref(), |entry, age, idle| {
                of(entry.tenant) && rule.is_cold(age, idle, entry.access_count)
            }) {
                Ok(true) => slept += 1,
                Ok(false) => {}
                Err(error) if slept == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(slept)
    }

    /// Wakes pieces; says of each that is not awake now why.
    pub fn wake_up_chunks(&self, hashes: &[ChunkHash]) -> Vec<(ChunkHash, NotWoken)> {
        let wake = |hash: &ChunkHash| loop {
            let Some(slot) = self.0.state.lock().slot_of(&hash.key) else { return Some(NotWoken::Unknown) };
            match self.0.wake_slot(slot, hash.key) {
                Woken::Awake => return None,
                Woken::Moving(flight) => super::ChunkWaiter(flight).wait(),
                Woken::NotWoken(why) => return Some(why),
            }
        };
        hashes.iter().filter_map(|hash| wake(hash).map(|why| (*hash, why))).collect()
    }
}

/// A store that panics must not leave others waiting: it has failed.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    caught.unwrap_or_else(|_| Err(Error::Damaged("the store panicked".to_owned())))
}

impl Shared {
    fn sleep_slot(
        &self,
        slot: u32,
        now: u64,
        store: &dyn SleepStore,
        is_cold: impl Fn(&Entry, Duration, Duration) -> bool,
    ) -> Result<bool> {
        let flight = Arc::new(Flight::default());
        let mut state = self.state.lock();
        let cold = state.entry(slot).is_some_and(|entry| {
            let since = |then: u64| Duration::from_millis(now.saturating_sub(then));
            let (age, idle) = (since(entry.created), since(entry.last_accessed));
            entry.is_evictable() && is_cold(entry, age, idle)
        });
        let cold = cold && state.pool.is_awake();
        let Some(awake) = cold.then(|| state.depart(slot, &flight)).flatten() else { return Ok(false) };
        drop(state);
        let saved = guarded(|| store.save(&awake.ids));
        let mut state = self.state.lock();
        let result = match saved {
            Ok(asleep) => {
                if let Some(entry) = state.entry(slot) {
                    let tenant = entry.tenant;
                    state.account(tenant).counted.slept += 1;
                }
                state.arrive(slot, awake, asleep);
                Ok(true)
            }
            Err(error) => {
                state.stay(slot, awake, now);
                Err(error)
            }
        };
        state.bury(slot);
        drop(state);
        flight.land();
        result
    }

    /// Wakes the piece in `slot`, if it is still the one with this key.
    pub(super) fn wake_slot(&self, slot: u32, key: BlockKey) -> Woken {
        let now = self.clock.millis();
        let flight = Arc::new(Flight::default());
        let mut state = self.state.lock();
        if !state.pool.is_awake() {
            return Woken::NotWoken(NotWoken::PoolAsleep);
        }
        let Some(entry) = state.entry(slot).filter(|entry| entry.hash.key == key) else {
            return Woken::Awake;
        };
        match &entry.place {
            Place::Awake(_) => return Woken::Awake,
            Place::Moving(flight) => return Woken::Moving(Arc::clone(flight)),
            Place::Asleep(_) => {}
        }
        let (tenant, blocks) = (entry.tenant, entry.hash.num_blocks);
        let Some(blocks) = state.room(&self.pool, tenant, blocks, now) else {
            return Woken::NotWoken(NotWoken::NoRoom);
        };
        // Evicting touches no sleeping piece, so the entry is still there.
        let moving = Place::Moving(Arc::clone(&flight));
        let place = state.entry_mut(slot).map(|entry| std::mem::replace(&mut entry.place, moving));
        drop(state);
        let restored = match &place {
            Some(Place::Asleep(asleep)) => guarded(|| asleep.restore(blocks.ids())),
            _ => Ok(()),
        };
        let mut state = self.state.lock();
        let counted = &mut state.account(tenant).counted;
        let woken = match restored {
            Ok(()) => {
                counted.woken += 1;
                let ids: Arc<[_]> = blocks.ids().into();
                let shared = blocks.share();
                state.wake(slot, shared.pin(), ids, now);
                Woken::Awake
            }
            Err(error) => {
                counted.lost += 1;
                state.account(tenant).used -= blocks.len();
                drop(blocks); // before anybody who waited asks for room
                state.remove(slot);
                Woken::NotWoken(NotWoken::Lost(error))
            }
        };
        state.bury(slot);
        drop(state);
        flight.land();
        woken
    }
}
