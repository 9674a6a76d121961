//! Saves what a prompt computes. A prompt does not fail because it cannot be saved.

use std::sync::atomic::Ordering;

use kvcore::{BlockId, BlockKey};
use kvtier::{AccountId, Record, RecordNote, Stored};

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
    /// Returns the errors of the backend, which are counted in [`TierMetrics`](super::TierMetrics).
    pub fn save(
        &self,
        cache: &ChunkCacheManager,
        hash: &ChunkHash,
        tenant: TenantId,
    ) -> Result<Option<Stored>> {
        self.counted(self.queue_piece(cache, hash, tenant))
    }

    /// Queues blocks of a prefix of a tenant's to be written, except those that are known: `blocks` with the `keys` of
    /// the chain that starts with `tokens`. The caller must hold the blocks. The last block may be
    /// partial if its key covers that. Waits for the stream, but not for the disk.
    ///
    /// # Errors
    /// Returns the errors of the backend, which are counted in [`TierMetrics`](super::TierMetrics).
    pub fn save_prefix(
        &self,
        account: AccountId,
        tokens: &[u32],
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<()> {
        self.counted(self.queue_prefix(account, tokens, keys, blocks))
    }

    /// Counts the error of a save, if there is one.
    fn counted<T>(&self, saved: Result<T>) -> Result<T> {
        self.save_errors.fetch_add(u64::from(saved.is_err()), Ordering::Relaxed);
        saved
    }

    fn queue_piece(
        &self,
        cache: &ChunkCacheManager,
        hash: &ChunkHash,
        tenant: TenantId,
    ) -> Result<Option<Stored>> {
        if self.slab.contains(&hash.key) {
            return Ok(Some(Stored::Known));
        }
        let memory = |lens: &[usize]| self.slab.buffers(lens);
        let Some(record) = self.device.copy_of(cache, hash, &memory)? else { return Ok(None) };
        let note = RecordNote {
            parent: None,
            cost: self.prefill.cost(hash.token_count),
            text: RecordNote::text_of(&record.id.tokens).filter(|_| is_public(tenant)),
            account: self.account(cache, tenant),
        };
        Ok(Some(self.slab.store(Record { note, ..record })))
    }

    fn queue_prefix(
        &self,
        account: AccountId,
        tokens: &[u32],
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<()> {
        let block_size = self.device.arena.layout().shape().block_size;
        let each = tokens.chunks(block_size).zip(keys).zip(blocks).enumerate();
        for (place, ((tokens, &key), &block)) in each {
            if self.slab.contains(&key) {
                continue;
            }
            let buffers = self.device.read_into(&[block], &|lens| self.slab.buffers(lens))?;
            let parent = place.checked_sub(1).map(|before| keys[before]);
            let note = RecordNote { parent, cost: self.prefill.cost(tokens.len()), text: None, account };
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
    /// Queues pieces that have been stored. A piece that the backend refuses to copy is counted, and not saved.
    pub(crate) fn save(&self, stored: &[PieceHold]) {
        for piece in stored {
            drop(self.link.save(&self.cache, &piece.chunk_hash(), self.tenant));
        }
    }

    /// Queues the blocks of a system prompt, with or without decoys. If the backend refuses to copy one, that is
    /// counted, and the rest is not saved.
    pub(crate) fn save_system(&self, sealed: &SealedPrefix) {
        let account = self.link.account(&self.cache, self.tenant);
        drop(self.link.save_prefix(account, sealed.tokens(), sealed.keys(), &sealed.segment().blocks));
    }
}
