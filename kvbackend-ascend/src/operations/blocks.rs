//! Copies of whole blocks: within a pool, between pools and other memory, with rotated keys, and to another
//! format.

use std::sync::Arc;

use kvcore::{
    BlockId, CopyBlocks, KvArena, KvFormat, KvPlane, MemoryKind, PlaneStrides, Result, RotateKeys, Storage,
    SwapBlocks, WritePairs,
};

use super::codes;
use super::geometry::{RowGeometry, RowNumbers};
use super::matrix::PlaneMatrix;
use super::plans::StepWork;
use super::sent::SentTensor;
use crate::bindings::types as sys;
use crate::errors::unsupported;
use crate::operators::{Tensor, bytes_of, number};
use crate::queue::{CopyDirection, Work};

/// The blocks of K or V in a pool, or of their scales.
struct Blocks<'a> {
    storage: &'a Arc<dyn Storage>,
    strides: PlaneStrides,
    heads: usize,
    dim: usize,
    dtype: sys::aclDataType,
    block_size: usize,
    on_host: bool,
}

impl<'a> Blocks<'a> {
    /// Describes a plane's blocks, and its scales' blocks if it has scales.
    fn of_plane(plane: &KvPlane<'a>, block_size: usize) -> Result<Vec<Self>> {
        let dtype = match plane.format {
            KvFormat::Dense(dtype) => number(dtype)?,
            KvFormat::Int8 { .. } => sys::ACL_INT8,
            other => return Err(unsupported(format!("caches in {}", other.name()))),
        };
        let blocks = |storage: &'a Arc<dyn Storage>, strides, dim, dtype| {
            let on_host = storage.kind() != MemoryKind::Device;
            Self { storage, strides, heads: plane.heads, dim, dtype, block_size, on_host }
        };
        let scales = plane
            .scales
            .map(|(storage, scales)| blocks(storage, scales.strides, scales.per_row, sys::ACL_FLOAT16));
        Ok([blocks(plane.storage, plane.strides, plane.dim, dtype)].into_iter().chain(scales).collect())
    }

    fn of(arena: &'a KvArena) -> Result<Vec<Self>> {
        let block_size = arena.layout().shape().block_size;
        let mut all = Self::of_plane(&arena.k_plane(), block_size)?;
        all.extend(Self::of_plane(&arena.v_plane(), block_size)?);
        Ok(all)
    }

    fn address(&self, layer: usize, block: usize) -> u64 {
        self.storage.address() + (self.strides.at(layer, block, 0, 0) * bytes_of(self.dtype)) as u64
    }

    fn elements(&self) -> usize {
        self.block_size * self.heads * self.dim
    }

    /// Returns a view `[tokens, heads, dim]` of the block at `address`, either in the pool or in a copy of
    /// the block.
    fn view(&self, address: u64) -> Tensor {
        let s = self.strides;
        let dims = [self.block_size, self.heads, self.dim];
        Tensor::strided(address, self.dtype, &dims, &[s.token, s.head, 1])
    }

    /// Returns the number of elements that a block spans, including gaps.
    fn span(&self) -> usize {
        self.strides.at(0, 0, self.block_size - 1, self.heads - 1) + self.dim
    }

    /// Returns whether a block's elements have no gaps between them.
    fn is_dense(&self) -> bool {
        self.span() == self.elements()
    }

    /// Reads a block into a dense tensor `[tokens, heads, dim]`.
    fn load(&self, work: &mut Work<'_>, layer: usize, block: BlockId) -> Result<Tensor> {
        let (at, bytes) = (self.address(layer, block.index()), self.span() * bytes_of(self.dtype));
        let from = if self.on_host {
            let staged = work.bytes(bytes)?;
            work.copy_bytes(staged, at, bytes, CopyDirection::ToDevice)?;
            staged
        } else {
            at
        };
        let rows = work.temporary(self.dtype, &[self.block_size, self.heads, self.dim])?;
        work.convert(&self.view(from), &rows)?;
        Ok(rows)
    }

    /// Writes a dense tensor `[tokens, heads, dim]` to a block.
    fn store(&self, work: &mut Work<'_>, layer: usize, block: BlockId, rows: &Tensor) -> Result<()> {
        let rows = rows.reshaped(&[self.block_size, self.heads, self.dim]);
        let (at, bytes) = (self.address(layer, block.index()), self.span() * bytes_of(self.dtype));
        if !self.on_host {
            return work.convert(&rows, &self.view(at));
        }
        let staged = work.bytes(bytes)?;
        if !self.is_dense() {
            // The bytes between the rows stay unchanged.
            work.copy_bytes(staged, at, bytes, CopyDirection::ToDevice)?;
        }
        work.convert(&rows, &self.view(staged))?;
        work.copy_bytes(at, staged, bytes, CopyDirection::ToHost)
    }

    /// Returns whether `self` and `other` store a block's elements with the same type and in the same order.
    fn is_like(&self, other: &Self) -> bool {
        let (a, b) = (self.strides, other.strides);
        a.token == b.token && a.head == b.head && self.dtype == other.dtype
    }
}

/// Copies a block of one layer, from one address to another.
fn copy_block(
    work: &mut Work<'_>,
    (src, from): (&Blocks<'_>, u64),
    (dst, to): (&Blocks<'_>, u64),
) -> Result<()> {
    let bytes = |blocks: &Blocks<'_>| blocks.span() * bytes_of(blocks.dtype);
    if src.is_like(dst) && src.is_dense() && !(src.on_host && dst.on_host) {
        let way = match (src.on_host, dst.on_host) {
            (true, _) => CopyDirection::ToDevice,
            (_, true) => CopyDirection::ToHost,
            _ => CopyDirection::OnDevice,
        };
        return work.copy_bytes(to, from, bytes(src), way);
    }
    // If a block is in pinned memory, its elements are rearranged on the device.
    let from = if src.on_host {
        let staged = work.bytes(bytes(src))?;
        work.copy_bytes(staged, from, bytes(src), CopyDirection::ToDevice)?;
        staged
    } else {
        from
    };
    if !dst.on_host {
        return work.convert(&src.view(from), &dst.view(to));
    }
    let staged = work.bytes(bytes(dst))?;
    if !dst.is_dense() {
        // The bytes between the rows stay unchanged.
        work.copy_bytes(staged, to, bytes(dst), CopyDirection::ToDevice)?;
    }
    work.convert(&src.view(from), &dst.view(staged))?;
    work.copy_bytes(to, staged, bytes(dst), CopyDirection::ToHost)
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

pub(super) fn rotate_keys(work: &mut StepWork<'_, '_>, op: &RotateKeys) -> Result<()> {
    let block_size = op.src.layout().shape().block_size;
    let values = |arena| Blocks::of_plane(arena, block_size);
    let (from, to) = (op.src.v_plane(), op.dst.v_plane());
    if op.pairs.is_empty() {
        return Ok(());
    }
    for (src, dst) in values(&from)?.iter().zip(&values(&to)?) {
        for &(from, to) in op.pairs.iter() {
            let ends = (src.address(op.layer, from.index()), dst.address(op.layer, to.index()));
            copy_block(work, (src, ends.0), (dst, ends.1))?;
        }
    }
    let [src, dst] = [&op.src, &op.dst].map(|arena| PlaneMatrix::new(arena, &arena.k_plane(), op.layer));
    let (src, dst) = (src?, dst?);
    let angles = work.angles_of_distance(&op.rotation.rope, op.rotation.delta)?.all();
    let mut numbers = BlockNumbers::new(&op.pairs, block_size);
    let places = numbers.of(work, &src, false)?;
    let keys = src.read(work, &places)?;
    let rotated = work.in_f32(&keys)?;
    angles.rotate(work, &rotated, &[1, 1])?;
    let places = numbers.of(work, &dst, true)?;
    dst.write(work, &places, &rotated)
}

/// Converts blocks of `src` to the format of `dst`, in all layers.
pub(super) fn convert_all(
    work: &mut StepWork<'_, '_>,
    src: &KvArena,
    dst: &KvArena,
    pairs: &WritePairs,
) -> Result<()> {
    if pairs.is_empty() {
        return Ok(());
    }
    let shape = src.layout().shape();
    if src.storages().chain(dst.storages()).any(|storage| storage.kind() != MemoryKind::Device) {
        return convert_by_block(work, src, dst, pairs);
    }
    let mut numbers = BlockNumbers::new(pairs, shape.block_size);
    for layer in 0..shape.num_layers {
        for planes in [[src.k_plane(), dst.k_plane()], [src.v_plane(), dst.v_plane()]] {
            let from = PlaneMatrix::new(src, &planes[0], layer)?;
            let to = PlaneMatrix::new(dst, &planes[1], layer)?;
            let places = [numbers.of(work, &from, false)?, numbers.of(work, &to, true)?];
            let mark = work.mark();
            let rows = from.read(work, &places[0])?;
            to.write(work, &places[1], &rows)?;
            work.free_since(mark);
        }
    }
    Ok(())
}

/// Converts one block at a time, for arenas in pinned memory.
fn convert_by_block(
    work: &mut StepWork<'_, '_>,
    src: &KvArena,
    dst: &KvArena,
    pairs: &WritePairs,
) -> Result<()> {
    let shape = src.layout().shape();
    for planes in [[src.k_plane(), dst.k_plane()], [src.v_plane(), dst.v_plane()]] {
        let (from, to) = (
            Blocks::of_plane(&planes[0], shape.block_size)?,
            Blocks::of_plane(&planes[1], shape.block_size)?,
        );
        for layer in 0..shape.num_layers {
            for &(a, b) in pairs.iter() {
                let mark = work.mark();
                let rows = from[0].load(work, layer, a)?;
                let rows = match from.get(1) {
                    None => work.in_f32(&rows)?,
                    Some(scales) => {
                        let scales = scales.load(work, layer, a)?;
                        codes::decoded(work, &rows, &scales)?
                    }
                };
                let Some(of_scales) = to.get(1) else {
                    to[0].store(work, layer, b, &rows)?;
                    work.free_since(mark);
                    continue;
                };
                let (codes, scales) = codes::encoded(work, &rows, to[0].dim / of_scales.dim)?;
                to[0].store(work, layer, b, &codes)?;
                of_scales.store(work, layer, b, &scales)?;
                work.free_since(mark);
            }
        }
    }
    Ok(())
}

/// The row indices of the blocks in `pairs`, sent once per geometry.
struct BlockNumbers<'a> {
    pairs: &'a WritePairs,
    block_size: usize,
    sent: Vec<(RowGeometry, bool, SentTensor)>,
}

impl<'a> BlockNumbers<'a> {
    fn new(pairs: &'a WritePairs, block_size: usize) -> Self {
        Self { pairs, block_size, sent: Vec::new() }
    }

    /// Returns the row indices for the pairs' sources, or for their destinations.
    fn of(&mut self, work: &mut Work<'_>, plane: &PlaneMatrix, written: bool) -> Result<RowNumbers> {
        RowNumbers::make(plane.geometries(), |geometry| {
            let sent = self.sent.iter().find(|(known, end, _)| (*known, *end) == (geometry, written));
            if let Some((_, _, sent)) = sent {
                return Ok(sent.tensor.clone());
            }
            let block = |&(from, to): &(BlockId, BlockId)| if written { to } else { from };
            let slots: Vec<usize> = (self.pairs.iter().map(block))
                .flat_map(|block| (0..self.block_size).map(move |token| (block, token)))
                .map(|(block, token)| block.index() * self.block_size + token)
                .collect();
            let sent = SentTensor::index(work, &geometry.by_slot(slots.into_iter()))?;
            self.sent.push((geometry, written, sent.clone()));
            Ok(sent.tensor)
        })
    }
}
