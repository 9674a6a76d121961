//! Block copies with rotated keys, for kernels that do not support segments.

use super::Rotation;
use super::copy::{check_pairs, same_blocks};
use super::entry::Storages;
use crate::base::Result;
use crate::device::{KvArena, WritePairs};

/// Copies blocks of one layer. Keys are rotated by a distance, and values are copied unchanged.
///
/// Always copy from the blocks as originally stored, because each further rotation would round again. This
/// rotation does not apply `YaRN`'s attention factor, which the stored keys already include. Quantised keys
/// are rotated in f32 and quantised again. Static scales must be equal in both arenas.
#[derive(Debug, Clone)]
pub struct RotateKeys {
    /// Arena that holds the originals.
    pub src: KvArena,
    /// Arena to write the copies to. May be the same arena as `src`, with other blocks.
    pub dst: KvArena,
    /// Layer to copy. Rotary embeddings may differ between layers.
    pub layer: usize,
    /// `(source, destination)` pairs. The destinations must be blocks that the caller is filling.
    pub pairs: WritePairs,
    /// The rotary embedding, and the distance to rotate the keys by.
    pub rotation: Rotation,
}

impl RotateKeys {
    /// Checks the blocks, the layer, the write permit and the rotation.
    pub fn check(&self) -> Result<()> {
        self.src.check_layer(self.layer)?;
        same_blocks(&self.src, &self.dst)?;
        check_pairs(&self.src, &self.dst, &self.pairs)?;
        self.rotation.check(self.src.layout().shape().k_dim)
    }

    /// Returns the number of bytes written.
    pub fn bytes(&self) -> usize {
        self.pairs.len() * self.dst.layout().block_bytes() / self.dst.layout().shape().num_layers
    }

    /// Adds the memory that the operation touches to `storages`.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        storages.arena(&self.src);
        storages.arena(&self.dst);
    }
}
