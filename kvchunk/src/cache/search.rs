//! The search for a piece under the lock: holds the piece, starts to wake it, returns a waiter for it, or
//! reserves room for it.

use std::sync::Arc;
use std::time::Instant;

use kvcore::BlockKey;

use super::SharedCache;
use super::flight::{ChunkWaiter, Flight};
use super::hold::{ChunkReservation, HeldPiece, PieceHold};
use super::state::{CacheState, PieceMemory, UnderWay};
use super::tenant::TenantId;
use crate::hash::{ChunkHash, ChunkPiece, PieceEvidence};
use crate::sleep::Waking;

/// The outcome of a request for a piece.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
pub enum Acquired {
    /// The piece is stored and is now held.
    Hit(PieceHold),
    /// The piece is missing, and this request must compute it.
    Compute(ChunkReservation),
    /// Another request is computing the piece, or the piece is being put to sleep or woken. Wait and then
    /// acquire it again, but compute your own reservations first (see [`ChunkWaiter`]).
    Busy(ChunkWaiter),
    /// The cache cannot keep the piece: there would be no room even if every piece without holders were
    /// evicted, the whole pool is asleep, or other contents have the same hash. This request must compute the
    /// piece only for itself.
    NoRoom,
}

/// A request for a piece: the piece, the tenant, the position to store the piece at, and the current time in
/// milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct PieceRequest<'a, 't> {
    pub(super) piece: &'a ChunkPiece<'t>,
    pub(super) tenant: TenantId,
    pub(super) stored_start: i64,
    pub(super) now: u64,
}

/// A piece that is to be stored.
pub(super) struct NewPiece {
    pub(super) hash: ChunkHash,
    pub(super) evidence: PieceEvidence,
    /// The hash of the same tokens with any system prompt, if the piece can be found by it.
    pub(super) any_system: Option<BlockKey>,
    pub(super) stored_start: i64,
}

/// The outcome of a search under the lock.
pub(super) enum Searched {
    Done(Acquired),
    /// The piece is asleep. Blocks have been reserved to wake it.
    Asleep(Waking),
}

impl SharedCache {
    /// Finds a piece, or reserves room for it, and counts the outcome.
    pub(super) fn find_or_reserve(
        self: &Arc<Self>,
        state: &mut CacheState,
        request: &PieceRequest<'_, '_>,
    ) -> Searched {
        let PieceRequest { piece, tenant, stored_start, now } = *request;
        if let Some(slot) = state.find(piece) {
            match state.index.at(slot).map(|entry| &entry.memory) {
                Some(PieceMemory::Asleep(_)) => {
                    if let Some(waking) = state.begin_waking(&self.pool, slot, now) {
                        return Searched::Asleep(waking);
                    }
                    state.count_uncached(tenant);
                    return Searched::Done(Acquired::NoRoom);
                }
                Some(PieceMemory::Moving(flight)) => {
                    return Searched::Done(Acquired::Busy(ChunkWaiter(Arc::clone(flight))));
                }
                Some(PieceMemory::Awake(_)) | None => {}
            }
            if let Some(hold) = self.hit(state, request, slot, true) {
                return Searched::Done(Acquired::Hit(hold));
            }
        } else if self.config.cross_system_reuse
            && let Some(slot) = state.find_any_system(piece, stored_start)
            && let Some(hold) = self.hit(state, request, slot, false)
        {
            return Searched::Done(Acquired::Hit(hold));
        }
        let known = state.under_way.get(&piece.hash().key).filter(|known| known.evidence.proves(piece));
        if let Some(flight) = known.map(|known| Arc::clone(&known.flight)) {
            state.account(tenant).counted.shared_flights += 1;
            return Searched::Done(Acquired::Busy(ChunkWaiter(flight)));
        }
        let reserved = self.reserve(state, request);
        Searched::Done(reserved.map_or(Acquired::NoRoom, Acquired::Compute))
    }

    /// Holds the piece in `slot` if it is awake, and counts a hit.
    pub(super) fn hit(
        self: &Arc<Self>,
        state: &mut CacheState,
        request: &PieceRequest<'_, '_>,
        slot: u32,
        same_system: bool,
    ) -> Option<PieceHold> {
        let hold = self.hold(state, slot, Some(request.now), same_system)?;
        state.count_hit(request.tenant, &hold);
        Some(hold)
    }

    /// Holds the piece in `slot` if it is awake. Counts a use if `used` is the time of one, but neither a hit nor a
    /// miss. `same_system` is false if the
    /// piece was computed with a system prompt other than the request's.
    pub(crate) fn hold(
        self: &Arc<Self>,
        state: &mut CacheState,
        slot: u32,
        used: Option<u64>,
        same_system: bool,
    ) -> Option<PieceHold> {
        let (entry, awake) = state.hold(slot, used)?;
        Some(PieceHold::new(HeldPiece {
            cache: Arc::clone(self),
            slot: Some(slot),
            generation: entry.generation,
            ids: Arc::clone(&awake.ids),
            blocks: Some(awake.pinned.share()),
            hash: entry.hash,
            stored_start: entry.stored_start,
            exact: entry.exact && same_system,
        }))
    }

    /// Reserves room for a piece, and counts a miss. Returns `None` if there is no room or the hash is
    /// already in use. In that case, the piece is computed only for this request and not kept.
    pub(super) fn reserve(
        self: &Arc<Self>,
        state: &mut CacheState,
        request: &PieceRequest<'_, '_>,
    ) -> Option<ChunkReservation> {
        let PieceRequest { piece, tenant, stored_start, now } = *request;
        let any_system = self.config.cross_system_reuse.then(|| piece.any_system()).flatten();
        let new = NewPiece { hash: piece.hash(), evidence: piece.evidence(), any_system, stored_start };
        let reserved = self.reserve_new(state, new, tenant, now);
        match &reserved {
            Some(_) => state.account(tenant).counted.miss(),
            None => state.count_uncached(tenant),
        }
        reserved
    }

    /// Reserves room for a piece like [`reserve`](Self::reserve), but counts nothing.
    pub(super) fn reserve_new(
        self: &Arc<Self>,
        state: &mut CacheState,
        new: NewPiece,
        tenant: TenantId,
        now: u64,
    ) -> Option<ChunkReservation> {
        let NewPiece { hash, evidence, any_system, stored_start } = new;
        let taken = state.under_way.contains_key(&hash.key) || state.index.slot_of(&hash.key).is_some();
        if taken || !state.pool.is_awake() {
            return None;
        }
        let blocks = state.room(&self.pool, tenant, hash.num_blocks, now)?;
        let flight: Arc<Flight> = Arc::default();
        let known = UnderWay {
            evidence: evidence.clone(),
            flight: Arc::clone(&flight),
            tenant,
            blocks: hash.num_blocks,
        };
        state.under_way.insert(hash.key, known);
        Some(ChunkReservation {
            cache: Arc::clone(self),
            hash,
            any_system,
            evidence,
            tenant,
            stored_start,
            ids: blocks.ids().into(),
            blocks: Some(blocks),
            flight,
            since: Instant::now(),
            fetched: false,
        })
    }
}

impl CacheState {
    /// Counts a hold as a hit for the tenant.
    pub(super) fn count_hit(&mut self, tenant: TenantId, hold: &PieceHold) {
        self.account(tenant).counted.hit(hold.num_tokens(), hold.is_exact());
    }

    /// Counts a miss for a piece that is computed for one request and not kept.
    pub(super) fn count_uncached(&mut self, tenant: TenantId) {
        let counted = &mut self.account(tenant).counted;
        counted.miss();
        counted.uncached += 1;
    }
}
