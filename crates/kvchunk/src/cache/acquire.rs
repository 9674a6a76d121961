//! Acquiring a piece: hold it, compute it, wait for the request that computes it, or go without.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::flight::{ChunkWaiter, Flight};
use super::hold::Held;
use super::state::{Awake, CacheState, PieceMemory, StoredPiece, UnderWay};
use super::tenant::TenantId;
use super::wake::Waking;
use super::{ChunkCacheManager, ChunkReservation, PieceHold, PieceRequest, SharedCache, Tally, known};
use crate::hash::{ChunkPiece, Evidence};
use crate::position::{PlacedPiece, PositionReindexer};

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
    /// Holds the piece if it is stored and awake. In that case it counts as a hit by `tally`; otherwise
    /// nothing is counted. A prompt can thus hold everything that it finds before it makes room for the rest.
    pub(crate) fn hold(&self, tenant: TenantId, piece: &ChunkPiece<'_>, tally: Tally) -> Option<PieceHold> {
        let since = Instant::now();
        let now = self.0.clock.millis();
        let mut state = self.0.lock();
        let tenant = known(&state, tenant);
        let slot = state.find(piece)?;
        let found = self.0.hit(&mut state, tenant, slot, now, tally)?;
        drop(state);
        self.0.looked_up(since.elapsed());
        Some(found)
    }

    /// Wakes the piece if it sleeps, and holds it. Counts as [`hold`](Self::hold) does.
    pub(crate) fn hold_woken(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        tally: Tally,
    ) -> Option<PieceHold> {
        let now = self.0.clock.millis();
        let mut state = self.0.lock();
        let tenant = known(&state, tenant);
        let slot = state.find(piece)?;
        let waking = state.begin_waking(&self.0.pool, slot, now)?;
        drop(state);
        let now = self.0.clock.millis();
        self.0.wake(waking, |state, slot| self.0.hit(state, tenant, slot, now, tally)).ok().flatten()
    }

    /// Counts a piece that a request computes for itself.
    pub(crate) fn go_without(&self, tenant: TenantId) {
        let mut state = self.0.lock();
        let tenant = known(&state, tenant);
        no_room(&mut state, tenant);
    }

    /// Counts a piece that was held with [`Tally::Later`] as a hit, because the request uses it.
    pub(crate) fn count_hit(&self, tenant: TenantId, chunk: &PieceHold) {
        let mut state = self.0.lock();
        let tenant = known(&state, tenant);
        state.account(tenant).counted.hit(chunk.num_tokens(), chunk.is_exact());
    }

    /// Releases a piece that was held with [`Tally::Later`], and counts it as a miss, because the request
    /// computes it for itself.
    pub(crate) fn give_up(&self, tenant: TenantId, chunk: PieceHold) {
        self.go_without(tenant);
        drop(chunk);
    }

    /// Looks a piece up for a tenant, and reserves room for it if it is missing. If this request must compute
    /// the piece, its first key is to be rotated to the position `stored_start`.
    ///
    /// A sleeping piece is woken without the lock, and is held as soon as it is awake.
    pub fn acquire(&self, tenant: TenantId, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        self.0.acquire(tenant, piece, stored_start, Tally::Now)
    }

    /// Acquires a piece as [`acquire`](Self::acquire) does, but counts a hit by `tally`.
    pub(crate) fn acquire_counted(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        tally: Tally,
    ) -> Acquired {
        self.0.acquire(tenant, piece, stored_start, tally)
    }

    /// Returns the piece if it is stored and awake. Unlike [`acquire`](Self::acquire), it reserves nothing,
    /// waits for nothing and wakes nothing.
    pub fn lookup(&self, tenant: TenantId, piece: &ChunkPiece<'_>) -> Option<PieceHold> {
        let since = Instant::now();
        let found = self.hold(tenant, piece, Tally::Now);
        if found.is_none() {
            let mut state = self.0.lock();
            let tenant = known(&state, tenant);
            state.account(tenant).counted.miss();
            drop(state);
            self.0.looked_up(since.elapsed());
        }
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

/// The outcome of a search under the lock.
enum Found {
    Here(Acquired),
    /// The piece sleeps, and has room to wake in.
    Waking(Waking),
}

impl SharedCache {
    fn acquire(
        self: &Arc<Self>,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        tally: Tally,
    ) -> Acquired {
        let mut looked = Duration::ZERO;
        loop {
            let (since, now) = (Instant::now(), self.clock.millis());
            let mut state = self.lock();
            let wanted = PieceRequest { piece, tenant: known(&state, tenant), stored_start, tally };
            let found = self.find_or_reserve(&mut state, &wanted, now);
            drop(state);
            looked += since.elapsed();
            let acquired = match found {
                Found::Here(acquired) => acquired,
                Found::Waking(waking) => {
                    let now = self.clock.millis();
                    let tenant = wanted.tenant;
                    match self.wake(waking, |state, slot| self.hit(state, tenant, slot, now, tally)) {
                        Ok(Some(chunk)) => Acquired::Hit(chunk),
                        // A lost piece can be computed now.
                        Ok(None) | Err(_) => continue,
                    }
                }
            };
            self.looked_up(looked);
            return acquired;
        }
    }

    fn looked_up(&self, took: Duration) {
        if self.config.stats {
            self.lookups.record(took);
        }
    }

    fn find_or_reserve(
        self: &Arc<Self>,
        state: &mut CacheState,
        wanted: &PieceRequest<'_, '_>,
        now: u64,
    ) -> Found {
        let PieceRequest { piece, tenant, tally, .. } = *wanted;
        if !state.pool.is_awake() {
            return Found::Here(no_room(state, tenant));
        }
        if let Some(slot) = state.find(piece) {
            let flight = match state.index.at(slot).map(|entry| &entry.memory) {
                Some(PieceMemory::Asleep(_)) => {
                    let waking = state.begin_waking(&self.pool, slot, now).map(Found::Waking);
                    return waking.unwrap_or_else(|| Found::Here(no_room(state, tenant)));
                }
                Some(PieceMemory::Moving(flight)) => Some(Arc::clone(flight)),
                Some(PieceMemory::Awake(_)) | None => None,
            };
            if let Some(flight) = flight {
                return Found::Here(Acquired::Busy(ChunkWaiter(flight)));
            }
            if let Some(chunk) = self.hit(state, tenant, slot, now, tally) {
                return Found::Here(Acquired::Hit(chunk));
            }
        } else if self.config.cross_system_reuse
            && let Some(slot) = state.find_any_system(piece, wanted.stored_start)
            && let Some(chunk) = self.hit_as(state, tenant, slot, now, false, tally)
        {
            return Found::Here(Acquired::Hit(chunk));
        }
        let key = piece.hash().key;
        // A piece that only shares its hash with a piece under way is computed beside it and not kept.
        let flight_of = |known: &UnderWay| known.evidence.proves(piece).then(|| Arc::clone(&known.flight));
        let known_flight = state.under_way.get(&key).map(flight_of);
        match known_flight {
            Some(Some(flight)) => {
                state.account(tenant).counted.shared_flights += 1;
                Found::Here(Acquired::Busy(ChunkWaiter(flight)))
            }
            Some(None) => Found::Here(no_room(state, tenant)),
            None if state.index.slot_of(&key).is_some() => Found::Here(no_room(state, tenant)),
            None => Found::Here(self.reserve(state, wanted, now)),
        }
    }

    /// Holds the piece in `slot`, if it is awake.
    fn hit(
        self: &Arc<Self>,
        state: &mut CacheState,
        tenant: TenantId,
        slot: u32,
        now: u64,
        tally: Tally,
    ) -> Option<PieceHold> {
        self.hit_as(state, tenant, slot, now, true, tally)
    }

    fn hit_as(
        self: &Arc<Self>,
        state: &mut CacheState,
        tenant: TenantId,
        slot: u32,
        now: u64,
        same_system: bool,
        tally: Tally,
    ) -> Option<PieceHold> {
        let (entry, awake) = state.hold(slot, now)?;
        let held = self.held(entry, awake, slot, entry.exact && same_system);
        if tally == Tally::Now {
            state.account(tenant).counted.hit(held.hash.token_count, held.exact);
        }
        Some(PieceHold::new(held))
    }

    pub(super) fn held(self: &Arc<Self>, entry: &StoredPiece, awake: &Awake, slot: u32, exact: bool) -> Held {
        Held {
            cache: Arc::clone(self),
            slot: Some(slot),
            generation: entry.generation,
            ids: Arc::clone(&awake.ids),
            blocks: Some(awake.pinned.share()),
            hash: entry.hash,
            stored_start: entry.stored_start,
            exact,
        }
    }

    fn reserve(
        self: &Arc<Self>,
        state: &mut CacheState,
        wanted: &PieceRequest<'_, '_>,
        now: u64,
    ) -> Acquired {
        let PieceRequest { piece, tenant, stored_start, .. } = *wanted;
        let hash = piece.hash();
        let Some(blocks) = state.room(&self.pool, tenant, hash.num_blocks, now) else {
            return no_room(state, tenant);
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
        Acquired::Compute(ChunkReservation {
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
                    memory: PieceMemory::Awake(Awake { pinned: blocks.pin(), ids: Arc::clone(&ids), number }),
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

fn no_room(state: &mut CacheState, tenant: TenantId) -> Acquired {
    let counted = &mut state.account(tenant).counted;
    counted.miss();
    counted.uncached += 1;
    Acquired::NoRoom
}
