//! Reads keys or values as rows: in place if they are dense, and decoded otherwise.

use kvcore::{DType, KvFormat, KvPlane, Result};

use super::pointers::{Prefetch, RowPointers};
use crate::fast::codes::{DecodeRow, check};
use crate::fast::locked::Locked;
use crate::fast::share;
use crate::plane::{PlaneSpans, RowAt, RowLayout};
use crate::raw::Origin;
use crate::simd::Simd;

/// Read access to the key or value plane of an arena.
pub(super) struct SourcePlane<'a> {
    codes: (RowLayout, Origin<'a>),
    scales: Option<(RowLayout, Origin<'a>)>,
    pub(super) format: KvFormat,
    /// The element type of a dense plane, or `None` for a quantised plane.
    pub(super) dense: Option<DType>,
    /// Number of elements per row.
    pub(super) dim: usize,
    /// Distance in bytes between the codes of consecutive heads.
    pub(super) head_bytes: usize,
    heads: usize,
}

impl<'a> SourcePlane<'a> {
    pub(super) fn new<'b: 'a>(plane: &KvPlane, spans: &PlaneSpans, locked: &Locked<'b>) -> Result<Self> {
        check(plane.format)?;
        let codes = (RowLayout::codes(plane), locked.origin(&spans.codes)?);
        let scales = spans.scales.as_ref().map(|scales| locked.origin(scales)).transpose()?;
        let dense = match plane.format {
            KvFormat::Dense(dtype) => Some(dtype),
            _ => None,
        };
        Ok(Self {
            codes,
            scales: RowLayout::scales(plane).zip(scales),
            format: plane.format,
            dense,
            dim: plane.dim,
            head_bytes: codes.0.head_bytes(),
            heads: plane.heads,
        })
    }

    /// Writes the code addresses of consecutive tokens in one block, starting with `first`, which must be a
    /// row of head 0. Checks that the rows of all heads are in bounds.
    pub(super) fn rows(&self, first: RowAt, to: &mut [*const u8]) {
        addresses(&self.codes, self.heads, first, to);
    }

    /// Writes the addresses of the scales of the same rows as [`rows`](Self::rows), if the plane has scales.
    pub(super) fn rows_of_scales(&self, first: RowAt, to: &mut [*const u8]) {
        if let Some(scales) = &self.scales {
            addresses(scales, self.heads, first, to);
        }
    }

    /// Returns the layout of the scales, if the plane has scales.
    pub(super) fn scales(&self) -> Option<&RowLayout> {
        self.scales.as_ref().map(|(layout, _)| layout)
    }

    // Decision: docs/decisions/backend-cpu.md#prefetching-follows-the-order-of-memory
    /// Returns the rows to prefetch while unit `i` of `units` processes `head`.
    ///
    /// If a token's heads are adjacent in memory, returns the rows of all heads for some of the tokens, in
    /// memory order. Otherwise, returns the rows of `head`.
    pub(super) fn ahead<'b>(
        &self,
        rows: &'b [*const u8],
        (i, units): (usize, usize),
        head: usize,
    ) -> Prefetch<'b> {
        let (at, offset, bytes) = if self.head_bytes == self.row_bytes() && units > 1 {
            let tokens = share(0..rows.len(), i, units);
            (&rows[tokens], 0, self.heads * self.head_bytes)
        } else {
            (rows, head * self.head_bytes, self.row_bytes())
        };
        let rows = RowPointers { at, offset, ..RowPointers::default() };
        Prefetch { rows, bytes, next: (0, 0) }
    }

    /// Returns the number of bytes per row.
    pub(super) fn row_bytes(&self) -> usize {
        self.codes.0.row_bytes()
    }

    /// Returns the distance in bytes between consecutive tokens of a block.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn token_bytes(&self) -> usize {
        self.codes.0.token_bytes()
    }

    /// Decodes a row to f32.
    ///
    /// # Safety
    /// `to` must be valid for writes of `dim` elements outside the plane, and the caller must be compiled for
    /// the instruction set of `S`.
    #[inline(always)]
    pub(super) unsafe fn decode<S: Simd>(&self, at: RowAt, to: *mut f32) {
        let bytes_of = |(layout, origin): &(RowLayout, Origin<'a>)| {
            let bytes = layout.bytes(at);
            origin.at(bytes.start, bytes.end - bytes.start)
        };
        let (codes, scales) =
            (bytes_of(&self.codes), self.scales.as_ref().map_or(std::ptr::null(), bytes_of));
        // SAFETY: `origin.at` checked that codes and scales are in bounds, `check` accepted the format in
        // `new`, the layout has whole groups, and `to` has room for `dim` elements by contract.
        unsafe { S::call(DecodeRow { format: self.format, codes, scales, to, dim: self.dim }) }
    }
}

/// Writes the row addresses of consecutive tokens in one block, starting with `first`, which must be a row of
/// head 0. Checks that the rows of all `heads` heads are in bounds.
fn addresses((layout, origin): &(RowLayout, Origin<'_>), heads: usize, first: RowAt, to: &mut [*const u8]) {
    let step = layout.token_bytes();
    let start = layout.bytes(first).start;
    let all = (to.len().max(1) - 1) * step + (heads - 1) * layout.head_bytes() + layout.row_bytes();
    let start = origin.at(start, all);
    for (t, row) in to.iter_mut().enumerate() {
        *row = start.wrapping_add(t * step);
    }
}
