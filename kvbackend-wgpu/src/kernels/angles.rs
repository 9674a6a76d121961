//! The rows of a RoPE table that a dispatch binds.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use kvcore::{Error, Result, Rope, RopeTable};
use wgpu::BufferUsages;

use crate::device::{GpuDevice, NAME};
use crate::pipeline::Binding;

/// The bound rows of a RoPE table. The row for a position's number is at index `|number| - first`. If the
/// number is negative, the kernel rotates in the opposite direction.
pub(super) struct RowAngles {
    pub(super) binding: Binding,
    pub(super) first: u32,
    rows: RopeRows,
}

/// The rows that a set of positions needs, in the table of any RoPE with the same number of pairs.
pub(super) enum RopeRows {
    /// A range of the table: the index of its first row, and the index after its last row.
    Span(u64, u64),
    /// Rows that are too far apart to bind at once, given as the sorted absolute values of their positions.
    Picked(Vec<u32>),
}

/// Returns the number of pairs that a RoPE rotates.
pub(super) fn pairs_of(rope: &Rope) -> usize {
    rope.config().rotary_dim / 2
}

impl RowAngles {
    /// Binds the rows for all positions in the given ranges.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device cannot bind the rows at once.
    pub(super) fn of(
        device: &Arc<GpuDevice>,
        rope: &Rope,
        positions: impl Iterator<Item = RangeInclusive<i32>> + Clone,
    ) -> Result<Self> {
        let rows = RopeRows::of(device, pairs_of(rope), positions)?;
        let (binding, first) = rows.bind(device, rope)?;
        Ok(Self { binding, first, rows })
    }

    /// Returns the number by which the kernel identifies a position. Consecutive positions have consecutive
    /// numbers.
    pub(super) fn number(&self, position: i32) -> i32 {
        self.rows.number(position)
    }
}

impl RopeRows {
    /// Finds the rows for all positions in the given ranges, in tables of `pairs` pairs.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device cannot bind the rows at once.
    pub(super) fn of(
        device: &GpuDevice,
        pairs: usize,
        positions: impl Iterator<Item = RangeInclusive<i32>> + Clone,
    ) -> Result<Self> {
        let ends = positions.clone().flat_map(|range| {
            // A range with positions of both signs contains 0.
            let zero = (*range.start() < 0 && *range.end() > 0).then_some(0);
            [*range.start(), *range.end()].into_iter().chain(zero)
        });
        let magnitudes = ends.map(i32::unsigned_abs);
        let (low, high) = magnitudes.fold((u32::MAX, 0), |(low, high), at| (low.min(at), high.max(at)));
        let row = 8 * pairs as u64;
        let align = device.binding_align();
        // Every `step` rows, a row starts at a valid binding offset.
        let step = (1..=align).find(|rows| (rows * row).is_multiple_of(align)).unwrap_or(align);
        let first = u64::from(low.min(high));
        let (first, end) = (first - first % step, u64::from(high) + 1);
        if (end - first) * row <= device.binding {
            return Ok(Self::Span(first, end));
        }
        let unsupported = |what| Err(Error::Unsupported { backend: NAME, what });
        if positions.clone().any(|range| *range.start() < 0 && *range.end() > 0) {
            return unsupported(
                "keys on both sides of position 0 together with distant positions; pass them in separate calls"
                    .to_owned(),
            );
        }
        let magnitudes: BTreeSet<u32> = positions.flatten().map(i32::unsigned_abs).collect();
        if magnitudes.len() as u64 * row > device.binding {
            let rows = magnitudes.len();
            return unsupported(format!(
                "angles of {rows} positions in one call: the device can bind only {} bytes at once; use fewer sequences \
                 per call",
                device.binding
            ));
        }
        Ok(Self::Picked(magnitudes.into_iter().collect()))
    }

    /// Binds the rows in a RoPE's table. Also returns the number of the first bound row.
    pub(super) fn bind(&self, device: &GpuDevice, rope: &Rope) -> Result<(Binding, u32)> {
        let half = pairs_of(rope);
        match self {
            &Self::Span(first, end) => {
                let (row, buffer) = (8 * half as u64, device.angles(rope)?);
                Ok((Binding { buffer, offset: first * row, size: (end - first) * row }, first as u32))
            }
            Self::Picked(magnitudes) => {
                let table: Arc<RopeTable> = rope.table([])?;
                let of = |&at: &u32| {
                    let row = at as usize * half..(at as usize + 1) * half;
                    table.cos()[row.clone()].iter().zip(&table.sin()[row]).flat_map(|(&c, &s)| [c, s])
                };
                let rows: Vec<f32> = magnitudes.iter().flat_map(of).collect();
                let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
                let buffer = device.buffer("angles", size_of_val(&rows[..]) as u64, usage)?;
                device
                    .fill(&buffer, 0, bytemuck::cast_slice(&rows))
                    .map_err(|reason| device.refusal(reason))?;
                // Numbers start at 1, because 0 has no sign.
                Ok((Binding::whole(&buffer), 1))
            }
        }
    }

    /// Returns the number by which the kernel identifies a position. Consecutive positions have consecutive
    /// numbers.
    pub(super) fn number(&self, position: i32) -> i32 {
        let Self::Picked(picked) = self else { return position };
        let at = picked.partition_point(|&known| known < position.unsigned_abs()) as i32 + 1;
        if position < 0 { -at } else { at }
    }
}
