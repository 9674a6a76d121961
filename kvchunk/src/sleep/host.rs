//! Sleeping pieces that are stored in blocks of a host arena, unchanged or quantised.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{
    Backend, BlockId, BlockPool, DType, Dequantize, Error as CoreError, KvArena, KvFormat, KvLayout, KvShape,
    MutableBlocks, Quantize, Storage, Stream, SwapBlocks, TensorView,
};
use xxhash_rust::xxh3::Xxh3;

use super::ledger::{Charge, Ledger};
use super::scales;
use super::store::Sleeping;
use crate::error::{Error, Result};

/// A host arena with its own block pool.
#[derive(Debug)]
pub(super) struct HostStore {
    backend: Arc<dyn Backend>,
    device: KvArena,
    host: KvArena,
    pool: BlockPool,
    stream: Arc<dyn Stream>,
    ledger: Arc<Ledger>,
}

/// A piece in host blocks.
#[derive(Debug)]
pub(super) struct HostPiece {
    store: Arc<HostStore>,
    /// The host arena with the piece's own scales, if the piece has any.
    scaled: Option<KvArena>,
    /// The piece's blocks. They are declared before the charge and therefore freed first, because the pool
    /// must have blocks for every piece that the ledger admits.
    blocks: MutableBlocks,
    charge: Charge,
    /// The digest of the saved contents.
    digest: u64,
}

impl HostStore {
    pub(super) fn plain(
        backend: Arc<dyn Backend>,
        device: KvArena,
        stream: Arc<dyn Stream>,
        ledger: &Arc<Ledger>,
    ) -> Result<Self> {
        let format = device.layout().shape().format;
        Self::build(backend, device, stream, format, ledger)
    }

    pub(super) fn quantised(
        backend: Arc<dyn Backend>,
        device: KvArena,
        stream: Arc<dyn Stream>,
        format: KvFormat,
        ledger: &Arc<Ledger>,
    ) -> Result<Self> {
        let refused = |format, reason: &str| CoreError::InvalidFormat { format, reason: reason.to_owned() };
        let stored = device.layout().shape().format;
        if stored.is_quantized() {
            return Err(refused(stored, "the arena is already quantised").into());
        }
        if !format.is_quantized() {
            return Err(
                refused(format, "it is not a quantised format; use the plain sleep form instead").into()
            );
        }
        let capabilities = backend.capabilities();
        let lacks = |kernel| capabilities.missing.contains(&kernel);
        if !capabilities.accepts(format) || lacks("quantize") || lacks("dequantize") {
            let what = format!("sleep in format {format}");
            return Err(CoreError::Unsupported { backend: backend.name(), what }.into());
        }
        Self::build(backend, device, stream, format, ledger)
    }

    fn build(
        backend: Arc<dyn Backend>,
        device: KvArena,
        stream: Arc<dyn Stream>,
        format: KvFormat,
        ledger: &Arc<Ledger>,
    ) -> Result<Self> {
        let shape = KvShape { format, ..device.layout().shape().clone() };
        let layout = KvLayout::within_budget(&shape, ledger.usage().limit_bytes)?;
        // The layout has checked that every block has a valid ID.
        let blocks = layout.shape().num_blocks as u32;
        let host =
            KvArena::allocate(backend.as_ref(), backend.capabilities().host_memory(), Arc::new(layout))?;
        let pool = BlockPool::new(0..blocks)?;
        Ok(Self { backend, device, host, pool, stream, ledger: Arc::clone(ledger) })
    }

    pub(super) fn arena(&self) -> &KvArena {
        &self.host
    }

    fn is_exact(&self) -> bool {
        self.device.layout().shape().format == self.host.layout().shape().format
    }

    pub(super) fn save(self: &Arc<Self>, blocks: &[BlockId]) -> Result<HostPiece> {
        let bytes = |arena: &KvArena| blocks.len() * arena.layout().block_bytes();
        let charge = self.ledger.charge(bytes(&self.device), bytes(&self.host))?;
        let taken = self.pool.allocate(blocks.len())?;
        let pairs: Arc<[_]> = blocks.iter().copied().zip(taken.ids().iter().copied()).collect();
        let pairs = taken.write_pairs(pairs)?;
        let src = self.device.clone();
        let mut scaled = None;
        if self.is_exact() {
            self.stream.swap_blocks(&SwapBlocks { src, dst: self.host.clone(), pairs })?;
        } else {
            let arenas = (&self.device, &self.host);
            scaled = scales::of_piece(self.backend.as_ref(), self.stream.as_ref(), arenas, blocks)?;
            let dst = scaled.clone().unwrap_or_else(|| self.host.clone());
            self.stream.quantize(&Quantize { src, dst, pairs })?;
        }
        let digest = self.digest(scaled.as_ref().unwrap_or(&self.host), taken.ids())?;
        Ok(HostPiece { store: Arc::clone(self), scaled, blocks: taken, charge, digest })
    }

    /// Returns a digest of the contents of `blocks` in a host arena, and of the arena's static scales. Waits
    /// for the stream.
    fn digest(&self, arena: &KvArena, blocks: &[BlockId]) -> Result<u64> {
        let layout = arena.layout();
        let planes = [arena.k_plane(), arena.v_plane()];
        let scales = |fixed: bool| {
            let of_kind = planes.iter().filter_map(move |p| p.scales.filter(|(_, s)| s.is_static() == fixed));
            of_kind.map(|(storage, scales)| (storage, scales.bytes))
        };
        let codes = [(arena.k(), layout.k_bytes()), (arena.v(), layout.v_bytes())];
        let buffers: Vec<(&Arc<dyn Storage>, usize)> = codes.into_iter().chain(scales(false)).collect();
        // Decision: docs/decisions/chunks.md#sleeping-pieces-are-checked-with-xxh3
        let mut digest = Xxh3::new();
        for block in blocks {
            for ((storage, bytes), runs) in buffers.iter().zip(layout.runs(&(block.0..block.0 + 1))) {
                for run in runs {
                    self.add(&mut digest, storage, run.start..run.end.min(*bytes))?;
                }
            }
        }
        for (storage, bytes) in scales(true) {
            self.add(&mut digest, storage, 0..bytes)?;
        }
        Ok(digest.digest())
    }

    fn add(&self, digest: &mut Xxh3, storage: &Arc<dyn Storage>, range: Range<usize>) -> Result<()> {
        let all = TensorView::new(Arc::clone(storage), DType::U8, &[range.end])?;
        let mut bytes = vec![0; range.len()];
        self.stream.read(&all.slice(0, range.start, range.end)?, &mut bytes)?;
        digest.update(&bytes);
        Ok(())
    }
}

impl Sleeping for HostPiece {
    fn restore(&self, blocks: &MutableBlocks) -> Result<()> {
        let (expected, got) = (self.blocks.len(), blocks.len());
        if expected != got {
            return Err(CoreError::mismatch("blocks of a sleeping piece", expected, got).into());
        }
        let store = &self.store;
        let pairs: Arc<[_]> = self.blocks.ids().iter().copied().zip(blocks.ids().iter().copied()).collect();
        let pairs = blocks.write_pairs(pairs)?;
        let src = self.scaled.clone().unwrap_or_else(|| store.host.clone());
        if store.digest(&src, self.blocks.ids())? != self.digest {
            return Err(Error::Damaged(
                "its digest differs from the one computed when it was saved".to_owned(),
            ));
        }
        let dst = store.device.clone();
        if self.is_exact() {
            store.stream.swap_blocks(&SwapBlocks { src, dst, pairs })?;
        } else {
            store.stream.dequantize(&Dequantize { src, dst, pairs })?;
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.charge.host_bytes()
    }

    fn is_exact(&self) -> bool {
        self.store.is_exact()
    }
}
