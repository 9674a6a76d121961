//! Chunks that outlive the process: a tier on a disk below the chunk cache.
//!
//! ```text
//!   commit ──► save:  computed pieces ─ copied ─► queue of the slab        the request does not wait
//!   acquire ──► missing ──► load ──► compare key, tokens, start, label, digest ──► reservation ──► Hit
//!                  └─ absent, damaged, late ──────────────────────────────────────────────────► Compute
//! ```
//!
//! A piece's bytes follow from its key, so what is loaded equals what would be computed. A piece whose hash is
//! not collision-resistant, or that slept quantised, is not saved.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier::{Record, RecordId, Slab, Stored};

use crate::assembly::{FoundPiece, PromptLookup};
use crate::cache::{Acquired, ChunkCacheManager, ChunkReservation, PieceHold, SystemFound};
use crate::error::Result;
use crate::hash::{ChunkHash, ChunkPiece};
use crate::replica::ReplicaDevice;

/// The link between a chunk cache and a slab on a disk.
#[derive(Debug, Clone)]
pub struct TierLink {
    /// The memory that holds the cache's chunks.
    pub device: ReplicaDevice,
    /// The records on the disk.
    pub slab: Arc<Slab>,
    /// The longest time that a request waits for one piece.
    pub patience: Duration,
}

impl TierLink {
    /// Queues a piece of `cache` to be written. Returns `None` if the piece cannot be saved: it is no longer
    /// in the cache, it is asleep or not exact, or its hash is not collision-resistant. Waits for the stream,
    /// but not for the disk.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn save(&self, cache: &ChunkCacheManager, hash: &ChunkHash) -> Result<Option<Stored>> {
        if self.slab.contains(&hash.key) {
            return Ok(Some(Stored::Known));
        }
        let Some(parcel) = self.device.pack(cache, hash)? else { return Ok(None) };
        let label = self.label(hash.num_blocks);
        let id =
            RecordId { key: parcel.key, tokens: parcel.tokens, stored_start: parcel.stored_start, label };
        Ok(Some(self.slab.store(Record { id, buffers: parcel.buffers })))
    }

    /// Fills reserved blocks from the disk. Returns false if the piece is not there, or must not be used; the
    /// slab counts the reasons.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    fn load(&self, piece: &ChunkPiece<'_>, reservation: &ChunkReservation) -> Result<bool> {
        let hash = piece.hash();
        let id = RecordId {
            key: hash.key,
            tokens: piece.tokens().into(),
            stored_start: reservation.stored_start(),
            label: self.label(hash.num_blocks),
        };
        match self.slab.load(&id, Instant::now() + self.patience) {
            Ok(buffers) => self.device.write(reservation, &buffers).map(|()| true),
            Err(_) => Ok(false),
        }
    }

    /// Returns the layout of a piece's buffers in words. The key covers it, too, so this only guards against
    /// records of programs whose keys cover less.
    fn label(&self, num_blocks: usize) -> Arc<str> {
        let shape = self.device.shape_of(num_blocks);
        format!("{shape:?} {}", self.device.keys).into()
    }
}

/// Saves the pieces that a prompt computes.
#[derive(Debug)]
pub(crate) struct TierSaving {
    pub(crate) link: TierLink,
    /// The cache that contains the pieces.
    pub(crate) cache: ChunkCacheManager,
}

impl TierSaving {
    /// Queues pieces that have been stored.
    pub(crate) fn save(&self, stored: &[PieceHold]) -> Result<()> {
        stored.iter().try_for_each(|piece| self.link.save(&self.cache, &piece.chunk_hash()).map(drop))
    }
}

/// A lookup that loads pieces from the disk that the lookup before it did not find.
pub(crate) struct TierLookup<'a> {
    pub(crate) above: Box<dyn PromptLookup + 'a>,
    pub(crate) link: &'a TierLink,
}

impl PromptLookup for TierLookup<'_> {
    fn fill_system(&self, tokens: &[u32], wait: bool) -> Result<SystemFound> {
        self.above.fill_system(tokens, wait)
    }

    fn hold(&self, pieces: &[Vec<ChunkPiece<'_>>]) -> Result<Vec<Vec<Option<FoundPiece>>>> {
        self.above.hold(pieces)
    }

    fn acquire(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        match self.above.acquire(piece, stored_start) {
            // A piece that cannot be loaded is computed.
            Acquired::Compute(reservation) if piece.resists_collisions() => {
                match self.link.load(piece, &reservation) {
                    Ok(true) => Acquired::Hit(reservation.store_fetched()),
                    Ok(false) | Err(_) => Acquired::Compute(reservation),
                }
            }
            acquired => acquired,
        }
    }
}
