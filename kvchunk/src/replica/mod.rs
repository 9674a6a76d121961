//! Replicas: several instances of one model, each with its own cache, that share chunks. A replica that lacks
//! a chunk fetches it from a replica that has the chunk.
//!
//! ```text
//!   get_chunk_with_remote_lookup
//!      │ acquire ──► hit, busy, no room: as without replicas
//!      ▼ reserved
//!    locate ──► pull from one ──► check ──► write into the reservation ──► store   Hit
//!      │ nobody       │ gone, damaged, failed: the next one     (or, between devices of a process: hand over)
//!      └──────────────┴──────────────────────────────────────────────────────────► Compute
//! ```
//!
//! Only the replica that lacks a chunk takes action. Nothing is broadcast, and replicas that are not asked
//! are not involved. No lock is held while bytes are transferred. Other local requests for the chunk wait for
//! the reservation, as they wait for a computation.

use std::fmt;
use std::sync::Arc;

use kvcore::{Backend, BlockId, BlockKey, KeyForm, KvArena, KvShape, Stream};
use kvtier::{Record, RecordBuffer, RecordId};

use crate::cache::{Acquired, ChunkCacheManager, ChunkReservation, PieceHold, TenantId};
use crate::error::{Error, Result};
use crate::hash::{ChunkHash, ChunkPiece};

mod bytes;
mod direct;
mod give;
mod host;
mod id;
mod local;
mod lookup;
mod parcel;

pub use bytes::BufferMemory;
pub use id::ReplicaId;
pub use local::LocalReplica;
pub(crate) use lookup::ReplicaLookup;
pub use parcel::ChunkParcel;

/// The connection from one replica to the others: a network, or [`LocalReplica`] within a process.
///
/// Every transfer involves only two replicas. The implementation must limit how long a call waits before it
/// fails.
pub trait ReplicaTransport: fmt::Debug + Send + Sync {
    /// Returns the other replicas that have a chunk, in the order in which to ask them. The answer is only a
    /// hint: the chunk may be evicted before it is fetched.
    ///
    /// # Errors
    /// Returns the errors of the implementation, such as [`Error::ReplicaFailed`].
    fn locate(&self, hash: &ChunkHash) -> Result<Vec<ReplicaId>>;

    /// Fetches a chunk's contents from one replica. Returns `None` if the replica no longer has the chunk.
    /// The replica creates the parcel with [`ReplicaDevice::pack`].
    ///
    /// # Errors
    /// Returns the errors of the implementation, such as [`Error::ReplicaFailed`].
    fn pull(&self, from: ReplicaId, hash: &ChunkHash) -> Result<Option<ChunkParcel>>;

    /// Fills the reserved blocks directly from the memory of one replica, without going through the host.
    /// Returns false if this is not possible, in which case the chunk is [pulled](Self::pull).
    ///
    /// # Errors
    /// Returns [`Error::ReplicaLacks`] if the replica no longer has the chunk, [`Error::ReplicaDiffers`] if
    /// its chunk differs from the requested piece, and the errors of the devices.
    fn hand_over(
        &self,
        from: ReplicaId,
        piece: &ChunkPiece<'_>,
        device: &ReplicaDevice,
        reservation: &ChunkReservation,
    ) -> Result<bool> {
        let _ = (from, piece, device, reservation);
        Ok(false)
    }
}

/// The memory that holds a replica's keys and values.
#[derive(Debug, Clone)]
pub struct ReplicaDevice {
    /// The backend. For a transfer through the host, it allocates host memory of the size of the piece.
    pub backend: Arc<dyn Backend>,
    /// The stream that orders the copies: the stream that writes and reads the arena, or a stream that is
    /// ordered with that stream by events.
    pub stream: Arc<dyn Stream>,
    /// The arena that the chunk cache's block IDs refer to.
    pub arena: KvArena,
    /// The form in which keys are stored.
    pub keys: KeyForm,
}

impl ReplicaDevice {
    /// Packs a chunk of `cache` for another replica. Returns `None` unless the chunk is stored, awake and
    /// exact, and its hash is collision-resistant. The chunk is held while it is read, which does not count
    /// as a hit. Waits for the stream.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn pack(&self, cache: &ChunkCacheManager, hash: &ChunkHash) -> Result<Option<ChunkParcel>> {
        let read = self.record_of(cache, hash, true, &RecordBuffer::zeroed)?;
        Ok(read.map(ChunkParcel::seal))
    }

    /// Returns a chunk's record to be kept elsewhere, in memory from `memory`, which returns buffers of these lengths with
    /// undefined contents. Returns `None` as [`pack`](Self::pack) does. This does not count as a use of the chunk.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub(crate) fn copy_of(
        &self,
        cache: &ChunkCacheManager,
        hash: &ChunkHash,
        memory: &BufferMemory<'_>,
    ) -> Result<Option<Record>> {
        self.record_of(cache, hash, false, memory)
    }

    fn record_of(
        &self,
        cache: &ChunkCacheManager,
        hash: &ChunkHash,
        is_use: bool,
        memory: &BufferMemory<'_>,
    ) -> Result<Option<Record>> {
        let Some((chunk, tokens)) = cache.hold_to_copy(hash, is_use) else { return Ok(None) };
        let buffers = self.read_into(chunk.block_ids(), memory)?;
        let id = self.record_id(chunk.chunk_hash().key, &tokens, chunk.cached_position_start());
        Ok(Some(Record::new(id, buffers)))
    }

    /// Returns the identity of a record of whole blocks: of a piece, or of a block of a prefix.
    pub(crate) fn record_id(&self, key: BlockKey, tokens: &[u32], stored_start: i64) -> RecordId {
        // The key covers the layout, too, so the label only guards against records of programs whose keys
        // cover less.
        let KvShape { num_layers, block_size, k_heads, v_heads, k_dim, v_dim, format, order, .. } =
            self.arena.layout().shape();
        let (keys, num_blocks) = (self.keys, tokens.len().div_ceil(*block_size));
        let label = format!(
            "{num_layers} layers, K {k_heads} × {k_dim}, V {v_heads} × {v_dim}, {format}, {keys} keys, {num_blocks} blocks of \
             {block_size}, {order:?}"
        );
        RecordId { key, tokens: tokens.into(), stored_start, label: label.into() }
    }

    /// Writes the contents of `parcel` into the reserved blocks, if it is the requested piece and undamaged.
    fn unpack(
        &self,
        parcel: &ChunkParcel,
        piece: &ChunkPiece<'_>,
        reservation: &ChunkReservation,
    ) -> Result<()> {
        parcel.check(self, piece, reservation.stored_start())?;
        let blocks = reservation.block_ids().len();
        self.write(blocks, reservation.write_pairs((0..blocks as u32).map(BlockId))?, &parcel.record.buffers)
    }
}

/// The link between a chunk cache and other replicas: the cache's own device, and the transport.
#[derive(Debug, Clone)]
#[doc(alias = "MultiGPUChunkCacheCoordinator")]
pub struct ReplicaLink {
    /// This replica's memory for keys and values.
    pub device: ReplicaDevice,
    /// The transport to the other replicas.
    pub transport: Arc<dyn ReplicaTransport>,
}

impl ReplicaLink {
    fn pull(&self, from: ReplicaId, piece: &ChunkPiece<'_>, reservation: &ChunkReservation) -> Result<()> {
        if self.transport.hand_over(from, piece, &self.device, reservation)? {
            return Ok(());
        }
        let parcel =
            self.transport.pull(from, &piece.hash())?.ok_or(Error::ReplicaLacks { replica: from })?;
        self.device.unpack(&parcel, piece, reservation)
    }
}

/// The result of a lookup in this cache and in the other replicas.
#[derive(Debug)]
pub struct RemoteLookup {
    /// The outcome, as returned by [`ChunkCacheManager::acquire`]. A piece that came from another replica is
    /// also a hit. A piece that no replica could give is reserved for this request to compute.
    pub acquired: Acquired,
    /// The replica that gave the piece, if any.
    pub fetched_from: Option<ReplicaId>,
    /// The errors of the replicas that failed to give the piece. The ID is `None` if the transport failed to
    /// find out which replicas have the piece.
    pub failed: Vec<(Option<ReplicaId>, Error)>,
}

impl ChunkCacheManager {
    /// Acquires a piece like [`acquire`](Self::acquire), but fetches a missing piece from a replica that has
    /// it. After this call, a fetched piece is also stored in this cache.
    ///
    /// Only one request asks the replicas. Other requests to this cache that need the piece wait for that
    /// request.
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
    /// let Acquired::Compute(reservation) = lookup(0).acquired else { panic!("no replica has it") };
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
        // A hash that is not collision-resistant proves nothing about contents that another replica has
        // hashed.
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

    // Decision: docs/decisions/chunks.md#replicas-pull-chunks-instead-of-broadcasting
    /// Fetches a piece from the replica `from`, unless it is already stored here. Use this method to share a
    /// piece before a request needs it. If another request is computing or fetching the piece, the call waits
    /// for at most [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms). To share a chunk with all replicas,
    /// call this method on each of them; no replica waits for the others.
    ///
    /// # Errors
    /// No blocks stay held if there is an error.
    ///
    /// - Returns [`Error::WeakHash`] if the hash is not collision-resistant.
    /// - Returns [`Error::ReplicaLacks`] if the replica does not have the piece.
    /// - Returns [`Error::ReplicaDiffers`] or [`Error::Damaged`] if the parcel fails its check.
    /// - Returns [`Error::NoRoomForChunk`] if this cache has no room.
    /// - Returns [`Error::StillBusy`] if the wait timed out.
    /// - Returns the errors of the transport and of the device.
    #[doc(alias = "sync_chunk_across_gpus")]
    pub fn pull_chunk(
        &self,
        tenant: TenantId,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
        link: &ReplicaLink,
        from: ReplicaId,
    ) -> Result<PieceHold> {
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
