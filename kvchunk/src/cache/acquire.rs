//! Acquiring a piece: hold it, compute it, wait for the request that computes it, or go without.

use std::time::{Duration, Instant};

use super::flight::ChunkWaiter;
use super::search::{PieceRequest, Searched};
use super::tenant::TenantId;
use super::{ChunkCacheManager, ChunkReservation, LockedState, PieceHold, SharedCache};
use crate::hash::ChunkPiece;
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
    /// Looks a piece up for a tenant, and reserves room for it if it is missing. If this request must compute
    /// the piece, its first key is to be rotated to the position `stored_start`.
    ///
    /// A sleeping piece is woken without the lock, and is held as soon as it is awake.
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
                        // A lost piece can be computed now.
                        Ok(None) | Err(_) => continue,
                    }
                }
            };
            self.0.looked_up(looked);
            return acquired;
        }
    }

    /// Holds the piece if it is stored and awake. The hold is not counted until
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
        let tenant = state.known(tenant);
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
        let request = PieceRequest { piece, tenant: state.known(tenant), stored_start, now };
        let reserved = self.0.reserve(&mut state, &request);
        drop(state);
        self.0.looked_up(since.elapsed());
        reserved
    }

    /// Counts a piece that a request computes for itself.
    pub(crate) fn go_without(&self, tenant: TenantId) {
        let mut state = self.0.lock();
        let tenant = state.known(tenant);
        state.count_uncached(tenant);
    }

    /// Returns the piece if it is stored and awake. Unlike [`acquire`](Self::acquire), it reserves nothing,
    /// waits for nothing and wakes nothing.
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

impl SharedCache {
    fn looked_up(&self, took: Duration) {
        if self.config.stats {
            self.lookups.record(took);
        }
    }
}
