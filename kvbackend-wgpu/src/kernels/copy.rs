//! Bit-for-bit copies of rows.

use std::sync::Arc;

use kvcore::{
    BlockId, CopyBlocks, CopyTensor, Error, KvLayout, KvPlane, PlaneStrides, Result, SwapBlocks, TensorView,
};
use smallvec::{SmallVec, smallvec};
use wgpu::BufferUsages;

use super::places::{PlaceBuffer, RowAxis, RowItems, RowPlace, SIDES, Windowed, byte_of, windows};
use crate::device::GpuDevice;
use crate::memory;
use crate::pipeline::Shader;
use crate::queue::Dispatch;

/// The number of bytes that one thread of `copy_units.wgsl` copies.
const UNIT: u64 = 16;

/// The number of threads per workgroup, in both kernels.
const THREADS: u64 = 256;

/// The maximum number of threads per dispatch. A thread's index has 32 bits.
const MOST_THREADS: u64 = 1 << 31;

/// A copy of rows. Offsets, strides and row lengths are in bytes; a row is dense in both buffers.
pub(super) struct Copy {
    pub(super) source: wgpu::Buffer,
    pub(super) dest: wgpu::Buffer,
    pub(super) rows: RowItems,
    /// The number of bytes per row.
    pub(super) row: u64,
}

/// Returns the offsets of a row in the source and in the destination. The offsets of scales are unused.
pub(super) fn place(source: u64, dest: u64) -> RowPlace {
    let mut place = [0; SIDES];
    (place[0], place[1]) = (source, dest);
    place
}

impl Copy {
    /// Joins rows that are adjacent in both buffers. Sorts the axes by their stride in the destination,
    /// largest first.
    fn joined(mut self) -> Self {
        self.rows.axes.retain(|axis| axis.n != 1);
        self.rows.axes.sort_by_key(|axis| std::cmp::Reverse(axis.strides[1]));
        while let Some(axis) = self.rows.axes.last().copied()
            && axis.strides[..2] == [self.row; 2]
        {
            self.row *= axis.n as u64;
            self.rows.axes.pop();
        }
        self
    }

    pub(super) fn dispatches(self, device: &GpuDevice) -> Result<Vec<Dispatch>> {
        if self.row == 0 || self.rows.items.is_empty() || self.rows.axes.iter().any(|axis| axis.n == 0) {
            return Ok(Vec::new());
        }
        let mut work = Vec::new();
        for Self { source, dest, rows, row } in self.joined().in_pieces(device) {
            let sides = [source, dest].map(|buffer| PlaceBuffer { buffer, bits: 8, row });
            for part in windows(device, rows.with_axes(3), &sides)? {
                work.extend(run(device, &part, row)?);
            }
        }
        Ok(work)
    }

    /// Divides rows that are longer than a binding into pieces of equal length and a shorter last piece.
    fn in_pieces(self, device: &GpuDevice) -> Vec<Self> {
        let piece = device.binding / 2 - device.binding / 2 % UNIT;
        if self.row <= piece {
            return vec![self];
        }
        let (pieces, rest) = (self.row / piece, self.row % piece);
        let mut left =
            Self { source: self.source.clone(), dest: self.dest.clone(), rows: self.rows.clone(), row: rest };
        for place in &mut left.rows.items {
            place[..2].iter_mut().for_each(|at| *at += pieces * piece);
        }
        let mut whole = Self { row: piece, ..self };
        whole.rows.axes.push(RowAxis { n: pieces as usize, strides: place(piece, piece) });
        [whole, left].into_iter().filter(|copy| copy.row > 0).collect()
    }
}

/// Returns whether all offsets, strides and lengths are multiples of [`UNIT`].
fn in_units(part: &Windowed, row: u64) -> bool {
    let whole = |places: &[u32]| places[..2].iter().all(|&at| u64::from(at).is_multiple_of(UNIT));
    row.is_multiple_of(UNIT)
        && part.items.iter().all(|(places, _)| whole(places))
        && part.axes.iter().all(|axis| axis.strides[..2].iter().all(|stride| stride.is_multiple_of(UNIT)))
}

fn run(device: &GpuDevice, part: &Windowed, row: u64) -> Result<Vec<Dispatch>> {
    let units = in_units(part, row);
    let (shader, unit) = if units { (Shader::CopyUnits, UNIT) } else { (Shader::CopyBytes, 1) };
    let mut axes: SmallVec<[RowAxis; 3]> = part.axes.clone();
    while axes.len() < 3 {
        axes.insert(0, RowAxis { n: 1, strides: [0; SIDES] });
    }
    // The number of threads per row. A row that starts inside a word needs one more thread.
    let per_row = if units { row / UNIT } else { row.div_ceil(4) + 1 };
    let per_item = axes.iter().map(|axis| axis.n as u64).product::<u64>() * per_row;
    if per_item > MOST_THREADS {
        return Err(Error::Overflow { what: "bytes of one copied item" });
    }
    let pipeline = device.pipeline(shader, &[], "")?;
    let mut work = Vec::new();
    for items in part.items.chunks((MOST_THREADS / per_item).max(1) as usize) {
        let mut args = vec![items.len() as u32];
        args.extend(axes.iter().map(|axis| axis.n as u32));
        args.extend([per_row, row / unit].map(|length| length as u32));
        for side in 0..2 {
            args.extend(axes.iter().map(|axis| (axis.strides[side] / unit) as u32));
        }
        for (places, _) in items {
            args.extend(places[..2].iter().map(|&at| at / unit as u32));
        }
        work.push(Dispatch {
            pipeline: Arc::clone(&pipeline),
            args,
            bindings: part.bindings.clone(),
            groups: (items.len() as u64 * per_item).div_ceil(THREADS),
            keeps: None,
        });
    }
    Ok(work)
}

/// Copies host bytes to a buffer, starting at byte `at`. The bytes go through a separate buffer, because the
/// device's queue only writes whole words.
pub(crate) fn bytes(device: &GpuDevice, bytes: &[u8], to: &wgpu::Buffer, at: usize) -> Result<Vec<Dispatch>> {
    let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % 4);
    let source =
        device.buffer("bytes", bytes.len() as u64, BufferUsages::STORAGE | BufferUsages::COPY_DST)?;
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    for (at, words) in [(0, whole), (whole.len() as u64, &last[..rest.len().next_multiple_of(4)])] {
        if !words.is_empty() {
            device.fill(&source, at, words).map_err(|reason| device.refusal(reason))?;
        }
    }
    let rows = RowItems { items: vec![place(0, at as u64)], numbers: vec![0], axes: SmallVec::new() };
    Copy { source, dest: to.clone(), rows, row: bytes.len() as u64 }.dispatches(device)
}

/// Copies whole blocks of K or V in the given layers, with their scales if these are stored per block.
pub(super) fn blocks(
    device: &Arc<GpuDevice>,
    (src, dst): (&KvPlane, &KvPlane),
    layers: std::ops::Range<usize>,
    block_size: usize,
    pairs: &[(BlockId, BlockId)],
) -> Result<Vec<Dispatch>> {
    let mut work = Vec::new();
    let dtype = src.format.storage_dtype();
    let codes = (src.storage, src.strides, dst.storage, dst.strides, dtype, src.dim);
    let scales = src.scales.zip(dst.scales).filter(|((_, scales), _)| !scales.is_static());
    let scales = scales.map(|((from, a), (to, b))| (from, a.strides, to, b.strides, a.dtype, a.per_row));
    for (from, a, to, b, dtype, row) in [Some(codes), scales].into_iter().flatten() {
        let at = |strides: PlaneStrides, layer: usize, block: BlockId| {
            byte_of(dtype, strides.at(layer, block.index(), 0, 0))
        };
        let items: Vec<RowPlace> = layers
            .clone()
            .flat_map(|layer| {
                pairs.iter().map(move |&(src, dst)| place(at(a, layer, src), at(b, layer, dst)))
            })
            .collect();
        let axis = |n, a, b| RowAxis { n, strides: place(byte_of(dtype, a), byte_of(dtype, b)) };
        let axes = smallvec![axis(block_size, a.token, b.token), axis(src.heads, a.head, b.head)];
        let rows = RowItems { numbers: vec![0; items.len()], items, axes };
        let (source, dest) = (memory::of(device, from)?.buffer()?, memory::of(device, to)?.buffer()?);
        work.extend(Copy { source, dest, rows, row: byte_of(dtype, row) }.dispatches(device)?);
    }
    Ok(work)
}

fn all_blocks(
    device: &Arc<GpuDevice>,
    planes: &[(KvPlane, KvPlane)],
    layout: &KvLayout,
    pairs: &[(BlockId, BlockId)],
) -> Result<Vec<Dispatch>> {
    let s = layout.shape();
    let mut work = Vec::new();
    for (src, dst) in planes {
        work.extend(blocks(device, (src, dst), 0..s.num_layers, s.block_size, pairs)?);
    }
    Ok(work)
}

pub(crate) fn copy_blocks(device: &Arc<GpuDevice>, op: &CopyBlocks) -> Result<Vec<Dispatch>> {
    let (k, v) = (op.arena.k_plane(), op.arena.v_plane());
    all_blocks(device, &[(k, k), (v, v)], op.arena.layout(), &op.pairs)
}

pub(crate) fn swap_blocks(device: &Arc<GpuDevice>, op: &SwapBlocks) -> Result<Vec<Dispatch>> {
    let (src, dst) = (&op.src, &op.dst);
    let planes = [(src.k_plane(), dst.k_plane()), (src.v_plane(), dst.v_plane())];
    all_blocks(device, &planes, src.layout(), &op.pairs)
}

pub(crate) fn copy_tensor(device: &Arc<GpuDevice>, op: &CopyTensor) -> Result<Vec<Dispatch>> {
    if op.dst.is_empty() {
        return Ok(Vec::new());
    }
    let dtype = op.src.dtype();
    let shape = op.src.shape();
    let strides = |view: &TensorView, axis: usize| byte_of(dtype, view.strides()[axis]);
    let dense = |view: &TensorView| view.strides().last().is_none_or(|&stride| stride == 1);
    // A row is the whole last axis if that axis is dense on both sides, otherwise a single element.
    let outer = match shape.last() {
        Some(&n) if n == 1 || (dense(&op.src) && dense(&op.dst)) => shape.len() - 1,
        _ => shape.len(),
    };
    let axes = (0..outer)
        .map(|axis| RowAxis {
            n: shape[axis],
            strides: place(strides(&op.src, axis), strides(&op.dst, axis)),
        })
        .collect();
    let items = vec![place(byte_of(dtype, op.src.offset()), byte_of(dtype, op.dst.offset()))];
    let row = byte_of(dtype, shape[outer..].iter().product());
    let buffer = |view: &TensorView| memory::of(device, view.storage())?.buffer();
    let (source, dest) = (buffer(&op.src)?, buffer(&op.dst)?);
    Copy { source, dest, rows: RowItems { items, numbers: vec![0], axes }, row }.dispatches(device)
}
