//! What other replicas may have of a cache, and what has come from them.

use std::sync::Arc;

use super::state::{Entry, Place};
use super::{ChunkCacheManager, ChunkKvCache, ChunkReservation, TenantId};
use crate::hash::ChunkHash;

/// Pieces that slept in fewer bits are no function of their hash, and a weak hash proves nothing elsewhere.
fn may_leave(entry: &Entry) -> bool {
    entry.exact && entry.evidence.is_tokens_alone()
}

impl ChunkCacheManager {
    /// Whether a replica would get the piece under a hash now.
    pub(crate) fn can_give(&self, hash: &ChunkHash) -> bool {
        let state = self.0.lock();
        let entry = state.index.slot_of(&hash.key).and_then(|slot| state.index.at(slot));
        state.pool.is_awake()
            && entry.is_some_and(|entry| may_leave(entry) && matches!(entry.place, Place::Awake(_)))
    }

    /// Holds the piece under a hash for another replica, with its tokens. It is a use, and no lookup of a tenant.
    pub(crate) fn hold_for_replica(&self, hash: &ChunkHash) -> Option<(ChunkKvCache, Arc<[u32]>)> {
        let now = self.0.clock.millis();
        let mut state = self.0.lock();
        let slot = state.index.slot_of(&hash.key)?;
        let entry = state.index.at(slot).filter(|entry| may_leave(entry))?;
        let tokens = Arc::clone(entry.evidence.tokens());
        let (entry, awake) = state.hold(slot, now)?;
        let held = self.0.held(entry, awake, slot, true);
        drop(state);
        Some((ChunkKvCache::new(held), tokens))
    }
}

impl ChunkCacheManager {
    /// Counts replicas that were asked in vain.
    pub(crate) fn count_fetch_failures(&self, tenant: TenantId, failures: usize) {
        if failures > 0 {
            self.0.lock().account(tenant).counted.fetch_failures += failures as u64;
        }
    }
}

impl ChunkReservation {
    /// As [`store`](Self::store), for a piece that has come from another replica.
    pub(crate) fn store_fetched(mut self) -> ChunkKvCache {
        self.fetched = true;
        self.store()
    }
}
