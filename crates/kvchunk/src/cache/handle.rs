//! Holds on stored pieces, and reservations for pieces to come.

use std::sync::Arc;
use std::time::Instant;

use kvcore::{BlockId, BlockKey, MutableBlocks, SharedBlocks, SlotMapping};

use super::Shared;
use super::flight::Flight;
use super::tenant::TenantId;
use crate::error::Result;
use crate::hash::{ChunkHash, Evidence};
use crate::position::Stored;

/// A hold on a stored piece of a chunk: its KV, where it lies, and where its keys were rotated to.
///
/// Cloning it adds a holder. Its blocks are never written again, and never evicted while it lives.
///
/// # Drop behaviour
/// With the last hold the piece stays cached until room is needed.
#[derive(Debug, Clone)]
pub struct ChunkKvCache(Arc<Held>);

#[derive(Debug)]
pub(super) struct Held {
    pub(super) cache: Arc<Shared>,
    /// Where the piece is in the index; `None` for one that is not kept.
    pub(super) slot: Option<u32>,
    pub(super) generation: u64,
    pub(super) ids: Arc<[BlockId]>,
    /// `None` only while it is dropped.
    pub(super) blocks: Option<SharedBlocks>,
    pub(super) hash: ChunkHash,
    pub(super) stored_start: i64,
    pub(super) exact: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        // The blocks first: once the cache hears of it, it may evict the piece and wants them back.
        drop(self.blocks.take());
        self.cache.release(self.slot, self.generation);
    }
}

impl ChunkKvCache {
    pub(super) fn new(held: Held) -> Self {
        Self(Arc::new(held))
    }

    /// The piece's hash.
    pub fn chunk_hash(&self) -> ChunkHash {
        self.0.hash
    }

    /// Tokens stored.
    pub fn num_tokens(&self) -> usize {
        self.0.hash.token_count
    }

    /// The physical blocks, in order.
    pub fn block_ids(&self) -> &Arc<[BlockId]> {
        &self.0.ids
    }

    /// What a placement goes by.
    pub(crate) fn stored(&self) -> Stored<'_> {
        Stored { blocks: &self.0.ids, len: self.num_tokens(), start: self.0.stored_start }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.0.cache.pool.block_size()
    }

    /// Position that the first key was rotated to when it was stored.
    pub fn cached_position_start(&self) -> i64 {
        self.0.stored_start
    }

    /// One past the position of the last key.
    pub fn cached_position_end(&self) -> i64 {
        self.0.stored_start + self.num_tokens() as i64
    }

    /// Whether the bytes are exactly those of the hash. They are not if the piece was computed under
    /// another system prompt, or quantised in its sleep.
    pub fn is_exact(&self) -> bool {
        self.0.exact
    }
}

/// Blocks for a piece that is about to be computed. Other requests for the piece wait for it.
///
/// # Drop behaviour
/// The blocks are free again, nothing of the piece can be found, and the next request computes it.
#[derive(Debug)]
#[must_use = "dropping it gives the blocks back"]
pub struct ChunkReservation {
    pub(super) cache: Arc<Shared>,
    pub(super) hash: ChunkHash,
    pub(super) any_system: Option<BlockKey>,
    pub(super) evidence: Evidence,
    pub(super) tenant: TenantId,
    pub(super) stored_start: i64,
    /// `None` once it is stored.
    pub(super) blocks: Option<MutableBlocks>,
    pub(super) ids: Arc<[BlockId]>,
    pub(super) flight: Arc<Flight>,
    pub(super) since: Instant,
    /// Whether it has come from another replica instead of being computed.
    pub(super) fetched: bool,
}

impl ChunkReservation {
    /// The piece's hash.
    pub fn chunk_hash(&self) -> ChunkHash {
        self.hash
    }

    /// The piece's tokens.
    pub fn tokens(&self) -> &Arc<[u32]> {
        self.evidence.tokens()
    }

    /// The blocks to fill, in order.
    pub fn block_ids(&self) -> &Arc<[BlockId]> {
        &self.ids
    }

    /// Where the piece's tokens go.
    pub fn slot_mapping(&self) -> Result<SlotMapping> {
        let tokens = 0..self.hash.token_count;
        Ok(SlotMapping::in_blocks(&self.ids, self.cache.pool.block_size(), tokens)?)
    }

    /// Position that the first key is to be rotated to.
    pub fn stored_start(&self) -> i64 {
        self.stored_start
    }

    /// Stores the piece, whose blocks have been filled; the handle holds it. When the cache is full of
    /// pieces in use, it is not kept, and freed with the handle's last clone.
    pub fn store(mut self) -> ChunkKvCache {
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
