//! The two products of attention, over rows at any addresses: queries with keys, weights with values.

use std::ops::Range;

use super::pointers::{Prefetch, RowPointers};
use crate::simd::{Simd, SimdElement};

/// Tokens whose products with a query are summed together.
const TOKENS: usize = 4;

/// Computes `logits[a * stride + t] (+)= queries[a] · rows[t]` for `Q` queries of `dim` elements each.
///
/// # Safety
/// `queries` has `Q * dim` elements, each row has `dim` elements of `E`, and `logits` has room for
/// `rows.len() + 3` elements at each of `Q` strides; with `add`, these elements are initialised. The caller
/// is compiled for `S`.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, E: SimdElement, const Q: usize>(
    queries: *const f32,
    dim: usize,
    rows: RowPointers<'_>,
    (logits, stride): (*mut f32, usize),
    add: bool,
    mut ahead: Prefetch<'_>,
) {
    let mut t = 0;
    let lines = ahead.lines(rows.len().div_ceil(TOKENS));
    // SAFETY: `t < rows.len()`, and the indices of the other three rows are clamped to the last. `block`
    // writes four logits from `t` on, at most three of them past the last row, for which `logits` has room by
    // contract.
    unsafe {
        while t < rows.len() {
            ahead.issue::<S>(lines);
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

/// Computes the products of `Q` queries with four rows.
///
/// # Safety
/// `queries` has `Q * dim` elements, each of `rows` has `dim` elements, and `to` has room for four elements
/// at each of `Q` strides, initialised with `add`. The caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn block<S: Simd, E: SimdElement, const Q: usize>(
    queries: *const f32,
    dim: usize,
    rows: [*const E; TOKENS],
    (to, stride): (*mut f32, usize),
    add: bool,
) {
    // SAFETY: `i + LANES <= dim` where a vector is loaded, `rest` gets the elements `i..dim`, and by contract
    // `queries`, `rows` and `to` have room for `Q` queries of `dim` elements and four products each.
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
///
/// # Safety
/// `queries` has `count * elements.end` elements, each of `rows` has `elements.end`, and `to` has room for
/// four initialised elements at each of `count` strides.
#[inline(never)]
unsafe fn rest<E: SimdElement>(
    (queries, count): (*const f32, usize),
    elements: Range<usize>,
    rows: [*const E; TOKENS],
    (to, stride): (*mut f32, usize),
) {
    for a in 0..count {
        for i in elements.clone() {
            // SAFETY: `a < count`, `i < elements.end` and `j < TOKENS`, for which `queries`, `rows` and `to`
            // have room by contract.
            unsafe {
                let q = *queries.add(a * elements.end + i);
                for (j, row) in rows.iter().enumerate() {
                    *to.add(a * stride + j) += q * row.add(i).read().to_f32();
                }
            }
        }
    }
}

/// Computes `out[a * out_stride ..] = out * shrink[a] + Σ_t weights[a * stride + t] · rows[t]` for `Q` rows
/// of output of `dim` elements each, `N` vectors at a time.
///
/// # Safety
/// Each row has `dim` elements of `E`, `weights` has `rows.len()` elements at each of `Q` strides, and `out`
/// has `dim` initialised elements at each of its `Q` strides. The caller is compiled for the instruction set
/// of `S`.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, E: SimdElement, const Q: usize, const N: usize>(
    weights: *const f32,
    stride: usize,
    rows: RowPointers<'_>,
    dim: usize,
    (out, out_stride): (*mut f32, usize),
    shrink: [f32; Q],
    mut ahead: Prefetch<'_>,
) {
    let mut i = 0;
    let lines = ahead.lines(rows.len() * (dim / (N * S::LANES)));
    // SAFETY: `i` plus the width of a strip is at most `dim` where vectors are accessed, `i < dim` where one
    // element is, and `t < rows.len()`; by contract rows, `weights` and `out` have room for these.
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

/// Accumulates `N` vectors of each output, from element `i` on.
///
/// # Safety
/// As for [`accumulate`], with rows and outputs of at least `i + N * S::LANES` elements.
#[inline(always)]
unsafe fn strip<S: Simd, E: SimdElement, const Q: usize, const N: usize>(
    weights: *const f32,
    stride: usize,
    rows: RowPointers<'_>,
    i: usize,
    (out, out_stride): (*mut f32, usize),
    shrink: [f32; Q],
    (ahead, lines): (&mut Prefetch<'_>, usize),
) {
    // SAFETY: `n < N`, `t < rows.len()` and `a < Q`; by contract each row and each output has `i + N * LANES`
    // elements, and `weights` has `rows.len()` at each stride.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; Q];
        for (a, acc) in acc.iter_mut().enumerate() {
            for (n, acc) in acc.iter_mut().enumerate() {
                let before = S::load(out.add(a * out_stride + i + n * S::LANES));
                *acc = S::mul(before, S::splat(shrink[a]));
            }
        }
        for t in 0..rows.len() {
            ahead.issue::<S>(lines);
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

/// Computes `to[i * stride + t] = rows[t][i]` for rows of `dim` elements. Columns past the last row repeat
/// the last row.
///
/// # Safety
/// There is at least one row, each row has `dim` elements of `E`, and `to` has room for `dim * stride`
/// elements, where `stride` is a multiple of `S::LANES`. The caller is compiled for the instruction set of
/// `S`.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd, E: SimdElement>(
    rows: RowPointers<'_>,
    dim: usize,
    to: *mut f32,
    stride: usize,
) {
    let mut t = 0;
    // SAFETY: row indices are clamped to the last row, `i + LANES <= dim` where a vector is loaded, and
    // `t + LANES <= stride`, because `stride` is a multiple of `LANES`; `to` has room for `dim * stride`
    // elements by contract.
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
