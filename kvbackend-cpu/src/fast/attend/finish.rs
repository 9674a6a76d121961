//! Turns partial softmax states into output rows: merges first the parts of split rows, and then the merge
//! groups.

use kvcore::{Attend, TensorView};

use super::softmax::StateLayout;
use crate::raw::Destination;
use crate::simd::{Simd, SimdTask, narrow};

/// The views that results are written to.
pub(super) struct Outputs<'a> {
    pub(super) out: (&'a TensorView, Destination<'a>),
    pub(super) lse: Option<(&'a TensorView, Destination<'a>)>,
}

/// Merges the states of one row and head, and writes the output and its log-sum-exp.
///
/// # Safety
/// For each merge group and part, `states` must point to a state of `v_dim + 2` elements. This task
/// overwrites these states, and no other code may access them during the call. `layout.v_dim` must be the
/// output's width, and no other thread may access this row and head of the outputs.
pub(super) struct Finish<'a> {
    pub(super) op: &'a Attend,
    pub(super) outputs: &'a Outputs<'a>,
    /// Indices of the row and of the head.
    pub(super) at: (usize, usize),
    /// Start of the states. The state of group `g` and part `p` begins at element `g * group stride + p *
    /// part stride`.
    pub(super) states: *mut f32,
    /// Number of parts, and distance between the states of consecutive parts, in elements.
    pub(super) parts: (usize, usize),
    pub(super) layout: StateLayout,
}

impl SimdTask for Finish<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { op, outputs, at: (row, head), states, parts: (parts, part_stride), layout } = self;
        // SAFETY: `index` is below the number of groups and `part < parts`, so by the contract of `Finish`
        // each state used has `v_dim + 2` elements. `first` and the other operand of `merge` are different
        // states.
        unsafe {
            for (index, group) in op.work.groups().iter().enumerate() {
                let first = states.add(index * layout.count * layout.stride());
                for part in 1..parts {
                    merge::<S>(first, first.add(part * part_stride), layout.v_dim);
                }
                // After the next lines, the group's state is equivalent to a single token whose logit is this
                // log-sum-exp and whose value is the group's mean value.
                let (max, sum) = (*first, *first.add(1));
                if sum != 0.0 {
                    scale::<S>(first.add(2), layout.v_dim, 1.0 / sum);
                    (*first, *first.add(1)) = ((max + sum.ln()) * group.lse_scale, 1.0);
                }
                if index > 0 {
                    merge::<S>(states, first, layout.v_dim);
                }
            }
            let (max, sum, values) = (*states, *states.add(1), states.add(2));
            let lse = if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.ln() };
            if sum != 0.0 && sum != 1.0 {
                scale::<S>(values, layout.v_dim, 1.0 / sum);
            }
            outputs.write::<S>(row, head, values, layout.v_dim, lse);
        }
    }
}

/// Merges partial softmax state `from` into `into`.
///
/// # Safety
/// `into` and `from` must have `v_dim + 2` elements each and must not overlap, and the caller must be
/// compiled for `S`.
#[inline(always)]
unsafe fn merge<S: Simd>(into: *mut f32, from: *const f32, v_dim: usize) {
    // SAFETY: `i + LANES <= v_dim + 2` where a vector is accessed and `i < v_dim + 2` where a single element
    // is accessed; `into` and `from` have `v_dim + 2` elements by contract.
    unsafe {
        let (a, b) = (*into, *from);
        let max = if a > b { a } else { b };
        // A state without weights has zeros, or NaN from infinite values. −∞ minus −∞ would give NaN as well.
        let share = |sum: f32, of: f32| if sum == 0.0 { 1.0 } else { (of - max).exp() };
        let (keep, take) = (share(*into.add(1), a), share(*from.add(1), b));
        *into = max;
        *into.add(1) = *into.add(1) * keep + *from.add(1) * take;
        let (mut i, keeps, takes) = (2, S::splat(keep), S::splat(take));
        while i + S::LANES <= v_dim + 2 {
            let sum = S::mul_add(S::load(from.add(i)), takes, S::mul(S::load(into.add(i)), keeps));
            S::store(into.add(i), sum);
            i += S::LANES;
        }
        for i in i..v_dim + 2 {
            *into.add(i) = *into.add(i) * keep + *from.add(i) * take;
        }
    }
}

/// Multiplies the `n` elements of `values` by `by`.
///
/// # Safety
/// `values` must have `n` elements, and the caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn scale<S: Simd>(values: *mut f32, n: usize, by: f32) {
    let mut i = 0;
    // SAFETY: `i + LANES <= n` where a vector is accessed and `i < n` where a single element is accessed;
    // `values` has `n` elements by contract.
    unsafe {
        while i + S::LANES <= n {
            S::store(values.add(i), S::mul(S::load(values.add(i)), S::splat(by)));
            i += S::LANES;
        }
        for i in i..n {
            *values.add(i) *= by;
        }
    }
}

impl Outputs<'_> {
    /// Writes the output and the log-sum-exp of one row and head.
    ///
    /// # Safety
    /// `values` must have `n` elements, no other thread may access this row and head of the outputs, and the
    /// caller must be compiled for the instruction set of `S`.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, row: usize, head: usize, values: *const f32, n: usize, lse: f32) {
        let (view, bytes) = self.out;
        let (strides, size) = (view.strides(), view.dtype().bits() / 8);
        let at = (view.offset() + row * strides[0] + head * strides[1]) * size;
        let to = bytes.at(at, n * size);
        // SAFETY: `at` checked that the `n` elements of the row and the log-sum-exp are in bounds, views are
        // aligned for their elements, and by contract `values` has `n` elements and no other thread accesses
        // the row and head.
        unsafe {
            narrow::<S>(view.dtype(), values, to, n);
            if let Some((view, bytes)) = self.lse {
                let strides = view.strides();
                let at = (view.offset() + row * strides[0] + head * strides[1]) * 4;
                *bytes.at(at, 4).cast::<f32>() = lse;
            }
        }
    }
}
