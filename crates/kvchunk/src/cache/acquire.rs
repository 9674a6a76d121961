//! Acquiring a piece: hold it, compute it, wait for the request that computes it, or go without.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::flight::{ChunkWaiter, Flight};
use super::hold::Held;
use super::state::{AwakePiece, CacheState, PieceMemory, StoredPiece, UnderWay};
use super::tenant::TenantId;
use super::{ChunkCacheManager, ChunkReservation, LockedState, PieceHold, SharedCache, known};
use crate::hash::{ChunkPiece, Evidence};
use crate::position::{PlacedPiece, PositionReindexer};
use crate::sleep::Waking;

/// The outcome of a request for a piece.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
pub enum Acquired {
    /// The piece is stored, and held.
    Hit(PieceHold),
    /// The piece is missing, and this request must compute it.
    Compute(ChunkReservation),
    /// Another request computes the piece, or the piece is being moved. Wait, and ask again. Compute your own
    /// reservations first; see [`ChunkWaiter`].
    Busy(ChunkWaiter),
    /// There is no room, even after every piece that nobody holds was evicted, or the whole pool sleeps. This
    /// request computes the piece for itself.
    NoRoom,
}

impl ChunkCacheManager {
    /// Looks a piece up for a tenant, and reserves room for it if it is missing. If this request must compute
    /// the piece, its first key is to be rotated to the position `stored_start`.
    ///
    /// A sleeping piece is woken without the lock, and is held as soon as it is awake.
    pub fn acquire(&self, tenant: TenantId, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        let mut looked = Duration::ZERO;
        loop {
            let (since, now) = (Instant::now(), self.0.clock.millis());
            let mut state = self.0.lock();
            let request = PieceRequest { piece, tenant: known(&state, tenant), stored_start, now };
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
                        // A lost piece can be computed now.
                        Ok(None) | Err(_) => continue,
                    }
                }
            };
            self.0.looked_up(looked);
            return acquired;
        }
    }

    /// Holds the piece if it is stored and awake. The hold counts as nothing until
    /// [`count_hit`](Self::count_hit).
    pub(crate) fn hold(&self, piece: &ChunkPiece<'_>) -> Option<PieceHold> {
        let (since, now) = (Instant::now(), self.0.clock.millis());
        let mut state = self.0.lock();
        let slot = state.find(piece)?;
        let hold = self.0.hold(&mut state, slot, now, true)?;
        drop(state);
        self.0.looked_up(since.elapsed());
        Some(hold)
    }

    // Decision: docs/decisions/chunks.md#a-hold-counts-as-a-hit-when-it-is-used
    /// Counts a hold as a hit, because a request of the tenant uses it.
    pub(crate) fn count_hit(&self, tenant: TenantId, hold: &PieceHold) {
        let mut state = self.0.lock();
        let tenant = known(&state, tenant);
        state.count_hit(tenant, hold);
    }

    /// Reserves room for a piece, and counts a miss. Returns `None` if there is no room, or if the piece is
    /// stored or under way already.
    pub(crate) fn reserve(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
    ) -> Option<ChunkReservation> {
        let (since, now) = (Instant::now(), self.0.clock.millis());
        let mut state = self.0.lock();
        let request = PieceRequest { piece, tenant: known(&state, tenant), stored_start, now };
        let reserved = self.0.reserve(&mut state, &request);
        drop(state);
        self.0.looked_up(since.elapsed());
        reserved
    }

    /// Counts a piece that a request computes for itself.
    pub(crate) fn go_without(&self, tenant: TenantId) {
        let mut state = self.0.lock();
        let tenant = known(&state, tenant);
        state.count_uncached(tenant);
    }

    /// Returns the piece if it is stored and awake. Unlike [`acquire`](Self::acquire), it reserves nothing,
    /// waits for nothing and wakes nothing.
    pub fn lookup(&self, tenant: TenantId, piece: &ChunkPiece<'_>) -> Option<PieceHold> {
        let (since, now) = (Instant::now(), self.0.clock.millis());
        let mut state = self.0.lock();
        let request = PieceRequest { piece, tenant: known(&state, tenant), stored_start: 0, now };
        let found = state.find(piece).and_then(|slot| self.0.hit(&mut state, &request, slot, true));
        if found.is_none() {
            state.account(request.tenant).counted.miss();
        }
        drop(state);
        self.0.looked_up(since.elapsed());
        found
    }

    /// Returns the piece at the position `new_position_start`. If the piece is not cached, `compute` fills
    /// the reservation's blocks. If another request is computing the piece, the call waits for that.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use kvchunk::{
    ///     ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher, ComputeMode,
    ///     HashAlgorithm, PositionReindexer, TenantId,
    /// };
    /// use kvcore::{KeyScope, Rope, RopeConfig};
    ///
    /// let cache = ChunkCacheManager::new(ChunkCacheConfig::default(), ChunkBlockPool::new(0..64, 16)?)?;
    /// let context = ChunkContext::new(KeyScope::new("m", b"w").root(), ComputeMode::Alone, &[]);
    /// let hasher = ChunkHasher::new(HashAlgorithm::Blake3, context, 16);
    /// let reindexer = PositionReindexer::new(Arc::new(Rope::new(RopeConfig::new(64, 10_000.0), 8192)?));
    /// let piece = hasher.pieces(&[5; 40], 4096).next().unwrap();
    /// let mut computed = 0;
    /// for position in [7, 700] {
    ///     let chunk = cache.get_or_compute_chunk(TenantId::default(), &piece, 0, &reindexer, position, |r| {
    ///         computed += r.write_slots()?.len();
    ///         Ok::<_, kvchunk::Error>(())
    ///     })?.expect("room for it");
    ///     assert_eq!((chunk.new_position_start(), chunk.position_offset()), (position, position));
    /// }
    /// assert_eq!(computed, 40); // once
    /// # Ok::<(), kvchunk::Error>(())
    /// ```
    ///
    /// Returns `None` if there is no room for the piece, or if the other request takes longer than
    /// [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms). In that case, compute the piece as part of an
    /// ordinary prompt.
    ///
    /// # Errors
    /// Returns the error of `compute`. In that case the blocks are free again, and the next request computes
    /// the piece. Returns [`Error::TooLong`](crate::Error::TooLong) if the model does not have one of the
    /// positions.
    pub fn get_or_compute_chunk<E: From<crate::Error>>(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        reindexer: &PositionReindexer,
        new_position_start: i64,
        compute: impl FnOnce(&ChunkReservation) -> Result<(), E>,
    ) -> Result<Option<PlacedPiece>, E> {
        reindexer.check(new_position_start, piece.tokens().len())?;
        let (since, limit) = (Instant::now(), self.0.config.max_wait());
        let chunk = loop {
            match self.acquire(tenant, piece, stored_start) {
                Acquired::Hit(chunk) => break chunk,
                Acquired::Compute(reservation) => {
                    compute(&reservation)?;
                    break reservation.store();
                }
                Acquired::Busy(waiter) => {
                    if !waiter.wait_for(limit.saturating_sub(since.elapsed())) {
                        self.go_without(tenant);
                        return Ok(None);
                    }
                }
                Acquired::NoRoom => return Ok(None),
            }
        };
        Ok(Some(self.reindex(reindexer, chunk, new_position_start)?))
    }

    /// Places a piece, and records the time that this took.
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

/// A request for a piece: the tenant that it is for, the position to store it at, and the time.
#[derive(Debug, Clone, Copy)]
struct PieceRequest<'a, 't> {
    piece: &'a ChunkPiece<'t>,
    tenant: TenantId,
    stored_start: i64,
    now: u64,
}

/// The outcome of a search under the lock.
enum Searched {
    Done(Acquired),
    /// The piece sleeps, and has room to wake in.
    Asleep(Waking),
}

impl SharedCache {
    fn looked_up(&self, took: Duration) {
        if self.config.stats {
            self.lookups.record(took);
        }
    }

    fn find_or_reserve(self: &Arc<Self>, state: &mut CacheState, request: &PieceRequest<'_, '_>) -> Searched {
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
    fn hit(
        self: &Arc<Self>,
        state: &mut CacheState,
        request: &PieceRequest<'_, '_>,
        slot: u32,
        same_system: bool,
    ) -> Option<PieceHold> {
        let hold = self.hold(state, slot, request.now, same_system)?;
        state.count_hit(request.tenant, &hold);
        Some(hold)
    }

    /// Holds the piece in `slot` if it is awake, without counting anything. `same_system` is false for a
    /// piece that was computed under another system prompt than the one that asks.
    pub(crate) fn hold(
        self: &Arc<Self>,
        state: &mut CacheState,
        slot: u32,
        now: u64,
        same_system: bool,
    ) -> Option<PieceHold> {
        let (entry, awake) = state.hold(slot, now)?;
        Some(PieceHold::new(Held {
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

    /// Reserves room for a piece, and counts a miss. A piece whose hash is taken gets no room: contents that
    /// only share the hash are computed beside the others and not kept.
    fn reserve(
        self: &Arc<Self>,
        state: &mut CacheState,
        request: &PieceRequest<'_, '_>,
    ) -> Option<ChunkReservation> {
        let PieceRequest { piece, tenant, stored_start, now } = *request;
        let hash = piece.hash();
        let taken = state.under_way.contains_key(&hash.key) || state.index.slot_of(&hash.key).is_some();
        let blocks = if taken || !state.pool.is_awake() {
            None
        } else {
            state.room(&self.pool, tenant, hash.num_blocks, now)
        };
        let Some(blocks) = blocks else {
            state.count_uncached(tenant);
            return None;
        };
        state.account(tenant).counted.miss();
        let (flight, evidence): (Arc<Flight>, Evidence) = (Arc::default(), piece.evidence());
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
            any_system: self.config.cross_system_reuse.then(|| piece.any_system()).flatten(),
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

    /// Stores a piece that has been computed or fetched.
    pub(super) fn store(self: &Arc<Self>, reservation: &mut ChunkReservation) -> PieceHold {
        let (hash, tenant) = (reservation.hash, reservation.tenant);
        let (blocks, ids) = (reservation.blocks.take(), Arc::clone(&reservation.ids));
        let blocks = blocks.map(kvcore::MutableBlocks::share);
        let now = self.clock.millis();
        if self.config.stats && !reservation.fetched {
            self.computes.record(reservation.since.elapsed());
        }
        let mut state = self.lock();
        let counted = &mut state.account(tenant).counted;
        if reservation.fetched {
            counted.fetched += 1;
        } else {
            counted.tokens_computed += hash.token_count as u64;
        }
        let place = state.index.len() < self.config.max_chunks || state.make_place(tenant, now);
        let number = if place { state.account(tenant).order.admit() } else { None };
        let (slot, generation) = match (number, &blocks) {
            (Some(number), Some(blocks)) => {
                state.account(tenant).counted.insertions += 1;
                let (slot, generation) = state.insert(StoredPiece {
                    hash,
                    any_system: reservation.any_system,
                    evidence: reservation.evidence.clone(),
                    tenant,
                    generation: 0,
                    stored_start: reservation.stored_start,
                    memory: PieceMemory::Awake(AwakePiece {
                        pinned: blocks.pin(),
                        ids: Arc::clone(&ids),
                        number,
                    }),
                    exact: true,
                    holders: 1,
                    doomed: false,
                    created: now,
                    awake_since: now,
                    last_accessed: now,
                    access_count: 0,
                });
                (Some(slot), generation)
            }
            _ => (None, state.insert_orphan(tenant, hash.num_blocks)),
        };
        state.under_way.remove(&hash.key);
        drop(state);
        reservation.flight.land();
        let (cache, stored_start) = (Arc::clone(self), reservation.stored_start);
        PieceHold::new(Held { cache, slot, generation, ids, blocks, hash, stored_start, exact: true })
    }

    /// Ends a reservation that was not computed. A reservation that was stored has ended already.
    pub(super) fn abandon(&self, reservation: &mut ChunkReservation) {
        let Some(blocks) = reservation.blocks.take() else { return };
        let mut state = self.lock();
        state.under_way.remove(&reservation.hash.key);
        state.account(reservation.tenant).used -= reservation.hash.num_blocks;
        drop(blocks);
        drop(state);
        reservation.flight.land();
    }

    /// Removes a holder.
    pub(super) fn release(&self, slot: Option<u32>, generation: u64) {
        let now = self.clock.millis();
        self.lock().let_go(slot, generation, now);
    }
}

impl CacheState {
    /// Counts a hold as a hit of a tenant.
    fn count_hit(&mut self, tenant: TenantId, hold: &PieceHold) {
        self.account(tenant).counted.hit(hold.num_tokens(), hold.is_exact());
    }

    /// Counts a miss of a piece that is computed for one request and not kept.
    fn count_uncached(&mut self, tenant: TenantId) {
        let counted = &mut self.account(tenant).counted;
        counted.miss();
        counted.uncached += 1;
    }
}
