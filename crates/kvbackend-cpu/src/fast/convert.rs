//! Rows of one format converted to another, rotated on the way if asked: all movement to and from quantised
//! caches.

use kvcore::{
    BlockId, Dequantize, Gather, KvArena, KvFormat, KvPlane, Quantize, Result, RotateKeys, Rotation,
    RowRotation, Scatter, TensorView,
};
use smallvec::{SmallVec, smallvec};

use super::blocks::BlockCopy;
use super::codes::{Decode, Encode, check};
use super::ends::{Ends, storages, with_ends};
use super::rotate::{Turn, rotate};
use super::{Fast, share};
use crate::movement::Movement;
use crate::plane::{RowAt, Span};
use crate::raw::{Origin, Target};
use crate::simd::{Simd, Task};

/// Elements of a row up to which the row lies on the stack.
const ROW: usize = 512;

/// The rows of one side: elements of a float type, or codes and scales.
#[derive(Clone, Copy)]
struct Side<B> {
    format: KvFormat,
    /// Bytes of a row.
    bytes: usize,
    codes: B,
    /// The scales, and the bytes of one row's scales.
    scales: Option<(B, usize)>,
}

/// Byte offsets of a row's codes and scales.
#[derive(Clone, Copy)]
struct Place {
    codes: usize,
    scales: usize,
}

/// The places of the rows of a plane.
#[derive(Clone, Copy)]
struct Places {
    codes: Span,
    scales: Option<Span>,
}

impl Places {
    fn new(plane: &KvPlane) -> Self {
        Self { codes: Span::codes(plane), scales: Span::scales(plane) }
    }

    fn at(&self, row: RowAt) -> Place {
        Place {
            codes: self.codes.bytes(row).start,
            scales: self.scales.map_or(0, |span| span.bytes(row).start),
        }
    }
}

impl<B> Side<B> {
    fn new(plane: &KvPlane, codes: B, scales: Option<B>) -> Self {
        let scales = scales.zip(Span::scales(plane)).map(|(scales, span)| (scales, span.row_bytes()));
        Self { format: plane.format, bytes: Span::codes(plane).row_bytes(), codes, scales }
    }

    fn of_rows(view: &TensorView, codes: B) -> Self {
        let bytes = view.shape()[2] * view.dtype().bits() / 8;
        Self { format: KvFormat::Dense(view.dtype()), bytes, codes, scales: None }
    }
}

fn source<'a>(plane: &KvPlane, ends: &Ends<'a>) -> Result<Side<Origin<'a>>> {
    check(plane.format)?;
    let scales = plane.scales.map(|(storage, _)| ends.origin(storage)).transpose()?;
    Ok(Side::new(plane, ends.origin(plane.storage)?, scales))
}

fn target<'a>(plane: &KvPlane, ends: &Ends<'a>) -> Result<Side<Target<'a>>> {
    check(plane.format)?;
    let scales = plane.scales.map(|(storage, _)| ends.target(storage)).transpose()?;
    Ok(Side::new(plane, ends.target(plane.storage)?, scales))
}

/// Converts rows of `dim` elements from one place to another, rotated by a position if asked.
///
/// The maker guarantees that no other thread accesses the rows written, that no row is both read and written,
/// and that the rotary dimension of `turn` is at most `dim`.
struct Convert<'a, I> {
    from: Side<Origin<'a>>,
    to: Side<Target<'a>>,
    dim: usize,
    /// The table that holds the positions, and the factor that multiplies rotated rows.
    turn: Option<(&'a Turn, f32)>,
    places: I,
}

impl<I: Iterator<Item = (Place, Place, i64)>> Task for Convert<'_, I> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (from, to, dim) = (self.from, self.to, self.dim);
        let mut row: SmallVec<[f32; ROW]> = smallvec![0.0; dim];
        let row = row.as_mut_ptr();
        for (a, b, position) in self.places {
            // SAFETY: `at` checks that the codes and scales of each row lie inside both sides, whose formats
            // passed `check`. The buffer `row` has `dim` elements, the caller guarantees the instruction set,
            // and the maker of the task excludes other accesses to the rows written and bounds the rotary
            // dimension by `dim`.
            unsafe {
                let codes = from.codes.at(a.codes, from.bytes);
                let scales = from.scales.map_or(std::ptr::null(), |(scales, n)| scales.at(a.scales, n));
                S::call(Decode { format: from.format, codes, scales, to: row, dim });
                if let Some((turn, factor)) = self.turn {
                    rotate::<S, f32>(row, row, dim, turn.at(position), factor);
                }
                let codes = to.codes.at(b.codes, to.bytes);
                let scales = to.scales.map_or(std::ptr::null_mut(), |(scales, n)| scales.at(b.scales, n));
                S::call(Encode { format: to.format, from: row, codes, scales, dim });
            }
        }
    }
}

/// Returns the byte offset of a head's row of a view.
fn row_of(view: &TensorView, row: usize, head: usize) -> Place {
    let at = view.offset() + row * view.strides()[0] + head * view.strides()[1];
    Place { codes: at * view.dtype().bits() / 8, scales: 0 }
}

impl Fast {
    /// Scatters rows into a plane of any format, each rotated to its position if asked. `twice` returns
    /// whether a slot is written twice.
    pub(super) fn scatter_converted(
        &self,
        op: &Scatter,
        plane: &KvPlane,
        rows: &TensorView,
        rotation: Option<&RowRotation>,
        twice: impl FnOnce() -> bool,
    ) -> Result<()> {
        let m = Movement::new(&op.arena, *plane, rows, op.layer, &op.slots);
        let turn = rotation.map(|rotation| Turn::of_checked(&rotation.rope)).transpose()?;
        let turn = turn.as_ref().map(|turn| (turn, turn.factor));
        let position = |row: usize| rotation.map_or(0, |rotation| rotation.positions[row]);
        let (places, parts) = (Places::new(plane), self.parts_of_scatter(&m, twice));
        with_ends(&[rows.storage()], &storages(plane), |ends| {
            let from = Side::of_rows(rows, ends.origin(rows.storage())?);
            let to = target(plane, ends)?;
            self.workers.run(parts, &|part| {
                let tokens = m.tokens(share(0..op.slots.len(), part, parts));
                let places = tokens.flat_map(|(row, at)| {
                    let position = position(row);
                    (0..plane.heads)
                        .map(move |head| (row_of(rows, row, head), places.at(at.head(head)), position))
                });
                self.level.run(Convert { from, to, dim: plane.dim, turn, places });
            });
            Ok(())
        })
    }

    /// Gathers rows of a quantised plane and rotates them if asked.
    pub(super) fn gather_codes(
        &self,
        op: &Gather,
        plane: &KvPlane,
        rows: &TensorView,
        rotation: Option<&Rotation>,
    ) -> Result<()> {
        let m = Movement::new(&op.arena, *plane, rows, op.layer, &op.slots);
        let turn = rotation.map(Turn::of_rotation).transpose()?;
        let (turn, delta) = (turn.as_ref().map(|turn| (turn, 1.0)), rotation.map_or(0, |r| r.delta));
        let (places, parts) = (Places::new(plane), self.parts(op.slots.len(), m.bytes()));
        with_ends(&storages(plane), &[rows.storage()], |ends| {
            let from = source(plane, ends)?;
            let to = Side::of_rows(rows, ends.target(rows.storage())?);
            self.workers.run(parts, &|part| {
                let tokens = m.tokens(share(0..op.slots.len(), part, parts));
                let places = tokens.flat_map(|(row, at)| {
                    (0..plane.heads)
                        .map(move |head| (places.at(at.head(head)), row_of(rows, row, head), delta))
                });
                self.level.run(Convert { from, to, dim: plane.dim, turn, places });
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
        let copy = BlockCopy::new(src, 0..src.layout().shape().num_layers, pairs);
        self.convert_plane(&copy, &src.k_plane(), &dst.k_plane(), None)?;
        self.convert_plane(&copy, &src.v_plane(), &dst.v_plane(), None)
    }

    /// Rotates the keys of a quantised arena and quantises them again.
    pub(super) fn rotate_codes(&self, op: &RotateKeys, copy: &BlockCopy) -> Result<()> {
        self.convert_plane(copy, &op.src.k_plane(), &op.dst.k_plane(), Some(&op.rotation))
    }

    fn convert_plane(
        &self,
        copy: &BlockCopy,
        src: &KvPlane,
        dst: &KvPlane,
        rotation: Option<&Rotation>,
    ) -> Result<()> {
        let turn = rotation.map(Turn::of_rotation).transpose()?;
        let (turn, delta) = (turn.as_ref().map(|turn| (turn, 1.0)), rotation.map_or(0, |r| r.delta));
        let (a, b) = (Places::new(src), Places::new(dst));
        let parts = self.parts(copy.pairs(), copy.rows() * src.heads * src.dim * size_of::<f32>());
        with_ends(&storages(src), &storages(dst), |ends| {
            let (from, to) = (source(src, ends)?, target(dst, ends)?);
            self.workers.run(parts, &|part| {
                let tokens = copy.tokens(share(0..copy.pairs(), part, parts));
                let places = tokens.flat_map(|(x, y)| {
                    (0..src.heads).map(move |head| (a.at(x.head(head)), b.at(y.head(head)), delta))
                });
                self.level.run(Convert { from, to, dim: src.dim, turn, places });
            });
            Ok(())
        })
    }
}
