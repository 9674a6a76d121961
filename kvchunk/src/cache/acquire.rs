//! Acquires a piece: the request gets a hold on it, computes it, waits for another request that computes it,
//! or does without the cache.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvcore::BlockKey;
use kvtier::RecordId;

use super::search::{Acquired, NewPiece, PieceRequest, Searched};
use super::state::CacheState;
use super::tenant::TenantId;
use super::{ChunkCacheManager, ChunkReservation, LockedState, PieceHold, SharedCache};
use crate::hash::{ChunkHash, ChunkPiece, PieceEvidence};
use crate::position::{PlacedPiece, PositionReindexer};
use crate::tier::MissReason;

impl ChunkCacheManager {
    /// Looks up a piece for a tenant, and reserves room for it if it is missing. If this request must compute
    /// the piece, it must rotate the first key to position `stored_start`.
    ///
    /// The lock is not held while a sleeping piece is woken. The piece is held as soon as it is awake.
    pub fn acquire(&self, tenant: TenantId, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        let mut looked = Duration::ZERO;
        loop {
            let (since, now) = (Instant::now(), self.0.clock.millis());
            let mut state = self.0.lock();
            let request = PieceRequest { piece, tenant: state.known(tenant), stored_start, now };
            let searched = self.0.find_or_reserve(&mut state, &request);
            drop(state);
            looked += since.elapsed();
            let acquired = match searched {
                Searched::Done(acquired) => acquired,
                Searched::Asleep(waking) => {
                    let now = self.0.clock.millis();
                    let hit = |state: &mut LockedState<'_>, slot| {
                        self.0.hit(state, &PieceRequest { now, ..request }, slot, true)
                    };
                    match self.0.wake(waking, hit) {
                        Ok(Some(hold)) => Acquired::Hit(hold),
                        // If the piece was lost, it can be computed now.
                        Ok(None) | Err(_) => continue,
                    }
                }
            };
            self.0.looked_up(looked);
            return acquired;
        }
    }

    /// Acquires the pieces of a whole prompt, each given with the position to store it at. Every stored piece
    /// is held before room is made for a missing one, so a prompt never evicts its own pieces. If there is no
    /// room for all missing pieces together, nothing is evicted, and each of them is
    /// [`NoRoom`](Acquired::NoRoom).
    ///
    /// The result has the order of `pieces`. A missing piece that occurs twice is reserved once, and is
    /// [`Busy`](Acquired::Busy) the second time.
    pub fn acquire_all(&self, tenant: TenantId, pieces: &[(ChunkPiece<'_>, i64)]) -> Vec<Acquired> {
        let held: Vec<_> = pieces.iter().map(|(piece, _)| self.hold(piece)).collect();
        let missing = pieces.iter().zip(&held).filter(|(_, held)| held.is_none());
        let have_room = self.have_room(tenant, missing.map(|(piece, _)| piece));
        let each = pieces.iter().zip(held).map(|((piece, stored_start), held)| match held {
            Some(hold) => {
                self.count_hit(tenant, &hold);
                Acquired::Hit(hold)
            }
            None if have_room || !self.needs_room(&self.0.lock(), piece, *stored_start) => {
                self.acquire(tenant, piece, *stored_start)
            }
            None => {
                self.go_without(tenant);
                Acquired::NoRoom
            }
        });
        each.collect()
    }

    /// Returns whether there would be room for all of these pieces if every piece without holders were evicted.
    fn have_room<'a, 't: 'a>(
        &self,
        tenant: TenantId,
        pieces: impl Iterator<Item = &'a (ChunkPiece<'t>, i64)>,
    ) -> bool {
        let state = self.0.lock();
        let new = pieces.filter(|(piece, stored_start)| self.needs_room(&state, piece, *stored_start));
        let blocks: HashMap<_, _> =
            new.map(|(piece, _)| (piece.hash().key, piece.hash().num_blocks)).collect();
        state.has_room(&self.0.pool, state.known(tenant), blocks.values().sum())
    }

    /// Returns whether a piece that is not stored and awake needs room: no other request computes it, and no piece of
    /// another system prompt can take its place.
    fn needs_room(&self, state: &CacheState, piece: &ChunkPiece<'_>, stored_start: i64) -> bool {
        let is_under_way = state.under_way.contains_key(&piece.hash().key);
        let reuses = self.0.config.cross_system_reuse;
        let has_other = reuses && state.find_any_system(piece, stored_start).is_some();
        !is_under_way && !has_other
    }

    /// Holds the piece if it is stored and awake. The hold does not count as a hit until
    /// [`count_hit`](Self::count_hit) is called.
    pub(crate) fn hold(&self, piece: &ChunkPiece<'_>) -> Option<PieceHold> {
        let (since, now) = (Instant::now(), self.0.clock.millis());
        let mut state = self.0.lock();
        let slot = state.find(piece)?;
        let hold = self.0.hold(&mut state, slot, Some(now), true)?;
        drop(state);
        self.0.looked_up(since.elapsed());
        Some(hold)
    }

    /// Returns whether the piece is stored. The piece may be asleep.
    pub(crate) fn contains(&self, piece: &ChunkPiece<'_>) -> bool {
        self.0.lock().find(piece).is_some()
    }

    /// Returns why a piece is not stored, as far as the tenant's own pieces tell.
    pub(crate) fn why_missing(&self, tenant: TenantId, piece: &ChunkPiece<'_>) -> MissReason {
        let state = self.0.lock();
        state.why_missing(state.known(tenant), piece)
    }

    // Decision: docs/decisions/chunks.md#a-hold-counts-as-a-hit-when-it-is-used
    /// Counts a hold as a hit, because one of the tenant's requests uses it.
    pub(crate) fn count_hit(&self, tenant: TenantId, hold: &PieceHold) {
        let mut state = self.0.lock();
        let tenant = state.known(tenant);
        state.count_hit(tenant, hold);
    }

    /// Reserves room for a piece, and counts a miss. Returns `None` if there is no room, or if the piece is
    /// already stored or being computed.
    pub(crate) fn reserve(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
    ) -> Option<ChunkReservation> {
        let (since, now) = (Instant::now(), self.0.clock.millis());
        let mut state = self.0.lock();
        let request = PieceRequest { piece, tenant: state.known(tenant), stored_start, now };
        let reserved = self.0.reserve(&mut state, &request);
        drop(state);
        self.0.looked_up(since.elapsed());
        reserved
    }

    /// Reserves room for the piece of a record, whose hash must be collision-resistant. Returns `None` if there is
    /// no room, or if the piece is already stored or being computed.
    pub(crate) fn reserve_record(&self, tenant: TenantId, id: &RecordId) -> Option<ChunkReservation> {
        let (token_count, now) = (id.tokens.len(), self.0.clock.millis());
        let num_blocks = token_count.div_ceil(self.0.pool.block_size());
        let new = NewPiece {
            hash: ChunkHash { key: id.key, token_count, num_blocks },
            evidence: PieceEvidence::of_tokens(&id.tokens),
            any_system: None,
            stored_start: id.stored_start,
        };
        let mut state = self.0.lock();
        let tenant = state.known(tenant);
        self.0.reserve_new(&mut state, new, tenant, now)
    }

    /// Returns whether a piece with this key is stored. The piece may be asleep.
    pub(crate) fn knows(&self, key: &BlockKey) -> bool {
        self.0.lock().index.slot_of(key).is_some()
    }

    /// Counts a miss for a piece that a request computes only for itself.
    pub(crate) fn go_without(&self, tenant: TenantId) {
        let mut state = self.0.lock();
        let tenant = state.known(tenant);
        state.count_uncached(tenant);
    }

    /// Returns a hold on the piece if it is stored and awake. Unlike [`acquire`](Self::acquire), this method
    /// never reserves blocks, waits, or wakes a piece. It counts a hit or a miss.
    pub fn lookup(&self, tenant: TenantId, piece: &ChunkPiece<'_>) -> Option<PieceHold> {
        let (since, now) = (Instant::now(), self.0.clock.millis());
        let mut state = self.0.lock();
        let request = PieceRequest { piece, tenant: state.known(tenant), stored_start: 0, now };
        let found = state.find(piece).and_then(|slot| self.0.hit(&mut state, &request, slot, true));
        if found.is_none() {
            state.account(request.tenant).counted.miss();
        }
        drop(state);
        self.0.looked_up(since.elapsed());
        found
    }

    /// Places a piece at its new position, and records how long this took.
    ///
    /// # Errors
    /// Returns the errors of [`PositionReindexer::reindex`].
    pub fn reindex(
        &self,
        reindexer: &PositionReindexer,
        chunk: PieceHold,
        new_position_start: i64,
    ) -> crate::Result<PlacedPiece> {
        let since = Instant::now();
        let placed = reindexer.reindex(chunk, new_position_start)?;
        self.reindexed(since);
        Ok(placed)
    }
}

impl SharedCache {
    fn looked_up(&self, took: Duration) {
        if self.config.stats {
            self.lookups.record(took);
        }
    }
}
