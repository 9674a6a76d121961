//! Holds on stored pieces, and reservations for missing ones.

use std::sync::Arc;
use std::time::Instant;

use kvcore::{BlockId, BlockKey, MutableBlocks, SharedBlocks, SlotMapping, WritePairs, WriteSlots};

use super::SharedCache;
use super::flight::Flight;
use super::heat::Heat;
use super::state::{AwakePiece, PieceMemory, StoredPiece};
use super::tenant::TenantId;
use crate::error::Result;
use crate::hash::{ChunkHash, PieceEvidence};
use crate::position::Stored;

/// A hold on a stored piece of a chunk: its blocks, and the position that its keys were rotated to.
///
/// A clone is another reference to the same hold. While a hold exists, the piece's blocks are neither
/// overwritten nor evicted.
///
/// # Drop behaviour
/// When the last hold is dropped, the piece stays cached until room is needed.
#[derive(Debug, Clone)]
#[doc(alias = "ChunkKVCache")]
pub struct PieceHold(Arc<HeldPiece>);

#[derive(Debug)]
pub(super) struct HeldPiece {
    pub(super) cache: Arc<SharedCache>,
    /// The piece's slot in the index, or `None` for a piece that is not kept.
    pub(super) slot: Option<u32>,
    pub(super) generation: u64,
    pub(super) ids: Arc<[BlockId]>,
    /// The piece's blocks; `None` only while the hold is being dropped.
    pub(super) blocks: Option<SharedBlocks>,
    pub(super) hash: ChunkHash,
    pub(super) stored_start: i64,
    pub(super) exact: bool,
}

impl Drop for HeldPiece {
    fn drop(&mut self) {
        // The blocks are dropped first, because after `release` the cache may evict the piece and take the
        // blocks back.
        drop(self.blocks.take());
        self.cache.release(self.slot, self.generation);
    }
}

impl PieceHold {
    pub(super) fn new(held: HeldPiece) -> Self {
        Self(Arc::new(held))
    }

    /// Returns the piece's hash.
    pub fn chunk_hash(&self) -> ChunkHash {
        self.0.hash
    }

    /// Returns the number of tokens in the piece.
    pub fn num_tokens(&self) -> usize {
        self.0.hash.token_count
    }

    /// Returns the IDs of the physical blocks, in token order.
    pub fn block_ids(&self) -> &Arc<[BlockId]> {
        &self.0.ids
    }

    /// Returns the piece's blocks, length and stored position, which are needed to place it.
    pub(crate) fn stored(&self) -> Stored<'_> {
        Stored { blocks: &self.0.ids, len: self.num_tokens(), start: self.0.stored_start }
    }

    /// Returns the number of tokens per block.
    pub fn block_size(&self) -> usize {
        self.0.cache.pool.block_size()
    }

    /// Returns the position that the first key was rotated to when the piece was stored.
    pub fn cached_position_start(&self) -> i64 {
        self.0.stored_start
    }

    /// Returns whether the bytes are exactly what the hash of the requested piece describes. They are not if
    /// the piece was computed with another system prompt, or was quantised while it slept.
    pub fn is_exact(&self) -> bool {
        self.0.exact
    }
}

/// Blocks reserved for a piece that this request is about to compute. Other requests for the piece wait for
/// the reservation to end.
///
/// # Drop behaviour
/// The blocks become free, and the next request that needs the piece computes it.
#[derive(Debug)]
#[must_use = "dropping it gives the blocks back"]
pub struct ChunkReservation {
    pub(super) cache: Arc<SharedCache>,
    pub(super) hash: ChunkHash,
    pub(super) any_system: Option<BlockKey>,
    pub(super) evidence: PieceEvidence,
    pub(super) tenant: TenantId,
    pub(super) stored_start: i64,
    /// The reserved blocks; `None` once the piece is stored.
    pub(super) blocks: Option<MutableBlocks>,
    pub(super) ids: Arc<[BlockId]>,
    pub(super) flight: Arc<Flight>,
    pub(super) since: Instant,
    /// True if the piece came from another replica instead of being computed.
    pub(crate) fetched: bool,
}

impl ChunkReservation {
    /// Returns the piece's hash.
    pub fn chunk_hash(&self) -> ChunkHash {
        self.hash
    }

    /// Returns the piece's tokens.
    pub fn tokens(&self) -> &Arc<[u32]> {
        self.evidence.tokens()
    }

    /// Returns the IDs of the blocks to fill, in token order.
    pub fn block_ids(&self) -> &Arc<[BlockId]> {
        &self.ids
    }

    /// Returns the slot of each of the piece's tokens, with a permit to write to them until the piece is
    /// stored.
    pub fn write_slots(&self) -> Result<WriteSlots> {
        let block_size = self.cache.pool.block_size();
        let slots = SlotMapping::in_blocks(&self.ids, block_size, 0..self.hash.token_count)?;
        match &self.blocks {
            Some(blocks) => Ok(blocks.write_slots(block_size, slots)?),
            None => Err(kvcore::Error::PermitVoid { what: "slots" }.into()),
        }
    }

    /// Returns a permit to copy `sources` into the reserved blocks: one source per block, in token order.
    pub(crate) fn write_pairs(&self, sources: impl Iterator<Item = BlockId>) -> Result<WritePairs> {
        let pairs: Arc<[_]> = sources.zip(self.ids.iter().copied()).collect();
        match &self.blocks {
            Some(blocks) => Ok(blocks.write_pairs(pairs)?),
            None => Err(kvcore::Error::PermitVoid { what: "blocks" }.into()),
        }
    }

    /// Returns the position that the first key must be rotated to.
    pub fn stored_start(&self) -> i64 {
        self.stored_start
    }

    /// Stores the piece and returns a hold on it. The caller must have filled the blocks. If the cache is
    /// full of pieces in use, the piece is not kept, and its blocks become free when the last hold is
    /// dropped.
    pub fn store(mut self) -> PieceHold {
        let cache = Arc::clone(&self.cache);
        cache.store(&mut self)
    }
}

impl Drop for ChunkReservation {
    fn drop(&mut self) {
        let cache = Arc::clone(&self.cache);
        cache.abandon(self);
    }
}

impl SharedCache {
    /// Stores the piece of a reservation, which must have been computed or fetched.
    fn store(self: &Arc<Self>, reservation: &mut ChunkReservation) -> PieceHold {
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
                    heat: Heat::first(now),
                });
                (Some(slot), generation)
            }
            _ => (None, state.insert_orphan(tenant, hash.num_blocks)),
        };
        state.under_way.remove(&hash.key);
        drop(state);
        reservation.flight.land();
        let (cache, stored_start) = (Arc::clone(self), reservation.stored_start);
        PieceHold::new(HeldPiece { cache, slot, generation, ids, blocks, hash, stored_start, exact: true })
    }

    /// Cancels a reservation. Does nothing if the piece has been stored.
    fn abandon(&self, reservation: &mut ChunkReservation) {
        let Some(blocks) = reservation.blocks.take() else { return };
        let mut state = self.lock();
        state.under_way.remove(&reservation.hash.key);
        state.account(reservation.tenant).used -= reservation.hash.num_blocks;
        drop(blocks);
        drop(state);
        reservation.flight.land();
    }

    /// Removes one holder of a piece.
    fn release(&self, slot: Option<u32>, generation: u64) {
        let now = self.clock.millis();
        self.lock().drop_holder(slot, generation, now);
    }
}
