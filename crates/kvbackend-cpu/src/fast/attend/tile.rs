//! Some tokens of a segment: where their rows lie, and their rows as the products want them.

use std::ops::Range;

use kvcore::{Attend, DType, KeyForm, Segment};

use super::part::Inputs;
use super::products::{Rows, transpose};
use super::source::Source;
use crate::fast::rotate::{Turn, rotate};
use crate::plane::RowAt;
use crate::simd::{Lane, Simd, Task};

/// Tokens of a tile, at most: if it is packed, its keys and values stay in the first cache for all queries.
pub(super) const TILE: usize = 64;

/// A tile of tokens of one segment.
pub(super) struct Tile<'a> {
    op: &'a Attend,
    pub(super) segment: &'a Segment,
    pub(super) tokens: Range<usize>,
    /// Codes of head 0.
    pub(super) keys: [*const u8; TILE],
    pub(super) values: [*const u8; TILE],
}

impl<'a> Tile<'a> {
    /// Up to [`TILE`] tokens of a run from `start` on, none past its end.
    pub(super) fn new(inputs: &Inputs<'a>, segment: &'a Segment, start: usize, end: usize) -> Self {
        let tokens = start..(start + TILE).min(end).max(start);
        let nothing = [std::ptr::null(); TILE];
        let mut tile = Self { op: inputs.op, segment, tokens, keys: nothing, values: nothing };
        let mut t = 0;
        while t < tile.len() {
            let at = tile.row(t);
            let run = (inputs.op.arena.layout().shape().block_size - at.token).min(tile.len() - t);
            inputs.keys.rows(at, &mut tile.keys[t..t + run]);
            inputs.values.rows(at, &mut tile.values[t..t + run]);
            t += run;
        }
        tile
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Head 0 of a token.
    fn row(&self, t: usize) -> RowAt {
        let block_size = self.op.arena.layout().shape().block_size;
        let (block, token) = ((self.tokens.start + t) / block_size, (self.tokens.start + t) % block_size);
        RowAt { layer: self.op.layer, block: self.segment.blocks[block].index(), token, head: 0 }
    }
}

/// How keys and values come to the products.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// From where they lie.
    InPlace,
    /// As rows of f32: they must be decoded or rotated.
    Widened,
    /// Values as rows, keys as columns, for many queries.
    Packed,
    /// By products of matrices.
    Matrix,
}

/// Memory for the rows of a tile, for one unit of heads at a time.
pub(super) struct Room<'a> {
    pub(super) keys: *mut f32,
    pub(super) values: *mut f32,
    /// Of packed keys: where each element of all tokens lies, those of latent attention's values after them.
    pub(super) columns: &'a [*const u8],
}

/// One head's rows of a tile as f32, keys rotated to where they are used if they are not yet.
struct Widen<'a> {
    source: &'a Source<'a>,
    tile: &'a Tile<'a>,
    head: usize,
    /// For keys that are not rotated.
    turn: Option<&'a Turn>,
    to: *mut f32,
}

impl Task for Widen<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let dim = self.source.dim;
        for t in 0..self.tile.len() {
            // SAFETY: there is room for a tile of rows.
            unsafe {
                let to = self.to.add(t * dim);
                let at = self.tile.row(t).head(self.head);
                self.source.decode::<S>(at, to);
                if let Some(turn) = self.turn {
                    let angle = turn.at(self.tile.segment.position((self.tile.tokens.start + t) as i64));
                    rotate::<S, f32>(to, to, dim, angle, turn.factor);
                }
            }
        }
    }
}

/// Rows of a tile as columns.
struct Turned<'a> {
    rows: Rows<'a>,
    dtype: Option<DType>,
    dim: usize,
    to: *mut f32,
}

impl Task for Turned<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: there are `dim` columns of a tile each.
        unsafe {
            match self.dtype {
                Some(DType::BF16) => self.by::<S, half::bf16>(),
                Some(DType::F16) => self.by::<S, half::f16>(),
                _ => self.by::<S, f32>(),
            }
        }
    }
}

impl Turned<'_> {
    #[inline(always)]
    unsafe fn by<S: Simd, E: Lane>(&self) {
        // SAFETY: the caller's.
        unsafe { transpose::<S, E>(self.rows, self.dim, self.to, TILE) }
    }
}

/// Rows of f32 that lie one after the other.
pub(super) fn beside(start: *mut f32, dim: usize) -> [*const u8; TILE] {
    std::array::from_fn(|t| start.wrapping_add(t * dim).cast::<u8>().cast_const())
}

impl Inputs<'_> {
    /// The rotation of keys that are not rotated yet.
    fn turn_of_keys(&self) -> Option<&Turn> {
        self.turn.as_ref().filter(|_| self.op.keys == KeyForm::Unrotated)
    }

    /// Keys and values of a tile as rows of f32.
    ///
    /// # Safety
    /// There is room for them.
    #[inline(always)]
    pub(super) unsafe fn widen<S: Simd>(&self, tile: &Tile<'_>, heads: (usize, usize), room: &Room<'_>) {
        // SAFETY: the caller's.
        unsafe {
            self.widen_keys::<S>(tile, heads.0, room);
            self.widen_values::<S>(tile, heads.1, room);
        }
    }

    #[inline(always)]
    unsafe fn widen_keys<S: Simd>(&self, tile: &Tile<'_>, head: usize, room: &Room<'_>) {
        let (source, turn) = (&self.keys, self.turn_of_keys());
        // SAFETY: the caller's.
        unsafe { S::call(Widen { source, tile, head, turn, to: room.keys }) }
    }

    #[inline(always)]
    unsafe fn widen_values<S: Simd>(&self, tile: &Tile<'_>, head: usize, room: &Room<'_>) {
        // SAFETY: the caller's.
        unsafe { S::call(Widen { source: &self.values, tile, head, turn: None, to: room.values }) }
    }

    /// Values of a tile as rows of f32, and keys as columns, those of latent attention after the rotated ones.
    ///
    /// # Safety
    /// There is room for them.
    #[inline(always)]
    pub(super) unsafe fn pack<S: Simd>(
        &self,
        tile: &Tile<'_>,
        (k_head, v_head): (usize, usize),
        room: &Room<'_>,
    ) {
        let (n, dim) = (tile.len(), self.keys.dim);
        let to = room.columns[0].cast_mut().cast::<f32>();
        // SAFETY: there are columns for keys, and for values where those are keys too.
        unsafe {
            self.widen_values::<S>(tile, v_head, room);
            if self.latent.is_some() {
                let rows = beside(room.values, self.values.dim);
                let rows = Rows { at: &rows[..n], head: 0 };
                S::call(Turned { rows, dtype: None, dim: self.values.dim, to: to.add(dim * TILE) });
            }
            if self.keys.dense.is_some() && self.turn_of_keys().is_none() {
                let rows = Rows { at: &tile.keys[..n], head: k_head * self.keys.head_bytes };
                S::call(Turned { rows, dtype: self.keys.dense, dim, to });
            } else {
                self.widen_keys::<S>(tile, k_head, room);
                let rows = beside(room.keys, dim);
                S::call(Turned { rows: Rows { at: &rows[..n], head: 0 }, dtype: None, dim, to });
            }
        }
    }
}
