//! Conversion of whole blocks between a dense arena and a quantised arena.

use super::copy::{check_pairs, same_extents};
use crate::base::{Error, Result};
use crate::device::{KvArena, WritePairs};

/// Quantises blocks of a dense arena into a quantised arena, in all layers, both K and V.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     Backend, BlockOrder, BlockPool, DType, Dequantize, KvArena, KvFormat, KvLayout, KvShape, MemoryKind, Quantize,
/// };
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let arena = |format, num_blocks| {
///     let shape = KvShape {
///         num_layers: 2, num_blocks, block_size: 16, k_heads: 2, v_heads: 2, k_dim: 64, v_dim: 64,
///         format, order: BlockOrder::TokenMajor,
///     };
///     KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))
/// };
/// let (dense, small) = (arena(DType::BF16.into(), 8)?, arena(KvFormat::Int8 { group: 32 }, 4)?);
/// // quantise two blocks to a little over half their size, and dequantise them again
/// let (resident, waiting) = (BlockPool::new(0..8)?, BlockPool::new(0..4)?);
/// let (own, kept) = (resident.allocate(2)?, waiting.allocate(2)?);
/// let [a, b] = [own.ids()[0], own.ids()[1]];
/// let [x, y] = [kept.ids()[0], kept.ids()[1]];
/// let out = kept.write_pairs([(a, x), (b, y)])?;
/// stream.quantize(&Quantize { src: dense.clone(), dst: small.clone(), pairs: out })?;
/// let back = own.write_pairs([(x, a), (y, b)])?;
/// stream.dequantize(&Dequantize { src: small, dst: dense, pairs: back })?;
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Quantize {
    /// Dense arena to read from.
    pub src: KvArena,
    /// Quantised arena to write to. Must have the extents of `src`, except for the number of blocks.
    pub dst: KvArena,
    /// `(source, destination)` pairs. The destinations must be blocks that the caller is filling.
    pub pairs: WritePairs,
}

impl Quantize {
    /// Checks the formats, the extents, the block IDs and the write permit.
    ///
    /// # Errors
    /// - Returns [`Error::InvalidFormat`] if the source is quantised or the destination is not.
    /// - Returns [`Error::Mismatch`] if the extents differ.
    /// - Returns [`Error::OutOfRange`] if a block is outside its arena.
    /// - Returns [`Error::Twice`] if a block is a destination twice.
    /// - Returns [`Error::PermitVoid`] if the permit is void.
    /// - Returns [`Error::Aliased`] if the arenas share memory.
    pub fn check(&self) -> Result<()> {
        check_sides(&self.src, &self.dst)?;
        check_pairs(&self.src, &self.dst, &self.pairs)
    }
}

/// Dequantises blocks of a quantised arena into a dense arena, in all layers, both K and V. Reverses
/// [`Quantize`], except for the rounding.
#[derive(Debug, Clone)]
pub struct Dequantize {
    /// Quantised arena to read from.
    pub src: KvArena,
    /// Dense arena to write to. Must have the extents of `src`, except for the number of blocks.
    pub dst: KvArena,
    /// `(source, destination)` pairs. The destinations must be blocks that the caller is filling.
    pub pairs: WritePairs,
}

impl Dequantize {
    /// Checks the formats, the extents and the block IDs.
    ///
    /// # Errors
    /// Returns the errors of [`Quantize::check`], with the roles of dense and quantised exchanged.
    pub fn check(&self) -> Result<()> {
        check_sides(&self.dst, &self.src)?;
        check_pairs(&self.src, &self.dst, &self.pairs)
    }
}

/// Checks that the first arena is dense and the second one quantised, and that both have the same extents but
/// no shared memory.
fn check_sides(dense: &KvArena, quantized: &KvArena) -> Result<()> {
    for (arena, wanted, reason) in
        [(dense, false, "the dense side is quantised"), (quantized, true, "the quantised side is dense")]
    {
        let format = arena.layout().shape().format;
        if format.is_quantized() != wanted {
            return Err(Error::InvalidFormat { format, reason: reason.to_owned() });
        }
    }
    same_extents(dense, quantized)?;
    if dense.shares_memory(quantized) {
        return Err(Error::Aliased { what: "the dense and the quantised arena" });
    }
    Ok(())
}
