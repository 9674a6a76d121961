//! Saves what a prompt computes.

use kvcore::{BlockId, BlockKey};
use kvtier::{Record, RecordNote, Stored};

use super::TierLink;
use crate::cache::{ChunkCacheManager, PieceHold, TenantId};
use crate::error::Result;
use crate::hash::ChunkHash;
use crate::prefix::SealedPrefix;

impl TierLink {
    /// Queues a piece of `cache` to be written. Returns `None` if the piece cannot be saved: it is no longer
    /// in the cache, it is asleep or not exact, or its hash is not collision-resistant. Waits for the stream,
    /// but not for the disk.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn save(
        &self,
        cache: &ChunkCacheManager,
        hash: &ChunkHash,
        tenant: TenantId,
    ) -> Result<Option<Stored>> {
        if self.slab.contains(&hash.key) {
            return Ok(Some(Stored::Known));
        }
        let Some(parcel) = self.device.pack(cache, hash)? else { return Ok(None) };
        let note = RecordNote {
            parent: None,
            cost: self.prefill.cost(hash.token_count),
            text: RecordNote::text_of(&parcel.record.id.tokens).filter(|_| is_public(tenant)),
        };
        Ok(Some(self.slab.store(Record { note, ..parcel.record })))
    }

    /// Queues blocks of a prefix to be written, except those that are known: `blocks` with the `keys` of the
    /// chain that starts with `tokens`. The caller must hold the blocks. The last block may be
    /// partial if its key covers that. Waits for the stream, but not for the disk.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn save_prefix(&self, tokens: &[u32], keys: &[BlockKey], blocks: &[BlockId]) -> Result<()> {
        let block_size = self.device.arena.layout().shape().block_size;
        let each = tokens.chunks(block_size).zip(keys).zip(blocks).enumerate();
        for (place, ((tokens, &key), &block)) in each {
            if self.slab.contains(&key) {
                continue;
            }
            let buffers = self.device.read(&[block])?;
            let parent = place.checked_sub(1).map(|before| keys[before]);
            let note = RecordNote { parent, cost: self.prefill.cost(tokens.len()), text: None };
            let id = self.device.record_id(key, tokens, (place * block_size) as i64);
            // A block without the blocks before it cannot be found.
            if self.slab.store(Record { id, note, buffers }) == Stored::Dropped {
                break;
            }
        }
        Ok(())
    }
}

/// Returns whether anybody may learn that a tenant's texts are stored.
pub(super) fn is_public(tenant: TenantId) -> bool {
    tenant == TenantId::default()
}

/// Saves the pieces that a prompt computes.
#[derive(Debug)]
pub(crate) struct TierSaving {
    pub(crate) link: TierLink,
    /// The cache that contains the pieces.
    pub(crate) cache: ChunkCacheManager,
    pub(crate) tenant: TenantId,
}

impl TierSaving {
    /// Queues pieces that have been stored.
    pub(crate) fn save(&self, stored: &[PieceHold]) -> Result<()> {
        let save =
            |piece: &PieceHold| self.link.save(&self.cache, &piece.chunk_hash(), self.tenant).map(drop);
        stored.iter().try_for_each(save)
    }

    /// Queues the blocks of a system prompt, with or without decoys.
    pub(crate) fn save_system(&self, sealed: &SealedPrefix) -> Result<()> {
        self.link.save_prefix(sealed.tokens(), sealed.keys(), &sealed.segment().blocks)
    }
}
