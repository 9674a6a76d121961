//! Replicas of one process, each with a cache of its own.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{ChunkParcel, ReplicaDevice, ReplicaId, ReplicaTransport};
use crate::cache::{ChunkCacheManager, WeakChunkCache};
use crate::error::{Error, Result};
use crate::hash::ChunkHash;

/// A replica of this process: threads with caches of their own. Who pulls reads the other's memory itself, through the
/// other's stream.
///
/// # Drop behaviour
/// A replica that is dropped gives nothing any more; the others compute what they would have pulled from it.
#[derive(Debug)]
pub struct LocalReplica {
    members: Arc<Mutex<Vec<Option<Member>>>>,
    id: ReplicaId,
}

/// What a replica gives from.
#[derive(Debug, Clone)]
struct Member {
    cache: WeakChunkCache,
    device: ReplicaDevice,
}

impl LocalReplica {
    /// So many replicas. None of them gives anything until it [serves](Self::serve).
    pub fn group(replicas: u32) -> Vec<Self> {
        let members = Arc::new(Mutex::new(vec![None; replicas as usize]));
        (0..replicas).map(|id| Self { members: Arc::clone(&members), id: ReplicaId(id) }).collect()
    }

    /// This replica's number.
    pub fn id(&self) -> ReplicaId {
        self.id
    }

    /// Lets the others pull from `cache`, whose chunks lie in `device`, as long as the cache lives.
    pub fn serve(&self, cache: &ChunkCacheManager, device: &ReplicaDevice) {
        let member = Member { cache: cache.downgrade(), device: device.clone() };
        self.members.lock()[self.id.0 as usize] = Some(member);
    }
}

impl ReplicaTransport for LocalReplica {
    fn locate(&self, hash: &ChunkHash) -> Result<Vec<ReplicaId>> {
        let members = self.members.lock().clone();
        // Replicas after this one first, so that not all ask the same one.
        let count = members.len() as u32;
        let others = (1..count).map(|step| (self.id.0 + step) % count);
        let has = |id: &u32| {
            let member = members[*id as usize].as_ref();
            member.and_then(|member| member.cache.upgrade()).is_some_and(|cache| cache.can_give(hash))
        };
        Ok(others.filter(has).map(ReplicaId).collect())
    }

    fn pull(&self, from: ReplicaId, hash: &ChunkHash) -> Result<Option<ChunkParcel>> {
        let member = self.members.lock().get(from.0 as usize).cloned().flatten();
        let left = || Error::ReplicaFailed { replica: from, reason: "it has left".to_owned() };
        let member = member.ok_or_else(left)?;
        let cache = member.cache.upgrade().ok_or_else(left)?;
        member.device.pack(&cache, hash)
    }
}

impl Drop for LocalReplica {
    fn drop(&mut self) {
        let gone = self.members.lock()[self.id.0 as usize].take();
        drop(gone); // not under the lock: it may hold the last of a stream
    }
}
