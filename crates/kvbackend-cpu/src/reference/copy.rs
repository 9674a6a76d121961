//! Whole blocks: copies inside an arena and between arenas, and copies with rotated keys.

use std::sync::Arc;

use kvcore::{BlockId, CopyBlocks, KvArena, KvFormat, KvPlane, Result, RotateKeys, Storage, SwapBlocks};

use super::{Rotator, locks, rows_of_block};
use crate::element::{dispatch, elements_mut};
use crate::memory::Access;
use crate::plane::{PlaneRowsMut, RowLayout};

pub(crate) fn copy_blocks(op: &CopyBlocks) -> Result<()> {
    copy_layers(&op.arena, &op.arena, &op.pairs)
}

pub(crate) fn swap_blocks(op: &SwapBlocks) -> Result<()> {
    copy_layers(&op.src, &op.dst, &op.pairs)
}

/// Copies blocks with rotated keys. Elements of dense keys past the rotary dimension are copied bit for bit.
pub(crate) fn rotate_keys(op: &RotateKeys) -> Result<()> {
    let copy =
        BlockCopy { layer: op.layer, block_size: op.src.layout().shape().block_size, pairs: &op.pairs };
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
        let copy = BlockCopy { layer, block_size: s.block_size, pairs };
        copy.plane(&src.k_plane(), &dst.k_plane())?;
        copy.plane(&src.v_plane(), &dst.v_plane())?;
    }
    Ok(())
}

/// Blocks of one layer, to be copied bit for bit.
struct BlockCopy<'a> {
    layer: usize,
    block_size: usize,
    pairs: &'a [(BlockId, BlockId)],
}

impl BlockCopy<'_> {
    /// Copies codes, and the scales that belong to blocks.
    fn plane(&self, src: &KvPlane, dst: &KvPlane) -> Result<()> {
        self.codes(src, dst, |_| Ok(()))?;
        if let (Some((from, scales)), Some((to, _))) = (src.scales, dst.scales)
            && let (Some(a), Some(b)) = (RowLayout::scales(src), RowLayout::scales(dst))
            && !scales.is_static()
        {
            self.bytes(src.heads, (from, a), (to, b), |_| Ok(()))?;
        }
        Ok(())
    }

    /// Copies codes and applies `change` to each row on the way.
    fn codes(&self, src: &KvPlane, dst: &KvPlane, change: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        self.bytes(
            src.heads,
            (src.storage, RowLayout::codes(src)),
            (dst.storage, RowLayout::codes(dst)),
            change,
        )
    }

    fn bytes(
        &self,
        heads: usize,
        src: (&Arc<dyn Storage>, RowLayout),
        dst: (&Arc<dyn Storage>, RowLayout),
        mut change: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut access = Access::new(&[src.0], &[dst.0])?;
        let mut rows = self.pairs.iter().flat_map(|&(from, to)| {
            rows_of_block(self.layer, from, self.block_size, heads)
                .map(move |at| (src.1.bytes(at), dst.1.bytes(at.block(to))))
        });
        let len = src.1.row_bytes();
        let mut buffer = vec![0f32; len.div_ceil(size_of::<f32>())]; // aligned for every element type
        let row = &mut bytemuck::cast_slice_mut(&mut buffer)[..len];
        if src.0.address() == dst.0.address() {
            let bytes = access.write(dst.0)?;
            rows.try_for_each(|(from, to)| {
                row.copy_from_slice(&bytes[from]);
                change(row)?;
                bytes[to].copy_from_slice(row);
                Ok(())
            })
        } else {
            let mut parts = access.parts();
            let (source, target) = (parts.read(src.0)?, parts.write(dst.0)?);
            rows.try_for_each(|(from, to)| {
                row.copy_from_slice(&source[from]);
                change(row)?;
                target[to].copy_from_slice(row);
                Ok(())
            })
        }
    }
}

/// Rotates quantised keys that have just been copied: in f32, after which they are quantised again.
fn rotate_quantized(copy: &BlockCopy, plane: &KvPlane, mut rotate: impl FnMut(&mut [f32])) -> Result<()> {
    let mut access = Access::new(&[], &locks(plane))?;
    let mut keys = PlaneRowsMut::new(plane, &mut access.parts())?;
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
