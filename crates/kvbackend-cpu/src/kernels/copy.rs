//! Whole blocks: copies inside an arena and between arenas, and copies with keys rotated.

use std::sync::Arc;

use kvcore::kernels::{CopyBlocks, RotateKeys, Rotation, SwapBlocks};
use kvcore::{BlockId, KvArena, KvLayout, PlaneStrides, Result, Storage};

use super::Rotator;
use crate::element::{Element, dispatch, elements, elements_mut};
use crate::memory::Access;

pub(crate) fn copy_blocks(op: &CopyBlocks) -> Result<()> {
    let layers = 0..op.arena.layout().shape().num_layers;
    copy(&op.arena, &op.arena, layers, &op.pairs, None)
}

pub(crate) fn swap_blocks(op: &SwapBlocks) -> Result<()> {
    copy(&op.src, &op.dst, 0..op.src.layout().shape().num_layers, &op.pairs, None)
}

pub(crate) fn rotate_keys(op: &RotateKeys) -> Result<()> {
    copy(&op.src, &op.dst, op.layer..op.layer + 1, &op.pairs, Some(&op.rotation))
}

/// One plane of one arena.
struct Side<'a> {
    storage: &'a Arc<dyn Storage>,
    strides: PlaneStrides,
}

fn copy(
    src: &KvArena,
    dst: &KvArena,
    layers: std::ops::Range<usize>,
    pairs: &[(BlockId, BlockId)],
    rotation: Option<&Rotation>,
) -> Result<()> {
    let (a, b) = (src.layout(), dst.layout());
    let (k_dim, v_dim) = (a.shape().k_dim, a.shape().v_dim);
    let k = (
        Side { storage: src.k(), strides: a.k_strides() },
        Side { storage: dst.k(), strides: b.k_strides() },
    );
    let v = (
        Side { storage: src.v(), strides: a.v_strides() },
        Side { storage: dst.v(), strides: b.v_strides() },
    );
    dispatch!(a.shape().dtype, T => {
        for layer in layers {
            copy_plane::<T>(a, &k.0, &k.1, layer, k_dim, pairs, rotation)?;
            copy_plane::<T>(a, &v.0, &v.1, layer, v_dim, pairs, None)?;
        }
        Ok(())
    })
}

fn copy_plane<T: Element>(
    layout: &KvLayout,
    src: &Side,
    dst: &Side,
    layer: usize,
    dim: usize,
    pairs: &[(BlockId, BlockId)],
    rotation: Option<&Rotation>,
) -> Result<()> {
    let s = layout.shape();
    let mut access = Access::new(&[src.storage], &[dst.storage])?;
    let mut rotator = rotation.map(|r| Rotator::new(&r.rope, [r.delta])).transpose()?;
    let mut row = vec![T::zeroed(); dim];
    for &(from, to) in pairs {
        for token in 0..s.block_size {
            for head in 0..s.kv_heads {
                let at = |block: BlockId, p: &PlaneStrides| {
                    layer * p.layer + block.index() * p.block + token * p.token + head * p.head
                };
                let (from, to) = (at(from, &src.strides), at(to, &dst.strides));
                row.copy_from_slice(&elements::<T>(access.read(src.storage)?)?[from..from + dim]);
                if let (Some(rotator), Some(rotation)) = (&mut rotator, rotation) {
                    rotator.rotate_elements(&mut row, rotation.delta, 1.0);
                }
                elements_mut::<T>(access.write(dst.storage)?)?[to..to + dim].copy_from_slice(&row);
            }
        }
    }
    Ok(())
}
