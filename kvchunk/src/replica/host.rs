//! Copies between blocks and host bytes without staging, for devices whose memory is host memory.
//!
//! In each layer, a block is one run of bytes, unless the arena's strides leave gaps inside a block. The bytes
//! of blocks are ordered as in a staging arena: layer by layer, and block by block in each layer.

use std::sync::Arc;

use kvcore::{
    BlockId, BlockOrder, DType, Dims, Error as CoreError, KvPlane, KvShape, PlaneStrides, Storage,
    TensorView, WritePairs,
};
use kvtier::RecordBuffer;

use super::ReplicaDevice;
use super::bytes::{BufferMemory, STATIC_SCALES, same};
use super::parcel::agree;
use crate::error::{Error, Result};

/// One of the arena's buffers, in bytes: K, V, or scales.
struct HostRuns<'a> {
    storage: &'a Arc<dyn Storage>,
    /// The distances between layers and between blocks, and the size of a block in one layer. `None` for static
    /// scales, which belong to the whole arena.
    blocks: Option<BlockRuns>,
    /// The number of bytes that belong to the buffer.
    bytes: usize,
}

#[derive(Clone, Copy)]
struct BlockRuns {
    layer: usize,
    block: usize,
    bytes: usize,
}

impl HostRuns<'_> {
    /// Returns the bytes from `start` on.
    fn view(&self, start: usize, bytes: usize) -> Result<TensorView> {
        let (shape, strides) = (Dims::new(&[bytes])?, Dims::new(&[1])?);
        Ok(TensorView::with_strides(Arc::clone(self.storage), DType::U8, shape, strides, start)?)
    }
}

/// Returns the runs of the blocks of one buffer, with rows of `len` elements, or `None` if a block has gaps.
fn runs(shape: &KvShape, heads: usize, len: usize, bits: usize, strides: PlaneStrides) -> Option<BlockRuns> {
    let dense = match shape.order {
        BlockOrder::HeadMajor => (shape.block_size * len, len),
        BlockOrder::TokenMajor => (len, heads * len),
    };
    let bytes = |elements: usize| elements * bits / 8;
    ((strides.head, strides.token) == dense).then(|| BlockRuns {
        layer: bytes(strides.layer),
        block: bytes(strides.block),
        bytes: bytes(shape.block_size * heads * len),
    })
}

/// Checks that a block is one of `limit` blocks.
fn inside(block: BlockId, limit: usize) -> Result<()> {
    if block.index() < limit {
        return Ok(());
    }
    let (value, limit) = (i128::from(block.0), limit as i128);
    Err(CoreError::OutOfRange { what: "block", value, limit }.into())
}

impl ReplicaDevice {
    /// Returns the buffers of the arena in the order of [`read`](Self::read), or `None` if their bytes must be
    /// staged.
    fn host_runs(&self) -> Option<Vec<HostRuns<'_>>> {
        if !self.backend.shares_host_memory() {
            return None;
        }
        let layout = self.arena.layout();
        let shape = layout.shape();
        let bits = shape.format.storage_dtype().bits();
        let mut buffers = Vec::with_capacity(4);
        for (plane, bytes) in
            [(self.arena.k_plane(), layout.k_bytes()), (self.arena.v_plane(), layout.v_bytes())]
        {
            let KvPlane { storage, strides, heads, dim, scales, .. } = plane;
            let blocks = Some(runs(shape, heads, dim, bits, strides)?);
            buffers.push(HostRuns { storage, blocks, bytes });
            if let Some((storage, scales)) = scales {
                let of_blocks = || runs(shape, heads, scales.per_row, scales.dtype.bits(), scales.strides);
                let blocks = if scales.is_static() { None } else { Some(of_blocks()?) };
                buffers.push(HostRuns { storage, blocks, bytes: scales.bytes });
            }
        }
        Some(buffers)
    }

    /// Checks that the arena has a block.
    fn is_here(&self, block: BlockId) -> Result<()> {
        inside(block, self.arena.layout().shape().num_blocks)
    }

    /// Returns what [`read_into`](Self::read_into) returns, or `None` if the bytes must be staged.
    pub(super) fn read_runs(
        &self,
        blocks: &[BlockId],
        memory: &BufferMemory<'_>,
    ) -> Result<Option<Vec<RecordBuffer>>> {
        let Some(buffers) = self.host_runs() else { return Ok(None) };
        blocks.iter().try_for_each(|&block| self.is_here(block))?;
        let layers = self.arena.layout().shape().num_layers;
        let len = |buffer: &HostRuns<'_>| {
            buffer.blocks.map_or(buffer.bytes, |runs| layers * blocks.len() * runs.bytes)
        };
        let mut contents = memory(&buffers.iter().map(len).collect::<Vec<_>>());
        for (buffer, all) in buffers.iter().zip(&mut contents) {
            let Some(BlockRuns { layer, block, bytes }) = buffer.blocks else {
                all.fill_runs(buffer.bytes, |_, all| {
                    Ok::<_, Error>(self.stream.read(&buffer.view(0, buffer.bytes)?, all)?)
                })?;
                continue;
            };
            all.fill_runs(bytes, |run, to| {
                let start = run / blocks.len() * layer + blocks[run % blocks.len()].index() * block;
                Ok::<_, Error>(self.stream.read(&buffer.view(start, bytes)?, to)?)
            })?;
        }
        Ok(Some(contents))
    }

    /// Does what [`write`](Self::write) does. Returns false and writes nothing if the bytes must be staged.
    pub(super) fn write_runs(
        &self,
        count: usize,
        pairs: &WritePairs,
        contents: &[impl AsRef<[u8]>],
    ) -> Result<bool> {
        let Some(buffers) = self.host_runs() else { return Ok(false) };
        let layers = self.arena.layout().shape().num_layers;
        same("buffers of a parcel", buffers.len(), contents.len())?;
        for (buffer, contents) in buffers.iter().zip(contents) {
            let contents = contents.as_ref();
            let expected = buffer.blocks.map_or(buffer.bytes, |runs| layers * count * runs.bytes);
            same("bytes of a buffer", expected, contents.len())?;
            if buffer.blocks.is_none() {
                let mut here = vec![0; buffer.bytes];
                self.stream.read(&buffer.view(0, buffer.bytes)?, &mut here)?;
                agree([(STATIC_SCALES, here == contents)])?;
            }
        }
        pairs.check()?;
        for &(from, to) in pairs.iter() {
            inside(from, count).and_then(|()| self.is_here(to))?;
        }
        for (buffer, contents) in buffers.iter().zip(contents) {
            let Some(BlockRuns { layer, block, bytes }) = buffer.blocks else { continue };
            for (at, &(from, to)) in (0..layers).flat_map(|at| pairs.iter().map(move |pair| (at, pair))) {
                let start = (at * count + from.index()) * bytes;
                let run = &contents.as_ref()[start..start + bytes];
                self.stream.write(&buffer.view(at * layer + to.index() * block, bytes)?, run)?;
            }
        }
        self.stream.synchronize()?;
        Ok(true)
    }
}
