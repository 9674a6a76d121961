//! Replicas: whole caches of one model that share chunks. Who misses a chunk pulls it from whoever has it.
//!
//! ```text
//!   get_chunk_with_remote_lookup
//!      │ acquire ──► hit, busy, no room: as without replicas
//!      ▼ reserved
//!    locate ──► pull from one ──► check ──► write into the reservation ──► store   Hit
//!      │ nobody       │ gone, damaged, failed: the next one
//!      └──────────────┴──────────────────────────────────────────────────────────► Compute
//! ```
//!
//! One side alone acts: nothing is broadcast, and a replica that does not ask takes no part. No lock is held while bytes
//! travel; other local requests for the chunk wait for the reservation, as they wait for a computation.

use std::fmt;
use std::sync::Arc;

use kvcore::{Backend, BlockId, KeyForm, KvArena, Stream};

use crate::cache::{Acquired, ChunkCacheManager, ChunkKvCache, ChunkReservation, TenantId};
use crate::error::{Error, Result};
use crate::hash::{ChunkHash, ChunkPiece};

mod bytes;
mod local;
mod parcel;

pub use local::LocalReplica;
pub use parcel::ChunkParcel;

/// A replica by its number in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaId(pub u32);

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "replica {}", self.0)
    }
}

/// How a replica reaches the others: a network, or [`LocalReplica`] within a process.
///
/// Every call is from one to one, and no other replica has to call anything for it to end. A call waits no longer than
/// its implementation allows, and then fails.
pub trait ReplicaTransport: fmt::Debug + Send + Sync {
    /// Other replicas that have a chunk, the one to ask first first. A hint: it may be evicted before it is pulled.
    ///
    /// # Errors
    /// The implementation's, such as [`Error::ReplicaFailed`].
    fn locate(&self, hash: &ChunkHash) -> Result<Vec<ReplicaId>>;

    /// A chunk's contents from one replica; `None` if it does not have it any more. Over there
    /// [`ReplicaDevice::pack`] makes the parcel.
    ///
    /// # Errors
    /// The implementation's, such as [`Error::ReplicaFailed`].
    fn pull(&self, from: ReplicaId, hash: &ChunkHash) -> Result<Option<ChunkParcel>>;
}

/// Where a replica's keys and values lie.
#[derive(Debug, Clone)]
pub struct ReplicaDevice {
    /// Allocates host memory that the bytes pass through: as much as the piece takes.
    pub backend: Arc<dyn Backend>,
    /// Orders the copies: the stream that computes into the arena and reads it, or one ordered with it by events.
    pub stream: Arc<dyn Stream>,
    /// What the chunk cache's block ids refer to.
    pub arena: KvArena,
    /// In which form keys are stored.
    pub keys: KeyForm,
}

impl ReplicaDevice {
    /// Packs a chunk of `cache` for another replica, if it is stored, awake and exact. It is held meanwhile, and is no hit.
    /// Waits for the stream.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn pack(&self, cache: &ChunkCacheManager, hash: &ChunkHash) -> Result<Option<ChunkParcel>> {
        let Some((chunk, tokens)) = cache.hold_for_replica(hash) else { return Ok(None) };
        let buffers = self.read(chunk.block_ids())?;
        Ok(Some(ChunkParcel::seal(self, &chunk, tokens, buffers)))
    }

    /// Writes what has come into blocks, if it is the piece that was asked for and whole.
    fn unpack(
        &self,
        parcel: &ChunkParcel,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        blocks: &[BlockId],
    ) -> Result<()> {
        parcel.check(self, piece, stored_start)?;
        self.write(blocks, &parcel.buffers)
    }
}

/// A replica as its own chunk cache needs it: its device, and the way to the others.
#[derive(Debug, Clone)]
#[doc(alias = "MultiGPUChunkCacheCoordinator")]
pub struct ReplicaLink {
    /// Where keys and values lie here.
    pub device: ReplicaDevice,
    /// The way to the other replicas.
    pub transport: Arc<dyn ReplicaTransport>,
}

impl ReplicaLink {
    fn pull(&self, from: ReplicaId, piece: &ChunkPiece<'_>, reservation: &ChunkReservation) -> Result<()> {
        let parcel =
            self.transport.pull(from, &piece.hash())?.ok_or(Error::ReplicaLacks { replica: from })?;
        self.device.unpack(&parcel, piece, reservation.stored_start(), reservation.block_ids())
    }
}

/// What a lookup here and among the other replicas gave.
#[derive(Debug)]
pub struct RemoteLookup {
    /// As of [`ChunkCacheManager::acquire`]; a hit also if the piece has come from another replica. What none of them
    /// could give is this request's to compute.
    pub acquired: Acquired,
    /// Who it came from.
    pub fetched_from: Option<ReplicaId>,
    /// Why replicas that were asked did not give it; `None` where it could not be asked who has it.
    pub failed: Vec<(Option<ReplicaId>, Error)>,
}

impl ChunkCacheManager {
    /// As [`acquire`](Self::acquire), but a piece that is missing here is pulled from a replica that has it. Afterwards
    /// it is found here.
    ///
    /// The replicas are asked by one request only: others that miss the piece here wait for that one.
    ///
    /// ```
    /// use std::{sync::Arc, time::Duration};
    /// use kvbackend_cpu::CpuBackend;
    /// use kvchunk::{
    ///     Acquired, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher, ComputeMode,
    ///     HashAlgorithm, LocalReplica, ReplicaDevice, ReplicaId, ReplicaLink, TenantId,
    /// };
    /// use kvcore::{Backend, BlockOrder, DType, KeyForm, KeyScope, KvArena, KvLayout, KvShape, MemoryKind};
    ///
    /// let shape = KvShape {
    ///     num_layers: 2, num_blocks: 8, block_size: 16, k_heads: 1, v_heads: 1, k_dim: 8, v_dim: 8,
    ///     format: DType::F32.into(), order: BlockOrder::TokenMajor,
    /// };
    /// let mut replicas = Vec::new();
    /// for transport in LocalReplica::group(2) {
    ///     let backend = CpuBackend::new();
    ///     let layout = Arc::new(KvLayout::new(shape.clone())?);
    ///     let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout)?;
    ///     let (stream, keys) = (backend.stream()?, KeyForm::Rotated);
    ///     let device = ReplicaDevice { backend, stream, arena, keys };
    ///     let cache = ChunkCacheManager::new(ChunkCacheConfig::default(), ChunkBlockPool::new(0..8, 16)?)?;
    ///     transport.serve(&cache, &device);
    ///     replicas.push((cache, ReplicaLink { device, transport: Arc::new(transport) }));
    /// }
    /// let context = ChunkContext::new(KeyScope::new("m", b"w").root(), ComputeMode::Alone, &[]);
    /// let hasher = ChunkHasher::new(HashAlgorithm::Blake3, context, 16);
    /// let piece = hasher.pieces(&[1, 2, 3], 4096).next().unwrap();
    /// let lookup = |at: usize| {
    ///     let (cache, link) = &replicas[at];
    ///     cache.get_chunk_with_remote_lookup(TenantId::default(), &piece, 0, link)
    /// };
    /// let Acquired::Compute(reservation) = lookup(0).acquired else { panic!("nobody has it") };
    /// drop(reservation.store());
    /// let there = lookup(1);
    /// assert!(matches!(there.acquired, Acquired::Hit(_)));
    /// assert_eq!(there.fetched_from, Some(ReplicaId(0)));
    /// assert_eq!(lookup(1).fetched_from, None); // it is here now
    /// # Ok::<(), kvchunk::Error>(())
    /// ```
    pub fn get_chunk_with_remote_lookup(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        link: &ReplicaLink,
    ) -> RemoteLookup {
        let mut failed = Vec::new();
        let reservation = match self.acquire(tenant, piece, stored_start) {
            Acquired::Compute(reservation) => reservation,
            acquired => return RemoteLookup { acquired, fetched_from: None, failed },
        };
        // A hash that does not resist collisions proves nothing about contents that another replica has hashed.
        let located =
            if piece.resists_collisions() { link.transport.locate(&piece.hash()) } else { Ok(Vec::new()) };
        let others = located.unwrap_or_else(|error| {
            failed.push((None, error));
            Vec::new()
        });
        for from in others {
            match link.pull(from, piece, &reservation) {
                Ok(()) => {
                    self.count_fetch_failures(tenant, failed.len());
                    let acquired = Acquired::Hit(reservation.store_fetched());
                    return RemoteLookup { acquired, fetched_from: Some(from), failed };
                }
                Err(error) => failed.push((Some(from), error)),
            }
        }
        self.count_fetch_failures(tenant, failed.len());
        RemoteLookup { acquired: Acquired::Compute(reservation), fetched_from: None, failed }
    }

    /// Pulls a piece from one replica, unless it is here: to share what is about to be asked for. Waits if another
    /// request computes or pulls it, no longer than [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms). To have a
    /// chunk everywhere, every replica pulls it; none waits for the others.
    ///
    /// # Errors
    /// [`Error::ReplicaLacks`]; [`Error::ReplicaDiffers`] and [`Error::Damaged`] for what has come;
    /// [`Error::NoRoomForChunk`]; [`Error::WeakHash`]; [`Error::StillBusy`] when it has waited; and those of the
    /// transport. Nothing is held then.
    #[doc(alias = "sync_chunk_across_gpus")]
    pub fn pull_chunk(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        link: &ReplicaLink,
        from: ReplicaId,
    ) -> Result<ChunkKvCache> {
        if !piece.resists_collisions() {
            return Err(Error::WeakHash);
        }
        let limit = self.config().max_wait();
        let since = std::time::Instant::now();
        loop {
            match self.acquire(tenant, piece, stored_start) {
                Acquired::Hit(chunk) => return Ok(chunk),
                Acquired::Compute(reservation) => {
                    link.pull(from, piece, &reservation)?;
                    return Ok(reservation.store_fetched());
                }
                Acquired::Busy(waiter) => {
                    if !waiter.wait_for(limit.saturating_sub(since.elapsed())) {
                        return Err(Error::StillBusy { limit });
                    }
                }
                Acquired::NoRoom => {
                    return Err(Error::NoRoomForChunk { blocks: piece.hash().num_blocks });
                }
            }
        }
    }
}
