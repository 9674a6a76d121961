//! Pieces as compressed bytes.

use std::sync::Arc;

use kvcore::kernels::SwapBlocks;
use kvcore::{
    Backend, BlockId, DType, Error as CoreError, KvArena, KvLayout, KvShape, MemoryKind, Storage, Stream,
    TensorView,
};

use super::ledger::{Charge, Ledger};
use super::planes::Planes;
use crate::cache::Sleeping;
use crate::error::Result;

/// A place for compressed pieces.
#[derive(Debug)]
pub(super) struct CompressedStore {
    backend: Arc<dyn Backend>,
    device: KvArena,
    stream: Arc<dyn Stream>,
    ledger: Arc<Ledger>,
}

/// A compressed piece.
#[derive(Debug)]
pub(super) struct CompressedPiece {
    store: Arc<CompressedStore>,
    blocks: usize,
    /// K, V, and the scales that go with blocks.
    buffers: Vec<Planes>,
    charge: Charge,
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

    /// Host blocks between the device and the compressor, for as long as one piece takes.
    fn staging(&self, num_blocks: usize) -> Result<KvArena> {
        let shape = KvShape { num_blocks, ..self.device.layout().shape().clone() };
        let layout = Arc::new(KvLayout::new(shape)?);
        Ok(KvArena::allocate(self.backend.as_ref(), MemoryKind::System, layout)?)
    }

    pub(super) fn save(self: &Arc<Self>, blocks: &[BlockId]) -> Result<CompressedPiece> {
        let staging = self.staging(blocks.len())?;
        let pairs = blocks.iter().copied().zip((0..).map(BlockId)).collect();
        self.stream.swap_blocks(&SwapBlocks { src: self.device.clone(), dst: staging.clone(), pairs })?;
        let compress = |buffer: Buffer<'_>| {
            let mut bytes = vec![0; buffer.bytes];
            self.stream.read(&buffer.view()?, &mut bytes)?;
            Planes::compress(&bytes, buffer.element)
        };
        let buffers = buffers(&staging).into_iter().map(compress).collect::<Result<Vec<_>>>()?;
        let bytes = buffers.iter().map(Planes::bytes).sum();
        let device_bytes = blocks.len() * self.device.layout().block_bytes();
        let charge = self.ledger.charge(device_bytes, bytes)?;
        Ok(CompressedPiece { store: Arc::clone(self), blocks: blocks.len(), buffers, charge })
    }
}

impl Sleeping for CompressedPiece {
    fn restore(&self, blocks: &[BlockId]) -> Result<()> {
        let (expected, got) = (self.blocks, blocks.len());
        if expected != got {
            return Err(CoreError::Mismatch { what: "blocks of a sleeping piece", expected, got }.into());
        }
        let store = &self.store;
        let staging = store.staging(got)?;
        for (buffer, planes) in buffers(&staging).into_iter().zip(&self.buffers) {
            store.stream.write(&buffer.view()?, &planes.decompress(buffer.bytes)?)?;
        }
        let pairs = (0..).map(BlockId).zip(blocks.iter().copied()).collect();
        let dst = store.device.clone();
        Ok(store.stream.swap_blocks(&SwapBlocks { src: staging, dst, pairs })?)
    }

    fn bytes(&self) -> usize {
        self.charge.host_bytes()
    }
}

/// A storage of an arena with what belongs to its blocks.
struct Buffer<'a> {
    storage: &'a Arc<dyn Storage>,
    bytes: usize,
    /// Bytes of an element.
    element: usize,
}

impl Buffer<'_> {
    fn view(&self) -> Result<TensorView> {
        Ok(TensorView::new(Arc::clone(self.storage), DType::U8, &[self.bytes])?)
    }
}

fn buffers(arena: &KvArena) -> Vec<Buffer<'_>> {
    let layout = arena.layout();
    let element = |dtype: DType| dtype.bits().div_ceil(8);
    let planes = [(arena.k_plane(), layout.k_bytes()), (arena.v_plane(), layout.v_bytes())];
    let mut all = Vec::with_capacity(4);
    for (plane, bytes) in planes {
        all.push(Buffer { storage: plane.storage, bytes, element: element(plane.format.storage_dtype()) });
        if let Some((storage, scales)) = plane.scales.filter(|(_, scales)| !scales.is_static()) {
            all.push(Buffer { storage, bytes: scales.bytes, element: element(scales.dtype) });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use kvbackend_cpu::CpuBackend;
    use kvcore::{BlockOrder, KeyScope, KvFormat, ManualClock};

    use super::*;
    use crate::{
        Acquired, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher, ColdRule,
        ComputeMode, Error, HashAlgorithm, SleepStore, TenantId,
    };

    /// A store of which one buffer rots.
    #[derive(Debug)]
    struct Rotting {
        store: Arc<CompressedStore>,
        buffer: usize,
    }

    impl SleepStore for Rotting {
        fn save(&self, blocks: &[BlockId]) -> Result<Box<dyn Sleeping>> {
            let mut piece = self.store.save(blocks)?;
            let frame = &mut piece.buffers[self.buffer].frames[0];
            let middle = frame.len() / 2;
            frame[middle] ^= 0x10;
            Ok(Box::new(piece))
        }
    }

    #[test]
    fn rule_8_damaged_bytes_are_found_and_the_chunk_is_computed_anew() {
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
        let refused = piece.restore(&[BlockId(0)]).unwrap_err();
        assert!(matches!(refused, Error::Core(CoreError::Mismatch { expected: 2, got: 1, .. })));
        piece.restore(&[BlockId(0), BlockId(2)]).unwrap();
    }
}
