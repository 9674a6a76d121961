//! Copies of whole blocks, within one arena or between two arenas.

use super::entry::Storages;
use super::{Dequantize, Quantize};
use crate::base::{BlockId, Error, KvShape, Result, same};
use crate::device::{KvArena, WritePairs};

/// Copies block `src` to block `dst` for each pair, in all layers, both K and V, bit for bit, including the
/// scales of quantised blocks.
///
/// Within one call, a block may be a source or a destination, but not both, because the order of the copies
/// is unspecified.
#[derive(Debug, Clone)]
pub struct CopyBlocks {
    /// Arena that contains the sources and destinations.
    pub arena: KvArena,
    /// `(source, destination)` pairs. The destinations must be blocks that the caller is filling.
    pub pairs: WritePairs,
}

impl CopyBlocks {
    /// Checks the block IDs and the write permit.
    ///
    /// # Errors
    /// Returns [`Error::PermitVoid`] if the permit is void, [`Error::OutOfRange`] if a block is outside the
    /// arena, and [`Error::Twice`] if a block is a destination twice, or both a source and a destination.
    pub fn check(&self) -> Result<()> {
        check_pairs(&self.arena, &self.arena, &self.pairs)
    }

    /// Returns the number of bytes written.
    pub fn bytes(&self) -> usize {
        self.pairs.len() * self.arena.layout().block_bytes()
    }

    /// Adds the memory that the operation touches to `storages`.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        storages.arena(&self.arena);
    }
}

/// Copies blocks to another arena with the same block shape, for example to move them to another kind of
/// memory or another pool.
///
/// Codes and per-block scales are copied bit for bit. Static scales belong to an arena and are not copied:
/// fp8 codes have the same values in both arenas only if both have the same static scales.
#[derive(Debug, Clone)]
pub struct SwapBlocks {
    /// Arena to read from.
    pub src: KvArena,
    /// Arena to write to. May differ from `src` in the number of blocks and the kind of memory.
    pub dst: KvArena,
    /// `(source, destination)` pairs. The destinations must be blocks that the caller is filling.
    pub pairs: WritePairs,
}

impl SwapBlocks {
    /// Checks the block IDs, the write permit, and that the blocks of both arenas have the same extents and
    /// format. `src` and `dst` may be the same arena, under the rule stated at [`CopyBlocks`].
    ///
    /// # Errors
    /// Returns the errors of [`CopyBlocks::check`], [`Error::Mismatch`] if the blocks differ, and
    /// [`Error::Aliased`] if the arenas share only part of their memory.
    pub fn check(&self) -> Result<()> {
        same_blocks(&self.src, &self.dst)?;
        check_pairs(&self.src, &self.dst, &self.pairs)
    }
}

/// Defines the methods shared by operations that copy whole blocks from arena `src` to arena `dst`.
macro_rules! between_arenas {
    ($($operation:ty),*) => {$(
        impl $operation {
            /// Returns the number of bytes written.
            pub fn bytes(&self) -> usize {
                self.pairs.len() * self.dst.layout().block_bytes()
            }

            /// Adds the memory that the operation touches to `storages`.
            pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
                storages.arena(&self.src);
                storages.arena(&self.dst);
            }
        }
    )*};
}

between_arenas!(SwapBlocks, Quantize, Dequantize);

/// Checks that the permit is valid, that the block IDs are inside their arenas, that no destination appears
/// twice, and that no byte is both read and written.
pub(super) fn check_pairs(src: &KvArena, dst: &KvArena, pairs: &WritePairs) -> Result<()> {
    pairs.check()?;
    for &(from, to) in pairs.iter() {
        src.check_block(from)?;
        dst.check_block(to)?;
    }
    let mut written: Vec<BlockId> = pairs.iter().map(|&(_, to)| to).collect();
    written.sort_unstable();
    if let Some(w) = written.windows(2).find(|w| w[0] == w[1]) {
        return Err(Error::Twice { what: "destination block", number: u64::from(w[0].0) });
    }
    if !one_memory(src, dst)? {
        return Ok(());
    }
    match pairs.iter().find(|(from, _)| written.binary_search(from).is_ok()) {
        Some(&(block, _)) => {
            Err(Error::Twice { what: "source or destination block", number: u64::from(block.0) })
        }
        None => Ok(()),
    }
}

/// Returns whether both arenas have the same memory and layout, so that a block ID refers to the same bytes
/// in both.
fn one_memory(src: &KvArena, dst: &KvArena) -> Result<bool> {
    let same = src.storages().zip(dst.storages()).all(|(a, b)| a.address() == b.address());
    if same && src.layout().shape() == dst.layout().shape() {
        return Ok(true);
    }
    if src.shares_memory(dst) { Err(Error::Aliased { what: "arenas of a block copy" }) } else { Ok(false) }
}

/// Checks that the blocks of both arenas have the same extents and format. The order inside a block and the
/// number of blocks may differ.
pub(super) fn same_blocks(src: &KvArena, dst: &KvArena) -> Result<()> {
    same_extents(src, dst)?;
    same("KV format of the arenas", src.layout().shape().format, dst.layout().shape().format)
}

/// Checks that the blocks of both arenas have the same extents. The formats may differ.
pub(super) fn same_extents(src: &KvArena, dst: &KvArena) -> Result<()> {
    let (a, b): (&KvShape, &KvShape) = (src.layout().shape(), dst.layout().shape());
    same("num_layers of the arenas", a.num_layers, b.num_layers)?;
    same("block_size of the arenas", a.block_size, b.block_size)?;
    same("k_heads of the arenas", a.k_heads, b.k_heads)?;
    same("v_heads of the arenas", a.v_heads, b.v_heads)?;
    same("k_dim of the arenas", a.k_dim, b.k_dim)?;
    same("v_dim of the arenas", a.v_dim, b.v_dim)
}
