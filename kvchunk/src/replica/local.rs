//! Replicas within one process, each with its own cache.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{ChunkParcel, ReplicaDevice, ReplicaId, ReplicaTransport};
use crate::cache::{ChunkCacheManager, ChunkReservation, WeakChunkCache};
use crate::error::{Error, Result};
use crate::hash::{ChunkHash, ChunkPiece};

/// A replica within this process: one or more threads with their own cache. A replica that fetches a chunk
/// from another replica reads the other replica's memory itself, on the other replica's stream. Blocks are
/// copied directly from device to device if the backend's devices can reach each other, otherwise through the
/// host.
///
/// # Drop behaviour
/// After a replica is dropped, the other replicas no longer get chunks from it, and compute these chunks
/// instead.
#[derive(Debug)]
pub struct LocalReplica {
    caches: Arc<Mutex<Vec<Option<ServedCache>>>>,
    id: ReplicaId,
}

/// The cache that a replica shares with the others, and the memory that contains its chunks.
#[derive(Debug, Clone)]
struct ServedCache {
    cache: WeakChunkCache,
    device: ReplicaDevice,
}

impl LocalReplica {
    /// Creates a group of `replicas` replicas. A replica does not give any chunks until it
    /// [serves](Self::serve) a cache.
    pub fn group(replicas: u32) -> Vec<Self> {
        let caches = Arc::new(Mutex::new(vec![None; replicas as usize]));
        (0..replicas).map(|id| Self { caches: Arc::clone(&caches), id: ReplicaId(id) }).collect()
    }

    /// Returns this replica's ID.
    pub fn id(&self) -> ReplicaId {
        self.id
    }

    /// Returns the cache and the memory of another replica, or an error if that replica serves no cache.
    fn served(&self, from: ReplicaId) -> Result<(ChunkCacheManager, ReplicaDevice)> {
        let served = self.caches.lock().get(from.0 as usize).cloned().flatten();
        let left = || Error::ReplicaFailed { replica: from, reason: "it has left".to_owned() };
        let served = served.ok_or_else(left)?;
        Ok((served.cache.upgrade().ok_or_else(left)?, served.device))
    }

    /// Allows the other replicas to fetch chunks from `cache` for as long as the cache exists. The chunks
    /// must be in `device`.
    pub fn serve(&self, cache: &ChunkCacheManager, device: &ReplicaDevice) {
        let served = ServedCache { cache: cache.downgrade(), device: device.clone() };
        self.caches.lock()[self.id.0 as usize] = Some(served);
    }
}

impl ReplicaTransport for LocalReplica {
    fn locate(&self, hash: &ChunkHash) -> Result<Vec<ReplicaId>> {
        let caches = self.caches.lock().clone();
        // Each replica asks its successors first, which spreads the requests over all replicas.
        let count = caches.len() as u32;
        let others = (1..count).map(|step| (self.id.0 + step) % count);
        let has = |id: &u32| {
            let served = caches[*id as usize].as_ref();
            served.and_then(|served| served.cache.upgrade()).is_some_and(|cache| cache.can_give(hash))
        };
        Ok(others.filter(has).map(ReplicaId).collect())
    }

    fn pull(&self, from: ReplicaId, hash: &ChunkHash) -> Result<Option<ChunkParcel>> {
        let (cache, device) = self.served(from)?;
        device.pack(&cache, hash)
    }

    fn hand_over(
        &self,
        from: ReplicaId,
        piece: &ChunkPiece<'_>,
        device: &ReplicaDevice,
        reservation: &ChunkReservation,
    ) -> Result<bool> {
        let (cache, giver) = self.served(from)?;
        if !giver.is_reached_by(device) {
            return Ok(false);
        }
        let (chunk, tokens) =
            cache.hold_to_copy(&piece.hash(), true).ok_or(Error::ReplicaLacks { replica: from })?;
        giver.copy_to(device, &chunk, &tokens, piece, reservation)
    }
}

impl Drop for LocalReplica {
    fn drop(&mut self) {
        let gone = self.caches.lock()[self.id.0 as usize].take();
        drop(gone); // not under the lock: the served cache may hold the last reference to a stream
    }
}
