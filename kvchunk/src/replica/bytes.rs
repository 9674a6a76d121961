//! Copies between an arena's blocks and host bytes.

use std::sync::Arc;

use kvcore::{
    BlockId, DType, Error as CoreError, KvArena, KvLayout, KvShape, MemoryKind, Storage, SwapBlocks,
    TensorView, WritePairs,
};
use kvtier::RecordBuffer;

use super::ReplicaDevice;
use super::parcel::agree;
use crate::error::Result;

/// Returns buffers of these lengths, whose contents are replaced.
pub type BufferMemory<'a> = dyn Fn(&[usize]) -> Vec<RecordBuffer> + 'a;

/// The name that errors use for static scales, which belong to a whole arena and must match between replicas.
pub(super) const STATIC_SCALES: &str = "static scales";

/// A buffer of staged blocks or, for static scales, which belong to the whole arena, a buffer of the device's
/// arena.
pub(super) struct ParcelBuffer<'a> {
    storage: &'a Arc<dyn Storage>,
    bytes: usize,
    pub(super) is_static: bool,
}

impl ParcelBuffer<'_> {
    pub(super) fn view(&self) -> Result<TensorView> {
        Ok(TensorView::new(Arc::clone(self.storage), DType::U8, &[self.bytes])?)
    }
}

/// Returns the buffers of the staged blocks: K and V, each followed by its scales if there are any.
pub(super) fn buffers<'a>(device: &'a KvArena, staged: &'a KvArena) -> Vec<ParcelBuffer<'a>> {
    let layout = staged.layout();
    let k = (staged.k_plane(), device.k_plane(), layout.k_bytes());
    let v = (staged.v_plane(), device.v_plane(), layout.v_bytes());
    let mut all = Vec::with_capacity(4);
    for (plane, of_device, bytes) in [k, v] {
        all.push(ParcelBuffer { storage: plane.storage, bytes, is_static: false });
        if let (Some((storage, scales)), Some((whole, _))) = (plane.scales, of_device.scales) {
            let is_static = scales.is_static();
            let storage = if is_static { whole } else { storage };
            all.push(ParcelBuffer { storage, bytes: scales.bytes, is_static });
        }
    }
    all
}

impl ReplicaDevice {
    /// Returns the arena's shape with its number of blocks changed to `num_blocks`.
    pub(crate) fn shape_of(&self, num_blocks: usize) -> KvShape {
        KvShape { num_blocks, ..self.arena.layout().shape().clone() }
    }

    /// Allocates a staging arena with `num_blocks` blocks.
    pub(super) fn staging(&self, kind: MemoryKind, num_blocks: usize) -> Result<KvArena> {
        let layout = Arc::new(KvLayout::new(self.shape_of(num_blocks))?);
        Ok(KvArena::allocate(self.backend.as_ref(), kind, layout)?)
    }

    /// Copies `blocks` to consecutive blocks of the staging arena.
    pub(super) fn stage(&self, blocks: &[BlockId], staged: &KvArena) -> Result<()> {
        let pairs: Arc<[_]> = blocks.iter().copied().zip((0..).map(BlockId)).collect();
        // Only the caller uses the staging arena.
        let pairs = WritePairs::unchecked(pairs);
        Ok(self.stream.swap_blocks(&SwapBlocks { src: self.arena.clone(), dst: staged.clone(), pairs })?)
    }

    /// Waits for the stream, and returns a buffer's bytes.
    pub(super) fn bytes(&self, buffer: &ParcelBuffer<'_>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; buffer.bytes];
        self.stream.read(&buffer.view()?, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills blocks from the staging arena, and waits for the stream, because the blocks must not be found
    /// before their contents have arrived.
    pub(super) fn fill(&self, staged: KvArena, pairs: WritePairs) -> Result<()> {
        self.stream.swap_blocks(&SwapBlocks { src: staged, dst: self.arena.clone(), pairs })?;
        Ok(self.stream.synchronize()?)
    }

    /// Waits for the stream, and returns the contents of `blocks`, buffer by buffer: K and V, each followed by its
    /// scales if there are any. Nothing may write the blocks during the call.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn read(&self, blocks: &[BlockId]) -> Result<Vec<RecordBuffer>> {
        self.read_into(blocks, &RecordBuffer::zeroed)
    }

    /// Does what [`read`](Self::read) does, with memory from `memory`, which returns buffers of these lengths with
    /// undefined contents.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn read_into(&self, blocks: &[BlockId], memory: &BufferMemory<'_>) -> Result<Vec<RecordBuffer>> {
        if let Some(contents) = self.read_runs(blocks, memory)? {
            return Ok(contents);
        }
        let staged = self.staging(self.backend.capabilities().host_memory(), blocks.len())?;
        self.stage(blocks, &staged)?;
        let sources = buffers(&self.arena, &staged);
        let mut contents = memory(&sources.iter().map(|source| source.bytes).collect::<Vec<_>>());
        for (source, bytes) in sources.iter().zip(&mut contents) {
            self.stream.read(&source.view()?, bytes)?;
        }
        Ok(contents)
    }

    /// Fills `blocks` blocks with `contents`, and waits for the stream. `pairs` are the numbers of the blocks in
    /// `contents`, from 0, with the blocks to fill.
    ///
    /// # Errors
    /// Returns an error if `contents` has other buffers than [`read`](Self::read) returns for as many blocks, and
    /// the errors of the backend.
    pub fn write(&self, blocks: usize, pairs: WritePairs, contents: &[impl AsRef<[u8]>]) -> Result<()> {
        if self.write_runs(blocks, &pairs, contents)? {
            return Ok(());
        }
        let staged = self.staging(self.backend.capabilities().host_memory(), blocks)?;
        let targets = buffers(&self.arena, &staged);
        same("buffers of a parcel", targets.len(), contents.len())?;
        for (buffer, bytes) in targets.iter().zip(contents) {
            let bytes = bytes.as_ref();
            same("bytes of a buffer", buffer.bytes, bytes.len())?;
            if !buffer.is_static {
                self.stream.write(&buffer.view()?, bytes)?;
                continue;
            }
            agree([(STATIC_SCALES, self.bytes(buffer)? == bytes)])?;
        }
        self.fill(staged, pairs)
    }
}

pub(super) fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(CoreError::mismatch(what, expected, got).into()) }
}
