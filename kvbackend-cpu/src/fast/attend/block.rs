//! Attention of queries over a tile, in blocks of queries whose sums fit in registers: logits, weights, and
//! weighted sums of values.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use kvcore::{Attend, AttendRows};

use super::elements::{RowElement, Scaling};
use super::pointers::{Prefetch, RowPointers, RowScales};
use super::products::{accumulate, dots};
use super::softmax::{LogitScaling, OnlineSoftmax, StateLayout};
use super::tile::{TILE, TokenTile};
use crate::simd::{Simd, SimdTask};

/// Distance in elements between the logits of consecutive queries: one tile plus one vector.
pub(super) const STRIDE: usize = TILE + 16;
/// Maximum number of queries per block.
pub(super) const QUERIES: usize = 6;

/// Computes the attention of one head unit's queries over one tile of tokens.
///
/// # Safety
/// With `n = queries()`, `q` must be valid for reads of `n` queries of `dims.0` f32 elements, and `latents`,
/// if given, of `n` queries of `dims.1`. `states` must be valid for `n` states of `layout`, and no other code
/// may access them. `keys` and `values` must have a row for each token of the tile, of `dims.0` and `dims.1`
/// elements.
pub(super) struct TileAttention<'a> {
    pub(super) op: &'a Attend,
    pub(super) entry: &'a AttendRows,
    /// The query rows.
    pub(super) rows: Range<usize>,
    /// Number of heads per row.
    pub(super) heads: usize,
    /// Number of elements per key, and per value.
    pub(super) dims: (usize, usize),
    pub(super) q: *const f32,
    /// In latent attention, the queries that are multiplied by the values.
    pub(super) latents: Option<*const f32>,
    /// The states of the segment's merge group.
    pub(super) states: *mut f32,
    pub(super) layout: StateLayout,
    pub(super) tile: &'a TokenTile<'a>,
    pub(super) keys: RowPointers<'a>,
    pub(super) values: RowPointers<'a>,
    pub(super) columns: &'a [*const u8],
    /// The next rows of keys and of values, which are prefetched.
    pub(super) ahead: [Prefetch<'a>; 2],
}

/// The tokens of a tile that the queries of a block attend to.
struct VisibleTokens<const Q: usize> {
    each: [Range<usize>; Q],
    /// The range from the first to the last token that any of the queries attends to.
    all: Range<usize>,
    /// The tokens that all of the queries attend to.
    common: Range<usize>,
}

impl TileAttention<'_> {
    pub(super) fn queries(&self) -> usize {
        self.rows.len() * self.heads
    }

    /// Processes all queries, reading the rows of `keys` and `values` in place.
    ///
    /// # Safety
    /// The conditions of [`TileAttention`] must hold, the rows must have elements of type `E`, and the caller
    /// must be compiled for the instruction set of `S`.
    #[inline(always)]
    pub(super) unsafe fn in_place<S: Simd, E: RowElement>(&self) {
        let (mut m, count) = (0, self.queries());
        // SAFETY: `m` plus the number of queries in a block is at most `count`, and the rows have elements of
        // type `E` by contract.
        unsafe {
            if const { S::REGISTERS >= 32 } {
                while m + 4 <= count {
                    S::call(QueryBlock::<E, 4, 4, false>::new(self, m));
                    m += 4;
                }
            }
            while m + 2 <= count {
                S::call(QueryBlock::<E, 2, 4, false>::new(self, m));
                m += 2;
            }
            while m < count {
                S::call(QueryBlock::<E, 1, 4, false>::new(self, m));
                m += 1;
            }
        }
    }

    /// Processes all queries, reading keys from f32 columns and values from f32 rows.
    ///
    /// # Safety
    /// The conditions of [`TileAttention`] must hold, and the values must be f32. `columns` must list
    /// `dims.0` columns of [`TILE`] f32 elements, and `dims.1` more if there are latents. The caller must be
    /// compiled for the instruction set of `S`.
    #[inline(always)]
    pub(super) unsafe fn packed<S: Simd>(&self) {
        let (mut m, count) = (0, self.queries());
        // SAFETY: `m` plus the number of queries in a block is at most `count`; columns and values are f32 by
        // contract.
        unsafe {
            if const { S::REGISTERS >= 32 } {
                while m + 6 <= count {
                    S::call(QueryBlock::<f32, 6, 4, true>::new(self, m));
                    m += 6;
                }
            }
            while m + 4 <= count {
                S::call(QueryBlock::<f32, 4, 2, true>::new(self, m));
                m += 4;
            }
            while m < count {
                S::call(QueryBlock::<f32, 1, 2, true>::new(self, m));
                m += 1;
            }
        }
    }

    /// Returns the tokens that query `m` attends to, as indices into the tile.
    pub(super) fn seen(&self, m: usize) -> Range<usize> {
        let tile = self.tile;
        if self.entry.selection.is_some() {
            return 0..tile.len();
        }
        tile.visible(self.rows.start + m / self.heads)
    }

    /// Returns the state of query `m`.
    ///
    /// # Safety
    /// `m` must be below `queries()`, and the conditions of [`TileAttention`] must hold.
    #[inline(always)]
    pub(super) unsafe fn state_of(&self, m: usize) -> *mut f32 {
        // SAFETY: `states` has `queries()` states of `layout.stride()` elements, and `m < queries()` by
        // contract.
        unsafe { self.states.add(m * self.layout.stride()) }
    }

    fn visible_tokens<const Q: usize>(&self, first: usize) -> VisibleTokens<Q> {
        let each: [_; Q] = std::array::from_fn(|a| self.seen(first + a));
        let (mut all, mut common) = (0..0, 0..self.tile.len());
        for one in &each {
            if one.start < one.end {
                let start = if all.end == 0 { one.start } else { one.start.min(all.start) };
                all = start..one.end.max(all.end);
            }
            common = common.start.max(one.start)..common.end.min(one.end);
        }
        VisibleTokens { each, all, common }
    }
}

/// Processes `Q` queries starting at `first`, `N` output vectors at a time. If `PACKED` is true, keys are in
/// columns.
///
/// # Safety
/// The conditions of [`TileAttention::in_place`] must hold, or the ones of [`TileAttention::packed`] if
/// `PACKED` is true. `first + Q` must be at most `queries()`.
struct QueryBlock<'a, E, const Q: usize, const N: usize, const PACKED: bool> {
    attention: &'a TileAttention<'a>,
    first: usize,
    element: PhantomData<E>,
}

impl<'a, E, const Q: usize, const N: usize, const PACKED: bool> QueryBlock<'a, E, Q, N, PACKED> {
    #[inline(always)]
    fn new(attention: &'a TileAttention<'a>, first: usize) -> Self {
        Self { attention, first, element: PhantomData }
    }
}

impl<E: RowElement, const Q: usize, const N: usize, const PACKED: bool> SimdTask
    for QueryBlock<'_, E, Q, N, PACKED>
{
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (attention, (k_dim, v_dim)) = (self.attention, self.attention.dims);
        let VisibleTokens { mut each, all, mut common } = attention.visible_tokens::<Q>(self.first);
        if all.end == 0 {
            return;
        }
        let mut logits = [const { MaybeUninit::<f32>::uninit() }; QUERIES * STRIDE];
        let row = logits.as_mut_ptr().cast::<f32>();
        let factor = attention.op.scale * attention.tile.segment.logit_scale;
        let scaling = LogitScaling { factor, softcap: attention.op.softcap };
        let stride = attention.layout.stride();
        // The first block of queries prefetches the next rows.
        let ahead = if self.first == 0 { attention.ahead } else { Default::default() };
        // SAFETY: `Q <= QUERIES`, so `logits` has `STRIDE` elements for each query: a tile and one vector.
        // `first + Q <= queries()` by contract, so queries and states belong to `attention`. Only logits that
        // `dots` or `accumulate` wrote are read, since the range of each query is inside `all`.
        unsafe {
            let q = attention.q.add(self.first * k_dim);
            let latents = attention.latents.map(|all| all.add(self.first * v_dim));
            if PACKED {
                packed_products::<S, Q, N>((q, latents), attention.dims, attention.columns, row);
            } else {
                let (keys, to) = (attention.keys.part(all.clone()), (row.add(all.start), STRIDE));
                dots::<S, E, Q>(q, k_dim, keys, to, false, ahead[0]);
                if let Some(q) = latents {
                    dots::<S, E, Q>(q, v_dim, attention.values.part(all), to, true, Prefetch::default());
                }
            }
            let mut shrink = [1.0; Q];
            for (a, seen) in each.iter_mut().enumerate() {
                let state = attention.state_of(self.first + a);
                let row = row.add(a * STRIDE + seen.start);
                if seen.start >= seen.end {
                    *seen = 0..0;
                    common = 0..0;
                    continue;
                }
                shrink[a] = S::call(OnlineSoftmax { row, n: seen.len(), scaling, state });
                if matches!(E::SCALING, Scaling::Rows) {
                    scale_weights::<S>(row, seen.len(), attention.values.scales, seen.start);
                }
            }
            let out = attention.state_of(self.first).add(2);
            if common.start < common.end {
                let (weights, values) = (row.add(common.start), attention.values.part(common.clone()));
                accumulate::<S, E, Q, N>(weights, STRIDE, values, v_dim, (out, stride), shrink, ahead[1]);
                shrink = [1.0; Q];
            } else {
                common = 0..0;
            }
            // Tokens that only some of the queries attend to: on the diagonal, or at the edge of a window.
            for (a, seen) in each.into_iter().enumerate() {
                let (before, after) = if common.is_empty() {
                    (seen, 0..0)
                } else {
                    (seen.start..common.start, common.end..seen.end)
                };
                let mut shrink = shrink[a];
                for part in [before, after].into_iter().filter(|part| part.start < part.end) {
                    let weights = row.add(a * STRIDE + part.start);
                    let values = attention.values.part(part);
                    let out = out.add(a * stride);
                    S::call(AccumulateValues::<E, N> {
                        weights,
                        values,
                        v_dim,
                        out,
                        shrink,
                        element: PhantomData,
                    });
                    shrink = 1.0;
                }
            }
        }
    }
}

/// Computes the products of `Q` queries with a packed tile. The products of consecutive queries begin
/// [`STRIDE`] elements apart.
///
/// # Safety
/// `q` must have `Q` queries of `dims.0` f32 elements, and `latents`, if given, `Q` queries of `dims.1`.
/// `columns` must list `dims.0` columns of [`TILE`] f32 elements, and `dims.1` more if there are latents.
/// `to` must be valid for writes of `Q * STRIDE` elements. The caller must be compiled for the instruction
/// set of `S`.
#[inline(always)]
pub(super) unsafe fn packed_products<S: Simd, const Q: usize, const N: usize>(
    (q, latents): (*const f32, Option<*const f32>),
    dims: (usize, usize),
    columns: &[*const u8],
    to: *mut f32,
) {
    let (keys, latent_keys) = columns.split_at(dims.0);
    let columns = |at| RowPointers { at, ..RowPointers::default() };
    // SAFETY: by contract, `q` and `latents` have `Q` queries as wide as there are columns, each column has
    // `TILE` elements, and `to` has room for `TILE` products at each of `Q` strides.
    unsafe {
        to.write_bytes(0, Q * STRIDE);
        let (of, ahead) = (columns(keys), Prefetch::default());
        accumulate::<S, f32, Q, N>(q, dims.0, of, TILE, (to, STRIDE), [1.0; Q], ahead);
        if let Some(q) = latents {
            let of = columns(latent_keys);
            accumulate::<S, f32, Q, N>(q, dims.1, of, TILE, (to, STRIDE), [1.0; Q], ahead);
        }
    }
}

/// Multiplies the weights of `n` tokens, starting at `first`, by the scales of their values.
///
/// # Safety
/// `weights`, and `scales` starting at token `first`, must be initialised for `n` tokens and `S::LANES` more,
/// with one scale per token. The caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn scale_weights<S: Simd>(weights: *mut f32, n: usize, scales: RowScales, first: usize) {
    for t in (0..n).step_by(S::LANES) {
        // SAFETY: `t < n`, so the vectors end before `n + LANES`, and both pointers are valid for `n + LANES`
        // elements by contract.
        unsafe {
            let (weight, scale) = (S::load(weights.add(t)), S::load(scales.row(first + t)));
            S::store(weights.add(t), S::mul(weight, scale));
        }
    }
}

/// Scales one query's accumulated output by `shrink`, then adds the weighted values.
///
/// # Safety
/// `weights` must have a weight for each row of `values`, each row must have `v_dim` elements of type `E`,
/// and `out` must have `v_dim` initialised f32 elements, which nothing else may access during the call.
pub(super) struct AccumulateValues<'a, E, const N: usize> {
    pub(super) weights: *const f32,
    pub(super) values: RowPointers<'a>,
    pub(super) v_dim: usize,
    pub(super) out: *mut f32,
    pub(super) shrink: f32,
    pub(super) element: PhantomData<E>,
}

impl<E: RowElement, const N: usize> SimdTask for AccumulateValues<'_, E, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let to = (self.out, 0);
        // SAFETY: by the contract of `AccumulateValues`, `weights` has `values.len()` elements, and each row
        // and `out` have `v_dim`.
        unsafe {
            accumulate::<S, E, 1, N>(
                self.weights,
                0,
                self.values,
                self.v_dim,
                to,
                [self.shrink],
                Prefetch::default(),
            );
        }
    }
}
