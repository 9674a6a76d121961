//! Copies chunks directly from one replica's device to another replica's device.
//!
//! ```text
//!   giver's blocks ─► staged there ─── event, copy_tensor ───► staged here ─► reserved blocks
//! ```

use kvcore::{BlockId, CopyTensor, MemoryKind};

use super::ReplicaDevice;
use super::bytes::{STATIC_SCALES, buffers};
use super::parcel::agree;
use crate::cache::{ChunkReservation, PieceHold};
use crate::error::Result;
use crate::hash::ChunkPiece;

impl ReplicaDevice {
    /// Returns whether another device can copy directly from this device's memory. Returns false if both
    /// replicas are on the same device.
    pub(super) fn is_reached_by(&self, other: &Self) -> bool {
        let here = self.arena.k_plane();
        other.stream.owns(here.storage).is_err() && other.stream.reaches(here.storage).is_ok()
    }

    // Decision: docs/decisions/chunks.md#replicas-of-a-process-copy-chunks-between-connected-devices
    /// Copies a chunk from this device to reserved blocks on `other`, after checking that it is the requested
    /// piece. Waits for the stream of `other`. Returns false and copies nothing if one of the two devices
    /// lacks the memory to stage the chunk.
    pub(super) fn copy_to(
        &self,
        other: &Self,
        chunk: &PieceHold,
        tokens: &[u32],
        piece: &ChunkPiece<'_>,
        reservation: &ChunkReservation,
    ) -> Result<bool> {
        let (hash, count) = (piece.hash(), chunk.block_ids().len());
        agree([
            ("tokens", *tokens == *piece.tokens()),
            ("position of the first key", chunk.cached_position_start() == reservation.stored_start()),
            ("shape of blocks", self.shape_of(hash.num_blocks) == other.shape_of(hash.num_blocks)),
            ("form of keys", self.keys == other.keys),
        ])?;
        let stagings = [self, other].map(|device| device.staging(MemoryKind::Device, count));
        let [Ok(there), Ok(here)] = stagings else { return Ok(false) };
        self.stage(chunk.block_ids(), &there)?;
        other.stream.wait_for(&self.stream.record()?)?;
        for (from, to) in buffers(&self.arena, &there).iter().zip(&buffers(&other.arena, &here)) {
            if to.is_static {
                agree([(STATIC_SCALES, self.bytes(from)? == other.bytes(to)?)])?;
            } else {
                other.stream.copy_tensor(&CopyTensor { src: from.view()?, dst: to.view()? })?;
            }
        }
        other.fill(here, reservation.write_pairs((0..count as u32).map(BlockId))?)?;
        Ok(true)
    }
}
