//! Quantisation and dequantisation of whole blocks.

use kvcore::{BlockId, Dequantize, KvArena, KvPlane, Quantize, Result};

use super::rows_of_block;
use crate::memory::Access;
use crate::plane::{PlaneRows, PlaneRowsMut, PlaneSpans};

pub(crate) fn quantize(op: &Quantize) -> Result<()> {
    convert(&op.src, &op.dst, &op.pairs)
}

pub(crate) fn dequantize(op: &Dequantize) -> Result<()> {
    convert(&op.src, &op.dst, &op.pairs)
}

/// Copies blocks from one arena to another, and converts them to the other arena's format.
fn convert(src: &KvArena, dst: &KvArena, pairs: &[(BlockId, BlockId)]) -> Result<()> {
    convert_plane((src, &src.k_plane()), (dst, &dst.k_plane()), pairs)?;
    convert_plane((src, &src.v_plane()), (dst, &dst.v_plane()), pairs)
}

fn convert_plane(
    (from, src): (&KvArena, &KvPlane),
    (to, dst): (&KvArena, &KvPlane),
    pairs: &[(BlockId, BlockId)],
) -> Result<()> {
    let s = from.layout().shape();
    let layers = 0..s.num_layers;
    let spans = (PlaneSpans::new(from, src, &layers), PlaneSpans::new(to, dst, &layers));
    let mut access = Access::new(&spans.0.all(), &spans.1.all())?;
    let mut parts = access.parts();
    let (source, mut target) =
        (PlaneRows::new(src, &spans.0, &mut parts)?, PlaneRowsMut::new(dst, &spans.1, &mut parts)?);
    let mut wide = vec![0.0; src.dim];
    for layer in layers {
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
