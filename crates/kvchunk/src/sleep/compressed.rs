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
