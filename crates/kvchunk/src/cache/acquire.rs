//! Acquiring a piece: hit, compute, wait for whoever computes it, or go without.

use std::sync::Arc;
use std::time::Instant;

use super::flight::{ChunkWaiter, Flight};
use super::handle::Held;
use super::state::{Awake, Entry, Place, State};
use super::tenant::TenantId;
use super::{ChunkCacheManager, ChunkKvCache, ChunkReservation, Shared, Wanted, known};
use crate::hash::{ChunkPiece, Evidence};
use crate::position::{PositionReindexer, ReindexedChunkKv};

/// What became of a request for a piece.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
pub enum Acquired {
    /// It is stored; the handle holds it.
    Hit(ChunkKvCache),
    /// It is this request's to compute.
    Compute(ChunkReservation),
    /// Another request computes it, or it is being moved: wait, then ask again. Compute what is reserved
    /// first: see [`ChunkWaiter`].
    Busy(ChunkWaiter),
    /// Even after evicting what nobody holds there is no room, or the whole pool sleeps: this request
    /// computes the piece for itself.
    NoRoom,
}

impl ChunkCacheManager {
    /// The piece if it is stored and awake, counted as a hit then and not at all otherwise: so that a prompt
    /// holds all that it finds before it makes room for what it does not.
    pub(crate) fn hold(&self, tenant: TenantId, piece: &ChunkPiece<'_>) -> Option<ChunkKvCache> {
        let since = Instant::now();
        let now = self.0.clock.millis();
        let mut state = self.0.state.lock();
        let tenant = known(&state, tenant);
        let slot = state.find(piece)?;
        let found = self.0.hit(&mut state, tenant, slot, now)?;
        drop(state);
        self.looked_up(since);
        Some(found)
    }

    fn looked_up(&self, since: Instant) {
        if self.0.config.stats {
            self.0.lookups.record(since.elapsed());
        }
    }

    /// Looks a piece up for a tenant, and reserves room for it if it is missing. `stored_start` is the
    /// position that its first key is rotated to if it is computed now.
    ///
    /// A piece that sleeps is woken, without the lock.
    pub fn acquire(&self, tenant: TenantId, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        let since = Instant::now();
        let acquired = self.0.acquire(tenant, piece, stored_start);
        self.looked_up(since);
        acquired
    }

    /// The stored piece, or `None`: a lookup that reserves nothing, waits for nothing and wakes nothing.
    pub fn lookup(&self, tenant: TenantId, piece: &ChunkPiece<'_>) -> Option<ChunkKvCache> {
        let since = Instant::now();
        let found = self.hold(tenant, piece);
        if found.is_none() {
            let mut state = self.0.state.lock();
            let tenant = known(&state, tenant);
            state.account(tenant).counted.miss();
            drop(state);
            self.looked_up(since);
        }
        found
    }

    /// The piece at the position `new_position_start`, computed by `compute` into the reservation's blocks
    /// if it is not cached. If another request computes it at this moment, waits for that.
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
    ///         computed += r.slot_mapping()?.len();
    ///         Ok::<_, kvchunk::Error>(())
    ///     })?.expect("room for it");
    ///     assert_eq!((chunk.new_position_start(), chunk.position_offset()), (position, position));
    /// }
    /// assert_eq!(computed, 40); // once
    /// # Ok::<(), kvchunk::Error>(())
    /// ```
    ///
    /// Returns `None` when there is no room for it: compute it as part of an ordinary prompt.
    ///
    /// # Errors
    /// What `compute` gives; the blocks are free again then, and the next request computes the piece. An
    /// error of the reindexer for a position that the model does not have.
    pub fn get_or_compute_chunk<E: From<crate::Error>>(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        reindexer: &PositionReindexer,
        new_position_start: i64,
        compute: impl FnOnce(&ChunkReservation) -> Result<(), E>,
    ) -> Result<Option<ReindexedChunkKv>, E> {
        reindexer.check(new_position_start, piece.tokens().len())?;
        let chunk = loop {
            match self.acquire(tenant, piece, stored_start) {
                Acquired::Hit(chunk) => break chunk,
                Acquired::Compute(reservation) => {
                    compute(&reservation)?;
                    break reservation.store();
                }
                Acquired::Busy(waiter) => waiter.wait(),
                Acquired::NoRoom => return Ok(None),
            }
        };
        Ok(Some(self.reindex(reindexer, chunk, new_position_start)?))
    }

    /// Places a piece, and records how long that took.
    ///
    /// # Errors
    /// As [`PositionReindexer::reindex`].
    pub fn reindex(
        &self,
        reindexer: &PositionReindexer,
        chunk: ChunkKvCache,
        new_position_start: i64,
    ) -> crate::Result<ReindexedChunkKv> {
        let since = Instant::now();
        let placed = reindexer.reindex(chunk, new_position_start)?;
        self.reindexed(since);
        Ok(placed)
    }
}

/// What was found under the lock.
#[expect(clippy::large_enum_variant, reason = "as above")]
enum Found {
    Here(Acquired),
    /// It sleeps, in this slot.
    Asleep(u32),
}

impl Shared {
    fn acquire(self: &Arc<Self>, tenant: TenantId, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        loop {
            let now = self.clock.millis();
            let mut state = self.state.lock();
            let wanted = Wanted { piece, tenant: known(&state, tenant), stored_start };
            match self.find_or_reserve(&mut state, &wanted, now) {
                Found::Here(acquired) => return acquired,
                Found::Asleep(slot) => {
                    drop(state);
                    // Whatever came of it, the next look says what there is now.
                    if !self.wake_slot(slot, piece.hash().key).may_look_again() {
                        let mut state = self.state.lock();
                        return no_room(&mut state, wanted.tenant);
                    }
                }
            }
        }
    }

    fn find_or_reserve(self: &Arc<Self>, state: &mut State, wanted: &Wanted<'_, '_>, now: u64) -> Found {
        let Wanted { piece, tenant, .. } = *wanted;
        if !state.pool.is_awake() {
            return Found::Here(no_room(state, tenant));
        }
        if let Some(slot) = state.find(piece) {
            let flight = match state.entry(slot).map(|entry| &entry.place) {
                Some(Place::Asleep(_)) => return Found::Asleep(slot),
                Some(Place::Moving(flight)) => Some(Arc::clone(flight)),
                _ => None,
            };
            if let Some(flight) = flight {
                return Found::Here(Acquired::Busy(ChunkWaiter(flight)));
            }
            if let Some(chunk) = self.hit(state, tenant, slot, now) {
                return Found::Here(Acquired::Hit(chunk));
            }
        } else if self.config.cross_system_reuse
            && let Some(slot) = state.find_any_system(piece, wanted.stored_start)
            && let Some(chunk) = self.hit_as(state, tenant, slot, now, false)
        {
            return Found::Here(Acquired::Hit(chunk));
        }
        let key = piece.hash().key;
        // A piece that only shares its hash with one under way is computed beside it and not kept.
        let known_flight = state.flights.get(&key).map(|(evidence, flight)| (evidence.proves(piece), flight));
        let known_flight = known_flight.map(|(same, flight)| same.then(|| Arc::clone(flight)));
        match known_flight {
            Some(Some(flight)) => {
                state.account(tenant).counted.shared_flights += 1;
                Found::Here(Acquired::Busy(ChunkWaiter(flight)))
            }
            Some(None) => Found::Here(no_room(state, tenant)),
            None if state.slot_of(&key).is_some() => Found::Here(no_room(state, tenant)),
            None => Found::Here(self.reserve(state, wanted, now)),
        }
    }

    /// Holds the piece in `slot`, if it is awake.
    fn hit(
        self: &Arc<Self>,
        state: &mut State,
        tenant: TenantId,
        slot: u32,
        now: u64,
    ) -> Option<ChunkKvCache> {
        self.hit_as(state, tenant, slot, now, true)
    }

    fn hit_as(
        self: &Arc<Self>,
        state: &mut State,
        tenant: TenantId,
        slot: u32,
        now: u64,
        same_system: bool,
    ) -> Option<ChunkKvCache> {
        let (entry, awake) = state.hold(slot, now)?;
        let held = self.held(entry, awake, slot, entry.exact && same_system);
        let counted = &mut state.account(tenant).counted;
        counted.lookup_count += 1;
        counted.hit_count += 1;
        counted.approximate_hits += u64::from(!held.exact);
        counted.tokens_reused += held.hash.token_count as u64;
        Some(ChunkKvCache::new(held))
    }

    fn held(self: &Arc<Self>, entry: &Entry, awake: &Awake, slot: u32, exact: bool) -> Held {
        Held {
            cache: Arc::clone(self),
            entry: Some((slot, entry.generation)),
            ids: Arc::clone(&awake.ids),
            blocks: Some(awake.pinned.share()),
            hash: entry.hash,
            stored_start: entry.stored_start,
            exact,
        }
    }

    fn reserve(self: &Arc<Self>, state: &mut State, wanted: &Wanted<'_, '_>, now: u64) -> Acquired {
        let Wanted { piece, tenant, stored_start } = *wanted;
        let hash = piece.hash();
        let Some(blocks) = state.room(&self.pool, tenant, hash.num_blocks, now) else {
            return no_room(state, tenant);
        };
        state.account(tenant).counted.miss();
        let (flight, evidence): (Arc<Flight>, Evidence) = (Arc::default(), piece.evidence());
        state.flights.insert(hash.key, (evidence.clone(), Arc::clone(&flight)));
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
        })
    }

    /// Stores a piece that has been computed.
    pub(super) fn store(self: &Arc<Self>, reservation: &mut ChunkReservation) -> ChunkKvCache {
        let (hash, tenant) = (reservation.hash, reservation.tenant);
        let mut held = Held {
            cache: Arc::clone(self),
            entry: None,
            ids: Arc::clone(&reservation.ids),
            blocks: reservation.blocks.take().map(kvcore::MutableBlocks::share),
            hash,
            stored_start: reservation.stored_start,
            exact: true,
        };
        let now = self.clock.millis();
        if self.config.stats {
            self.computes.record(reservation.since.elapsed());
        }
        let mut state = self.state.lock();
        state.account(tenant).counted.tokens_computed += hash.token_count as u64;
        // What sleeps is colder than what is awake.
        let room =
            state.len() < self.config.max_chunks || state.evict_sleeper() || state.evict_any(tenant, now);
        if let (true, Some(blocks)) = (room, &held.blocks) {
            state.account(tenant).counted.insertions += 1;
            held.entry = Some(state.insert(Entry {
                hash,
                any_system: reservation.any_system,
                evidence: reservation.evidence.clone(),
                tenant,
                generation: 0,
                stored_start: reservation.stored_start,
                place: Place::Awake(Awake { pinned: blocks.pin(), ids: Arc::clone(&held.ids), number: 0 }),
                exact: true,
                holders: 1,
                doomed: false,
                created: now,
                last_accessed: now,
                access_count: 0,
            }));
        } else {
            state.account(tenant).used -= hash.num_blocks;
        }
        state.flights.remove(&hash.key);
        drop(state);
        reservation.flight.land();
        ChunkKvCache::new(held)
    }

    /// Ends a reservation that was not computed; one that was stored has ended already.
    pub(super) fn abandon(&self, reservation: &mut ChunkReservation) {
        let Some(blocks) = reservation.blocks.take() else { return };
        let mut state = self.state.lock();
        state.flights.remove(&reservation.hash.key);
        state.account(reservation.tenant).used -= reservation.hash.num_blocks;
        drop(blocks);
        drop(state);
        reservation.flight.land();
    }

    /// A holder has gone.
    pub(super) fn release(&self, slot: u32, generation: u64) {
        let now = self.clock.millis();
        self.state.lock().let_go(slot, generation, now);
    }
}

fn no_room(state: &mut State, tenant: TenantId) -> Acquired {
    let counted = &mut state.account(tenant).counted;
    counted.miss();
    counted.uncached += 1;
    Acquired::NoRoom
}
