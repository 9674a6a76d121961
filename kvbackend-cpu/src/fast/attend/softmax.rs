//! Online softmax: turns logits into weights, one tile at a time (Milakov and Gimelshein, 2018).

use crate::simd::{Simd, SimdTask, exp};

/// The layout of partial softmax states. Each state has one query's running maximum, sum of weights, and
/// weighted sum of values.
#[derive(Clone, Copy)]
pub(super) struct StateLayout {
    pub(super) v_dim: usize,
    /// Number of states per merge group.
    pub(super) count: usize,
}

impl StateLayout {
    /// Returns the number of elements of a state.
    #[inline(always)]
    pub(super) fn stride(self) -> usize {
        self.v_dim + 2
    }

    /// Resets the states of `groups` merge groups to the empty state.
    ///
    /// # Safety
    /// `states` must be valid for writes of `groups * self.count` states of initialised elements, which
    /// nothing else may access during the call.
    pub(super) unsafe fn reset(self, states: *mut f32, groups: usize) {
        // SAFETY: by contract, `states` has `groups * count` states of `stride()` initialised elements, which
        // nothing else accesses meanwhile.
        let states = unsafe { std::slice::from_raw_parts_mut(states, groups * self.count * self.stride()) };
        states.fill(0.0);
        states.iter_mut().step_by(self.stride()).for_each(|max| *max = f32::NEG_INFINITY);
    }
}

/// The scaling that turns a tile's products into logits.
#[derive(Clone, Copy)]
pub(super) struct LogitScaling {
    pub(super) factor: f32,
    pub(super) softcap: Option<f32>,
}

// Decision: docs/decisions/backend-cpu.md#a-token-without-weight-is-read
/// Turns `n` products into weights relative to the running maximum, `state[0]`, and adds the weights to the
/// running sum, `state[1]`. Returns the factor to multiply earlier weights by. A logit of −∞ has the weight 0.
///
/// # Safety
/// `row` must have `n` initialised elements and room for `S::LANES` more, and `state` must have two elements.
/// No other code may access `row` or `state` during the call.
pub(super) struct OnlineSoftmax {
    pub(super) row: *mut f32,
    pub(super) n: usize,
    pub(super) scaling: LogitScaling,
    pub(super) state: *mut f32,
}

impl SimdTask for OnlineSoftmax {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let Self { row, n, scaling, state } = self;
        // SAFETY: `t < n` where an element is read and `t + LANES <= n + LANES` where a vector is accessed;
        // by contract `row` has room for `n + LANES` elements, of which the last `LANES` are written first,
        // and `state` has two elements.
        unsafe {
            let largest = scaled::<S>(row, n, scaling);
            let before = *state;
            let mut max = if largest > before { largest } else { before };
            // The maximum ignores NaN, but the output must be NaN if a logit is NaN.
            if max == f32::NEG_INFINITY && (0..n).any(|t| (*row.add(t)).is_nan()) {
                max = f32::NAN;
            }
            // −∞ minus −∞ would give NaN.
            let top = if max == f32::NEG_INFINITY { 0.0 } else { max };
            for t in n..n + S::LANES {
                *row.add(t) = f32::NEG_INFINITY;
            }
            let (mut sum, top) = (S::splat(0.0), S::splat(top));
            let mut t = 0;
            while t < n {
                let weight = exp::<S>(S::sub(S::load(row.add(t)), top));
                S::store(row.add(t), weight);
                sum = S::add(sum, weight);
                t += S::LANES;
            }
            let shrink = if before == max { 1.0 } else { (before - max).exp() };
            *state = max;
            *state.add(1) = *state.add(1) * shrink + S::sum(sum);
            shrink
        }
    }
}

/// Scales and soft-caps `n` products, and returns the largest result.
///
/// # Safety
/// `row` must have `n` initialised elements, and the caller must be compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn scaled<S: Simd>(row: *mut f32, n: usize, scaling: LogitScaling) -> f32 {
    // SAFETY: `t + LANES <= n` where a vector is accessed and `t < n` where a single element is accessed;
    // `row` has `n` elements by contract.
    unsafe {
        if let Some(cap) = scaling.softcap {
            let mut largest = f32::NEG_INFINITY;
            for t in 0..n {
                let logit = cap * (*row.add(t) * scaling.factor / cap).tanh();
                *row.add(t) = logit;
                largest = if largest > logit { largest } else { logit };
            }
            return largest;
        }
        let factor = S::splat(scaling.factor);
        let mut largest = S::splat(f32::NEG_INFINITY);
        let mut t = 0;
        while t + S::LANES <= n {
            let logits = S::mul(S::load(row.add(t)), factor);
            S::store(row.add(t), logits);
            largest = S::max(largest, logits);
            t += S::LANES;
        }
        let mut largest = S::largest(largest);
        for t in t..n {
            let logit = *row.add(t) * scaling.factor;
            *row.add(t) = logit;
            largest = if largest > logit { largest } else { logit };
        }
        largest
    }
}
