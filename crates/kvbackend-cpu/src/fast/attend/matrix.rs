//! Queries against a tile by products of matrices: keys of bf16 where they lie, values in pairs of rows, and queries
//! and weights in as many parts of bf16 as their numbers need.

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

use super::block::{Meeting, Single};
use super::products::{Ahead, Rows, dots};
use super::softmax::{Scaling, Weights};
use super::source::Source;
use super::tile::TILE;
use crate::simd::amx::{self, EACH, Each, PARTS, ROW, ROWS, Shared, Tiles};
use crate::simd::avx512::{Avx512, upper_halves};
use crate::simd::{Simd, SimdLevel};

/// Elements of a row of a tile.
const PAIRS: usize = 2 * ROWS;
/// Logits of a query, and a vector more.
const STRIDE: usize = TILE + ROWS;

/// How queries come to the products.
#[derive(Clone, Copy)]
pub(super) struct Form {
    /// Numbers of bf16 that a query's element is the sum of.
    parts: usize,
    k_dim: usize,
    v_dim: usize,
    /// Bytes from one token's keys to the next within a block, and of its values.
    token_bytes: [usize; 2],
    /// Of latent attention: queries meet the values, too.
    latent: bool,
}

/// Memory of an item, every part of it in whole tiles, and the thread's tiles.
pub(super) struct Room {
    form: Form,
    tiles: Tiles,
    /// Queries in columns, of all units; then what meets the values.
    queries: [*mut u8; 2],
    /// Rows of keys and of values, if they do not lie evenly.
    copies: [*mut u8; 2],
    /// Values, their tokens in pairs.
    values: *mut u8,
    weights: *mut u8,
    /// Results of four products, twice.
    sums: [*mut f32; 2],
}

/// Groups of queries that are multiplied at once.
fn groups(queries: usize) -> usize {
    queries.div_ceil(ROWS)
}

impl Form {
    /// That of a call, if matrices can compute it: over rotated keys and values of bf16, in whole rows of tiles.
    pub(super) fn of(
        level: SimdLevel,
        op: &Attend,
        latent: Option<&TensorView>,
        [keys, values]: [&Source<'_>; 2],
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
            token_bytes: [keys, values].map(Source::token_bytes),
            latent: latent.is_some(),
        })
    }

    /// Bytes of a group's queries against keys, and against values.
    fn queries_bytes(&self) -> [usize; 2] {
        let tiles = |dim: usize| dim / PAIRS * self.parts * amx::TILE;
        [tiles(self.k_dim), if self.latent { tiles(self.v_dim) } else { 0 }]
    }

    fn sizes(&self, units: usize, queries: usize) -> [usize; 8] {
        let [keys, latents] = self.queries_bytes().map(|bytes| bytes * units * groups(queries));
        let rows = |dim: usize| TILE * dim * 2;
        let latent_rows = if self.latent { rows(self.v_dim) } else { 0 };
        let (weights, sums) = (TILE / PAIRS * PARTS * amx::TILE, EACH * amx::TILE);
        [keys, latents, rows(self.k_dim), latent_rows, rows(self.v_dim), weights, sums, sums]
    }

    /// Memory for `units` units of `queries` queries each.
    ///
    /// # Safety
    /// The processor has AMX.
    pub(super) unsafe fn room(self, units: usize, queries: usize, memory: &mut Vec<f32>) -> Room {
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
        Room {
            form: self,
            // SAFETY: the caller's.
            tiles: unsafe { Tiles::new() },
            queries: [q, latents],
            copies: [keys, latent_keys],
            values,
            weights,
            sums: [sums.cast(), more.cast()],
        }
    }
}

impl Room {
    /// Puts the queries of a unit into columns, those for keys (`which` 0) or for values (1).
    ///
    /// # Safety
    /// There are `count` queries of their dimension at `from`, and the processor has AMX.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn put_queries(&self, which: usize, unit: usize, count: usize, from: *const f32) {
        let (parts, dim) = (self.form.parts, [self.form.k_dim, self.form.v_dim][which]);
        // SAFETY: the room is of so many queries.
        unsafe {
            let mut to = self.columns(which, unit, count, 0).cast_mut();
            for first in (0..count).step_by(ROWS) {
                for i in (0..dim).step_by(PAIRS) {
                    let mut squares = [[_mm512_setzero_ps(); ROWS]; PARTS];
                    for j in 0..ROWS.min(count - first) {
                        let q = from.add((first + j) * dim + i);
                        let halves = halves(_mm512_loadu_ps(q), _mm512_loadu_ps(q.add(ROWS)));
                        for (square, half) in squares.iter_mut().zip(halves) {
                            square[j] = _mm512_castsi512_ps(half);
                        }
                    }
                    for square in &mut squares[..parts] {
                        Avx512::transpose(square);
                        for (row, vector) in square.iter().enumerate() {
                            _mm512_storeu_ps(to.add(row * ROW).cast(), *vector);
                        }
                        to = to.add(amx::TILE);
                    }
                }
            }
        }
    }

    /// The columns of a group of a unit's queries.
    fn columns(&self, which: usize, unit: usize, count: usize, group: usize) -> *const u8 {
        self.queries[which].wrapping_add(self.form.queries_bytes()[which] * (unit * groups(count) + group))
    }
}

/// The parts of two vectors, one after the other.
#[inline(always)]
unsafe fn halves(a: __m512, b: __m512) -> [__m512i; PARTS] {
    // SAFETY: the caller's.
    unsafe {
        let (a, b) = (amx::parts(a), amx::parts(b));
        let mut halves = [_mm512_setzero_si512(); PARTS];
        for (half, (a, b)) in halves.iter_mut().zip(a.into_iter().zip(b)) {
            *half = upper_halves(_mm512_castps_si512(a), _mm512_castps_si512(b));
        }
        halves
    }
}

/// The first tokens of `range` in a vector that begins with token `first`.
fn lanes(range: &Range<usize>, first: usize) -> u16 {
    let below = |t: usize| ((1u32 << t.saturating_sub(first).min(ROWS)) - 1) as u16;
    below(range.end) & !below(range.start)
}

/// Values of up to a tile of tokens in pairs, what is missing as zeros; whether all are finite. Of each 32
/// elements the first tile has those of the first halves of quarters, the second those of the second.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn put_values(rows: Rows<'_>, dim: usize, to: *mut u8, mut ahead: [Ahead<'_>; 2]) -> bool {
    let n = rows.len();
    let pairs = n.next_multiple_of(PAIRS) / 2;
    let lines = ahead.map(|ahead| ahead.lines(pairs));
    // SAFETY: rows have `dim` elements, and there is room for a tile of tokens.
    unsafe {
        let magnitude = _mm512_set1_epi16(0x7fff);
        let mut largest = _mm512_setzero_si512();
        for pair in 0..pairs {
            for (ahead, lines) in ahead.iter_mut().zip(lines) {
                ahead.ask::<Avx512>(lines);
            }
            let (step, row) = (pair / ROWS, pair % ROWS);
            let to = to.add(step * (dim / ROWS) * amx::TILE + row * ROW);
            for i in (0..dim).step_by(PAIRS) {
                let mut both = [_mm512_setzero_si512(); 2];
                for (t, vector) in both.iter_mut().enumerate() {
                    if 2 * pair + t < n {
                        *vector = _mm512_loadu_si512(rows.row::<u16>(2 * pair + t).add(i).cast::<__m512i>());
                        largest = _mm512_max_epu16(largest, _mm512_and_si512(*vector, magnitude));
                    }
                }
                let to = to.add(i / ROWS * amx::TILE).cast::<__m512i>();
                _mm512_storeu_si512(to, _mm512_unpacklo_epi16(both[0], both[1]));
                _mm512_storeu_si512(to.byte_add(amx::TILE), _mm512_unpackhi_epi16(both[0], both[1]));
            }
        }
        _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0
    }
}

impl Meeting<'_> {
    /// All queries of unit `unit` of the room against the tile.
    ///
    /// # Safety
    /// The queries are in the room, the pointers lead to states and rows of bf16 of the sizes named, and the
    /// processor has AMX.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn by_matrices(&self, room: &Room, unit: usize) {
        let (form, tiles) = (&room.form, &room.tiles);
        // SAFETY: the caller's.
        unsafe {
            let finite = put_values(self.values, form.v_dim, room.values, self.ahead);
            let keys = self.evenly(self.keys, form.k_dim, form.token_bytes[0], room.copies[0]);
            let latent = form.latent;
            let latents =
                latent.then(|| self.evenly(self.values, form.v_dim, form.token_bytes[1], room.copies[1]));
            let count = self.queries();
            for group in 0..groups(count) {
                let columns =
                    |which| Shared { at: room.columns(which, unit, count, group), parts: form.parts };
                amx::rows_by_columns(tiles, keys, columns(0), form.k_dim / PAIRS, room.sums[0]);
                if let Some(rows) = latents {
                    amx::rows_by_columns(tiles, rows, columns(1), form.v_dim / PAIRS, room.sums[1]);
                }
                self.weigh(room, group, finite);
            }
        }
    }

    /// Four groups of 16 rows, a stride apart: where they lie, if they lie so, or copied.
    #[inline(always)]
    unsafe fn evenly(&self, rows: Rows<'_>, dim: usize, token_bytes: usize, copies: *mut u8) -> Each {
        let block_size = self.op.arena.layout().shape().block_size;
        // What follows a block's last token in sight is read, but belongs to the same block.
        let even = block_size.is_multiple_of(ROWS) && self.tile.tokens.start.is_multiple_of(ROWS);
        let stride = if even { token_bytes } else { dim * 2 };
        if !even {
            for t in 0..rows.len() {
                // SAFETY: rows have `dim` elements, and there is room for a tile of them.
                unsafe {
                    std::ptr::copy_nonoverlapping(rows.row::<u8>(t), copies.add(t * stride), stride);
                }
            }
        }
        let mut at = [rows.row::<u8>(0); EACH];
        for (i, at) in at.iter_mut().enumerate() {
            let first = if i * ROWS < rows.len() { i * ROWS } else { 0 };
            *at = if even { rows.row(first) } else { copies.wrapping_add(first * stride).cast_const() };
        }
        Each { at, stride, step: ROW }
    }

    /// Turns the sums of a group of queries into weights, and adds up the values.
    #[inline(always)]
    unsafe fn weigh(&self, room: &Room, group: usize, finite: bool) {
        let (n, first) = (self.tile.len(), group * ROWS);
        let count = ROWS.min(self.queries() - first);
        let mut logits = [const { MaybeUninit::<f32>::uninit() }; ROWS * STRIDE];
        let logits = logits.as_mut_ptr().cast::<f32>();
        let factor = self.op.scale * self.tile.segment.logit_scale;
        let scaling = Scaling { factor, softcap: self.op.softcap };
        let mut shrink = [1.0; ROWS];
        let steps = n.div_ceil(PAIRS);
        // SAFETY: rows of logits have room for a tile and a vector, states are the meeting's, and the room's parts
        // are of a tile of tokens.
        unsafe {
            if !self.put_logits(room, logits) {
                for a in 0..count {
                    self.put_logits_of(room, first + a, logits.add(a * STRIDE));
                }
            }
            for (a, shrink) in shrink[..count].iter_mut().enumerate() {
                let mut seen = self.seen(first + a);
                let row = logits.add(a * STRIDE);
                let state = self.state_of(first + a);
                let weights = Weights { row: row.add(seen.start), n: seen.len(), scaling, state };
                match Avx512::call(weights) {
                    Some(by) if !seen.is_empty() => *shrink = by,
                    _ => seen = 0..0,
                }
                if finite {
                    put_weights(row, &seen, steps, room.weights.add(a * ROW));
                } else if !seen.is_empty() {
                    Avx512::call(Single::<bf16, 4> {
                        weights: row.add(seen.start),
                        values: self.values.part(seen),
                        v_dim: room.form.v_dim,
                        out: state.add(2),
                        shrink: *shrink,
                        element: PhantomData,
                    });
                }
            }
            if finite {
                self.add_values(room, (first, count), steps, &shrink);
            }
        }
    }

    /// Queries' rows of sums; whether all are numbers.
    #[inline(always)]
    unsafe fn put_logits(&self, room: &Room, logits: *mut f32) -> bool {
        let mut unordered = 0;
        for i in 0..self.tile.len().div_ceil(ROWS) {
            // SAFETY: there are sums of a tile of tokens.
            unsafe {
                let mut square = [_mm512_setzero_ps(); ROWS];
                for (j, vector) in square.iter_mut().enumerate() {
                    let at = (i * ROWS + j) * ROWS;
                    *vector = _mm512_loadu_ps(room.sums[0].add(at));
                    if room.form.latent {
                        *vector = Avx512::add(*vector, _mm512_loadu_ps(room.sums[1].add(at)));
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

    /// One query's products without its parts: infinity times nothing is no number.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn put_logits_of(&self, room: &Room, m: usize, row: *mut f32) {
        let (k_dim, v_dim) = (room.form.k_dim, room.form.v_dim);
        // SAFETY: queries are the meeting's; a row of logits has room for a tile and a vector.
        unsafe {
            let to = (row, STRIDE);
            dots::<Avx512, bf16, 1>(self.q.add(m * k_dim), k_dim, self.keys, to, false, Ahead::default());
            if let Some(q) = self.latents {
                dots::<Avx512, bf16, 1>(q.add(m * v_dim), v_dim, self.values, to, true, Ahead::default());
            }
        }
    }

    /// Adds weights times values to the states of some queries, which shrink before.
    #[inline(always)]
    unsafe fn add_values(
        &self,
        room: &Room,
        (first, count): (usize, usize),
        steps: usize,
        shrink: &[f32; ROWS],
    ) {
        let dim = room.form.v_dim;
        let weights = Shared { at: room.weights, parts: PARTS };
        // SAFETY: there are tiles of values for `dim` elements and `steps` steps, and states of so many elements.
        unsafe {
            // The places of 16 elements beside each other, and of those after them.
            let low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            let high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
            for i in (0..dim).step_by(EACH * ROWS) {
                let tile = |j: usize| (i / ROWS + j).min(dim / ROWS - 1) * amx::TILE;
                let mut at = [room.values.cast_const(); EACH];
                for (j, at) in at.iter_mut().enumerate() {
                    *at = at.add(tile(j));
                }
                let each = Each { at, stride: ROW, step: dim / ROWS * amx::TILE };
                amx::row_by_each_columns(&room.tiles, each, weights, steps, room.sums[0]);
                for (a, shrink) in shrink[..count].iter().enumerate() {
                    let out = self.state_of(first + a).add(2 + i);
                    for j in (0..EACH.min((dim - i) / ROWS)).step_by(2) {
                        let sums = |j: usize| _mm512_loadu_ps(room.sums[0].add((j * ROWS + a) * ROWS));
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

/// The weights of one query's tokens in parts, nothing for those that it does not see.
#[inline(always)]
unsafe fn put_weights(row: *const f32, seen: &Range<usize>, steps: usize, to: *mut u8) {
    for step in 0..steps {
        let at = step * PAIRS;
        // SAFETY: only what is seen is loaded, and there are tiles for each step's parts.
        unsafe {
            let a = _mm512_maskz_loadu_ps(lanes(seen, at), row.add(at));
            let b = _mm512_maskz_loadu_ps(lanes(seen, at + ROWS), row.add(at + ROWS));
            for (part, half) in halves(a, b).into_iter().enumerate() {
                let to = to.add((step * PARTS + part) * amx::TILE);
                _mm512_storeu_si512(to.cast::<__m512i>(), half);
            }
        }
    }
}
