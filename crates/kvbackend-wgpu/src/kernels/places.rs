//! Where rows lie, and which parts of the buffers must be bound to reach them.
//!
//! A kernel counts in 32 bits from the beginning of what is bound, and a device binds only so much of a buffer
//! at once. Rows that lie further apart are moved by several runs, each with its own windows.

use std::collections::BTreeMap;

use kvcore::{Error, Result};
use smallvec::SmallVec;

use crate::NAME;
use crate::device::Device;
use crate::pipeline::Binding;

/// Buffers that a row has a place in: source, destination, scales of either.
pub(super) const SIDES: usize = 4;

/// A place in each of them, in that side's units.
pub(super) type Place = [u64; SIDES];

/// Items of one run at most: their arguments must fit a binding.
const MOST_ITEMS: usize = 1 << 18;

/// A loop inside each item.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    pub(super) n: usize,
    pub(super) strides: Place,
}

/// A buffer, and in what units places in it are counted.
#[derive(Debug, Clone)]
pub(super) struct Side {
    pub(super) buffer: wgpu::Buffer,
    /// Bits of a unit.
    pub(super) bits: u64,
    /// Units of a row.
    pub(super) row: u64,
}

/// Rows that are moved: items at any places, each a loop over the axes.
#[derive(Debug, Clone, Default)]
pub(super) struct Rows {
    pub(super) items: Vec<Place>,
    /// A number of each item that is not a place.
    pub(super) numbers: Vec<i32>,
    pub(super) axes: SmallVec<[Axis; 3]>,
}

impl Rows {
    /// Turns the outermost axis into items.
    fn unroll(&mut self) {
        let Some(axis) = (!self.axes.is_empty()).then(|| self.axes.remove(0)) else { return };
        let steps = |place: &Place| {
            let place = *place;
            (0..axis.n as u64).map(move |i| std::array::from_fn(|side| place[side] + i * axis.strides[side]))
        };
        self.items = self.items.iter().flat_map(steps).collect();
        self.numbers = self.numbers.iter().flat_map(|&number| std::iter::repeat_n(number, axis.n)).collect();
    }

    /// The same rows with at most `most` axes.
    pub(super) fn with_axes(mut self, most: usize) -> Self {
        while self.axes.len() > most {
            self.unroll();
        }
        self
    }

    /// Units from an item's place to its last row's end.
    fn span(&self, side: usize, row: u64) -> u64 {
        self.axes.iter().map(|axis| (axis.n as u64 - 1) * axis.strides[side]).sum::<u64>() + row
    }
}

/// Rows of one run: what is bound of each side, and the items that lie there, their places counted from the
/// beginning of what is bound.
pub(super) struct Windowed {
    pub(super) bindings: Vec<Binding>,
    pub(super) items: Vec<([u32; SIDES], i32)>,
    pub(super) axes: SmallVec<[Axis; 3]>,
}

/// Divides rows into runs that the device can bind.
///
/// # Errors
/// [`Error::Unsupported`] for a single row that is larger than what can be bound.
pub(super) fn windows(device: &Device, mut rows: Rows, sides: &[Side]) -> Result<Vec<Windowed>> {
    let align = device.binding_align();
    // What begins anywhere is bound from the multiple below, and ends with a whole word.
    let limit = |side: &Side| (device.binding - align - 4) * 8 / side.bits;
    while let Some(i) = (0..sides.len()).find(|&i| rows.span(i, sides[i].row) > limit(&sides[i])) {
        if rows.axes.is_empty() {
            let bytes = sides[i].row * sides[i].bits / 8;
            let what = format!("a row of {bytes} bytes: the device binds {} at once", device.binding);
            return Err(Error::Unsupported { backend: NAME, what });
        }
        rows.unroll();
    }
    let spans: Vec<u64> = sides.iter().enumerate().map(|(i, side)| rows.span(i, side.row)).collect();
    let steps: Vec<u64> = sides.iter().zip(&spans).map(|(side, span)| (limit(side) - span).max(1)).collect();
    let mut groups: BTreeMap<SmallVec<[u64; SIDES]>, Vec<usize>> = BTreeMap::new();
    if fits_once(&rows, sides, &spans, limit) {
        groups.insert(SmallVec::new(), (0..rows.items.len()).collect());
    } else {
        for (at, item) in rows.items.iter().enumerate() {
            groups
                .entry(steps.iter().zip(item).map(|(step, place)| place / step).collect())
                .or_default()
                .push(at);
        }
    }
    let mut windowed = Vec::new();
    for items in groups.values().flat_map(|items| items.chunks(MOST_ITEMS)) {
        windowed.push(window(align, &rows, sides, &spans, items));
    }
    Ok(windowed)
}

/// Whether one run reaches all items.
fn fits_once(rows: &Rows, sides: &[Side], spans: &[u64], limit: impl Fn(&Side) -> u64) -> bool {
    sides.iter().enumerate().all(|(i, side)| {
        let places = rows.items.iter().map(|item| item[i]);
        let (low, high) = places.fold((u64::MAX, 0), |(low, high), at| (low.min(at), high.max(at)));
        high.saturating_sub(low) + spans[i] <= limit(side)
    })
}

fn window(align: u64, rows: &Rows, sides: &[Side], spans: &[u64], items: &[usize]) -> Windowed {
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
