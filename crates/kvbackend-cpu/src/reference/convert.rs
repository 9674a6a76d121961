//! Quantisation and dequantisation of whole blocks.

use kvcore::{BlockId, Dequantize, KvArena, KvPlane, Quantize, Result};

use super::{locks, rows_of_block};
use crate::memory::Access;
use crate::plane::{PlaneRows, PlaneRowsMut};

pub(crate) fn quantize(op: &Quantize) -> Result<()> {
    convert(&op.src, &op.dst, &op.pairs)
}

pub(crate) fn dequantize(op: &Dequantize) -> Result<()> {
    convert(&op.src, &op.dst, &op.pairs)
}

/// Converts blocks of one arena to the format of another.
fn convert(src: &KvArena, dst: &KvArena, pairs: &[(BlockId, BlockId)]) -> Result<()> {
    convert_plane(src, &src.k_plane(), &dst.k_plane(), pairs)?;
    convert_plane(src, &src.v_plane(), &dst.v_plane(), pairs)
}

fn convert_plane(arena: &KvArena, src: &KvPlane, dst: &KvPlane, pairs: &[(BlockId, BlockId)]) -> Result<()> {
    let s = arena.layout().shape();
    let mut access = Access::new(&locks(src), &locks(dst))?;
    let mut parts = access.parts();
    let (source, mut target) = (PlaneRows::new(src, &mut parts)?, PlaneRowsMut::new(dst, &mut parts)?);
    let mut wide = vec![0.0; src.dim];
    for layer in 0..s.num_layers {
        for &(from, to) in pairs {
            for (a, b) in rows_of_block(layer, from, s.block_size, src.heads).zip(rows_of_block(
                layer,
                to,
                s.block_size,
                src.heads,
            )) {
                target.write(b, source.read(a, &mut wide)?)?;
            }
        }
    }
    Ok(())
}
