//! Copies between blocks of an arena and bytes on the host.

use std::sync::Arc;

use kvcore::{
    BlockId, DType, Error as CoreError, KvArena, KvLayout, KvShape, Storage, SwapBlocks, TensorView,
    WritePairs,
};

use super::ReplicaDevice;
use crate::cache::ChunkReservation;
use crate::error::{Error, Result};

/// A buffer of staged blocks. Static scales belong to the whole arena and lie in the device's.
struct ParcelBuffer<'a> {
    storage: &'a Arc<dyn Storage>,
    bytes: usize,
    is_static: bool,
}

impl ParcelBuffer<'_> {
    fn view(&self) -> Result<TensorView> {
        Ok(TensorView::new(Arc::clone(self.storage), DType::U8, &[self.bytes])?)
    }
}

/// Returns K, its scales, V and its scales.
fn buffers<'a>(device: &'a KvArena, staged: &'a KvArena) -> Vec<ParcelBuffer<'a>> {
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
    /// Returns the shape of `num_blocks` blocks of the arena.
    pub(super) fn shape_of(&self, num_blocks: usize) -> KvShape {
        KvShape { num_blocks, ..self.arena.layout().shape().clone() }
    }

    /// Allocates host memory for `num_blocks` blocks.
    fn staging(&self, num_blocks: usize) -> Result<KvArena> {
        let layout = Arc::new(KvLayout::new(self.shape_of(num_blocks))?);
        Ok(KvArena::allocate(self.backend.as_ref(), self.backend.capabilities().host_memory(), layout)?)
    }

    /// Reads the contents of blocks. Waits for the stream.
    pub(super) fn read(&self, blocks: &[BlockId]) -> Result<Vec<Vec<u8>>> {
        let staged = self.staging(blocks.len())?;
        let pairs: Arc<[_]> = blocks.iter().copied().zip((0..).map(BlockId)).collect();
        // The staged copy is this call's own.
        let pairs = WritePairs::unchecked(pairs);
        self.stream.swap_blocks(&SwapBlocks { src: self.arena.clone(), dst: staged.clone(), pairs })?;
        let read = |buffer: &ParcelBuffer<'_>| {
            let mut bytes = vec![0; buffer.bytes];
            self.stream.read(&buffer.view()?, &mut bytes)?;
            Ok(bytes)
        };
        buffers(&self.arena, &staged).iter().map(read).collect()
    }

    /// Fills blocks and waits for the stream, since contents that have not arrived must not be found.
    pub(super) fn write(&self, reservation: &ChunkReservation, contents: &[Vec<u8>]) -> Result<()> {
        let blocks = reservation.block_ids().len();
        let staged = self.staging(blocks)?;
        let targets = buffers(&self.arena, &staged);
        same("buffers of a parcel", targets.len(), contents.len())?;
        for (buffer, bytes) in targets.iter().zip(contents) {
            same("bytes of a buffer", buffer.bytes, bytes.len())?;
            if !buffer.is_static {
                self.stream.write(&buffer.view()?, bytes)?;
                continue;
            }
            let mut own = vec![0; buffer.bytes];
            self.stream.read(&buffer.view()?, &mut own)?;
            if own != *bytes {
                return Err(Error::ReplicaDiffers { what: "static scales" });
            }
        }
        let pairs = reservation.write_pairs((0..blocks as u32).map(BlockId))?;
        self.stream.swap_blocks(&SwapBlocks { src: staged.clone(), dst: self.arena.clone(), pairs })?;
        Ok(self.stream.synchronize()?)
    }
}

fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(CoreError::Mismatch { what, expected, got }.into()) }
}
