//! Products of activations and a model's matrices, and the steps between these products.
//!
//! [`Products`] multiplies f32 activations by a matrix in its stored form: floats, or ggml blocks. Every
//! matrix element is decoded once for all rows, and only products and their sums are rounded, unless the caller
//! chooses another [`ComputeType`]. Norms, gates and sums also run on all threads, because a single-threaded step
//! would keep all other threads waiting.
//!
//! ```
//! use kvbackend_cpu::dense::{Matrix, Products, StoredType};
//!
//! let ones = [1.0f32; 2 * 3];
//! let matrix = Matrix::new(StoredType::F32, 2, 3, bytemuck::cast_slice(&ones))?;
//! let mut y = [0.0; 4];
//! Products::new().multiply(&[1.0, 2.0, 3.0, 0.0, 0.5, 0.0], &matrix, &mut y)?;
//! assert_eq!(y, [6.0, 6.0, 0.5, 0.5]);
//! # Ok::<(), kvcore::Error>(())
//! ```

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvcore::{Error, Result};

use crate::raw::Destination;
use crate::simd::{AvailableLevel, Simd, SimdLevel, SimdTask};
use crate::workers::Workers;
use crate::{CpuBackend, CpuOptions};

mod between;
mod bytes;
mod compute;
mod eight;
mod file;
mod panel;
mod single;
mod sixteen;
mod stored;
mod tile;
mod types;
#[cfg(target_arch = "x86_64")]
mod unit;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_unit.rs"]
mod unit;

pub use bytes::SharedBytes;
pub use compute::ComputeType;
pub use file::{FileAccess, WeightFile, check_regular_file};
pub use types::StoredType;

// Decision: docs/decisions/backend-cpu.md#products-decode-weights-as-they-read-them
/// Maximum number of rows to multiply at a time.
const ROWS: usize = 96;
/// The maximum number of rows per run is at least this, however long the rows are, because shorter runs are
/// not worthwhile.
const FEWEST_OF_A_RUN: usize = 24;
/// The approximate number of row elements to multiply at a time.
const FEW: usize = 64 << 10;
/// The number of matrix rows to decode at a time.
const GROUP: usize = 4 * tile::COLUMNS;
/// Padding between decoded rows, in elements: one cache line.
const PAD: usize = 16;
/// Minimum size of a thread's share of a matrix, in bytes: about as much as one thread multiplies by a row in
/// the time that it takes to wake another thread.
const BYTES_PER_THREAD: usize = 64 << 10;

/// A matrix `[out, input]` in its stored form, row by row.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    dtype: StoredType,
    out: usize,
    input: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl fmt::Debug for Matrix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Matrix([{}, {}] {})", self.out, self.input, self.dtype)
    }
}

impl<'a> Matrix<'a> {
    /// Creates a matrix from its stored bytes.
    ///
    /// # Errors
    /// Returns [`Error::NotMultiple`] if rows do not consist of whole blocks, and [`Error::Mismatch`] if the
    /// number of bytes does not match the extents.
    pub fn new(dtype: StoredType, out: usize, input: usize, bytes: &'a [u8]) -> Result<Self> {
        let row_bytes = dtype.row_bytes(input).ok_or(Error::NotMultiple {
            what: "the width of a matrix in blocks",
            value: input,
            of: dtype.block_elements(),
        })?;
        let expected = out.saturating_mul(row_bytes);
        if bytes.len() != expected {
            return Err(Error::mismatch("bytes of a matrix", expected, bytes.len()));
        }
        Ok(Self { dtype, out, input, row_bytes, bytes })
    }

    /// Returns the bytes of a range of rows.
    fn rows(&self, rows: Range<usize>) -> &'a [u8] {
        &self.bytes[rows.start * self.row_bytes..rows.end * self.row_bytes]
    }

    /// Returns the bytes of a range of a row's elements. The range must consist of whole blocks.
    fn elements(&self, row: usize, elements: &Range<usize>) -> &'a [u8] {
        let at = |element: usize| element / self.dtype.block_elements() * self.dtype.block_bytes();
        &self.rows(row..row + 1)[at(elements.start)..at(elements.end)]
    }

    /// Returns rows of the matrix as f32, decoded into `scratch` unless they are already stored as aligned
    /// f32.
    ///
    /// # Safety
    /// The caller must be compiled for the instruction set of `S`.
    #[inline(always)]
    unsafe fn in_f32<'s, S: Simd>(&self, rows: Range<usize>, scratch: &'s mut Vec<f32>) -> tile::Columns<'s>
    where
        'a: 's,
    {
        let (bytes, count, input) = (self.rows(rows.clone()), rows.len(), self.input);
        if self.dtype == StoredType::F32
            && let Ok(values) = bytemuck::try_cast_slice(bytes)
        {
            return tile::Columns { values, count, stride: input };
        }
        // Without the padding, rows that are a power of two apart would share few sets of the first-level
        // cache.
        let stride = input + PAD;
        if scratch.len() < count * stride {
            scratch.resize(count * stride, 0.0);
        }
        for (row, to) in bytes.chunks_exact(self.row_bytes).zip(scratch.chunks_exact_mut(stride)) {
            // SAFETY: the caller is compiled for `S`, by contract.
            unsafe { stored::decode::<S>(self.dtype, row, &mut to[..input]) };
        }
        tile::Columns { values: &scratch[..count * stride], count, stride }
    }
}

thread_local! {
    /// This thread's buffer for decoded matrix rows.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// This thread's buffer for rounded rows in f32.
    static ROUNDED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Multiplies rows by matrices, on a backend's threads.
#[derive(Clone)]
pub struct Products {
    level: AvailableLevel,
    workers: Arc<Workers>,
    compute: ComputeType,
}

impl fmt::Debug for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { level, workers, compute } = self;
        write!(f, "Products({compute}, {}, {} threads)", level.level(), workers.count())
    }
}

impl Default for Products {
    fn default() -> Self {
        Self::new()
    }
}

impl Products {
    /// Creates an instance that uses the processor's best instruction set and the threads shared by all
    /// backends that do not set a thread count.
    pub fn new() -> Self {
        Self {
            level: AvailableLevel::best(),
            workers: Workers::of_the_machine(),
            compute: ComputeType::Exact,
        }
    }

    /// Creates an instance that uses a backend's instruction set and threads.
    pub fn on(backend: &CpuBackend) -> Self {
        Self { level: backend.level, workers: Arc::clone(&backend.workers), compute: ComputeType::Exact }
    }

    /// Creates an instance that uses the instruction set and threads of `options`; the other fields are
    /// ignored.
    ///
    /// # Errors
    /// Returns the errors of [`CpuBackend::with_options`].
    pub fn with_options(options: &CpuOptions) -> Result<Self> {
        Ok(Self::on(CpuBackend::with_options(options)?.as_ref()))
    }

    /// Returns this instance with another compute type.
    #[must_use]
    pub fn with_compute(self, compute: ComputeType) -> Self {
        Self { compute, ..self }
    }

    /// Returns the compute type.
    pub fn compute(&self) -> ComputeType {
        self.compute
    }

    /// Returns whether many rows are multiplied faster than in [`ComputeType::Exact`], by `AVX512_VNNI` in
    /// [`ComputeType::Int8`], and by `AVX512_BF16` in [`ComputeType::Bf16`]. Without the instructions, and in bf16 on a matrix unit
    /// (AMX), rounded rows are multiplied like any others.
    pub fn is_faster_than_exact(&self) -> bool {
        let level = self.level.level();
        match self.compute {
            ComputeType::Exact => false,
            ComputeType::Bf16 => level < SimdLevel::Amx && sixteen::has_dot_products(level),
            ComputeType::Int8 => eight::has_dot_products(level),
        }
    }

    /// Computes `y = x · matrixᵀ`, where `x` is `[rows, input]` and `y` is `[rows, out]`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if `x` or `y` does not consist of whole rows, or if the two have different
    /// numbers of rows.
    pub fn multiply(&self, x: &[f32], matrix: &Matrix<'_>, y: &mut [f32]) -> Result<()> {
        let rows = x.len().checked_div(matrix.input).or_else(|| y.len().checked_div(matrix.out)).unwrap_or(0);
        same("elements of the rows to multiply", rows * matrix.input, x.len())?;
        same("elements of the products", rows * matrix.out, y.len())?;
        self.products(x, rows, matrix, Destination::new(bytemuck::cast_slice_mut(y)))
    }

    /// Returns `x · matrixᵀ`, where `x` is `[rows, input]` and the result is `[rows, out]`. The result's
    /// memory is not zeroed first.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if `x` does not have `rows` rows, and [`Error::Overflow`] if the number of
    /// products overflows.
    pub fn multiplied(&self, x: &[f32], rows: usize, matrix: &Matrix<'_>) -> Result<Vec<f32>> {
        let elements =
            rows.checked_mul(matrix.out).ok_or(Error::Overflow { what: "elements of the products" })?;
        // SAFETY: the products write every element of `y`, or return an error.
        unsafe { filled(elements, |y| self.products(x, rows, matrix, y)) }
    }

    /// Writes the products to `y`, which must have `rows` rows of `matrix.out` f32 elements. Every element is
    /// written, unless an error is returned.
    fn products(&self, x: &[f32], rows: usize, matrix: &Matrix<'_>, y: Destination<'_>) -> Result<()> {
        let (out, input) = (matrix.out, matrix.input);
        same("elements of the rows to multiply", rows * input, x.len())?;
        if rows == 0 || out == 0 {
            return Ok(());
        }
        if input == 0 {
            let y = y.at(0, rows * out * size_of::<f32>()).cast::<f32>();
            // SAFETY: `y` has `rows * out` elements by contract, and no other thread uses it. Zero bytes are
            // 0.0.
            unsafe { y.write_bytes(0, rows * out) };
            return Ok(());
        }
        match self.compute {
            compute if !compute.rounds_for(matrix.dtype) => self.exact((x, rows), matrix, y),
            ComputeType::Exact => self.exact((x, rows), matrix, y),
            ComputeType::Bf16 => sixteen::multiply(self, (x, rows), matrix, y),
            ComputeType::Int8 => eight::multiply(self, (x, rows), matrix, y),
        }
        Ok(())
    }

    /// Returns the number of threads for a product.
    fn threads(&self, matrix: &Matrix<'_>, rows: usize) -> usize {
        self.workers.parts(matrix.out, matrix.out * matrix.row_bytes * rows.min(8), BYTES_PER_THREAD)
    }

    /// Rounds a copy of the rows in f32, and writes its products. Neither side may be empty.
    fn exact_of_rounded(
        &self,
        (x, rows): (&[f32], usize),
        matrix: &Matrix<'_>,
        y: Destination<'_>,
        round: impl FnOnce(&mut [f32]),
    ) {
        ROUNDED.with_borrow_mut(|rounded| {
            rounded.clear();
            rounded.extend_from_slice(x);
            round(rounded);
            self.exact((rounded, rows), matrix, y);
        });
    }

    /// Writes the products of rows as they are. Neither side may be empty.
    fn exact(&self, (x, rows): (&[f32], usize), matrix: &Matrix<'_>, y: Destination<'_>) {
        let (out, threads) = (matrix.out, self.threads(matrix, rows));
        if unit::multiply(self.level.level(), (&self.workers, threads), (x, rows), matrix, y) {
            return;
        }
        let unit = if rows >= panel::FEWEST_ROWS { panel::UNIT } else { tile::COLUMNS };
        in_parts((&self.workers, threads), out, unit, &|columns| {
            SCRATCH.with_borrow_mut(|scratch| {
                let part = MatrixPart { x, rows, matrix, columns, y, scratch };
                // SAFETY: `y` has `rows` rows of `out` elements, and no other part has these columns.
                unsafe { self.level.run(part) };
            });
        });
    }
}

fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::mismatch(what, expected, got)) }
}

/// Returns `len` elements written by `fill`. The memory is not zeroed first.
///
/// # Errors
/// Returns the error of `fill`.
///
/// # Safety
/// If `fill` returns `Ok`, it must have written every element.
unsafe fn filled(len: usize, fill: impl FnOnce(Destination<'_>) -> Result<()>) -> Result<Vec<f32>> {
    let mut elements = Vec::with_capacity(len);
    fill(Destination::to_fill(&mut elements.spare_capacity_mut()[..len]))?;
    // SAFETY: there is room for `len` elements, and `fill` has written all of them.
    unsafe { elements.set_len(len) };
    Ok(elements)
}

/// Splits the `out` columns into ranges that begin at multiples of `unit`, and calls `work` once for each
/// range, on the given number of threads.
fn in_parts(
    (workers, threads): (&Workers, usize),
    out: usize,
    unit: usize,
    work: &(dyn Fn(Range<usize>) + Sync),
) {
    // There are several parts per thread, so a thread that starts late can take fewer parts.
    let parts = if threads > 1 { (4 * threads).min(out.div_ceil(unit)) } else { 1 };
    workers.run(parts, &|part| {
        let at = |part: usize| (out * part / parts).next_multiple_of(unit).min(out);
        work(at(part)..if part + 1 == parts { out } else { at(part + 1) });
    });
}

/// A task that multiplies all rows of `x` by a range of matrix rows, and writes the products to the same
/// range of columns of `y`.
///
/// `y` must have `rows` rows of `matrix.out` f32 elements, and no other thread may access their `columns`.
struct MatrixPart<'a> {
    x: &'a [f32],
    rows: usize,
    matrix: &'a Matrix<'a>,
    columns: Range<usize>,
    y: Destination<'a>,
    scratch: &'a mut Vec<f32>,
}

impl SimdTask for MatrixPart<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { x, rows, matrix, columns, y, scratch } = self;
        let (out, input) = (matrix.out, matrix.input);
        let y = y.at(0, rows * out * size_of::<f32>()).cast::<f32>();
        // SAFETY: the caller is compiled for `S`, and the columns of `y` belong to this part by contract.
        if rows == 1 && unsafe { single::columns::<S>(x, matrix, columns.clone(), y, scratch) } {
            return;
        }
        if rows >= panel::FEWEST_ROWS && (matrix.dtype == StoredType::F32 || S::LANES >= panel::DECODED_LANES)
        {
            // SAFETY: the caller is compiled for `S`, and the columns of `y` belong to this part by contract.
            unsafe { panel::columns::<S>((x, rows), matrix, columns, y, scratch) };
            return;
        }
        let ahead = matrix.dtype == StoredType::F32;
        // The rows of `x` are split into runs of equal length that fit in the second-level cache together
        // with the matrix rows they are multiplied by.
        let runs = rows.div_ceil((FEW / input).clamp(FEWEST_OF_A_RUN, ROWS));
        for from in columns.clone().step_by(GROUP) {
            let taken = from..(from + GROUP).min(columns.end);
            // SAFETY: the caller is compiled for `S`.
            let group = unsafe { matrix.in_f32::<S>(taken.clone(), scratch) };
            for run in 0..runs {
                let (at, end) = (rows * run / runs, rows * (run + 1) / runs);
                let x = &x[at * input..end * input];
                for column in taken.clone().step_by(tile::COLUMNS) {
                    let w = group.part(column - from..(column + tile::COLUMNS).min(taken.end) - from);
                    // SAFETY: the caller is compiled for `S`. `w` has rows of `input` elements, `x` has the
                    // run's rows, and `y` has `rows` rows of `out` elements, of which the columns `taken`
                    // belong to this part by contract.
                    unsafe {
                        let y = (y.add(at * out + column), out);
                        tile::columns::<S>((x, end - at, input), w, y, ahead && run == 0);
                    }
                }
            }
        }
    }
}
