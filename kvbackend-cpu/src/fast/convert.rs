//! Converts rows from one format to another, and rotates them if requested. Rows that are scattered into a
//! quantised cache or gathered from one are also converted here.

use kvcore::{
    BlockId, Dequantize, Gather, KvArena, KvFormat, KvPlane, Quantize, Result, RotateKeys, Rotation,
    RowRotation, Scatter, TensorView,
};
use smallvec::{SmallVec, smallvec};

use super::blocks::BlockPairs;
use super::codes::{DecodeRow, EncodeRow, check};
use super::locked::{Locked, with_locked};
use super::rotate::{RotationTable, rotate};
use super::{Fast, share};
use crate::movement::LayerMovement;
use crate::plane::{PlaneSpans, RowAt, RowLayout};
use crate::raw::{Destination, Origin};
use crate::simd::{Simd, SimdTask};

/// Maximum number of elements per row for which the row buffer is kept on the stack.
const ROW: usize = 512;

/// The source or destination rows of a conversion: elements of a float type, or codes and scales.
#[derive(Clone, Copy)]
struct RowSide<B> {
    format: KvFormat,
    /// Number of bytes per row.
    bytes: usize,
    codes: B,
    /// The scales, and the number of scale bytes per row.
    scales: Option<(B, usize)>,
}

/// Byte offsets of a row's codes and scales.
#[derive(Clone, Copy)]
struct RowOffsets {
    codes: usize,
    scales: usize,
}

/// The layout of a plane's rows: codes, and scales if the format has scales.
#[derive(Clone, Copy)]
struct PlaneLayout {
    codes: RowLayout,
    scales: Option<RowLayout>,
}

impl PlaneLayout {
    fn new(plane: &KvPlane) -> Self {
        Self { codes: RowLayout::codes(plane), scales: RowLayout::scales(plane) }
    }

    fn at(&self, row: RowAt) -> RowOffsets {
        RowOffsets {
            codes: self.codes.bytes(row).start,
            scales: self.scales.map_or(0, |layout| layout.bytes(row).start),
        }
    }
}

impl<B> RowSide<B> {
    fn new(plane: &KvPlane, codes: B, scales: Option<B>) -> Self {
        let scales =
            scales.zip(RowLayout::scales(plane)).map(|(scales, layout)| (scales, layout.row_bytes()));
        Self { format: plane.format, bytes: RowLayout::codes(plane).row_bytes(), codes, scales }
    }

    fn of_rows(view: &TensorView, codes: B) -> Self {
        let bytes = view.shape()[2] * view.dtype().bits() / 8;
        Self { format: KvFormat::Dense(view.dtype()), bytes, codes, scales: None }
    }
}

fn source<'a>(plane: &KvPlane, spans: &PlaneSpans, locked: &Locked<'a>) -> Result<RowSide<Origin<'a>>> {
    check(plane.format)?;
    let scales = spans.scales.as_ref().map(|scales| locked.origin(scales)).transpose()?;
    Ok(RowSide::new(plane, locked.origin(&spans.codes)?, scales))
}

fn target<'a>(plane: &KvPlane, spans: &PlaneSpans, locked: &Locked<'a>) -> Result<RowSide<Destination<'a>>> {
    check(plane.format)?;
    let scales = spans.scales.as_ref().map(|scales| locked.target(scales)).transpose()?;
    Ok(RowSide::new(plane, locked.target(&spans.codes)?, scales))
}

/// Converts rows of `dim` elements from one format to another, and rotates each row to its position if
/// requested.
///
/// # Safety
/// No other thread may access the rows being written, and no row may be both read and written. The formats of
/// both sides must have passed [`check`], and the rotary dimension of `table` must be at most `dim`.
struct ConvertRows<'a, I> {
    from: RowSide<Origin<'a>>,
    to: RowSide<Destination<'a>>,
    dim: usize,
    /// The table to rotate with, and the factor to multiply rotated rows by.
    table: Option<(&'a RotationTable, f32)>,
    offsets: I,
}

impl<I: Iterator<Item = (RowOffsets, RowOffsets, i64)>> SimdTask for ConvertRows<'_, I> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (from, to, dim) = (self.from, self.to, self.dim);
        let mut row: SmallVec<[f32; ROW]> = smallvec![0.0; dim];
        let row = row.as_mut_ptr();
        for (a, b, position) in self.offsets {
            // SAFETY: `at` checks that the codes and scales of each row lie inside both sides. The buffer
            // `row` has `dim` elements, and the instruction set of `S` is available by contract. By the
            // contract of `ConvertRows` the formats passed `check`, nothing else accesses the rows written,
            // and the rotary dimension is at most `dim`.
            unsafe {
                let codes = from.codes.at(a.codes, from.bytes);
                let scales = from.scales.map_or(std::ptr::null(), |(scales, n)| scales.at(a.scales, n));
                S::call(DecodeRow { format: from.format, codes, scales, to: row, dim });
                if let Some((table, factor)) = self.table {
                    rotate::<S, f32>(row, row, dim, table.at(position), factor);
                }
                let codes = to.codes.at(b.codes, to.bytes);
                let scales = to.scales.map_or(std::ptr::null_mut(), |(scales, n)| scales.at(b.scales, n));
                S::call(EncodeRow { format: to.format, from: row, codes, scales, dim });
            }
        }
    }
}

/// Returns the byte offsets of a head's row in a view.
fn row_of(view: &TensorView, row: usize, head: usize) -> RowOffsets {
    let at = view.offset() + row * view.strides()[0] + head * view.strides()[1];
    RowOffsets { codes: at * view.dtype().bits() / 8, scales: 0 }
}

impl Fast {
    /// Scatters rows into a plane of any format, and rotates each one to its position if requested. `twice`
    /// must return whether any slot is written twice.
    pub(super) fn scatter_converted(
        &self,
        op: &Scatter,
        plane: &KvPlane,
        rows: &TensorView,
        rotation: Option<&RowRotation>,
        twice: impl FnOnce() -> bool,
    ) -> Result<()> {
        let m = LayerMovement::new(&op.arena, *plane, rows, op.layer, &op.slots);
        let table = rotation.map(|rotation| RotationTable::of_checked(&rotation.rope)).transpose()?;
        let table = table.as_ref().map(|table| (table, table.factor));
        let position = |row: usize| rotation.map_or(0, |rotation| rotation.positions[row]);
        let (layout, parts) = (PlaneLayout::new(plane), self.parts_of_scatter(&m, twice));
        let source = m.span_of_rows()?;
        with_locked(&[&source], &m.spans.all(), |locked| {
            let from = RowSide::of_rows(rows, locked.origin(&source)?);
            let to = target(plane, &m.spans, locked)?;
            self.workers.run(parts, &|part| {
                let tokens = m.tokens(share(0..op.slots.len(), part, parts));
                let offsets = tokens.flat_map(|(row, at)| {
                    let position = position(row);
                    (0..plane.heads)
                        .map(move |head| (row_of(rows, row, head), layout.at(at.head(head)), position))
                });
                // SAFETY: the operation's check made sure that rows and arena are different storages. Threads
                // share the work only if no slot is written twice, `target` checked the format, and the
                // operation's check bounded the rotary dimension of keys by `plane.dim`.
                unsafe { self.level.run(ConvertRows { from, to, dim: plane.dim, table, offsets }) };
            });
            Ok(())
        })
    }

    /// Gathers rows of a quantised plane, and rotates them if requested.
    pub(super) fn gather_codes(
        &self,
        op: &Gather,
        plane: &KvPlane,
        rows: &TensorView,
        rotation: Option<&Rotation>,
    ) -> Result<()> {
        let m = LayerMovement::new(&op.arena, *plane, rows, op.layer, &op.slots);
        let table = rotation.map(RotationTable::of_rotation).transpose()?;
        let (table, delta) = (table.as_ref().map(|table| (table, 1.0)), rotation.map_or(0, |r| r.delta));
        let (layout, parts) = (PlaneLayout::new(plane), self.parts(op.slots.len(), m.bytes()));
        let target = m.span_of_rows()?;
        with_locked(&m.spans.all(), &[&target], |locked| {
            let from = source(plane, &m.spans, locked)?;
            let to = RowSide::of_rows(rows, locked.target(&target)?);
            self.workers.run(parts, &|part| {
                let tokens = m.tokens(share(0..op.slots.len(), part, parts));
                let offsets = tokens.flat_map(|(row, at)| {
                    (0..plane.heads)
                        .map(move |head| (layout.at(at.head(head)), row_of(rows, row, head), delta))
                });
                // SAFETY: the operation's check made sure that rows and arena are different storages and that
                // rows share no elements. `share` gives each thread its own rows, `source` checked the
                // format, and the operation's check bounded the rotary dimension of keys by `plane.dim`.
                unsafe { self.level.run(ConvertRows { from, to, dim: plane.dim, table, offsets }) };
            });
            Ok(())
        })
    }

    pub(crate) fn quantize(&self, op: &Quantize) -> Result<()> {
        self.convert_blocks(&op.src, &op.dst, &op.pairs)
    }

    pub(crate) fn dequantize(&self, op: &Dequantize) -> Result<()> {
        self.convert_blocks(&op.src, &op.dst, &op.pairs)
    }

    fn convert_blocks(&self, src: &KvArena, dst: &KvArena, pairs: &[(BlockId, BlockId)]) -> Result<()> {
        let copy = BlockPairs::new((src, dst), 0..src.layout().shape().num_layers, pairs);
        self.convert_plane(&copy, &src.k_plane(), &dst.k_plane(), None)?;
        self.convert_plane(&copy, &src.v_plane(), &dst.v_plane(), None)
    }

    /// Rotates the keys of a quantised arena and quantises them again.
    pub(super) fn rotate_codes(&self, op: &RotateKeys, copy: &BlockPairs) -> Result<()> {
        self.convert_plane(copy, &op.src.k_plane(), &op.dst.k_plane(), Some(&op.rotation))
    }

    fn convert_plane(
        &self,
        copy: &BlockPairs,
        src: &KvPlane,
        dst: &KvPlane,
        rotation: Option<&Rotation>,
    ) -> Result<()> {
        let table = rotation.map(RotationTable::of_rotation).transpose()?;
        let (table, delta) = (table.as_ref().map(|table| (table, 1.0)), rotation.map_or(0, |r| r.delta));
        let (a, b) = (PlaneLayout::new(src), PlaneLayout::new(dst));
        let parts = self.parts(copy.pairs(), copy.rows() * src.heads * src.dim * size_of::<f32>());
        let spans = copy.spans(src, dst);
        with_locked(&spans.0.all(), &spans.1.all(), |locked| {
            let (from, to) = (source(src, &spans.0, locked)?, target(dst, &spans.1, locked)?);
            self.workers.run(parts, &|part| {
                let tokens = copy.tokens(share(0..copy.pairs(), part, parts));
                let offsets = tokens.flat_map(|(x, y)| {
                    (0..src.heads).map(move |head| (a.at(x.head(head)), b.at(y.head(head)), delta))
                });
                // SAFETY: the operation's check rejected destinations that appear twice and blocks that are
                // both source and destination, and `share` gives each thread its own pairs. `source` and
                // `target` checked the formats. A rotation is given for keys only, and the operation's check
                // bounded its rotary dimension by their `dim`.
                unsafe { self.level.run(ConvertRows { from, to, dim: src.dim, table, offsets }) };
            });
            Ok(())
        })
    }
}
