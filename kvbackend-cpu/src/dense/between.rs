//! A model's steps between matrix products: norms, gates and sums, each in one pass over its rows.

use std::ops::Range;

use kvcore::{Error, Result};

use super::{Products, filled, same};
use crate::raw::Destination;
use crate::simd::{Simd, SimdTask, exp};

/// Minimum size of a thread's output, in bytes: about as much as one thread computes in the time that it
/// takes to wake another thread.
const BYTES_PER_THREAD: usize = 32 << 10;
/// Number of elements per unit of work: several cache lines, so that two threads can write to the same line
/// only where their parts meet.
const UNIT: usize = 256;

// Decision: docs/decisions/backend-cpu.md#steps-between-products-run-on-the-same-threads
impl Products {
    /// Returns each row of `x` divided by its root mean square and multiplied by `weight`, which must be as
    /// long as a row. `eps` is added to the mean square. (`RMSNorm`, Zhang and Sennrich, 2019.)
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `weight` is empty, and [`Error::NotMultiple`] if `x` does not consist of
    /// whole rows.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f64) -> Result<Vec<f32>> {
        let width = weight.len();
        if width == 0 {
            return Err(Error::Zero { what: "elements of a norm" });
        }
        if !x.len().is_multiple_of(width) {
            return Err(Error::NotMultiple {
                what: "elements of the rows of a norm",
                value: x.len(),
                of: width,
            });
        }
        // SAFETY: the parts cover all rows, and a norm writes every element of its rows.
        unsafe {
            filled(x.len(), |y| {
                self.cut(x.len() / width, width, |rows| self.level.run(Norm { x, weight, eps, rows, y }));
                Ok(())
            })
        }
    }

    /// Returns `gate · sigmoid(gate) · up`, element by element. (`SwiGLU`, Shazeer, 2020.)
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the operands differ in length.
    pub fn gated(&self, gate: &[f32], up: &[f32]) -> Result<Vec<f32>> {
        self.pairs(Pair::Gate, gate, up)
    }

    /// Returns `gelu(gate) · up`, element by element, with the tanh approximation of GELU. (`GeGLU`, Shazeer,
    /// 2020.)
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the operands differ in length.
    pub fn gated_gelu(&self, gate: &[f32], up: &[f32]) -> Result<Vec<f32>> {
        self.pairs(Pair::GeluGate, gate, up)
    }

    /// Returns `x + y`, element by element.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the operands differ in length.
    pub fn sums(&self, x: &[f32], y: &[f32]) -> Result<Vec<f32>> {
        self.pairs(Pair::Sum, x, y)
    }

    fn pairs(&self, what: Pair, a: &[f32], b: &[f32]) -> Result<Vec<f32>> {
        same("elements of the other operand", a.len(), b.len())?;
        // SAFETY: the parts cover all units, the last unit is cut short, and a task writes every element of
        // its range.
        unsafe {
            filled(a.len(), |y| {
                self.cut(a.len().div_ceil(UNIT), UNIT, |units| {
                    let at = units.start * UNIT..(units.end * UNIT).min(a.len());
                    self.level.run(PairFunction { what, a, b, at, y });
                });
                Ok(())
            })
        }
    }

    /// Splits `units` units of `elements` elements each into ranges of units, and calls `work` once for each
    /// range, on several threads if there is enough work.
    fn cut(&self, units: usize, elements: usize, work: impl Fn(Range<usize>) + Sync) {
        let parts = self.workers.parts(units, units * elements * size_of::<f32>(), BYTES_PER_THREAD);
        self.workers.run(parts, &|part| work(units * part / parts..units * (part + 1) / parts));
    }
}

/// A task that normalises some of the rows.
struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f64,
    rows: Range<usize>,
    /// Output with as many elements as `x`. No other thread may access the elements of `rows`.
    y: Destination<'a>,
}

impl SimdTask for Norm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let width = self.weight.len();
        let weight = self.weight.as_ptr();
        for row in self.rows {
            let x = &self.x[row * width..(row + 1) * width];
            let (factor, x) = (factor(x, self.eps), x.as_ptr());
            let y = self.y.at(row * width * size_of::<f32>(), size_of_val(self.weight)).cast::<f32>();
            // SAFETY: `x`, `weight` and `y` have `width` elements, and vectors are loaded and stored where
            // `i + LANES <= width`. No other thread accesses these elements of `y`, and the caller is
            // compiled for `S`.
            unsafe {
                let mut i = 0;
                while i + S::LANES <= width {
                    let scaled = S::mul(S::load(x.add(i)), S::splat(factor));
                    S::store(y.add(i), S::mul(scaled, S::load(weight.add(i))));
                    i += S::LANES;
                }
                for i in i..width {
                    y.add(i).write(*x.add(i) * factor * *weight.add(i));
                }
            }
        }
    }
}

/// Returns the factor that normalises a row. The squares are summed in f64, because expert routing depends on
/// the last digits of the sum.
#[inline(always)]
fn factor(row: &[f32], eps: f64) -> f32 {
    // Eight independent sums allow the compiler to vectorise the loop.
    let mut sums = [0.0f64; 8];
    let (eights, end) = row.as_chunks::<8>();
    for x in eights {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += f64::from(*x) * f64::from(*x);
        }
    }
    let end: f64 = end.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let mean = (sums.iter().sum::<f64>() + end) / row.len() as f64;
    (1.0 / (mean + eps).sqrt()) as f32
}

/// A function of two elements.
#[derive(Clone, Copy)]
enum Pair {
    /// `a · sigmoid(a) · b`.
    Gate,
    /// `a · sigmoid(2u) · b` with `u = √(2/π) (a + 0.044715 a³)`. The first two factors equal
    /// `a/2 · (1 + tanh u)`.
    GeluGate,
    /// `a + b`.
    Sum,
}

impl Pair {
    /// # Safety
    /// The caller must be compiled for `S`.
    #[inline(always)]
    unsafe fn of<S: Simd>(self, a: S::V, b: S::V) -> S::V {
        // SAFETY: the instruction set of `S` is available by contract, and no pointers are involved.
        unsafe {
            match self {
                Self::Gate => gate::<S>(a, a, b),
                Self::GeluGate => {
                    let cubic = S::mul(S::splat(2.0 * GELU * 0.044_715), S::mul(a, a));
                    gate::<S>(a, S::mul(a, S::add(S::splat(2.0 * GELU), cubic)), b)
                }
                Self::Sum => S::add(a, b),
            }
        }
    }
}

/// √(2/π).
const GELU: f32 = 0.797_884_6;

/// Returns `a · sigmoid(x) · b`.
///
/// # Safety
/// The caller must be compiled for `S`.
#[inline(always)]
unsafe fn gate<S: Simd>(a: S::V, x: S::V, b: S::V) -> S::V {
    // SAFETY: the instruction set of `S` is available by contract, and no pointers are involved.
    unsafe {
        let below = S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), x)));
        S::mul(S::div(a, below), b)
    }
}

/// A task that applies a function to elements `at` of two operands.
struct PairFunction<'a> {
    what: Pair,
    a: &'a [f32],
    b: &'a [f32],
    at: Range<usize>,
    /// Output with as many elements as `a` and `b`. No other thread may access the elements `at`.
    y: Destination<'a>,
}

impl SimdTask for PairFunction<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { what, a, b, at, y } = self;
        let (len, y) =
            (at.len(), y.at(at.start * size_of::<f32>(), at.len() * size_of::<f32>()).cast::<f32>());
        let (a, b) = (a[at.clone()].as_ptr(), b[at].as_ptr());
        // SAFETY: `a`, `b` and `y` have `len` elements; vectors are loaded and stored where `i + LANES <=
        // len`, and each of `lanes` has room for the longest vector. No other thread accesses these elements
        // of `y`, and the caller is compiled for `S`.
        unsafe {
            let mut i = 0;
            while i + S::LANES <= len {
                S::store(y.add(i), what.of::<S>(S::load(a.add(i)), S::load(b.add(i))));
                i += S::LANES;
            }
            if i < len {
                let mut lanes = [[0.0f32; 16]; 3];
                for j in i..len {
                    (lanes[0][j - i], lanes[1][j - i]) = (*a.add(j), *b.add(j));
                }
                let of = what.of::<S>(S::load(lanes[0].as_ptr()), S::load(lanes[1].as_ptr()));
                S::store(lanes[2].as_mut_ptr(), of);
                for j in i..len {
                    y.add(j).write(lanes[2][j - i]);
                }
            }
        }
    }
}
