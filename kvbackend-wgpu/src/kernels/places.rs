//! The offsets of rows, and the parts of buffers that must be bound to reach these rows.
//!
//! A kernel counts in 32 bits from the start of a binding, and a device can bind only a limited part of a
//! buffer at once. Rows that are too far apart for one binding are moved by several dispatches, each with its
//! own windows.

use std::collections::BTreeMap;

use kvcore::{DType, Error, Result};
use smallvec::SmallVec;

use crate::device::{GpuDevice, NAME};
use crate::pipeline::Binding;

/// The number of buffers in which a row has an offset: source, destination, and the scales of both.
pub(super) const SIDES: usize = 4;

/// A row's offset in each of the [`SIDES`] buffers, in the unit of its [`PlaceBuffer`].
pub(super) type RowPlace = [u64; SIDES];

/// Returns the byte offset of an element, which must be the first of a row.
pub(super) fn byte_of(dtype: DType, element: usize) -> u64 {
    element as u64 * dtype.bits() as u64 / 8
}

/// The maximum number of items per dispatch, whose arguments must fit in a binding.
const MOST_ITEMS: usize = 1 << 18;

/// A loop over an item's rows: the number of steps, and the length of a step in each buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowAxis {
    pub(super) n: usize,
    pub(super) strides: RowPlace,
}

/// A buffer, and the unit in which offsets into it are counted.
#[derive(Debug, Clone)]
pub(super) struct PlaceBuffer {
    pub(super) buffer: wgpu::Buffer,
    /// The number of bits per unit.
    pub(super) bits: u64,
    /// The number of units per row.
    pub(super) row: u64,
}

/// Rows to move: items at arbitrary offsets, each with a loop over the same axes.
#[derive(Debug, Clone, Default)]
pub(super) struct RowItems {
    pub(super) items: Vec<RowPlace>,
    /// For each item, a number that is not an offset, such as the position by which it is rotated.
    pub(super) numbers: Vec<i32>,
    pub(super) axes: SmallVec<[RowAxis; 3]>,
}

impl RowItems {
    /// Replaces each item with `count` items that make `n` steps along an axis each. These items start at
    /// steps `first`, `first + n`, and so on.
    fn pieces(&self, axis: usize, n: usize, first: usize, count: usize) -> Self {
        let strides = self.axes[axis].strides;
        let steps = |place: &RowPlace| {
            let place = *place;
            let at = (0..count).map(move |i| (first + i * n) as u64);
            at.map(move |step| std::array::from_fn(|side| place[side] + step * strides[side]))
        };
        let mut axes = self.axes.clone();
        axes[axis].n = n;
        Self {
            items: self.items.iter().flat_map(steps).collect(),
            numbers: self.numbers.iter().flat_map(|&number| std::iter::repeat_n(number, count)).collect(),
            axes,
        }
    }

    /// Returns the same rows with at most `most` axes. The shortest axes are turned into items.
    pub(super) fn with_axes(mut self, most: usize) -> Self {
        while self.axes.len() > most {
            let shortest = (0..self.axes.len()).min_by_key(|&i| self.axes[i].n).unwrap_or(0);
            self = self.pieces(shortest, 1, 0, self.axes[shortest].n);
            self.axes.remove(shortest);
        }
        self
    }

    /// Splits items along the axis that spans the most, until one window per buffer covers a whole item.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if a single row is longer than the limit of its buffer.
    fn cut(self, lengths: &[u64], limits: &[u64]) -> Result<Vec<Self>> {
        let Some(side) = (0..limits.len()).find(|&i| self.span(i, lengths[i]) > limits[i]) else {
            return Ok(vec![self]);
        };
        let reach = |axis: &RowAxis| (axis.n as u64 - 1) * axis.strides[side];
        let furthest = (0..self.axes.len()).max_by_key(|&i| reach(&self.axes[i]));
        let Some(furthest) = furthest.filter(|&i| reach(&self.axes[i]) > 0) else {
            let (row, limit) = (lengths[side], limits[side]);
            let what = format!(
                "a row of {row} elements: the device can bind only {limit} at once; use shorter rows"
            );
            return Err(Error::Unsupported { backend: NAME, what });
        };
        let axis = self.axes[furthest];
        let others = self.span(side, lengths[side]) - reach(&axis);
        let n = 1 + (limits[side].saturating_sub(others) / axis.strides[side]) as usize;
        let (whole, left) = (axis.n / n, axis.n % n);
        let mut parts = self.pieces(furthest, n, 0, whole).cut(lengths, limits)?;
        if left > 0 {
            parts.extend(self.pieces(furthest, left, whole * n, 1).cut(lengths, limits)?);
        }
        Ok(parts)
    }

    /// Returns the number of units from an item's offset to the end of its last row.
    fn span(&self, side: usize, row: u64) -> u64 {
        self.axes.iter().map(|axis| (axis.n as u64 - 1) * axis.strides[side]).sum::<u64>() + row
    }
}

/// The rows of one dispatch: a binding of each buffer, and items with offsets from the start of the bindings.
pub(super) struct Windowed {
    pub(super) bindings: Vec<Binding>,
    pub(super) items: Vec<([u32; SIDES], i32)>,
    pub(super) axes: SmallVec<[RowAxis; 3]>,
}

// Decision: docs/decisions/backend-wgpu.md#a-large-pool-is-bound-in-windows
/// Divides rows into groups that a dispatch can bind.
///
/// # Errors
/// Returns [`Error::Unsupported`] if a single row is longer than a binding.
pub(super) fn windows(device: &GpuDevice, rows: RowItems, sides: &[PlaceBuffer]) -> Result<Vec<Windowed>> {
    let align = device.binding_align();
    // A binding starts at the multiple of `align` at or below its first unit, and ends with a whole word.
    let limits: Vec<u64> = sides.iter().map(|side| (device.binding - align - 4) * 8 / side.bits).collect();
    let mut windowed = Vec::new();
    let lengths: Vec<u64> = sides.iter().map(|side| side.row).collect();
    for rows in rows.cut(&lengths, &limits)? {
        let spans: Vec<u64> = sides.iter().enumerate().map(|(i, side)| rows.span(i, side.row)).collect();
        let steps = || limits.iter().zip(&spans).map(|(limit, span)| (limit - span).max(1));
        let mut groups: BTreeMap<SmallVec<[u64; SIDES]>, Vec<usize>> = BTreeMap::new();
        if fits_once(&rows, &limits, &spans) {
            groups.insert(SmallVec::new(), (0..rows.items.len()).collect());
        } else {
            for (at, item) in rows.items.iter().enumerate() {
                groups
                    .entry(steps().zip(item).map(|(step, place)| place / step).collect())
                    .or_default()
                    .push(at);
            }
        }
        for items in groups.values().flat_map(|items| items.chunks(MOST_ITEMS)) {
            windowed.push(window(align, &rows, sides, &spans, items));
        }
    }
    Ok(windowed)
}

/// Returns whether a single dispatch can reach all items.
fn fits_once(rows: &RowItems, limits: &[u64], spans: &[u64]) -> bool {
    limits.iter().zip(spans).enumerate().all(|(i, (limit, span))| {
        let places = rows.items.iter().map(|item| item[i]);
        let (low, high) = places.fold((u64::MAX, 0), |(low, high), at| (low.min(at), high.max(at)));
        high.saturating_sub(low) + span <= *limit
    })
}

fn window(align: u64, rows: &RowItems, sides: &[PlaceBuffer], spans: &[u64], items: &[usize]) -> Windowed {
    let mut starts = [0; SIDES];
    let mut bindings = Vec::with_capacity(sides.len());
    for (i, side) in sides.iter().enumerate() {
        let places = items.iter().map(|&at| rows.items[at][i]);
        let (low, high) = places.fold((u64::MAX, 0), |(low, high), at| (low.min(at), high.max(at)));
        let first = low * side.bits / 8;
        let offset = first - first % align;
        let end = ((high + spans[i]) * side.bits).div_ceil(8).next_multiple_of(4).max(offset + 4);
        starts[i] = offset * 8 / side.bits;
        bindings.push(Binding { buffer: side.buffer.clone(), offset, size: end - offset });
    }
    let item = |&at: &usize| {
        (std::array::from_fn(|i| (rows.items[at][i].wrapping_sub(starts[i])) as u32), rows.numbers[at])
    };
    Windowed { bindings, items: items.iter().map(item).collect(), axes: rows.axes.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the offsets of all rows of all items, sorted.
    fn places(rows: &RowItems) -> Vec<RowPlace> {
        let mut all = rows.clone().with_axes(0).items;
        all.sort_unstable();
        all
    }

    #[test]
    fn what_reaches_too_far_is_cut_where_it_does_and_stays_the_same_rows() {
        let axis = |n, src, dst| RowAxis { n, strides: [src, dst, 0, 0] };
        // A transposition of 30 by 40: the source steps over rows, the destination over columns.
        let rows = RowItems {
            items: vec![[7, 3, 0, 0]],
            numbers: vec![5],
            axes: SmallVec::from_iter([axis(30, 40, 1), axis(40, 1, 30)]),
        };
        for limits in [[2000, 2000], [100, 2000], [100, 90], [39, 29], [1, 1]] {
            let spans = |rows: &RowItems| [rows.span(0, 1), rows.span(1, 1)];
            let fitting = fitted(&rows, limits).unwrap();
            assert!(
                fitting.iter().all(|part| spans(part).iter().zip(limits).all(|(span, limit)| *span <= limit))
            );
            let mut cut: Vec<RowPlace> = fitting.iter().flat_map(places).collect();
            cut.sort_unstable();
            assert_eq!(cut, places(&rows), "{limits:?}");
            assert!(fitting.iter().all(|part| part.numbers.iter().all(|number| *number == 5)));
            assert!(limits != [2000, 2000] || fitting.len() == 1);
        }
        assert!(matches!(fitted(&rows, [0, 2000]), Err(Error::Unsupported { .. })));
    }

    fn fitted(rows: &RowItems, limits: [u64; 2]) -> Result<Vec<RowItems>> {
        rows.clone().cut(&[1, 1], &limits)
    }
}
