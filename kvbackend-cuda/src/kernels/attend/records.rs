//! A plan's records, as declared in `attend.cuh`.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use kvcore::{QueryRow, Segment};

/// The window size that stands for no window. Kernels can add positions to it without overflow.
pub(super) const NO_WINDOW: i64 = 1 << 61;

/// The part index of a task that writes the output directly.
pub(super) const DIRECT: u32 = u32::MAX;

/// The value of every byte in an absent record. No task has the number of rows that these bytes encode, and
/// no output row has the index that they encode.
pub(super) const ABSENT: u8 = u8::MAX;

/// Clamps a position so that the sum of a few positions cannot overflow. No prompt is long enough to reach
/// the limits.
fn clamped(position: i64) -> i64 {
    position.clamp(-(1 << 60), 1 << 60)
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RowRecord {
    logical: i64,
    position: i64,
}

impl RowRecord {
    pub(super) fn new(row: QueryRow) -> Self {
        let logical = i64::try_from(row.logical).unwrap_or(i64::MAX);
        Self { logical: clamped(logical), position: clamped(row.position) }
    }
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct SegmentRecord {
    logical_start: i64,
    position: i64,
    len: u32,
    pad: u32,
}

impl SegmentRecord {
    pub(super) fn new(segment: &Segment) -> Self {
        let logical = i64::try_from(segment.logical_start).unwrap_or(i64::MAX);
        Self {
            logical_start: clamped(logical),
            position: clamped(segment.position(0)),
            len: segment.len as u32,
            pad: 0,
        }
    }
}

/// A range of a segment's tokens, or of entries in a list of selected tokens, that a task reads.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RunRecord {
    segment: u32,
    pub(super) first: u32,
    pub(super) end: u32,
    table: u32,
    offset: i64,
    logit_scale: f32,
    listed: u32,
}

impl RunRecord {
    /// Describes a range of tokens in the segment with index `number`, whose blocks are listed at offset
    /// `table` in the tables.
    pub(super) fn of_segment(segment: &Segment, number: u32, tokens: Range<usize>, table: u32) -> Self {
        Self {
            segment: number,
            first: tokens.start as u32,
            end: tokens.end as u32,
            table,
            offset: clamped(segment.position_offset),
            logit_scale: segment.logit_scale,
            listed: 0,
        }
    }

    /// Describes `count` selected tokens of a segment, listed at offset `list` in the tables.
    pub(super) fn of_list(segment: &Segment, number: u32, count: usize, list: u32) -> Self {
        Self { listed: 1, ..Self::of_segment(segment, number, 0..count, list) }
    }

    /// Returns the part of the run with the tokens `first..end`.
    pub(super) fn part(&self, first: u32, end: u32) -> Self {
        Self { first, end, ..*self }
    }
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TaskRecord {
    pub(super) row: u32,
    pub(super) rows: u32,
    pub(super) run: u32,
    pub(super) runs: u32,
    /// The index of the task's first part, or [`DIRECT`].
    pub(super) part: u32,
    pub(super) lse_scale: f32,
}

/// An output row to merge: its index, the offset of its list of parts, and the range of its groups.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MergedRow {
    pub(super) row: u32,
    pub(super) list: u32,
    pub(super) range: u32,
    pub(super) ranges: u32,
}

/// The range of a group's parts, counted from the row's first part.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct GroupRange {
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) group: u32,
    pub(super) pad: u32,
}
