//! Bit-for-bit copies: whole blocks, tensors, and rows of the pool's type.

use bytemuck::{Pod, Zeroable};
use kvcore::{CopyBlocks, CopyTensor, Error, KvArena, KvPlane, Result, SwapBlocks, TensorView, WritePairs};
use smallvec::SmallVec;

use super::places::{Items, Region, Side, blocks, bytes_of, unit_log};
use crate::memory;
use crate::module::{CudaKernel, Module};
use crate::queue::{Launch, Lowering};

const WIDE: CudaKernel = CudaKernel { module: Module::Copy, name: "copy_wide", shared: 0 };
const ROWS: CudaKernel = CudaKernel { module: Module::Copy, name: "copy_rows", shared: 0 };
const TENSOR: CudaKernel = CudaKernel { module: Module::Copy, name: "copy_tensor", shared: 0 };

/// Threads per block, as declared in `copy.cu`.
const THREADS: u32 = 256;

/// The number of units that each thread has in flight, as declared in `copy.cu`. A team of threads copies this
/// many short items at once, or one long item.
const DEPTH: u64 = 4;

/// The maximum number of axes outside the items of a tensor copy.
const AXES: usize = 5;

/// The maximum number of [`CopyPart`]s per launch.
const PARTS: usize = 4;

#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct CopyAxes {
    n: [u32; AXES],
    pad: u32,
    src: [i64; AXES],
    dst: [i64; AXES],
}

/// A part of a launch: the items of one plane. An item consists of a few runs of bytes that are contiguous on
/// both sides.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct CopyPart {
    src: Side,
    dst: Side,
    n1: u32,
    n0: u32,
    src1: i64,
    src0: i64,
    dst1: i64,
    dst0: i64,
    run: u32,
    units: u32,
    unit_log: u32,
    team_log: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CopyArgs {
    items: Items,
    axes: CopyAxes,
    parts: [CopyPart; PARTS],
}

/// An axis inside an item: its extent, and its strides on both sides in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct InnerAxis {
    pub(super) n: usize,
    pub(super) src: i64,
    pub(super) dst: i64,
}

impl CopyPart {
    /// Describes items that consist of runs of `run` bytes along two axes. `more` contains the strides of the
    /// axes outside the item.
    pub(super) fn new(src: Side, dst: Side, axes: [InnerAxis; 2], run: i64, more: &[i64]) -> Result<Self> {
        let mut run = run;
        let mut left: SmallVec<[InnerAxis; 2]> = axes.into_iter().filter(|axis| axis.n != 1).collect();
        left.sort_by_key(|axis| std::cmp::Reverse(axis.dst));
        // Merge runs that are adjacent on both sides.
        while let Some(axis) = left.last().copied()
            && axis.src == run
            && axis.dst == run
        {
            run *= axis.n as i64;
            left.pop();
        }
        let one = InnerAxis { n: 1, src: 0, dst: 0 };
        let inner = left.pop().unwrap_or(one);
        let outer = left.pop().unwrap_or(one);
        let distances = [run, outer.src, outer.dst, inner.src, inner.dst];
        let unit_log = unit_log(
            src.places().into_iter().chain(dst.places()).chain(distances).chain(more.iter().copied()),
        );
        let narrow =
            |n: i64| u32::try_from(n).map_err(|_| Error::Overflow { what: "bytes of one copied item" });
        let (in_run, n1, n0) = (narrow(run >> unit_log)?, narrow(outer.n as i64)?, narrow(inner.n as i64)?);
        let units = narrow(i64::from(in_run).saturating_mul(i64::from(n1)).saturating_mul(i64::from(n0)))?;
        let team_log = units.next_power_of_two().clamp(1, THREADS).ilog2();
        Ok(Self {
            src,
            dst,
            n1,
            n0,
            src1: outer.src,
            src0: inner.src,
            dst1: outer.dst,
            dst0: inner.dst,
            run: in_run,
            units,
            unit_log,
            team_log,
        })
    }

    /// Returns the number of thread blocks that copy `count` items.
    fn blocks(&self, count: u32) -> u32 {
        let teams = u64::from(THREADS >> self.team_log);
        let step = if self.units > 2 << self.team_log { 1 } else { DEPTH };
        blocks(u64::from(count), teams * step)
    }
}

/// Launches a copy of several parts, which all have the same items and layers.
pub(super) fn run(to: &mut Lowering<'_>, items: Items, layers: usize, parts: &[CopyPart]) {
    launch(to, items, CopyAxes::default(), layers, parts, None);
}

fn launch(
    to: &mut Lowering<'_>,
    items: Items,
    axes: CopyAxes,
    layers: usize,
    parts: &[CopyPart],
    kernel: Option<CudaKernel>,
) {
    let parts: SmallVec<[CopyPart; PARTS]> = parts.iter().copied().filter(|part| part.units > 0).collect();
    let grid = parts.iter().map(|part| part.blocks(items.count)).max().unwrap_or(0);
    let wide = parts.iter().all(|part| part.unit_log == 4);
    let kernel = kernel.unwrap_or(if wide { WIDE } else { ROWS });
    let mut args = CopyArgs { items, axes, parts: [CopyPart::default(); PARTS] };
    args.parts[..parts.len()].copy_from_slice(&parts);
    to.launch(Launch::new(kernel, [grid, layers as u32, parts.len() as u32], THREADS, 0, &args));
}

/// Describes copies of whole blocks of one plane, and of their scales if blocks have their own scales.
fn plane(src: &KvPlane, dst: &KvPlane, layer: usize, block_size: usize) -> Result<SmallVec<[CopyPart; 2]>> {
    let of = |from: Region, to: Region, run: i64| {
        let (tokens, heads) = (
            InnerAxis { n: block_size, src: from.side.token, dst: to.side.token },
            InnerAxis { n: src.heads, src: from.head, dst: to.head },
        );
        CopyPart::new(from.side, to.side, [tokens, heads], run, &[])
    };
    let codes = bytes_of(src.format.storage_dtype(), src.dim);
    let mut parts = SmallVec::new();
    parts.push(of(Region::plane(src, layer), Region::plane(dst, layer), codes)?);
    if let (Some((_, scales)), Some(from), Some(to)) =
        (src.scales, Region::scales(src, layer), Region::scales(dst, layer))
        && !scales.is_static()
    {
        parts.push(of(from, to, bytes_of(scales.dtype, scales.per_row))?);
    }
    Ok(parts)
}

fn all_layers(to: &mut Lowering<'_>, src: &KvArena, dst: &KvArena, pairs: &WritePairs) -> Result<()> {
    let s = src.layout().shape();
    let mut parts = plane(&src.k_plane(), &dst.k_plane(), 0, s.block_size)?;
    parts.extend(plane(&src.v_plane(), &dst.v_plane(), 0, s.block_size)?);
    let items = Items::pairs(to, pairs, s.block_size)?;
    run(to, items, s.num_layers, &parts);
    Ok(())
}

pub(super) fn copy_blocks(to: &mut Lowering<'_>, op: &CopyBlocks) -> Result<()> {
    all_layers(to, &op.arena, &op.arena, &op.pairs)
}

pub(super) fn swap_blocks(to: &mut Lowering<'_>, op: &SwapBlocks) -> Result<()> {
    all_layers(to, &op.src, &op.dst, &op.pairs)
}

pub(super) fn copy_tensor(to: &mut Lowering<'_>, op: &CopyTensor) -> Result<()> {
    if op.dst.is_empty() {
        return Ok(());
    }
    if memory::of(to.device(), op.src.storage()).is_err() {
        return memory::copy_from_peer(to.device(), to.stream().raw, op);
    }
    let dtype = op.src.dtype();
    let dense = |view: &TensorView| view.strides().last().is_none_or(|&stride| stride == 1);
    let stride = |view: &TensorView, axis: usize| bytes_of(dtype, view.strides()[axis]);
    let shape = op.src.shape();
    // A run is the whole last axis if it is dense on both sides, otherwise a single element.
    let outer = match shape.last() {
        Some(&n) if n == 1 || (dense(&op.src) && dense(&op.dst)) => shape.len() - 1,
        _ => shape.len(),
    };
    let run = bytes_of(dtype, shape[outer..].iter().product());
    let mut axes: Vec<InnerAxis> = (0..outer)
        .map(|axis| InnerAxis { n: shape[axis], src: stride(&op.src, axis), dst: stride(&op.dst, axis) })
        .filter(|axis| axis.n != 1)
        .collect();
    let one = InnerAxis { n: 1, src: 0, dst: 0 };
    // Up to two axes are inside an item: the innermost axes of the destination.
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.dst));
    let inner =
        [axes.pop().unwrap_or(one), if axes.len() > AXES - 1 { axes.pop().unwrap_or(one) } else { one }];
    let more: SmallVec<[i64; 12]> = axes.iter().flat_map(|axis| [axis.src, axis.dst]).collect();
    let side = |view: &TensorView| Side {
        address: view.storage().address() + bytes_of(dtype, view.offset()) as u64,
        ..Side::default()
    };
    let part = CopyPart::new(side(&op.src), side(&op.dst), inner, run, &more)?;
    let mut outer = CopyAxes { n: [1; AXES], ..CopyAxes::default() };
    for (i, axis) in axes.iter().enumerate() {
        outer.n[i] =
            u32::try_from(axis.n).map_err(|_| Error::Overflow { what: "extent of a tensor copy" })?;
        (outer.src[i], outer.dst[i]) = (axis.src, axis.dst);
    }
    let count = axes.iter().map(|axis| axis.n).product();
    let items = Items::new(super::places::ItemKind::Rows, 0, count, 1)?;
    launch(to, items, outer, 1, &[part], Some(TENSOR));
    Ok(())
}
