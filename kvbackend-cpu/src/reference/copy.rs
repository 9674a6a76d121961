//! Copies whole blocks within an arena or between arenas, with or without rotating their keys.

use kvcore::{BlockId, CopyBlocks, KvArena, KvFormat, KvPlane, Result, RotateKeys, SwapBlocks};

use super::{Rotator, rows_of_block};
use crate::element::{dispatch, elements_mut};
use crate::memory::{Access, ByteSpan};
use crate::plane::{PlaneRowsMut, PlaneSpans, RowLayout};

pub(crate) fn copy_blocks(op: &CopyBlocks) -> Result<()> {
    copy_layers(&op.arena, &op.arena, &op.pairs)
}

pub(crate) fn swap_blocks(op: &SwapBlocks) -> Result<()> {
    copy_layers(&op.src, &op.dst, &op.pairs)
}

/// Copies blocks and rotates the copied keys. Elements of dense keys past the rotary dimension are copied bit
/// for bit.
pub(crate) fn rotate_keys(op: &RotateKeys) -> Result<()> {
    let copy = BlockCopy {
        arenas: (&op.src, &op.dst),
        layer: op.layer,
        block_size: op.src.layout().shape().block_size,
        pairs: &op.pairs,
    };
    let (src, dst, rotation) = (op.src.k_plane(), op.dst.k_plane(), &op.rotation);
    let mut rotator = Rotator::by(rotation)?;
    if let KvFormat::Dense(dtype) = dst.format {
        dispatch!(dtype, T => copy.codes(&src, &dst, |row| {
            rotator.rotate_elements(elements_mut::<T>(row)?, rotation.delta, 1.0);
            Ok(())
        }))?;
    } else {
        copy.plane(&src, &dst)?;
        rotate_quantized(&copy, &dst, |row| rotator.rotate(row, rotation.delta, 1.0))?;
    }
    copy.plane(&op.src.v_plane(), &op.dst.v_plane())
}

fn copy_layers(src: &KvArena, dst: &KvArena, pairs: &[(BlockId, BlockId)]) -> Result<()> {
    let s = src.layout().shape();
    for layer in 0..s.num_layers {
        let copy = BlockCopy { arenas: (src, dst), layer, block_size: s.block_size, pairs };
        copy.plane(&src.k_plane(), &dst.k_plane())?;
        copy.plane(&src.v_plane(), &dst.v_plane())?;
    }
    Ok(())
}

/// A bit-for-bit copy of blocks in one layer.
struct BlockCopy<'a> {
    /// The source and destination arenas.
    arenas: (&'a KvArena, &'a KvArena),
    layer: usize,
    block_size: usize,
    pairs: &'a [(BlockId, BlockId)],
}

impl BlockCopy<'_> {
    /// Copies a plane's codes, and its scales if they are stored per block.
    fn plane(&self, src: &KvPlane, dst: &KvPlane) -> Result<()> {
        self.codes(src, dst, |_| Ok(()))?;
        let (from, to) = self.spans(src, dst);
        if let (Some(from), Some(to)) = (&from.scales, &to.scales)
            && let (Some(a), Some(b)) = (RowLayout::scales(src), RowLayout::scales(dst))
            && src.scales.is_some_and(|(_, scales)| !scales.is_static())
        {
            self.bytes(src.heads, (from, a), (to, b), |_| Ok(()))?;
        }
        Ok(())
    }

    /// Returns the byte ranges of the layer in a plane of the source and in a plane of the destination.
    fn spans<'b>(&self, src: &KvPlane<'b>, dst: &KvPlane<'b>) -> (PlaneSpans<'b>, PlaneSpans<'b>) {
        let (from, to) = self.arenas;
        (PlaneSpans::of_layer(from, src, self.layer), PlaneSpans::of_layer(to, dst, self.layer))
    }

    /// Copies codes row by row, and applies `change` to each copied row.
    fn codes(&self, src: &KvPlane, dst: &KvPlane, change: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        let (from, to) = self.spans(src, dst);
        self.bytes(
            src.heads,
            (&from.codes, RowLayout::codes(src)),
            (&to.codes, RowLayout::codes(dst)),
            change,
        )
    }

    fn bytes(
        &self,
        heads: usize,
        src: (&ByteSpan<'_>, RowLayout),
        dst: (&ByteSpan<'_>, RowLayout),
        mut change: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut access = Access::new(&[src.0], &[dst.0])?;
        let mut parts = access.parts();
        let mut rows = self.pairs.iter().flat_map(|&(from, to)| {
            rows_of_block(self.layer, from, self.block_size, heads)
                .map(move |at| (src.1.bytes(at), dst.1.bytes(at.block(to))))
        });
        let len = src.1.row_bytes();
        let mut buffer = vec![0f32; len.div_ceil(size_of::<f32>())]; // aligned for every element type
        let row = &mut bytemuck::cast_slice_mut(&mut buffer)[..len];
        if std::ptr::eq(src.0.storage()?, dst.0.storage()?) {
            let mut bytes = parts.write(dst.0)?;
            rows.try_for_each(|(from, to)| {
                row.copy_from_slice(&bytes[from]);
                change(row)?;
                bytes[to].copy_from_slice(row);
                Ok(())
            })
        } else {
            let (source, mut target) = (parts.read(src.0)?, parts.write(dst.0)?);
            rows.try_for_each(|(from, to)| {
                row.copy_from_slice(&source[from]);
                change(row)?;
                target[to].copy_from_slice(row);
                Ok(())
            })
        }
    }
}

/// Rotates quantised keys that have just been copied: decodes them, rotates them in f32, and quantises them
/// again.
fn rotate_quantized(copy: &BlockCopy, plane: &KvPlane, mut rotate: impl FnMut(&mut [f32])) -> Result<()> {
    let spans = PlaneSpans::of_layer(copy.arenas.1, plane, copy.layer);
    let mut access = Access::new(&[], &spans.all())?;
    let mut keys = PlaneRowsMut::new(plane, &spans, &mut access.parts())?;
    let mut wide = vec![0.0; plane.dim];
    copy.pairs
        .iter()
        .flat_map(|pair| rows_of_block(copy.layer, pair.1, copy.block_size, plane.heads))
        .try_for_each(|at| {
            keys.read(at, &mut wide)?;
            rotate(&mut wide);
            keys.write(at, &wide)
        })
}
