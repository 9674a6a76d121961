//! The rotated copy: for kernels that know no segments.

use std::sync::Arc;

use super::Rotation;
use super::copy::{check_pairs, same_blocks};
use crate::base::{BlockId, Result};
use crate::device::KvArena;

/// Copies blocks of one layer, their keys moved by a distance, their values as they are.
///
/// Out of place only, and always from the stored original: chained moves would round again and
/// again. The rotation has magnitude 1, so that the attention factor of `YaRN` enters once. Quantised
/// keys are rotated in f32 and quantised anew; static scales must be the same in both arenas.
#[derive(Debug, Clone)]
pub struct RotateKeys {
    /// Where the originals lie.
    pub src: KvArena,
    /// Where the copies go; may be the same arena, in other blocks.
    pub dst: KvArena,
    /// Layer copied (rotary embeddings may differ by layer).
    pub layer: usize,
    /// `(source, destination)` pairs.
    pub pairs: Arc<[(BlockId, BlockId)]>,
    /// By how much, and with which embedding.
    pub rotation: Rotation,
}

impl RotateKeys {
    /// Checks blocks, layer and distance.
    pub fn check(&self) -> Result<()> {
        self.src.check_layer(self.layer)?;
        same_blocks(&self.src, &self.dst)?;
        check_pairs(&self.src, &self.dst, &self.pairs)?;
        if Arc::ptr_eq(self.src.k(), self.dst.k()) {
            super::CopyBlocks { arena: self.src.clone(), pairs: Arc::clone(&self.pairs) }.check()?;
        }
        self.rotation.check(self.src.layout().shape().k_dim)
    }

    /// Bytes written.
    pub fn bytes(&self) -> usize {
        self.pairs.len() * self.dst.layout().block_bytes() / self.dst.layout().shape().num_layers
    }
}
