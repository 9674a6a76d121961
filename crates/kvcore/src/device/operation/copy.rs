//! Whole blocks, inside an arena or between two.

use std::sync::Arc;

use crate::base::{BlockId, Error, KvShape, Result, same};
use crate::device::KvArena;

/// Copies block `src` to block `dst` for each pair, over all layers, K and V, bit for bit, with the
/// scales of quantised blocks.
///
/// A block may be a source or a destination of one call, not both: no order is promised.
#[derive(Debug, Clone)]
pub struct CopyBlocks {
    /// The arena of both.
    pub arena: KvArena,
    /// `(source, destination)` pairs.
    pub pairs: Arc<[(BlockId, BlockId)]>,
}

impl CopyBlocks {
    /// Checks the block ids.
    pub fn check(&self) -> Result<()> {
        check_pairs(&self.arena, &self.arena, &self.pairs)?;
        let mut written: Vec<BlockId> = self.pairs.iter().map(|&(_, dst)| dst).collect();
        written.sort_unstable();
        match self.pairs.iter().find(|(src, _)| written.binary_search(src).is_ok()) {
            Some((src, _)) => Err(Error::InvalidStrides {
                what: "block copy",
                reason: format!("block {src} is source and destination"),
            }),
            None => Ok(()),
        }
    }

    /// Bytes written.
    pub fn bytes(&self) -> usize {
        self.pairs.len() * self.arena.layout().block_bytes()
    }
}

/// Copies blocks from one arena to another of the same block shape: between memories or pools.
///
/// Codes and the scales of blocks move bit for bit. Static scales belong to an arena and stay: codes
/// of fp8 mean the same in both only if both were given the same scales.
#[derive(Debug, Clone)]
pub struct SwapBlocks {
    /// Where blocks are read.
    pub src: KvArena,
    /// Where they are written; may differ in the number of blocks and in the memory it lies in.
    pub dst: KvArena,
    /// `(source, destination)` pairs.
    pub pairs: Arc<[(BlockId, BlockId)]>,
}

impl SwapBlocks {
    /// Checks block ids and that both arenas hold the same kind of block.
    pub fn check(&self) -> Result<()> {
        same_blocks(&self.src, &self.dst)?;
        check_pairs(&self.src, &self.dst, &self.pairs)
    }

    /// Bytes written.
    pub fn bytes(&self) -> usize {
        self.pairs.len() * self.dst.layout().block_bytes()
    }
}

/// Block ids inside their arenas, and no destination twice.
pub(super) fn check_pairs(src: &KvArena, dst: &KvArena, pairs: &[(BlockId, BlockId)]) -> Result<()> {
    for &(from, to) in pairs {
        src.check_block(from)?;
        dst.check_block(to)?;
    }
    let mut written: Vec<BlockId> = pairs.iter().map(|&(_, to)| to).collect();
    written.sort_unstable();
    match written.windows(2).find(|w| w[0] == w[1]) {
        Some(w) => Err(Error::InvalidStrides {
            what: "block copy",
            reason: format!("block {} is written twice", w[0]),
        }),
        None => Ok(()),
    }
}

/// Whether blocks of both arenas hold the same elements in the same format, whatever their order or
/// number.
pub(super) fn same_blocks(src: &KvArena, dst: &KvArena) -> Result<()> {
    same_extents(src, dst)?;
    let (expected, got) = (src.layout().shape().format, dst.layout().shape().format);
    if expected == got {
        Ok(())
    } else {
        Err(Error::FormatMismatch { what: "KV format of the arenas", expected, got })
    }
}

/// Whether blocks of both arenas have the same extents, whatever their format.
pub(super) fn same_extents(src: &KvArena, dst: &KvArena) -> Result<()> {
    let (a, b): (&KvShape, &KvShape) = (src.layout().shape(), dst.layout().shape());
    same("num_layers of the arenas", a.num_layers, b.num_layers)?;
    same("block_size of the arenas", a.block_size, b.block_size)?;
    same("k_heads of the arenas", a.k_heads, b.k_heads)?;
    same("v_heads of the arenas", a.v_heads, b.v_heads)?;
    same("k_dim of the arenas", a.k_dim, b.k_dim)?;
    same("v_dim of the arenas", a.v_dim, b.v_dim)
}
