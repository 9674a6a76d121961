//! Sleeping pieces that are stored as compressed bytes.

use std::sync::Arc;

use kvcore::{
    Backend, BlockId, DType, Error as CoreError, KvArena, KvLayout, KvShape, MutableBlocks, Storage, Stream,
    SwapBlocks, TensorView, WritePairs,
};

use super::ledger::{Charge, Ledger};
use super::planes::BytePlanes;
use super::store::Sleeping;
use crate::error::Result;

/// A store for compressed pieces.
#[derive(Debug)]
pub(super) struct CompressedStore {
    backend: Arc<dyn Backend>,
    device: KvArena,
    stream: Arc<dyn Stream>,
    ledger: Arc<Ledger>,
}

// Decision: docs/decisions/chunks.md#chunks-are-compressed-eight-blocks-at-a-time
/// The maximum number of blocks that are staged between the device and the compressor at a time. The staging
/// memory is not part of the budget, and does not grow with the piece.
const STAGED_BLOCKS: usize = 8;

/// A compressed piece.
#[derive(Debug)]
pub(super) struct CompressedPiece {
    store: Arc<CompressedStore>,
    blocks: usize,
    /// One group for every [`STAGED_BLOCKS`] blocks.
    groups: Vec<StagedGroup>,
    charge: Charge,
}

/// A few compressed blocks: K and V, with their scales.
#[derive(Debug)]
struct StagedGroup {
    buffers: Vec<BytePlanes>,
}

impl CompressedStore {
    pub(super) fn new(
        backend: Arc<dyn Backend>,
        device: KvArena,
        stream: Arc<dyn Stream>,
        ledger: Arc<Ledger>,
    ) -> Self {
        Self { backend, device, stream, ledger }
    }

    /// Returns a host arena to stage blocks between the device and the compressor. Reuses `there` if it has
    /// the right size.
    fn staging(&self, num_blocks: usize, there: Option<KvArena>) -> Result<KvArena> {
        if let Some(staging) = there.filter(|arena| arena.layout().shape().num_blocks == num_blocks) {
            return Ok(staging);
        }
        let shape = KvShape { num_blocks, ..self.device.layout().shape().clone() };
        let layout = Arc::new(KvLayout::new(shape)?);
        Ok(KvArena::allocate(self.backend.as_ref(), self.backend.capabilities().host_memory(), layout)?)
    }

    /// Compresses the contents of `blocks` and saves them. Stops with an error as soon as the compressed
    /// bytes exceed the budget.
    pub(super) fn save(self: &Arc<Self>, blocks: &[BlockId]) -> Result<CompressedPiece> {
        let (mut groups, mut bytes, mut staging) = (Vec::new(), 0, None);
        for group in blocks.chunks(STAGED_BLOCKS) {
            let dst = self.staging(group.len(), staging.take())?;
            // Only this call uses the staging arena.
            let pairs: Arc<[_]> = group.iter().copied().zip((0..).map(BlockId)).collect();
            let pairs = WritePairs::unchecked(pairs);
            self.stream.swap_blocks(&SwapBlocks { src: self.device.clone(), dst: dst.clone(), pairs })?;
            let compress = |buffer: StagedBuffer<'_>| {
                let mut bytes = vec![0; buffer.bytes];
                self.stream.read(&buffer.view()?, &mut bytes)?;
                BytePlanes::compress(&bytes, buffer.element)
            };
            let buffers = buffers(&dst).into_iter().map(compress).collect::<Result<Vec<_>>>()?;
            bytes += buffers.iter().map(BytePlanes::bytes).sum::<usize>();
            self.ledger.has_room(bytes)?;
            groups.push(StagedGroup { buffers });
            staging = Some(dst);
        }
        let device_bytes = blocks.len() * self.device.layout().block_bytes();
        let charge = self.ledger.charge(device_bytes, bytes)?;
        Ok(CompressedPiece { store: Arc::clone(self), blocks: blocks.len(), groups, charge })
    }
}

impl Sleeping for CompressedPiece {
    fn restore(&self, blocks: &MutableBlocks) -> Result<()> {
        let (expected, got) = (self.blocks, blocks.len());
        if expected != got {
            return Err(CoreError::mismatch("blocks of a sleeping piece", expected, got).into());
        }
        let (store, mut staging) = (&self.store, None);
        for (ids, group) in blocks.ids().chunks(STAGED_BLOCKS).zip(&self.groups) {
            let src = store.staging(ids.len(), staging.take())?;
            for (buffer, planes) in buffers(&src).into_iter().zip(&group.buffers) {
                store.stream.write(&buffer.view()?, &planes.decompress(buffer.bytes)?)?;
            }
            let pairs: Arc<[_]> = (0..).map(BlockId).zip(ids.iter().copied()).collect();
            let pairs = blocks.write_pairs(pairs)?;
            let dst = store.device.clone();
            store.stream.swap_blocks(&SwapBlocks { src: src.clone(), dst, pairs })?;
            staging = Some(src);
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.charge.host_bytes()
    }
}

/// A storage of an arena, with the size in bytes of the part that contains blocks.
struct StagedBuffer<'a> {
    storage: &'a Arc<dyn Storage>,
    bytes: usize,
    /// Size of an element in bytes.
    element: usize,
}

impl StagedBuffer<'_> {
    fn view(&self) -> Result<TensorView> {
        Ok(TensorView::new(Arc::clone(self.storage), DType::U8, &[self.bytes])?)
    }
}

fn buffers(arena: &KvArena) -> Vec<StagedBuffer<'_>> {
    let layout = arena.layout();
    let element = |dtype: DType| dtype.bits().div_ceil(8);
    let planes = [(arena.k_plane(), layout.k_bytes()), (arena.v_plane(), layout.v_bytes())];
    let mut all = Vec::with_capacity(4);
    for (plane, bytes) in planes {
        all.push(StagedBuffer {
            storage: plane.storage,
            bytes,
            element: element(plane.format.storage_dtype()),
        });
        if let Some((storage, scales)) = plane.scales.filter(|(_, scales)| !scales.is_static()) {
            all.push(StagedBuffer { storage, bytes: scales.bytes, element: element(scales.dtype) });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use kvcore::Compared::Number;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use kvbackend_cpu::CpuBackend;
    use kvcore::{BlockOrder, Capabilities, CounterSnapshot, KeyScope, KvFormat, ManualClock, MemoryKind};

    use super::*;
    use crate::{
        Acquired, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher, ColdRule,
        ComputeMode, Error, HashAlgorithm, SleepStore, TenantId,
    };
    use kvcore::BlockPool;

    /// A store that damages one buffer.
    #[derive(Debug)]
    struct Rotting {
        store: Arc<CompressedStore>,
        buffer: usize,
    }

    impl SleepStore for Rotting {
        fn save(&self, blocks: &[BlockId]) -> Result<Box<dyn Sleeping>> {
            let mut piece = self.store.save(blocks)?;
            let frame = &mut piece.groups[0].buffers[self.buffer].frames[0];
            let middle = frame.len() / 2;
            frame[middle] ^= 0x10;
            Ok(Box::new(piece))
        }
    }

    #[test]
    fn rule_8_damaged_bytes_are_found_and_the_chunk_is_recomputed() {
        let backend = CpuBackend::new();
        let shape = KvShape {
            num_layers: 2,
            num_blocks: 8,
            block_size: 4,
            k_heads: 2,
            v_heads: 2,
            k_dim: 16,
            v_dim: 16,
            format: KvFormat::Int8 { group: 8 },
            order: BlockOrder::HeadMajor,
        };
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        for buffer in 0..4 {
            let device =
                KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::clone(&layout)).unwrap();
            let stream = backend.stream().unwrap();
            for plane in buffers(&device) {
                let bytes: Vec<u8> = (0..plane.bytes).map(|at| (at * at % 251) as u8).collect();
                stream.write(&plane.view().unwrap(), &bytes).unwrap();
            }
            let ledger = Arc::new(Ledger::new(1 << 20));
            let store = Arc::new(CompressedStore::new(backend.clone(), device, stream, Arc::clone(&ledger)));
            let clock = ManualClock::default();
            let cache = ChunkCacheManager::build(
                ChunkCacheConfig::default(),
                ChunkBlockPool::new(0..8, 4).unwrap(),
                Some(Arc::new(Rotting { store, buffer })),
                Arc::new(clock.clone()),
            )
            .unwrap();
            let context = ChunkContext::new(KeyScope::new("m", b"w").root(), ComputeMode::Alone, &[]);
            let hasher = ChunkHasher::new(HashAlgorithm::Blake3, context, 4);
            let piece = hasher.pieces(&[1; 10], usize::MAX).next().unwrap();
            let acquire = || cache.acquire(TenantId::default(), &piece, 0);
            let Acquired::Compute(reservation) = acquire() else { panic!() };
            drop(reservation.store());
            clock.advance(std::time::Duration::from_secs(100));
            assert_eq!(cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 1);
            assert_eq!(ledger.usage().pieces, 1);
            assert!(matches!(acquire(), Acquired::Compute(_)), "buffer {buffer}");
            assert_eq!((cache.metrics().lost, ledger.usage().pieces), (1, 0));
            cache.check_invariants().unwrap();
        }
    }

    /// A backend that records the size of the largest requested allocation.
    #[derive(Debug)]
    struct Watched {
        backend: Arc<CpuBackend>,
        largest: AtomicUsize,
    }

    impl Backend for Watched {
        fn name(&self) -> &'static str {
            self.backend.name()
        }

        fn capabilities(&self) -> Capabilities {
            self.backend.capabilities()
        }

        fn allocate(&self, kind: MemoryKind, bytes: usize) -> kvcore::Result<Arc<dyn Storage>> {
            self.largest.fetch_max(bytes, SeqCst);
            self.backend.allocate(kind, bytes)
        }

        fn stream(&self) -> kvcore::Result<Arc<dyn Stream>> {
            self.backend.stream()
        }

        fn counters(&self) -> CounterSnapshot {
            self.backend.counters()
        }
    }

    /// Creates a store over an arena of 64 blocks of noise, 1 KiB each in K and in V.
    fn noisy(limit: usize) -> (Arc<CompressedStore>, Arc<Watched>) {
        let shape = KvShape {
            num_layers: 2,
            num_blocks: 64,
            block_size: 4,
            k_heads: 2,
            v_heads: 2,
            k_dim: 16,
            v_dim: 16,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let (layout, backend) = (Arc::new(KvLayout::new(shape).unwrap()), CpuBackend::new());
        let device = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).unwrap();
        let stream = backend.stream().unwrap();
        let mut random = 1u32;
        for plane in buffers(&device) {
            let mut next = || {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (random >> 24) as u8
            };
            let bytes: Vec<u8> = (0..plane.bytes).map(|_| next()).collect();
            stream.write(&plane.view().unwrap(), &bytes).unwrap();
        }
        let watched = Arc::new(Watched { backend, largest: AtomicUsize::new(0) });
        let ledger = Arc::new(Ledger::new(limit));
        (Arc::new(CompressedStore::new(watched.clone(), device, stream, ledger)), watched)
    }

    #[test]
    fn staging_memory_does_not_grow_with_the_piece() {
        let (store, watched) = noisy(1 << 20);
        let blocks: Vec<BlockId> = (0..21).map(|i| BlockId(i * 3)).collect();
        let bytes = |blocks: &[BlockId]| -> Vec<Vec<u8>> {
            let all = buffers(&store.device).into_iter().map(|plane| {
                let mut bytes = vec![0; plane.bytes];
                store.stream.read(&plane.view().unwrap(), &mut bytes).unwrap();
                bytes
            });
            let pick = |bytes: Vec<u8>| {
                let of = |layer: usize| blocks.iter().map(move |block| (layer * 64 + block.index()) * 512);
                (0..2).flat_map(of).flat_map(|at| bytes[at..at + 512].to_vec()).collect()
            };
            all.map(pick).collect()
        };
        let before = bytes(&blocks);
        let piece = store.save(&blocks).unwrap();
        let elsewhere = BlockPool::new(40..64).unwrap().allocate(21).unwrap();
        piece.restore(&elsewhere).unwrap();
        assert_eq!(bytes(elsewhere.ids()), before);
        assert_eq!(watched.largest.load(SeqCst), STAGED_BLOCKS * 1024);
    }

    #[test]
    fn a_piece_that_does_not_fit_is_given_up_early() {
        let (store, watched) = noisy(20 << 10);
        let blocks: Vec<BlockId> = (0..60).map(BlockId).collect();
        let refused = store.save(&blocks).unwrap_err();
        assert!(matches!(refused, Error::SleepFull { asked, limit, .. } if asked > limit), "{refused}");
        // Eight blocks fit and sixteen do not: noise does not shrink.
        assert_eq!(watched.counters().block_copy_bytes, 16 * 2048);
    }

    #[test]
    fn another_number_of_blocks_is_refused() {
        let backend = CpuBackend::new();
        let shape = KvShape {
            num_layers: 1,
            num_blocks: 4,
            block_size: 4,
            k_heads: 1,
            v_heads: 1,
            k_dim: 8,
            v_dim: 8,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        let device = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).unwrap();
        let (stream, ledger) = (backend.stream().unwrap(), Arc::new(Ledger::new(1 << 20)));
        let store = Arc::new(CompressedStore::new(backend, device, stream, ledger));
        let piece = store.save(&[BlockId(1), BlockId(3)]).unwrap();
        let pool = BlockPool::new(0..4).unwrap();
        let refused = piece.restore(&pool.allocate(1).unwrap()).unwrap_err();
        assert!(matches!(
            refused,
            Error::Core(CoreError::Mismatch { expected: Number(2), got: Number(1), .. })
        ));
        piece.restore(&pool.allocate(2).unwrap()).unwrap();
    }
}
