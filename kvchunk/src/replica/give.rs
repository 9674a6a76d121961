//! The cache's part in sharing: gives pieces to other replicas, and stores pieces received from them.

use std::sync::Arc;

use crate::cache::{ChunkCacheManager, ChunkReservation, PieceHold, PieceMemory, StoredPiece, TenantId};
use crate::hash::ChunkHash;

/// Returns whether another replica may use the piece. A piece that was quantised while it slept no longer
/// matches its hash exactly, and a weak hash proves nothing to another replica.
fn may_leave(entry: &StoredPiece) -> bool {
    entry.exact && entry.evidence.is_tokens_alone()
}

impl ChunkCacheManager {
    /// Returns whether the piece with this hash can currently be given to another replica.
    pub(crate) fn can_give(&self, hash: &ChunkHash) -> bool {
        let state = self.0.lock();
        let entry = state.index.slot_of(&hash.key).and_then(|slot| state.index.at(slot));
        state.pool.is_awake()
            && entry.is_some_and(|entry| may_leave(entry) && matches!(entry.memory, PieceMemory::Awake(_)))
    }

    /// Holds the piece with this hash to copy it, and returns the hold with the piece's tokens. If another replica
    /// uses the copy, this counts as a use of the piece, but not as a lookup by a tenant.
    pub(crate) fn hold_to_copy(&self, hash: &ChunkHash, is_use: bool) -> Option<(PieceHold, Arc<[u32]>)> {
        let now = self.0.clock.millis();
        let mut state = self.0.lock();
        let slot = state.index.slot_of(&hash.key)?;
        let entry = state.index.at(slot).filter(|entry| may_leave(entry))?;
        let tokens = Arc::clone(entry.evidence.tokens());
        let hold = self.0.hold(&mut state, slot, is_use.then_some(now), true)?;
        drop(state);
        Some((hold, tokens))
    }

    /// Counts failed requests to other replicas.
    pub(crate) fn count_fetch_failures(&self, tenant: TenantId, failures: usize) {
        if failures > 0 {
            let mut state = self.0.lock();
            let tenant = state.known(tenant);
            state.account(tenant).counted.fetch_failures += failures as u64;
        }
    }
}

impl ChunkReservation {
    /// Stores the piece like [`store`](Self::store), but counts it as fetched from another replica.
    pub(crate) fn store_fetched(mut self) -> PieceHold {
        self.fetched = true;
        self.store()
    }
}
