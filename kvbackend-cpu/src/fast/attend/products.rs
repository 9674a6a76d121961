//! The two products of attention, queries times keys and weights times values, over rows at arbitrary
//! addresses.

use std::ops::Range;

use super::elements::{RowElement, Scaling};
use super::pointers::{Prefetch, RowPointers};
use crate::simd::{Simd, SimdElement};

/// Number of tokens whose products with a query are computed at the same time.
const TOKENS: usize = 4;

/// Computes `logits[a * stride + t] (+)= queries[a] · rows[t]` for `Q` queries of `dim` elements each.
///
/// # Safety
/// `queries` must have `Q * dim` elements. Each row must have `dim` elements of type `E` and their scales,
/// with room for three more rows' scales. `logits` must have room for `rows.len() + 3` elements at each of
/// `Q` strides, initialised if `add` is true. The caller must be compiled for `S`.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, E: RowElement, const Q: usize>(
    queries: *const f32,
    dim: usize,
    rows: RowPointers<'_>,
    (logits, stride): (*mut f32, usize),
    add: bool,
    mut ahead: Prefetch<'_>,
) {
    let mut t = 0;
    let lines = ahead.lines(rows.len().div_ceil(TOKENS));
    // SAFETY: `t < rows.len()`, and the indices of the other three rows are clamped to the last row. `block`
    // writes four logits starting at `t`, at most three of them past the last row, and `logits` has room for
    // these by contract.
    unsafe {
        while t < rows.len() {
            ahead.issue::<S>(lines);
            block::<S, E, Q>(queries, dim, (rows, t), (logits.add(t), stride), add);
            t += TOKENS;
        }
    }
}

/// Computes the products of `Q` queries with four rows, starting at row `t`.
///
/// # Safety
/// `queries` must have `Q * dim` elements. Each of `rows` must have `dim` elements. If rows have scales, the
/// scales of three rows past the last one must be readable. `t` must be the index of a row. For each of the `Q`
/// queries, `to` must have room for four elements, `stride` apart from the next query's; they must be
/// initialised if `add` is true. The caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn block<S: Simd, E: RowElement, const Q: usize>(
    queries: *const f32,
    dim: usize,
    (rows, t): (RowPointers<'_>, usize),
    (to, stride): (*mut f32, usize),
    add: bool,
) {
    let four: [usize; TOKENS] = std::array::from_fn(|j| (t + j).min(rows.len() - 1));
    // SAFETY: `i + LANES <= dim` where a vector is loaded, `rest` gets the elements `i..dim`, and by contract
    // `queries`, `rows` and `to` have room for `Q` queries of `dim` elements and four products each, and
    // there are scales for four rows starting at `t`.
    unsafe {
        let at = four.map(|t| rows.row::<u8>(t));
        let mut acc = [[S::splat(0.0); TOKENS]; Q];
        let mut i = 0;
        if matches!(E::SCALING, Scaling::Groups) {
            let mut scales = four.map(|t| rows.scales.row(t));
            while i < dim {
                let factors =
                    [S::splat(*scales[0]), S::splat(*scales[1]), S::splat(*scales[2]), S::splat(*scales[3])];
                for _ in 0..rows.scales.group / S::LANES {
                    multiply::<S, E, Q>((queries, dim), (at, factors), i, &mut acc);
                    i += S::LANES;
                }
                scales = scales.map(|scale| scale.add(1));
            }
        }
        let one = [S::splat(1.0); TOKENS];
        while i + S::LANES <= dim {
            multiply::<S, E, Q>((queries, dim), (at, one), i, &mut acc);
            i += S::LANES;
        }
        for (a, [w, x, y, z]) in acc.iter().enumerate() {
            let mut sums = S::sum_four(*w, *x, *y, *z);
            if matches!(E::SCALING, Scaling::Rows) {
                let scales = rows.scales.row(t).cast::<[f32; TOKENS]>().read_unaligned();
                sums = std::array::from_fn(|j| sums[j] * scales[j]);
            }
            let to = to.add(a * stride).cast::<[f32; TOKENS]>();
            if add {
                let before = to.read_unaligned();
                to.write_unaligned(std::array::from_fn(|j| before[j] + sums[j]));
            } else {
                to.write_unaligned(sums);
            }
        }
        if i < dim {
            rest::<E>((queries, Q), i..dim, (rows, four), (to, stride));
        }
    }
}

/// Adds the products of one vector from each of `Q` queries and four rows, starting at element `i`. Elements
/// that are scaled group by group are first multiplied by the factors of their rows.
///
/// # Safety
/// `queries` must have `Q * dim` elements, each of `rows` must have `dim`, and `i + S::LANES` must be at most
/// `dim`. The caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn multiply<S: Simd, E: RowElement, const Q: usize>(
    (queries, dim): (*const f32, usize),
    (rows, factors): ([*const u8; TOKENS], [S::V; TOKENS]),
    i: usize,
    acc: &mut [[S::V; TOKENS]; Q],
) {
    // SAFETY: by contract, the vector that starts at element `i` is inside each row and each of the `Q`
    // queries.
    unsafe {
        let mut keys = [S::splat(0.0); TOKENS];
        for (key, (row, factor)) in keys.iter_mut().zip(rows.into_iter().zip(factors)) {
            *key = E::load::<S>(row, i);
            if matches!(E::SCALING, Scaling::Groups) {
                *key = S::mul(*key, factor);
            }
        }
        for (a, acc) in acc.iter_mut().enumerate() {
            let q = S::load(queries.add(a * dim + i));
            for (acc, key) in acc.iter_mut().zip(keys) {
                *acc = S::mul_add(q, key, *acc);
            }
        }
    }
}

/// Adds the products of the last elements, which do not fill a vector.
///
/// # Safety
/// `queries` must have `count * elements.end` elements. Each of `rows` must have `elements.end` elements and
/// their scales, and `four` must be indices of rows. `to` must have four initialised elements at each of
/// `count` strides.
#[inline(never)]
unsafe fn rest<E: RowElement>(
    (queries, count): (*const f32, usize),
    elements: Range<usize>,
    (rows, four): (RowPointers<'_>, [usize; TOKENS]),
    (to, stride): (*mut f32, usize),
) {
    for a in 0..count {
        for i in elements.clone() {
            // SAFETY: `a < count`, `i < elements.end` and `j < TOKENS`, and `queries`, `rows` and `to` have
            // these elements by contract.
            unsafe {
                let q = *queries.add(a * elements.end + i);
                for (j, t) in four.into_iter().enumerate() {
                    let scale = match E::SCALING {
                        Scaling::None => 1.0,
                        Scaling::Rows | Scaling::Groups => *rows.scales.element(t, i),
                    };
                    *to.add(a * stride + j) += q * (E::one(rows.row(t), i) * scale);
                }
            }
        }
    }
}

/// Computes `out[a * out_stride ..] = out * shrink[a] + Σ_t weights[a * stride + t] · rows[t]` for `Q` output
/// rows of `dim` elements each, `N` vectors at a time. Weights must already be multiplied by the rows'
/// scales.
///
/// # Safety
/// Each row must have `dim` elements of type `E` and their groups' scales. `weights` must have `rows.len()`
/// elements at each of `Q` strides, and `out` must have `dim` initialised elements at each of its `Q`
/// strides. The caller must be compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, E: RowElement, const Q: usize, const N: usize>(
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
    // SAFETY: `i` plus the width of a strip is at most `dim` where vectors are accessed, `i < dim` where a
    // single element is accessed, and `t < rows.len()`; by contract, rows, `weights` and `out` have these
    // elements.
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
                    let mut value = E::one(rows.row(t), i);
                    if matches!(E::SCALING, Scaling::Groups) {
                        value *= *rows.scales.element(t, i);
                    }
                    sum += *weights.add(a * stride + t) * value;
                }
                *out.add(a * out_stride + i) = sum;
            }
        }
    }
}

/// Accumulates `N` vectors of each output, starting at element `i`.
///
/// # Safety
/// The same as for [`accumulate`]. Rows and outputs must have at least `i + N * S::LANES` elements.
#[inline(always)]
unsafe fn strip<S: Simd, E: RowElement, const Q: usize, const N: usize>(
    weights: *const f32,
    stride: usize,
    rows: RowPointers<'_>,
    i: usize,
    (out, out_stride): (*mut f32, usize),
    shrink: [f32; Q],
    (ahead, lines): (&mut Prefetch<'_>, usize),
) {
    let groups: [usize; N] = std::array::from_fn(|n| match E::SCALING {
        Scaling::Groups => (i + n * S::LANES) / rows.scales.group,
        Scaling::None | Scaling::Rows => 0,
    });
    // SAFETY: `n < N`, `t < rows.len()` and `a < Q`; by contract each row and each output has `i + N * LANES`
    // elements, each row has the scales of `groups`, and `weights` has `rows.len()` elements at each stride.
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
            let row = rows.row::<u8>(t);
            let mut values = [S::splat(0.0); N];
            for (n, value) in values.iter_mut().enumerate() {
                *value = E::load::<S>(row, i + n * S::LANES);
                if matches!(E::SCALING, Scaling::Groups) {
                    *value = S::mul(*value, S::splat(*rows.scales.row(t).add(groups[n])));
                }
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

/// Computes `to[i * stride + t] = rows[t][i]` for rows of `dim` elements. Columns past the last row contain
/// copies of the last row.
///
/// # Safety
/// There must be at least one row, each row must have `dim` elements of type `E`, and `to` must have room for
/// `dim * stride` elements, where `stride` is a multiple of `S::LANES`. The caller must be compiled for the
/// instruction set of `S`.
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
                    *vector =
                        <E as SimdElement>::load::<S>(rows.row::<E>((t + lane).min(rows.len() - 1)).add(i));
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
