//! Pieces in blocks of a host arena, as they are or quantised.

use std::sync::Arc;

use kvcore::kernels::{Dequantize, Quantize, SwapBlocks};
use kvcore::{
    Backend, BlockId, BlockPool, Error as CoreError, KvArena, KvFormat, KvLayout, KvShape, MemoryKind,
    MutableBlocks, Stream,
};

use super::ledger::{Charge, Ledger};
use super::scales;
use crate::cache::Sleeping;
use crate::error::Result;

/// A host arena with its own blocks.
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
    /// The host arena under the piece's own scales, if it has any.
    scaled: Option<KvArena>,
    /// Before the charge: what the ledger has room for, the pool must have.
    blocks: MutableBlocks,
    charge: Charge,
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
            return Err(refused(stored, "the arena is quantised already").into());
        }
        if !format.is_quantized() {
            return Err(refused(format, "it is no quantised format; sleep plain instead").into());
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
        // The layout has checked that ids can name all blocks.
        let blocks = layout.shape().num_blocks as u32;
        let host = KvArena::allocate(backend.as_ref(), MemoryKind::System, Arc::new(layout))?;
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
        let pairs = blocks.iter().copied().zip(taken.ids().iter().copied()).collect();
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
        Ok(HostPiece { store: Arc::clone(self), scaled, blocks: taken, charge })
    }
}

impl Sleeping for HostPiece {
    fn restore(&self, blocks: &[BlockId]) -> Result<()> {
        let (expected, got) = (self.blocks.len(), blocks.len());
        if expected != got {
            return Err(CoreError::Mismatch { what: "blocks of a sleeping piece", expected, got }.into());
        }
        let store = &self.store;
        let pairs = self.blocks.ids().iter().copied().zip(blocks.iter().copied()).collect();
        let src = self.scaled.clone().unwrap_or_else(|| store.host.clone());
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
