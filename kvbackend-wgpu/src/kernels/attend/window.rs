//! The parts of K, V, their scales, queries and outputs that a dispatch binds.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{Attend, Error, KvPlane, PlaneStrides, Result, TensorView};
use smallvec::SmallVec;
use wgpu::Buffer;

use crate::device::{GpuDevice, NAME};
use crate::memory;
use crate::pipeline::Binding;

/// The windows that contain a block: the index of the window for K, for V, for K's scales and for V's scales.
pub(super) type WindowKey = [u32; 4];

/// K, V, or the scales of one of them, with the division of its blocks into windows.
struct WindowedRole {
    buffer: Buffer,
    bits: u64,
    strides: PlaneStrides,
    /// The number of elements that a block spans in one layer.
    span: u64,
    /// The number of blocks per window.
    blocks: usize,
}

/// The division of a layer's blocks into windows.
pub(super) struct PlaneWindows {
    planes: [Option<WindowedRole>; 4],
    align: u64,
    num_blocks: usize,
    one: bool,
}

impl PlaneWindows {
    /// Divides the blocks into windows for a call.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if a block spans more than the device can bind at once.
    pub(super) fn of(device: &Arc<GpuDevice>, op: &Attend) -> Result<Self> {
        let s = op.arena.layout().shape();
        let (k, v) = (op.arena.k_plane(), op.arena.v_plane());
        let align = device.binding_align();
        let plane = |buffer, bits, strides: PlaneStrides, heads: usize, row: usize| {
            let span = ((s.block_size - 1) * strides.token + (heads - 1) * strides.head + row) as u64;
            let limit = (device.binding - align - 4) * 8 / bits;
            if span > limit {
                let what = format!(
                    "blocks that reach over {} bytes: the device can bind only {} at once; use fewer tokens per block",
                    span * bits / 8,
                    device.binding
                );
                return Err(Error::Unsupported { backend: NAME, what });
            }
            let more = (limit - span).checked_div(strides.block as u64).unwrap_or(u64::MAX);
            let blocks = usize::try_from(more).unwrap_or(usize::MAX).saturating_add(1);
            Ok(WindowedRole { buffer, bits, strides, span, blocks })
        };
        let codes = |p: &KvPlane| {
            let buffer = memory::of(device, p.storage)?.buffer()?;
            plane(buffer, p.format.storage_dtype().bits() as u64, p.strides, p.heads, p.dim)
        };
        let scales = |p: &KvPlane| {
            let of = |(storage, layout): (_, kvcore::ScaleLayout)| {
                let buffer = memory::of(device, storage)?.buffer()?;
                plane(buffer, layout.dtype.bits() as u64, layout.strides, p.heads, layout.per_row)
            };
            p.scales.map(of).transpose()
        };
        let planes = [Some(codes(&k)?), Some(codes(&v)?), scales(&k)?, scales(&v)?];
        let one = planes.iter().flatten().all(|plane| plane.blocks >= s.num_blocks);
        Ok(Self { planes, align, num_blocks: s.num_blocks, one })
    }

    /// Returns the number of blocks per window for each plane, or `None` if every layer is bound as a whole.
    pub(super) fn blocks(&self) -> Option<[usize; 4]> {
        let of = |plane: &Option<WindowedRole>| plane.as_ref().map_or(0, |plane| plane.blocks);
        (!self.one).then(|| std::array::from_fn(|i| of(&self.planes[i])))
    }

    /// Returns whether every layer is bound as a whole.
    pub(super) fn are_one(&self) -> bool {
        self.one
    }

    /// Returns the windows that contain a block.
    pub(super) fn key(&self, block: usize) -> WindowKey {
        if self.one {
            return [0; 4];
        }
        std::array::from_fn(|i| self.planes[i].as_ref().map_or(0, |plane| (block / plane.blocks) as u32))
    }

    /// Returns a plane's binding and four words for the kernel: the offset of block 0 from the start of the
    /// binding (in elements, modulo 2³²), and the strides of a block, a token and a head.
    pub(super) fn window(
        &self,
        device: &GpuDevice,
        i: usize,
        layer: usize,
        key: WindowKey,
    ) -> (Binding, [u32; 4]) {
        let Some(plane) = &self.planes[i] else {
            return (Binding::whole(&device.nothing[1]), [0; 4]);
        };
        let strides = plane.strides;
        let first = key[i] as usize * plane.blocks.min(self.num_blocks);
        let last = (first + plane.blocks.min(self.num_blocks)).min(self.num_blocks) - 1;
        let element = |block: usize| strides.at(layer, block, 0, 0) as u64;
        let start = element(first) * plane.bits / 8;
        let offset = start - start % self.align;
        let end = ((element(last) + plane.span) * plane.bits).div_ceil(8).next_multiple_of(4);
        let base = (strides.layer * layer) as u64;
        let base = base.wrapping_sub(offset * 8 / plane.bits) as u32;
        let binding = Binding { buffer: plane.buffer.clone(), offset, size: end - offset };
        (binding, [base, strides.block as u32, strides.token as u32, strides.head as u32])
    }
}

/// Returns the range to bind for some rows of a view: its first byte, and the byte after its last.
fn extent(device: &GpuDevice, view: &TensorView, rows: &Range<usize>) -> (u64, u64) {
    let (bits, strides) = (view.dtype().bits(), view.strides());
    let first = view.offset() + rows.start * strides[0];
    let rest: usize = view.shape()[1..].iter().zip(&strides[1..]).map(|(n, stride)| (n - 1) * stride).sum();
    let end = view.offset() + (rows.end.max(rows.start + 1) - 1) * strides[0] + rest + 1;
    let start = (first * bits / 8) as u64;
    let end = ((end * bits) as u64).div_ceil(8).next_multiple_of(4);
    (start - start % device.binding_align(), end)
}

/// Returns the maximum number of rows of a view, at least 1, that can be bound at once regardless of where
/// they start.
pub(super) fn most_rows(device: &GpuDevice, view: &TensorView) -> usize {
    let bits = view.dtype().bits() as u64;
    let rest: usize =
        view.shape()[1..].iter().zip(&view.strides()[1..]).map(|(n, stride)| (n - 1) * stride).sum();
    // The start may be rounded down and the end rounded up.
    let room = device.binding.saturating_sub(device.binding_align() + 4) * 8 / bits;
    let more = room.saturating_sub(rest as u64 + 1).checked_div(view.strides()[0] as u64);
    usize::try_from(more.unwrap_or(u64::MAX)).unwrap_or(usize::MAX).saturating_add(1)
}

/// Binds some rows of a view. Also returns three words for the kernel: the offset of row 0 from the start of
/// the binding (in elements, modulo 2³²), and the strides of a row and a head.
///
/// # Errors
/// Returns [`Error::Unsupported`] if the rows span more than the device can bind at once.
pub(super) fn rows_window(
    device: &Arc<GpuDevice>,
    view: &TensorView,
    rows: &Range<usize>,
) -> Result<(Binding, SmallVec<[u32; 3]>)> {
    let (start, end) = extent(device, view, rows);
    if end - start > device.binding {
        let what = format!(
            "rows that reach over {} bytes: the device can bind only {} at once; use fewer rows per call",
            end - start,
            device.binding
        );
        return Err(Error::Unsupported { backend: NAME, what });
    }
    let buffer = memory::of(device, view.storage())?.buffer()?;
    let base = (view.offset() as u64).wrapping_sub(start * 8 / view.dtype().bits() as u64) as u32;
    let strides = view.strides()[..2].iter().map(|&stride| stride as u32);
    Ok((Binding { buffer, offset: start, size: end - start }, std::iter::once(base).chain(strides).collect()))
}
