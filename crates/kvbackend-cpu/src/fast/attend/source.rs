//! K or V as rows: where they lie if they are dense, decoded otherwise.

use kvcore::{DType, KvFormat, KvPlane, Result};

use super::products::{Ahead, Rows};
use crate::fast::codes::{Decode, check};
use crate::fast::ends::Ends;
use crate::fast::share;
use crate::plane::{RowAt, Span};
use crate::raw::Origin;
use crate::simd::Simd;

/// One plane of an arena, to read.
pub(super) struct Source<'a> {
    codes: (Span, Origin<'a>),
    scales: Option<(Span, Origin<'a>)>,
    format: KvFormat,
    /// The element type of a dense plane.
    pub(super) dense: Option<DType>,
    /// Elements of a row.
    pub(super) dim: usize,
    /// Bytes from one head's codes to the next.
    pub(super) head_bytes: usize,
    heads: usize,
}

impl<'a> Source<'a> {
    pub(super) fn new<'b: 'a>(plane: &KvPlane, ends: &Ends<'b>) -> Result<Self> {
        check(plane.format)?;
        let codes = (Span::codes(plane), ends.origin(plane.storage)?);
        let scales = plane.scales.map(|(storage, _)| ends.origin(storage)).transpose()?;
        let dense = match plane.format {
            KvFormat::Dense(dtype) => Some(dtype),
            _ => None,
        };
        Ok(Self {
            codes,
            scales: Span::scales(plane).zip(scales),
            format: plane.format,
            dense,
            dim: plane.dim,
            head_bytes: codes.0.head_bytes(),
            heads: plane.heads,
        })
    }

    /// Where the codes of tokens of one block begin, from that at `first` on, which is of head 0. All heads' rows
    /// lie inside.
    pub(super) fn rows(&self, first: RowAt, to: &mut [*const u8]) {
        let head = (self.heads - 1) * self.head_bytes;
        let step = self.codes.0.token_bytes();
        let start = self.codes.0.bytes(first).start;
        let all = (to.len().max(1) - 1) * step + head + self.row_bytes();
        let start = self.codes.1.at(start, all);
        for (t, row) in to.iter_mut().enumerate() {
            *row = start.wrapping_add(t * step);
        }
    }

    /// What of the rows to come is asked for while unit `i` of `units` is at work with `head`.
    /// Where the heads of a token lie beside each other, that is all of them for some of the tokens, in the order of
    /// memory; elsewhere it is the same head.
    pub(super) fn ahead<'b>(
        &self,
        rows: &'b [*const u8],
        (i, units): (usize, usize),
        head: usize,
    ) -> Ahead<'b> {
        let (rows, bytes) = if self.head_bytes == self.row_bytes() && units > 1 {
            let tokens = share(0..rows.len(), i, units);
            (Rows { at: &rows[tokens], head: 0 }, self.heads * self.head_bytes)
        } else {
            (Rows { at: rows, head: head * self.head_bytes }, self.row_bytes())
        };
        Ahead { rows, bytes, next: (0, 0) }
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.codes.0.row_bytes()
    }

    /// Bytes from one token to the next within a block.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn token_bytes(&self) -> usize {
        self.codes.0.token_bytes()
    }

    /// A row as f32.
    ///
    /// # Safety
    /// There is room for a row.
    #[inline(always)]
    pub(super) unsafe fn decode<S: Simd>(&self, at: RowAt, to: *mut f32) {
        let place = |(span, origin): &(Span, Origin<'a>)| {
            let bytes = span.bytes(at);
            origin.at(bytes.start, bytes.end - bytes.start)
        };
        let (codes, scales) = (place(&self.codes), self.scales.as_ref().map_or(std::ptr::null(), place));
        // SAFETY: the caller's; the layout has whole groups.
        unsafe { S::call(Decode { format: self.format, codes, scales, to, dim: self.dim }) }
    }
}
