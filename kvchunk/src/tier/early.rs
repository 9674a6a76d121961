//! Puts records into the caches while others are being loaded, so that they are copied while the disk works.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvcore::{BlockKey, KvPool};
use kvtier::Found;
use parking_lot::Mutex;

use super::fetch::Part;
use super::{MissReason, TierFetch, TierLink};
use crate::assembly::Assembler;
use crate::cache::{Acquired, ChunkCacheManager, PieceHold, TenantId};
use crate::error::Result;
use crate::hash::ChunkPiece;
use crate::position::PositionPlan;
use crate::prompt::ChunkedPrompt;

/// The number of parts in which the records of a prompt are copied.
const BATCHES: usize = 16;

/// What a fetch has put into the caches before its prompt is looked up.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// The pieces, held until the lookup uses them or the fetch ends.
    pieces: Mutex<HashMap<BlockKey, PieceHold>>,
    /// The number of records that were taken.
    taken: AtomicUsize,
    /// True if what has arrived cannot be put into the caches now. It is left to the lookup.
    is_over: AtomicBool,
}

impl TierFetch {
    /// Calls `put` if so many records have arrived, in the prompt's order, that they are worth a copy of their own. If
    /// `put` takes none of them, it is not called again.
    fn put_batch(&self, put: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.early.is_over.load(Ordering::Relaxed) || !self.has_batch() {
            return Ok(());
        }
        let before = self.early.taken.load(Ordering::Relaxed);
        let result = put();
        if self.early.taken.load(Ordering::Relaxed) == before {
            self.early.is_over.store(true, Ordering::Relaxed);
        }
        result
    }

    fn has_batch(&self) -> bool {
        let records = self.records.lock();
        let left = self.order.iter().filter_map(|key| match records.get(key)? {
            Part::Loading(loading, _) => Some(loading.is_over()),
            Part::Missed(_) => None,
        });
        left.take_while(|is_over| *is_over).count() >= self.order.len().div_ceil(BATCHES)
    }

    /// Returns whether a record has arrived, can be used, and was not taken.
    fn has_arrived(&self, key: &BlockKey) -> bool {
        matches!(self.records.lock().get(key), Some(Part::Loading(loading, _)) if loading.has_arrived())
    }

    /// Takes a record for blocks that may be evicted before the prompt is looked up.
    fn take_early(&self, key: &BlockKey) -> Option<Found> {
        let found = self.take(key)?;
        self.early.taken.fetch_add(1, Ordering::Relaxed);
        self.records.lock().insert(*key, Part::Missed(MissReason::Evicted));
        Some(found)
    }

    /// Returns whether a piece was put into the cache, and is held.
    pub(super) fn has_piece(&self, key: &BlockKey) -> bool {
        self.early.pieces.lock().contains_key(key)
    }

    /// Removes and returns a piece that was put into the cache before the lookup.
    pub(super) fn take_piece(&self, key: &BlockKey) -> Option<PieceHold> {
        self.early.pieces.lock().remove(key)
    }
}

impl TierLink {
    /// Puts blocks of a chain into the pool while others are being loaded: those that have arrived and follow the
    /// blocks that the pool has already. Call this method while a prompt waits. Blocks that are evicted before the
    /// prompt is looked up are computed.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn put_arrived(
        &self,
        pool: &KvPool,
        (root, keys): (&BlockKey, &[BlockKey]),
        fetch: &TierFetch,
    ) -> Result<()> {
        fetch.put_batch(|| self.put_blocks(pool, (root, keys), fetch))
    }

    fn put_blocks(
        &self,
        pool: &KvPool,
        (root, keys): (&BlockKey, &[BlockKey]),
        fetch: &TierFetch,
    ) -> Result<()> {
        let cached = pool.blocks().cached_prefix(keys);
        let count = keys[cached..].iter().take_while(|key| fetch.has_arrived(key)).count();
        let Ok(blocks) = pool.blocks().allocate(count) else { return Ok(()) };
        let arrived = keys[cached..cached + count].iter().map_while(|key| fetch.take_early(key)).collect();
        self.fill(blocks, (root, keys, cached), arrived).map(drop)
    }

    /// Puts a piece that has arrived into the cache, and holds it until the prompt is looked up.
    fn put_piece(
        &self,
        (cache, tenant): (&ChunkCacheManager, TenantId),
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        fetch: &TierFetch,
    ) -> Result<()> {
        let key = piece.hash().key;
        let hold = match cache.acquire(tenant, piece, stored_start) {
            // Another prompt has put it there.
            Acquired::Hit(hold) => {
                if let Some(unused) = fetch.take_early(&key) {
                    self.slab.recycle(unused);
                }
                hold
            }
            Acquired::Compute(reservation) => {
                let Some(buffers) = fetch.take_early(&key) else { return Ok(()) };
                self.write_piece(&reservation, buffers)?;
                reservation.store_fetched()
            }
            Acquired::Busy(_) | Acquired::NoRoom => {
                fetch.early.is_over.store(true, Ordering::Relaxed);
                return Ok(());
            }
        };
        fetch.early.pieces.lock().insert(key, hold);
        Ok(())
    }
}

impl Assembler<'_> {
    /// Puts the parts of a prompt that have arrived into the caches while others are being loaded. Call this method
    /// while the prompt waits, with the fetch that [`fetch`](Self::fetch) has begun.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn put_arrived(&self, prompt: &ChunkedPrompt, plan: &PositionPlan, fetch: &TierFetch) -> Result<()> {
        let Some(link) = self.tier.filter(|_| self.ranks.is_none()) else { return Ok(()) };
        fetch.put_batch(|| {
            let plan = self.in_slots(prompt, plan.clone())?;
            for (keys, _) in self.prefixes_of(prompt, true)? {
                link.put_blocks(&self.main, (self.tenant.root(), &keys), fetch)?;
            }
            let Some(cache) = self.chunks else { return Ok(()) };
            let mut put = Ok(());
            self.each_piece(prompt, &plan, |place, tokens_before, piece| {
                if put.is_ok() && fetch.has_arrived(&piece.hash().key) {
                    let stored_start = place.stored_start + tokens_before as i64;
                    put = link.put_piece((cache, self.tenant.id()), piece, stored_start, fetch);
                }
            })?;
            put
        })
    }
}
