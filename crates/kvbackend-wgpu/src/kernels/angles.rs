//! The rows of a RoPE table that a run of a kernel binds.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use kvcore::{Error, Result, Rope, RopeTable};
use wgpu::BufferUsages;

use crate::NAME;
use crate::device::Device;
use crate::pipeline::Binding;

/// Rows of a RoPE table, bound. A kernel finds the row of a number at its magnitude minus `first`, and
/// rotates in the opposite direction if the number is negative.
pub(super) struct Turns {
    pub(super) binding: Binding,
    pub(super) first: u32,
    /// Sorted magnitudes of the positions whose rows were picked; none if the rows are bound as they lie.
    picked: Option<Vec<u32>>,
}

/// Returns the number of pairs that a RoPE rotates.
pub(super) fn pairs_of(rope: &Rope) -> usize {
    rope.config().rotary_dim / 2
}

impl Turns {
    /// Binds the rows of all positions in some ranges.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device cannot bind the rows at once.
    pub(super) fn of(
        device: &Arc<Device>,
        rope: &Rope,
        positions: impl Iterator<Item = RangeInclusive<i32>> + Clone,
    ) -> Result<Self> {
        let ends = positions.clone().flat_map(|range| {
            // A range with positions of both signs contains 0.
            let zero = (*range.start() < 0 && *range.end() > 0).then_some(0);
            [*range.start(), *range.end()].into_iter().chain(zero)
        });
        let magnitudes = ends.map(i32::unsigned_abs);
        let (low, high) = magnitudes.fold((u32::MAX, 0), |(low, high), at| (low.min(at), high.max(at)));
        let row = 8 * pairs_of(rope) as u64;
        let align = device.binding_align();
        // Rows after which a row begins at an offset where a binding may begin.
        let step = (1..=align).find(|rows| (rows * row).is_multiple_of(align)).unwrap_or(align);
        let first = u64::from(low.min(high));
        let first = first - first % step;
        let size = (u64::from(high) + 1 - first) * row;
        if size > device.binding {
            return Self::picked(device, rope, positions);
        }
        let buffer = device.angles(rope)?;
        Ok(Self { binding: Binding { buffer, offset: first * row, size }, first: first as u32, picked: None })
    }

    /// Makes a table of only the rows that are needed, for rows that lie too far apart to be bound at once.
    fn picked(
        device: &Arc<Device>,
        rope: &Rope,
        positions: impl Iterator<Item = RangeInclusive<i32>> + Clone,
    ) -> Result<Self> {
        let unsupported = |what| Err(Error::Unsupported { backend: NAME, what });
        if positions.clone().any(|range| *range.start() < 0 && *range.end() > 0) {
            return unsupported(
                "keys on both sides of position 0 beside positions far away; give them in calls of their own"
                    .to_owned(),
            );
        }
        let magnitudes: BTreeSet<u32> = positions.flatten().map(i32::unsigned_abs).collect();
        let half = pairs_of(rope);
        let table: Arc<RopeTable> = rope.table([])?;
        let of = |&at: &u32| {
            let row = at as usize * half..(at as usize + 1) * half;
            table.cos()[row.clone()].iter().zip(&table.sin()[row]).flat_map(|(&c, &s)| [c, s])
        };
        let rows: Vec<f32> = magnitudes.iter().flat_map(of).collect();
        let size = size_of_val(&rows[..]) as u64;
        if size > device.binding {
            let rows = magnitudes.len();
            return unsupported(format!(
                "angles of {rows} positions in one call: the device binds {} bytes at once; give it fewer sequences a call",
                device.binding
            ));
        }
        let buffer = device.buffer("angles", size, BufferUsages::STORAGE | BufferUsages::COPY_DST)?;
        device.fill(&buffer, 0, bytemuck::cast_slice(&rows)).map_err(|reason| device.refusal(reason))?;
        // Numbers begin at 1, so that each has a sign.
        Ok(Self {
            binding: Binding::whole(&buffer),
            first: 1,
            picked: Some(magnitudes.into_iter().collect()),
        })
    }

    /// Returns the number of a position for the kernel. Consecutive positions have consecutive numbers.
    pub(super) fn number(&self, position: i32) -> i32 {
        let Some(picked) = &self.picked else { return position };
        let at = picked.partition_point(|&known| known < position.unsigned_abs()) as i32 + 1;
        if position < 0 { -at } else { at }
    }
}
