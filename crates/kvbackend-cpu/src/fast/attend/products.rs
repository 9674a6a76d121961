//! The two products of attention, over rows that lie anywhere: queries with keys, weights with values.

use std::ops::Range;

use crate::simd::{Lane, Simd};

/// Tokens whose products with a query are summed together.
const TOKENS: usize = 4;

/// Rows that lie anywhere.
#[derive(Clone, Copy, Default)]
pub(super) struct Rows<'a> {
    /// Where those of head 0 begin, token by token.
    pub(super) at: &'a [*const u8],
    /// Bytes from there to the head at work.
    pub(super) head: usize,
}

impl Rows<'_> {
    /// Those of some tokens.
    #[inline(always)]
    pub(super) fn part(self, tokens: Range<usize>) -> Self {
        Self { at: &self.at[tokens], ..self }
    }

    pub(super) fn len(self) -> usize {
        self.at.len()
    }

    #[inline(always)]
    pub(super) fn row<E>(self, t: usize) -> *const E {
        self.at[t].wrapping_add(self.head).cast()
    }
}

/// Rows of a plane that come next, asked for while others are computed: memory is kept busy by either product.
#[derive(Clone, Copy, Default)]
pub(super) struct Ahead<'a> {
    pub(super) rows: Rows<'a>,
    /// Bytes of each.
    pub(super) bytes: usize,
    /// The row and the byte of it that this has come to.
    pub(super) next: (usize, usize),
}

impl Ahead<'_> {
    /// Lines to ask for at each of `steps` steps, so that all are by the last.
    #[inline(always)]
    pub(super) fn lines(&self, steps: usize) -> usize {
        (self.rows.len() * self.bytes.div_ceil(64)).div_ceil(steps.max(1))
    }

    /// Asks for up to `lines` cache lines. They come to the second cache: a tile's rows of all heads are more than
    /// the first one holds.
    #[inline(always)]
    pub(super) unsafe fn ask<S: Simd>(&mut self, lines: usize) {
        let (mut left, (t, at)) = (lines, &mut self.next);
        while left > 0 && *t < self.rows.len() {
            let start = self.rows.row::<u8>(*t).wrapping_add(*at);
            let here = left.min((self.bytes - *at).div_ceil(64));
            for line in 0..here {
                // SAFETY: any address may be asked for.
                unsafe { S::prefetch_far(start.wrapping_add(64 * line)) };
            }
            left -= here;
            *at += 64 * here;
            if *at >= self.bytes {
                (*t, *at) = (*t + 1, 0);
            }
        }
    }
}

/// `logits[a * stride + t] (+)= queries[a] · rows[t]` for `Q` queries of `dim` elements each.
///
/// # Safety
/// Queries have `Q * dim` elements, each row `dim`, and logits room for `rows.len()` at each stride and three more.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, E: Lane, const Q: usize>(
    queries: *const f32,
    dim: usize,
    rows: Rows<'_>,
    (logits, stride): (*mut f32, usize),
    add: bool,
    mut ahead: Ahead<'_>,
) {
    let mut t = 0;
    let lines = ahead.lines(rows.len().div_ceil(TOKENS));
    // SAFETY: `t` stays below the number of rows; the last rows' logits may be followed by some of nothing.
    unsafe {
        while t < rows.len() {
            ahead.ask::<S>(lines);
            let last = rows.len() - 1;
            let four = [
                rows.row::<E>(t),
                rows.row((t + 1).min(last)),
                rows.row((t + 2).min(last)),
                rows.row((t + 3).min(last)),
            ];
            block::<S, E, Q>(queries, dim, four, (logits.add(t), stride), add);
            t += TOKENS;
        }
    }
}

/// The products of `Q` queries with four rows.
#[inline(always)]
unsafe fn block<S: Simd, E: Lane, const Q: usize>(
    queries: *const f32,
    dim: usize,
    rows: [*const E; TOKENS],
    (to, stride): (*mut f32, usize),
    add: bool,
) {
    // SAFETY: `i + LANES <= dim` wherever a vector is loaded.
    unsafe {
        let mut acc = [[S::splat(0.0); TOKENS]; Q];
        let mut i = 0;
        while i + S::LANES <= dim {
            let keys = [
                E::load::<S>(rows[0].add(i)),
                E::load::<S>(rows[1].add(i)),
                E::load::<S>(rows[2].add(i)),
                E::load::<S>(rows[3].add(i)),
            ];
            for (a, acc) in acc.iter_mut().enumerate() {
                let q = S::load(queries.add(a * dim + i));
                for (acc, key) in acc.iter_mut().zip(keys) {
                    *acc = S::mul_add(q, key, *acc);
                }
            }
            i += S::LANES;
        }
        for (a, [w, x, y, z]) in acc.iter().enumerate() {
            let sums = S::sum_four(*w, *x, *y, *z);
            let to = to.add(a * stride).cast::<[f32; TOKENS]>();
            if add {
                let before = to.read_unaligned();
                to.write_unaligned(std::array::from_fn(|j| before[j] + sums[j]));
            } else {
                to.write_unaligned(sums);
            }
        }
        if i < dim {
            rest::<E>((queries, Q), i..dim, rows, (to, stride));
        }
    }
}

/// Adds the products of the last elements, fewer than a vector.
#[inline(never)]
unsafe fn rest<E: Lane>(
    (queries, count): (*const f32, usize),
    elements: Range<usize>,
    rows: [*const E; TOKENS],
    (to, stride): (*mut f32, usize),
) {
    for a in 0..count {
        for i in elements.clone() {
            // SAFETY: the caller's.
            unsafe {
                let q = *queries.add(a * elements.end + i);
                for (j, row) in rows.iter().enumerate() {
                    *to.add(a * stride + j) += q * row.add(i).read().to_f32();
                }
            }
        }
    }
}

/// `out[a * out_stride ..] = out * shrink[a] + Σ_t weights[a * stride + t] · rows[t]` for `Q` rows of output of
/// `dim` elements each, `N` vectors of them at a time.
///
/// # Safety
/// Each row has `dim` elements, weights has `rows.len()` at each stride, and out room for `dim` at each of its.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, E: Lane, const Q: usize, const N: usize>(
    weights: *const f32,
    stride: usize,
    rows: Rows<'_>,
    dim: usize,
    (out, out_stride): (*mut f32, usize),
    shrink: [f32; Q],
    mut ahead: Ahead<'_>,
) {
    let mut i = 0;
    let lines = ahead.lines(rows.len() * (dim / (N * S::LANES)));
    // SAFETY: `i` plus the width of each strip stays within `dim`.
    unsafe {
        while i + N * S::LANES <= dim {
            strip::<S, E, Q, N>(weights, stride, rows, i, (out, out_stride), shrink, (&mut ahead, lines));
            i += N * S::LANES;
        }
        while i + S::LANES <= dim {
            strip::<S, E, Q, 1>(weights, stride, rows, i, (out, out_stride), shrink, (&mut ahead, 0));
            i += S::LANES;
        }
        for i in i..dim {
            for (a, shrink) in shrink.into_iter().enumerate() {
                let mut sum = *out.add(a * out_stride + i) * shrink;
                for t in 0..rows.len() {
                    sum += *weights.add(a * stride + t) * rows.row::<E>(t).add(i).read().to_f32();
                }
                *out.add(a * out_stride + i) = sum;
            }
        }
    }
}

/// `N` vectors of each output, from element `i` on.
#[inline(always)]
unsafe fn strip<S: Simd, E: Lane, const Q: usize, const N: usize>(
    weights: *const f32,
    stride: usize,
    rows: Rows<'_>,
    i: usize,
    (out, out_stride): (*mut f32, usize),
    shrink: [f32; Q],
    (ahead, lines): (&mut Ahead<'_>, usize),
) {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; Q];
        for (a, acc) in acc.iter_mut().enumerate() {
            for (n, acc) in acc.iter_mut().enumerate() {
                let before = S::load(out.add(a * out_stride + i + n * S::LANES));
                *acc = S::mul(before, S::splat(shrink[a]));
            }
        }
        for t in 0..rows.len() {
            ahead.ask::<S>(lines);
            let row = rows.row::<E>(t).add(i);
            let mut values = [S::splat(0.0); N];
            for (n, value) in values.iter_mut().enumerate() {
                *value = E::load::<S>(row.add(n * S::LANES));
            }
            for (a, acc) in acc.iter_mut().enumerate() {
                let weight = S::splat(*weights.add(a * stride + t));
                for (acc, value) in acc.iter_mut().zip(values) {
                    *acc = S::mul_add(weight, value, *acc);
                }
            }
        }
        for (a, acc) in acc.into_iter().enumerate() {
            for (n, acc) in acc.into_iter().enumerate() {
                S::store(out.add(a * out_stride + i + n * S::LANES), acc);
            }
        }
    }
}

/// `to[i * stride + t] = rows[t][i]` for rows of `dim` elements; columns past the last row are filled with it.
///
/// # Safety
/// There is at least one row, each has `dim` elements, and `to` room for `dim` times `stride`, which is a multiple
/// of the vector.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd, E: Lane>(rows: Rows<'_>, dim: usize, to: *mut f32, stride: usize) {
    let mut t = 0;
    // SAFETY: `t` stays below `stride`, `i` below `dim`.
    unsafe {
        while t < stride {
            let mut i = 0;
            while i + S::LANES <= dim {
                let mut square = [S::splat(0.0); 16];
                for (lane, vector) in square[..S::LANES].iter_mut().enumerate() {
                    *vector = E::load::<S>(rows.row::<E>((t + lane).min(rows.len() - 1)).add(i));
                }
                S::transpose(&mut square);
                for (lane, vector) in square[..S::LANES].iter().enumerate() {
                    S::store(to.add((i + lane) * stride + t), *vector);
                }
                i += S::LANES;
            }
            for i in i..dim {
                for lane in 0..S::LANES {
                    let row = rows.row::<E>((t + lane).min(rows.len() - 1));
                    *to.add(i * stride + t + lane) = row.add(i).read().to_f32();
                }
            }
            t += S::LANES;
        }
    }
}
