//! Copies of whole blocks: within a pool, between pools and memories, and with the keys rotated.

use kvcore::{
    BlockId, CopyBlocks, KvArena, KvFormat, KvPlane, MemoryKind, Result, RotateKeys, SwapBlocks, WritePairs,
};

use super::places::PlaneRows;
use super::plans::Sent;
use super::turn::{Angles, in_f32};
use super::unsupported;
use crate::bindings::types as sys;
use crate::operators::{Tensor, bytes_of, number};
use crate::stream::{Way, Work};

/// Blocks of K or V in a pool.
struct Blocks<'a> {
    plane: KvPlane<'a>,
    dtype: sys::aclDataType,
    block_size: usize,
    on_host: bool,
}

impl<'a> Blocks<'a> {
    fn new(plane: KvPlane<'a>, block_size: usize) -> Result<Self> {
        let KvFormat::Dense(dtype) = plane.format else {
            return Err(unsupported(format!("caches in {}", plane.format.name())));
        };
        let on_host = plane.storage.kind() != MemoryKind::Device;
        Ok(Self { dtype: number(dtype)?, on_host, plane, block_size })
    }

    fn of(arena: &'a KvArena) -> Result<[Self; 2]> {
        let block_size = arena.layout().shape().block_size;
        Ok([Self::new(arena.k_plane(), block_size)?, Self::new(arena.v_plane(), block_size)?])
    }

    fn address(&self, layer: usize, block: usize) -> u64 {
        self.plane.storage.address()
            + (self.plane.strides.at(layer, block, 0, 0) * bytes_of(self.dtype)) as u64
    }

    fn elements(&self) -> usize {
        self.block_size * self.plane.heads * self.plane.dim
    }

    /// Returns a block as `[tokens, heads, dim]`, at an address that need not be in the pool.
    fn view(&self, address: u64) -> Tensor {
        let s = self.plane.strides;
        Tensor::strided(
            address,
            self.dtype,
            &[self.block_size, self.plane.heads, self.plane.dim],
            &[s.token, s.head, 1],
        )
    }

    /// Returns the elements from the first of a block to its last.
    fn span(&self) -> usize {
        self.plane.strides.at(0, 0, self.block_size - 1, self.plane.heads - 1) + self.plane.dim
    }

    /// Returns whether a block is a row of elements without gaps.
    fn is_dense(&self) -> bool {
        self.span() == self.elements()
    }

    /// Returns whether blocks of both have the same order.
    fn is_like(&self, other: &Self) -> bool {
        let (a, b) = (self.plane.strides, other.plane.strides);
        a.token == b.token && a.head == b.head && self.dtype == other.dtype
    }
}

/// Copies a block of one layer.
fn copy_block(
    work: &mut Work<'_>,
    (src, from): (&Blocks<'_>, u64),
    (dst, to): (&Blocks<'_>, u64),
) -> Result<()> {
    let bytes = |blocks: &Blocks<'_>| blocks.span() * bytes_of(blocks.dtype);
    if src.is_like(dst) && src.is_dense() && !(src.on_host && dst.on_host) {
        let way = match (src.on_host, dst.on_host) {
            (true, _) => Way::Up,
            (_, true) => Way::Down,
            _ => Way::Within,
        };
        return work.copy_bytes(to, from, bytes(src), way);
    }
    // Blocks of pinned memory are rearranged on the device.
    let from = if src.on_host {
        let staged = work.bytes(bytes(src))?;
        work.copy_bytes(staged, from, bytes(src), Way::Up)?;
        staged
    } else {
        from
    };
    if !dst.on_host {
        return work.convert(&src.view(from), &dst.view(to));
    }
    let staged = work.bytes(bytes(dst))?;
    if !dst.is_dense() {
        // What lies between the rows stays.
        work.copy_bytes(staged, to, bytes(dst), Way::Up)?;
    }
    work.convert(&src.view(from), &dst.view(staged))?;
    work.copy_bytes(to, staged, bytes(dst), Way::Down)
}

fn copy_all(work: &mut Work<'_>, src: &KvArena, dst: &KvArena, pairs: &WritePairs) -> Result<()> {
    let layers = src.layout().shape().num_layers;
    for (src, dst) in Blocks::of(src)?.iter().zip(&Blocks::of(dst)?) {
        for layer in 0..layers {
            for &(from, to) in pairs.iter() {
                let ends = (src.address(layer, from.index()), dst.address(layer, to.index()));
                copy_block(work, (src, ends.0), (dst, ends.1))?;
            }
        }
    }
    Ok(())
}

pub(super) fn copy_blocks(work: &mut Work<'_>, op: &CopyBlocks) -> Result<()> {
    copy_all(work, &op.arena, &op.arena, &op.pairs)
}

pub(super) fn swap_blocks(work: &mut Work<'_>, op: &SwapBlocks) -> Result<()> {
    copy_all(work, &op.src, &op.dst, &op.pairs)
}

pub(super) fn rotate_keys(work: &mut Work<'_>, op: &RotateKeys) -> Result<()> {
    let ([_, from_v], [_, to_v]) = (Blocks::of(&op.src)?, Blocks::of(&op.dst)?);
    if op.pairs.is_empty() {
        return Ok(());
    }
    for &(from, to) in op.pairs.iter() {
        let ends = (from_v.address(op.layer, from.index()), to_v.address(op.layer, to.index()));
        copy_block(work, (&from_v, ends.0), (&to_v, ends.1))?;
    }
    let rows = |arena: &KvArena| {
        let shape = arena.layout().shape();
        PlaneRows::new(&arena.k_plane(), op.layer, (shape.num_blocks, shape.block_size))
    };
    let (src, dst) = (rows(&op.src)?, rows(&op.dst)?);
    let block_size = op.src.layout().shape().block_size;
    let angles = Angles::of_distance(work, &op.rotation.rope, op.rotation.delta)?;
    let keys = keys_of(work, &src, op.pairs.iter().map(|pair| pair.0), block_size)?;
    let turned = in_f32(work, &keys)?;
    angles.turn(work, &turned, &[1, 1])?;
    work.convert(&turned, &keys)?;
    let index = index_of(work, &dst, op.pairs.iter().map(|pair| pair.1), block_size)?;
    let unit = dst.unit();
    let count = keys.dims().iter().product::<usize>() / unit;
    work.put_rows(&dst.matrix, &index, &keys.reshaped(&[count, unit]))
}

/// Sends up the numbers of all rows of some blocks.
fn index_of(
    work: &mut Work<'_>,
    plane: &PlaneRows,
    blocks: impl Iterator<Item = BlockId>,
    block_size: usize,
) -> Result<Tensor> {
    let slots: Vec<usize> = blocks
        .flat_map(|block| (0..block_size).map(move |token| block.index() * block_size + token))
        .collect();
    let index = plane.geometry.by_slot(slots.into_iter());
    Ok(Sent::send(work, &index, sys::ACL_INT32, &[index.len()])?.tensor)
}

/// Returns the keys of some blocks, `[tokens, heads, dim]`.
fn keys_of(
    work: &mut Work<'_>,
    plane: &PlaneRows,
    blocks: impl ExactSizeIterator<Item = BlockId>,
    block_size: usize,
) -> Result<Tensor> {
    let tokens = blocks.len() * block_size;
    let dims = [tokens, plane.geometry.heads, plane.geometry.dim];
    let index = index_of(work, plane, blocks, block_size)?;
    let keys = work.temporary(plane.dtype(), &dims)?;
    let unit = plane.unit();
    let count = dims.iter().product::<usize>() / unit;
    work.take_rows(&plane.matrix, &index, &keys.reshaped(&[count, unit]))?;
    Ok(keys)
}
