//! Computes attention over a tile with matrix products. Keys are read in place as bf16 rows, values are
//! interleaved in pairs of rows, and queries and weights are split into as many bf16 parts as they need.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_UNORD_Q, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cmpge_epu16_mask, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_maskz_loadu_ps, _mm512_max_epu16, _mm512_permutex2var_ps, _mm512_set1_epi16, _mm512_set1_ps,
    _mm512_setr_epi32, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_ps, _mm512_storeu_si512,
    _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;
use kvcore::{Attend, DType, KeyForm, TensorView};

use super::block::{AccumulateValues, TileAttention};
use super::pointers::{Prefetch, RowPointers};
use super::products::dots;
use super::softmax::{LogitScaling, OnlineSoftmax};
use super::source::SourcePlane;
use super::tile::TILE;
use crate::simd::amx::{self, AmxTiles, Operands, PARTS, PRODUCTS, ROW, ROWS, SharedOperand};
use crate::simd::avx512::{Avx512, upper_halves};
use crate::simd::{Simd, SimdLevel};

/// Number of elements per row of a bf16 tile.
const PAIRS: usize = 2 * ROWS;
/// Distance in elements between the logits of consecutive queries: one tile plus one vector.
const STRIDE: usize = TILE + ROWS;

/// The shapes of a call's matrix products, and the number of parts that queries are split into.
#[derive(Clone, Copy)]
pub(super) struct MatrixForm {
    /// Number of bf16 parts that each element of a query is split into.
    parts: usize,
    k_dim: usize,
    v_dim: usize,
    /// Distance in bytes between the keys of consecutive tokens in a block, and between their values.
    token_bytes: [usize; 2],
    /// True if this is latent attention, in which queries are also multiplied by the values.
    latent: bool,
}

/// An item's buffers, which consist of whole AMX tiles, and the thread's tile registers.
pub(super) struct MatrixBuffers {
    form: MatrixForm,
    tiles: AmxTiles,
    /// The queries of all units as columns: first the queries to multiply by keys, then the ones to multiply
    /// by values.
    queries: [*mut u8; 2],
    /// Copies of keys, and of values used as latent keys, whose rows are not evenly spaced in the cache.
    copies: [*mut u8; 2],
    /// The tile's values, with tokens interleaved in pairs.
    values: *mut u8,
    weights: *mut u8,
    /// Results of four matrix products, for keys and for latents.
    sums: [*mut f32; 2],
}

/// Returns the number of groups that `queries` queries form. A group has up to [`ROWS`] queries.
fn groups(queries: usize) -> usize {
    queries.div_ceil(ROWS)
}

impl MatrixForm {
    /// Returns the form of a call, if the matrix unit can compute it: keys must be stored rotated, and keys
    /// and values must be bf16 rows that fill whole tile rows.
    pub(super) fn of(
        level: SimdLevel,
        op: &Attend,
        latent: Option<&TensorView>,
        [keys, values]: [&SourcePlane<'_>; 2],
    ) -> Option<Self> {
        let (k_dim, v_dim) = (keys.dim, values.dim);
        let fits = k_dim.is_multiple_of(PAIRS) && v_dim.is_multiple_of(PAIRS) && k_dim > 0 && v_dim > 0;
        let of_bf16 = [keys, values].iter().all(|source| source.dense == Some(DType::BF16));
        if level < SimdLevel::Amx || !fits || !of_bf16 || op.keys != KeyForm::Rotated {
            return None;
        }
        let mut queries = [Some(&op.q), latent].into_iter().flatten();
        let whole = op.rope.is_none() && queries.all(|view| view.dtype() == DType::BF16);
        Some(Self {
            parts: if whole { 1 } else { PARTS },
            k_dim,
            v_dim,
            token_bytes: [keys, values].map(SourcePlane::token_bytes),
            latent: latent.is_some(),
        })
    }

    /// Returns the size, in bytes, of a group's queries for the product with keys, and of its queries for the
    /// product with values.
    fn queries_bytes(&self) -> [usize; 2] {
        let tiles = |dim: usize| dim / PAIRS * self.parts * amx::TILE_BYTES;
        [tiles(self.k_dim), if self.latent { tiles(self.v_dim) } else { 0 }]
    }

    fn sizes(&self, units: usize, queries: usize) -> [usize; 8] {
        let [keys, latents] = self.queries_bytes().map(|bytes| bytes * units * groups(queries));
        let rows = |dim: usize| TILE * dim * 2;
        let latent_rows = if self.latent { rows(self.v_dim) } else { 0 };
        let (weights, sums) = (TILE / PAIRS * PARTS * amx::TILE_BYTES, PRODUCTS * amx::TILE_BYTES);
        [keys, latents, rows(self.k_dim), latent_rows, rows(self.v_dim), weights, sums, sums]
    }

    /// Creates buffers in `memory` for `units` units of `queries` queries each.
    ///
    /// # Safety
    /// The processor must support AMX with bf16, and no other [`AmxTiles`] of this thread may be alive. The
    /// buffers must be used and dropped in this thread, before `memory` is changed or dropped.
    pub(super) unsafe fn buffers(self, units: usize, queries: usize, memory: &mut Vec<f32>) -> MatrixBuffers {
        let sizes = self.sizes(units, queries);
        let bytes = sizes.iter().sum::<usize>() + ROW;
        if memory.len() * 4 < bytes {
            memory.resize(bytes.div_ceil(4), 0.0);
        }
        let start = memory.as_mut_ptr().cast::<u8>();
        let mut at = start.wrapping_add(start.align_offset(ROW));
        let [q, latents, keys, latent_keys, values, weights, sums, more] = sizes.map(|size| {
            let part = at;
            at = at.wrapping_add(size);
            part
        });
        MatrixBuffers {
            form: self,
            // SAFETY: by contract, AMX is available, no other `AmxTiles` of this thread is alive, and this
            // one is dropped in this thread.
            tiles: unsafe { AmxTiles::new() },
            queries: [q, latents],
            copies: [keys, latent_keys],
            values,
            weights,
            sums: [sums.cast(), more.cast()],
        }
    }
}

impl MatrixBuffers {
    /// Writes a unit's queries to columns: the queries for keys if `which` is 0, and the queries for values
    /// if it is 1.
    ///
    /// # Safety
    /// The buffers must have been made for `count` queries per unit and more than `unit` units, with latents
    /// if `which` is 1. `from` must be valid for reads of `count` queries of `k_dim` or `v_dim` f32 elements,
    /// and the processor must support AVX-512.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn put_queries(&self, which: usize, unit: usize, count: usize, from: *const f32) {
        let (parts, dim) = (self.form.parts, [self.form.k_dim, self.form.v_dim][which]);
        // SAFETY: a query has `dim` elements, a multiple of `PAIRS`, so `i + PAIRS <= dim` for both
        // loads, and `first + j < count`. The columns of a unit have room for `groups(count)` groups of
        // `queries_bytes` bytes, as many as are written. AVX-512 is available by contract.
        unsafe {
            let mut to = self.columns(which, unit, count, 0).cast_mut();
            for first in (0..count).step_by(ROWS) {
                for i in (0..dim).step_by(PAIRS) {
                    let mut squares = [[_mm512_setzero_ps(); ROWS]; PARTS];
                    for j in 0..ROWS.min(count - first) {
                        let q = from.add((first + j) * dim + i);
                        let halves = bf16_parts(_mm512_loadu_ps(q), _mm512_loadu_ps(q.add(ROWS)));
                        for (square, half) in squares.iter_mut().zip(halves) {
                            square[j] = _mm512_castsi512_ps(half);
                        }
                    }
                    for square in &mut squares[..parts] {
                        Avx512::transpose(square);
                        for (row, vector) in square.iter().enumerate() {
                            _mm512_storeu_ps(to.add(row * ROW).cast(), *vector);
                        }
                        to = to.add(amx::TILE_BYTES);
                    }
                }
            }
        }
    }

    /// Returns the address of the columns of one group of a unit's queries.
    fn columns(&self, which: usize, unit: usize, count: usize, group: usize) -> *const u8 {
        self.queries[which].wrapping_add(self.form.queries_bytes()[which] * (unit * groups(count) + group))
    }
}

/// Splits two vectors into bf16 parts. Each part holds the elements of `a`, followed by the elements of `b`.
///
/// # Safety
/// The processor must support AVX-512 F, BW and DQ, and the caller must be compiled for them.
#[inline(always)]
unsafe fn bf16_parts(a: __m512, b: __m512) -> [__m512i; PARTS] {
    // SAFETY: AVX-512 F, BW and DQ are available by contract, and no pointers are involved.
    unsafe {
        let (a, b) = (amx::parts(a), amx::parts(b));
        let mut halves = [_mm512_setzero_si512(); PARTS];
        for (half, (a, b)) in halves.iter_mut().zip(a.into_iter().zip(b)) {
            *half = upper_halves(_mm512_castps_si512(a), _mm512_castps_si512(b));
        }
        halves
    }
}

/// Returns a mask of the lanes whose tokens are in `range`, for a vector that begins with token `first`.
fn lane_mask(range: &Range<usize>, first: usize) -> u16 {
    let below = |t: usize| ((1u32 << t.saturating_sub(first).min(ROWS)) - 1) as u16;
    below(range.end) & !below(range.start)
}

/// Interleaves the values of up to [`TILE`] tokens in pairs, with zeros for missing tokens, and returns
/// whether all values are finite. Of every 8 elements, the first 4 are written to the first tile and the last
/// 4 to the second.
///
/// # Safety
/// `rows` must have at most [`TILE`] rows of `dim` bf16 elements, `dim` must be a multiple of [`PAIRS`], `to`
/// must be valid for writes of `TILE * dim` bf16 elements, and the processor must support AVX-512.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn put_values(rows: RowPointers<'_>, dim: usize, to: *mut u8, mut ahead: [Prefetch<'_>; 2]) -> bool {
    let n = rows.len();
    let pairs = n.next_multiple_of(PAIRS) / 2;
    let lines = ahead.map(|ahead| ahead.lines(pairs));
    // SAFETY: a row is loaded only if `2 * pair + t < n`, and `i + PAIRS <= dim`. `to` is written in
    // `n.div_ceil(PAIRS)` steps of `dim / ROWS` tiles, at most the `TILE * dim` elements that it has by
    // contract.
    unsafe {
        let magnitude = _mm512_set1_epi16(0x7fff);
        let mut largest = _mm512_setzero_si512();
        for pair in 0..pairs {
            for (ahead, lines) in ahead.iter_mut().zip(lines) {
                ahead.issue::<Avx512>(lines);
            }
            let (step, row) = (pair / ROWS, pair % ROWS);
            let to = to.add(step * (dim / ROWS) * amx::TILE_BYTES + row * ROW);
            for i in (0..dim).step_by(PAIRS) {
                let mut both = [_mm512_setzero_si512(); 2];
                for (t, vector) in both.iter_mut().enumerate() {
                    if 2 * pair + t < n {
                        *vector = _mm512_loadu_si512(rows.row::<u16>(2 * pair + t).add(i).cast::<__m512i>());
                        largest = _mm512_max_epu16(largest, _mm512_and_si512(*vector, magnitude));
                    }
                }
                let to = to.add(i / ROWS * amx::TILE_BYTES).cast::<__m512i>();
                _mm512_storeu_si512(to, _mm512_unpacklo_epi16(both[0], both[1]));
                _mm512_storeu_si512(to.byte_add(amx::TILE_BYTES), _mm512_unpackhi_epi16(both[0], both[1]));
            }
        }
        _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0
    }
}

impl TileAttention<'_> {
    /// Computes the attention of all queries of unit `unit`, which are in the buffers, over the tile, and
    /// adds the results to the queries' states.
    ///
    /// # Safety
    /// The conditions of [`TileAttention`] must hold, with bf16 keys and values in the cache. `buffers` must
    /// have been made in this thread for at least `unit + 1` units of `queries()` queries of these
    /// dimensions, and must hold their queries. The processor must support AMX.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn by_matrices(&self, buffers: &MatrixBuffers, unit: usize) {
        let (form, tiles) = (&buffers.form, &buffers.tiles);
        // SAFETY: the conditions of `put_values`, `evenly_spaced` and `weigh_values` follow from this
        // function's. For `rows_by_columns`, `evenly_spaced` returns four groups of `ROWS` readable rows,
        // `columns` the `dim / PAIRS` steps of a group's tiles, and each of `sums` has room for `PRODUCTS`
        // tiles.
        unsafe {
            let finite = put_values(self.values, form.v_dim, buffers.values, self.ahead);
            let keys = self.evenly_spaced(self.keys, form.k_dim, form.token_bytes[0], buffers.copies[0]);
            let latent = form.latent;
            let latents = latent
                .then(|| self.evenly_spaced(self.values, form.v_dim, form.token_bytes[1], buffers.copies[1]));
            let count = self.queries();
            for group in 0..groups(count) {
                let columns = |which| SharedOperand {
                    at: buffers.columns(which, unit, count, group),
                    parts: form.parts,
                };
                amx::rows_by_columns(tiles, keys, columns(0), form.k_dim / PAIRS, buffers.sums[0]);
                if let Some(rows) = latents {
                    amx::rows_by_columns(tiles, rows, columns(1), form.v_dim / PAIRS, buffers.sums[1]);
                }
                self.weigh_values(buffers, group, finite);
            }
        }
    }

    /// Returns four groups of 16 rows that are evenly spaced within each group. A group is read in place if
    /// possible, and copied otherwise.
    ///
    /// # Safety
    /// `rows` must be the rows of this attention's tile in the cache, with `dim` bf16 elements each, and
    /// `copies` must be valid for writes of [`TILE`] such rows.
    #[inline(always)]
    unsafe fn evenly_spaced(
        &self,
        rows: RowPointers<'_>,
        dim: usize,
        token_bytes: usize,
        copies: *mut u8,
    ) -> Operands {
        let block_size = self.op.arena.layout().shape().block_size;
        // A group always reads 16 rows, even past the last visible token. All 16 belong to the same block.
        let even = block_size.is_multiple_of(ROWS) && self.tile.tokens.start.is_multiple_of(ROWS);
        let stride = if even { token_bytes } else { dim * 2 };
        if !even {
            for t in 0..rows.len() {
                // SAFETY: `t < rows.len() <= TILE`, each row has `dim` elements, which are `stride` bytes,
                // and `copies` has room for `TILE` rows outside the cache by contract.
                unsafe {
                    std::ptr::copy_nonoverlapping(rows.row::<u8>(t), copies.add(t * stride), stride);
                }
            }
        }
        let mut at = [rows.row::<u8>(0); PRODUCTS];
        for (i, at) in at.iter_mut().enumerate() {
            let first = if i * ROWS < rows.len() { i * ROWS } else { 0 };
            *at = if even { rows.row(first) } else { copies.wrapping_add(first * stride).cast_const() };
        }
        Operands { at, stride, step: ROW }
    }

    /// Turns the sums of query group `group` into weights, and accumulates the weighted values.
    ///
    /// # Safety
    /// The same as for [`by_matrices`](Self::by_matrices). In addition, the products of `group` with keys and
    /// latents must have been computed, and `put_values` must have been called and have returned `finite`.
    #[inline(always)]
    unsafe fn weigh_values(&self, buffers: &MatrixBuffers, group: usize, finite: bool) {
        let (n, first) = (self.tile.len(), group * ROWS);
        let count = ROWS.min(self.queries() - first);
        let mut logits = [const { MaybeUninit::<f32>::uninit() }; ROWS * STRIDE];
        let logits = logits.as_mut_ptr().cast::<f32>();
        let factor = self.op.scale * self.tile.segment.logit_scale;
        let scaling = LogitScaling { factor, softcap: self.op.softcap };
        let mut shrink = [1.0; ROWS];
        let steps = n.div_ceil(PAIRS);
        // SAFETY: `a < count`, so `first + a` is one of the queries. A row of logits has `STRIDE` elements, a
        // tile and one vector, and `seen` is inside the tile. `buffers.weights` has `steps * PARTS` tiles,
        // with a row for each `a < ROWS`. States and rows belong to the attention.
        unsafe {
            if !self.put_logits(buffers, logits) {
                for a in 0..count {
                    self.put_logits_of(buffers, first + a, logits.add(a * STRIDE));
                }
            }
            for (a, shrink) in shrink[..count].iter_mut().enumerate() {
                let mut seen = self.seen(first + a);
                let row = logits.add(a * STRIDE);
                let state = self.state_of(first + a);
                if seen.is_empty() {
                    seen = 0..0;
                } else {
                    let (row, n) = (row.add(seen.start), seen.len());
                    *shrink = Avx512::call(OnlineSoftmax { row, n, scaling, state });
                }
                if finite {
                    put_weights(row, &seen, steps, buffers.weights.add(a * ROW));
                } else if !seen.is_empty() {
                    Avx512::call(AccumulateValues::<bf16, 4> {
                        weights: row.add(seen.start),
                        values: self.values.part(seen),
                        v_dim: buffers.form.v_dim,
                        out: state.add(2),
                        shrink: *shrink,
                        element: PhantomData,
                    });
                }
            }
            if finite {
                self.add_values(buffers, (first, count), steps, &shrink);
            }
        }
    }

    /// Writes the logits of a query group from its sums, one row per query, and returns whether none of the
    /// logits is NaN.
    ///
    /// # Safety
    /// `buffers.sums` must hold this tile's products, and `logits` must be valid for writes of `ROWS` rows of
    /// [`STRIDE`] elements. The caller must be compiled for AVX-512.
    #[inline(always)]
    unsafe fn put_logits(&self, buffers: &MatrixBuffers, logits: *mut f32) -> bool {
        let mut unordered = 0;
        for i in 0..self.tile.len().div_ceil(ROWS) {
            // SAFETY: `i < TILE / ROWS` and `j < ROWS`, so each load is inside the `PRODUCTS` tiles of a sum,
            // and each store inside row `j` of `logits`, which has room by contract.
            unsafe {
                let mut square = [_mm512_setzero_ps(); ROWS];
                for (j, vector) in square.iter_mut().enumerate() {
                    let at = (i * ROWS + j) * ROWS;
                    *vector = _mm512_loadu_ps(buffers.sums[0].add(at));
                    if buffers.form.latent {
                        *vector = Avx512::add(*vector, _mm512_loadu_ps(buffers.sums[1].add(at)));
                    }
                    unordered |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(*vector, *vector);
                }
                Avx512::transpose(&mut square);
                for (j, vector) in square.iter().enumerate() {
                    _mm512_storeu_ps(logits.add(j * STRIDE + i * ROWS), *vector);
                }
            }
        }
        unordered == 0
    }

    /// Computes one query's logits without splitting operands into bf16 parts, because infinity times a part
    /// of 0 gives NaN.
    ///
    /// # Safety
    /// `m` must be below `queries()`, the conditions of [`TileAttention`] must hold with bf16 keys and
    /// values, `row` must be valid for writes of [`STRIDE`] elements, and the processor must support AVX-512.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn put_logits_of(&self, buffers: &MatrixBuffers, m: usize, row: *mut f32) {
        let (k_dim, v_dim) = (buffers.form.k_dim, buffers.form.v_dim);
        // SAFETY: query `m` has `k_dim` elements, and `v_dim` latent elements; a tile has at most `TILE`
        // rows, so `row` has room for their logits and three more.
        unsafe {
            let to = (row, STRIDE);
            dots::<Avx512, bf16, 1>(self.q.add(m * k_dim), k_dim, self.keys, to, false, Prefetch::default());
            if let Some(q) = self.latents {
                dots::<Avx512, bf16, 1>(q.add(m * v_dim), v_dim, self.values, to, true, Prefetch::default());
            }
        }
    }

    /// Multiplies the states of `count` queries, starting at `first`, by `shrink`, and adds weights times
    /// values to them.
    ///
    /// # Safety
    /// `buffers` must hold the values and weights of `steps` steps, `first + count` must be at most
    /// `queries()`, and `count` at most `ROWS`. The states of these queries must be valid, and the caller
    /// must be compiled for AVX-512.
    #[inline(always)]
    unsafe fn add_values(
        &self,
        buffers: &MatrixBuffers,
        (first, count): (usize, usize),
        steps: usize,
        shrink: &[f32; ROWS],
    ) {
        let dim = buffers.form.v_dim;
        let weights = SharedOperand { at: buffers.weights, parts: PARTS };
        // SAFETY: `tile(j)` is one of the `dim / ROWS` tiles of a step, and `values` and `weights` have tiles
        // for `steps` steps. `a < count <= ROWS` is a row of each sum. `dim` is a multiple of `PAIRS`, so
        // `i + (j + 2) * ROWS <= dim` for each pair of sums, and a state has `dim` values.
        unsafe {
            // The indices of 16 adjacent elements, and of the 16 elements that follow.
            let low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            let high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
            for i in (0..dim).step_by(PRODUCTS * ROWS) {
                let tile = |j: usize| (i / ROWS + j).min(dim / ROWS - 1) * amx::TILE_BYTES;
                let mut at = [buffers.values.cast_const(); PRODUCTS];
                for (j, at) in at.iter_mut().enumerate() {
                    *at = at.add(tile(j));
                }
                let each = Operands { at, stride: ROW, step: dim / ROWS * amx::TILE_BYTES };
                amx::row_by_each_columns(&buffers.tiles, each, weights, steps, buffers.sums[0]);
                for (a, shrink) in shrink[..count].iter().enumerate() {
                    let out = self.state_of(first + a).add(2 + i);
                    for j in (0..PRODUCTS.min((dim - i) / ROWS)).step_by(2) {
                        let sums = |j: usize| _mm512_loadu_ps(buffers.sums[0].add((j * ROWS + a) * ROWS));
                        let (x, y) = (sums(j), sums(j + 1));
                        for (places, k) in [(low, j), (high, j + 1)] {
                            let (sum, out) = (_mm512_permutex2var_ps(x, places, y), out.add(k * ROWS));
                            let before = _mm512_loadu_ps(out);
                            _mm512_storeu_ps(out, _mm512_fmadd_ps(before, _mm512_set1_ps(*shrink), sum));
                        }
                    }
                }
            }
        }
    }
}

/// Writes one query's weights, split into parts, with 0 for tokens that the query does not attend to.
///
/// # Safety
/// `row` must have an initialised element for each token of `seen`, `seen.end` must be at most
/// `steps * PAIRS`, and `to` must be valid for a row of `steps * PARTS` tiles. The caller must be compiled
/// for AVX-512.
#[inline(always)]
unsafe fn put_weights(row: *const f32, seen: &Range<usize>, steps: usize, to: *mut u8) {
    for step in 0..steps {
        let at = step * PAIRS;
        // SAFETY: the masks load only tokens in `seen`, which are initialised by contract, and `to` has a row
        // in each of the `steps * PARTS` tiles.
        unsafe {
            let a = _mm512_maskz_loadu_ps(lane_mask(seen, at), row.add(at));
            let b = _mm512_maskz_loadu_ps(lane_mask(seen, at + ROWS), row.add(at + ROWS));
            for (part, half) in bf16_parts(a, b).into_iter().enumerate() {
                let to = to.add((step * PARTS + part) * amx::TILE_BYTES);
                _mm512_storeu_si512(to.cast::<__m512i>(), half);
            }
        }
    }
}
