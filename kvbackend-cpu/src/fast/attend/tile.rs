//! Tiles of a segment's tokens: the addresses of their rows, and buffers with the rows in the form that the
//! products need.

use std::ops::Range;

use kvcore::{Attend, DType, KeyForm, Segment};

use super::inputs::CallInputs;
use super::pointers::RowPointers;
use super::products::transpose;
use super::source::SourcePlane;
use crate::fast::rotate::{RotationTable, rotate};
use crate::plane::RowAt;
use crate::simd::{Simd, SimdElement, SimdTask};

/// Maximum number of tokens per tile. The keys and values of a packed tile stay in the first-level cache
/// while all queries are processed.
pub(super) const TILE: usize = 64;

/// A tile: consecutive tokens of one segment.
pub(super) struct TokenTile<'a> {
    op: &'a Attend,
    pub(super) segment: &'a Segment,
    pub(super) tokens: Range<usize>,
    /// The address of head 0's key for each token.
    pub(super) keys: [*const u8; TILE],
    pub(super) values: [*const u8; TILE],
    /// For keys and for values, the address of head 0's scales for each token. Null if there are no scales.
    pub(super) scales: [[*const u8; TILE]; 2],
}

impl<'a> TokenTile<'a> {
    /// Creates a tile of up to [`TILE`] tokens that starts at token `start` and ends at or before `end`.
    pub(super) fn new(inputs: &CallInputs<'a>, segment: &'a Segment, start: usize, end: usize) -> Self {
        let tokens = start..(start + TILE).min(end).max(start);
        let nothing = [std::ptr::null(); TILE];
        let scales = [nothing; 2];
        let mut tile = Self { op: inputs.op, segment, tokens, keys: nothing, values: nothing, scales };
        let mut t = 0;
        while t < tile.len() {
            let at = tile.row(t);
            let run = (inputs.op.arena.layout().shape().block_size - at.token).min(tile.len() - t);
            inputs.keys.rows(at, &mut tile.keys[t..t + run]);
            inputs.values.rows(at, &mut tile.values[t..t + run]);
            inputs.keys.rows_of_scales(at, &mut tile.scales[0][t..t + run]);
            inputs.values.rows_of_scales(at, &mut tile.scales[1][t..t + run]);
            t += run;
        }
        tile
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the tokens that a query row attends to if there is no selection, as indices into the tile.
    pub(super) fn visible(&self, row: usize) -> Range<usize> {
        let seen = self.op.visible(self.segment, self.op.work.rows()[row]);
        let at = |token: usize| token.saturating_sub(self.tokens.start).min(self.len());
        at(seen.start)..at(seen.end).max(at(seen.start))
    }

    /// Returns head 0's row for token `t` of the tile.
    fn row(&self, t: usize) -> RowAt {
        let block_size = self.op.arena.layout().shape().block_size;
        let (block, token) = ((self.tokens.start + t) / block_size, (self.tokens.start + t) % block_size);
        RowAt { layer: self.op.layer, block: self.segment.blocks[block].index(), token, head: 0 }
    }
}

/// The form in which the products read keys and values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TileForm {
    /// Rows of the cache, read in place.
    InPlace,
    /// f32 rows, which are decoded or rotated first.
    Widened,
    /// Values as f32 rows and keys as f32 columns, for many queries.
    Packed,
    /// bf16 rows, for matrix products on the matrix unit.
    Matrix,
}

/// Buffers for the rows that one head unit reads from one tile.
pub(super) struct TileBuffers<'a> {
    pub(super) keys: *mut f32,
    pub(super) values: *mut f32,
    /// The addresses of the packed keys' columns, one per element of a key. In latent attention, the
    /// addresses of the values' columns follow.
    pub(super) columns: &'a [*const u8],
}

/// Converts one head's rows of a tile to f32. Unrotated keys are also rotated to the positions at which they
/// are used.
///
/// # Safety
/// `to` must be valid for writes of `tile.len() * source.dim` elements outside the plane.
struct WidenRows<'a> {
    source: &'a SourcePlane<'a>,
    tile: &'a TokenTile<'a>,
    head: usize,
    /// The rotation to apply to unrotated keys.
    table: Option<&'a RotationTable>,
    to: *mut f32,
}

impl SimdTask for WidenRows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let dim = self.source.dim;
        for t in 0..self.tile.len() {
            // SAFETY: `t < tile.len()`, so `to` has room for row `t` by the contract of `WidenRows`; the
            // operation's check bounds the rotary dimension by `dim`, and the caller guarantees the
            // instruction set.
            unsafe {
                let to = self.to.add(t * dim);
                let at = self.tile.row(t).head(self.head);
                self.source.decode::<S>(at, to);
                if let Some(table) = self.table {
                    let angle = table.at(self.tile.segment.position((self.tile.tokens.start + t) as i64));
                    rotate::<S, f32>(to, to, dim, angle, table.factor);
                }
            }
        }
    }
}

/// Writes the rows of a tile as columns.
///
/// # Safety
/// There must be at least one row, and each row must have `dim` elements of `dtype`, or of f32 if that is
/// `None`. `to` must be valid for writes of `dim` columns of [`TILE`] elements.
struct TransposeRows<'a> {
    rows: RowPointers<'a>,
    dtype: Option<DType>,
    dim: usize,
    to: *mut f32,
}

impl SimdTask for TransposeRows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the conditions of `of_type` follow from those of `TransposeRows`, with `E` the type of
        // `dtype`; the caller guarantees the instruction set.
        unsafe {
            match self.dtype {
                Some(DType::BF16) => self.of_type::<S, half::bf16>(),
                Some(DType::F16) => self.of_type::<S, half::f16>(),
                _ => self.of_type::<S, f32>(),
            }
        }
    }
}

impl TransposeRows<'_> {
    /// Writes rows of type `E` as columns.
    ///
    /// # Safety
    /// The conditions of [`TransposeRows`] must hold, the rows must have elements of type `E`, and the caller
    /// must be compiled for `S`.
    #[inline(always)]
    unsafe fn of_type<S: Simd, E: SimdElement>(&self) {
        // SAFETY: by contract each row has `dim` elements of `E` and `to` has room for `dim * TILE`; `TILE`
        // is a multiple of the longest vector.
        unsafe { transpose::<S, E>(self.rows, self.dim, self.to, TILE) }
    }
}

/// Returns the addresses of adjacent f32 rows of `dim` elements, starting at `start`.
pub(super) fn adjacent_rows(start: *mut f32, dim: usize) -> [*const u8; TILE] {
    std::array::from_fn(|t| start.wrapping_add(t * dim).cast::<u8>().cast_const())
}

impl CallInputs<'_> {
    /// Returns the rotation to apply to keys, if they are stored unrotated.
    fn key_rotation(&self) -> Option<&RotationTable> {
        self.table.as_ref().filter(|_| self.op.keys == KeyForm::Unrotated)
    }

    /// Writes a tile's keys and values as f32 rows.
    ///
    /// # Safety
    /// `buffers.keys` and `buffers.values` must have room for [`TILE`] rows each, `heads` must be a K head
    /// and a V head, and the caller must be compiled for the instruction set of `S`.
    #[inline(always)]
    pub(super) unsafe fn widen<S: Simd>(
        &self,
        tile: &TokenTile<'_>,
        heads: (usize, usize),
        buffers: &TileBuffers<'_>,
    ) {
        // SAFETY: by contract `buffers.keys` and `buffers.values` have room for a tile of rows, as
        // `widen_keys` and `widen_values` need.
        unsafe {
            self.widen_keys::<S>(tile, heads.0, buffers);
            self.widen_values::<S>(tile, heads.1, buffers);
        }
    }

    /// Writes a tile's keys as f32 rows.
    ///
    /// # Safety
    /// `buffers.keys` must have room for [`TILE`] rows, and the caller must be compiled for the instruction
    /// set of `S`.
    #[inline(always)]
    unsafe fn widen_keys<S: Simd>(&self, tile: &TokenTile<'_>, head: usize, buffers: &TileBuffers<'_>) {
        let (source, table) = (&self.keys, self.key_rotation());
        // SAFETY: `buffers.keys` has room for `TILE` rows of `keys.dim` elements by contract, and a tile has
        // at most `TILE` tokens.
        unsafe { S::call(WidenRows { source, tile, head, table, to: buffers.keys }) }
    }

    /// Writes a tile's values as f32 rows.
    ///
    /// # Safety
    /// `buffers.values` must have room for [`TILE`] rows, and the caller must be compiled for the instruction
    /// set of `S`.
    #[inline(always)]
    unsafe fn widen_values<S: Simd>(&self, tile: &TokenTile<'_>, head: usize, buffers: &TileBuffers<'_>) {
        // SAFETY: `buffers.values` has room for `TILE` rows of `values.dim` elements by contract, and
        // `tile.len() <= TILE`.
        unsafe { S::call(WidenRows { source: &self.values, tile, head, table: None, to: buffers.values }) }
    }

    /// Writes a tile's values as f32 rows, and its keys as columns. In latent attention, also writes the
    /// values as columns, after the keys.
    ///
    /// # Safety
    /// `tile` must not be empty, and `buffers.keys` and `buffers.values` must have room for [`TILE`] rows
    /// each. `buffers.columns` must list adjacent columns of [`TILE`] writable elements: one per element of a
    /// key, and with latents one per element of a value. The caller must be compiled for the instruction set
    /// of `S`.
    #[inline(always)]
    pub(super) unsafe fn pack<S: Simd>(
        &self,
        tile: &TokenTile<'_>,
        (k_head, v_head): (usize, usize),
        buffers: &TileBuffers<'_>,
    ) {
        // SAFETY: the caller guarantees the conditions of both functions. In latent attention, `pack_columns`
        // itself first writes the values as rows.
        unsafe {
            if self.latent.is_none() {
                self.widen_values::<S>(tile, v_head, buffers);
            }
            self.pack_columns::<S>(tile, (k_head, v_head), buffers);
        }
    }

    /// Writes a tile's keys as columns. In latent attention, also writes its values, first as f32 rows and
    /// then as columns after the keys.
    ///
    /// # Safety
    /// The conditions of [`pack`](Self::pack) must hold, but `buffers.values` is only needed in latent
    /// attention.
    #[inline(always)]
    pub(super) unsafe fn pack_columns<S: Simd>(
        &self,
        tile: &TokenTile<'_>,
        (k_head, v_head): (usize, usize),
        buffers: &TileBuffers<'_>,
    ) {
        let (n, dim) = (tile.len(), self.keys.dim);
        let to = buffers.columns[0].cast_mut().cast::<f32>();
        // SAFETY: by contract, `to` points to `keys.dim` adjacent columns of `TILE` elements, followed in
        // latent attention by `values.dim` more columns. The rows have been written by `widen_values` and
        // `widen_keys`, or are inside the cache, as `SourcePlane::rows` checked.
        unsafe {
            if self.latent.is_some() {
                self.widen_values::<S>(tile, v_head, buffers);
                let rows = adjacent_rows(buffers.values, self.values.dim);
                let rows = RowPointers { at: &rows[..n], ..RowPointers::default() };
                S::call(TransposeRows { rows, dtype: None, dim: self.values.dim, to: to.add(dim * TILE) });
            }
            if self.keys.dense.is_some() && self.key_rotation().is_none() {
                let rows = RowPointers {
                    at: &tile.keys[..n],
                    offset: k_head * self.keys.head_bytes,
                    ..RowPointers::default()
                };
                S::call(TransposeRows { rows, dtype: self.keys.dense, dim, to });
            } else {
                self.widen_keys::<S>(tile, k_head, buffers);
                let rows = adjacent_rows(buffers.keys, dim);
                S::call(TransposeRows {
                    rows: RowPointers { at: &rows[..n], ..RowPointers::default() },
                    dtype: None,
                    dim,
                    to,
                });
            }
        }
    }
}
