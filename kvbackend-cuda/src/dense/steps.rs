//! The dense steps that need no matrix products: table lookups, norms, gates and sums.

use bytemuck::{Pod, Zeroable};
use kvcore::{Error, Result, Storage, TensorView};
use std::sync::Arc;

use super::weight::WeightArgs;
use super::{CudaSteps, CudaWeight, address, matrix_shape, narrow};
use crate::module::{CudaKernel, Module};
use crate::queue::Launch;

/// Threads per block, as declared in `dense.cu`.
pub(super) const THREADS: u32 = 256;

/// The maximum number of blocks per grid. If there are more rows, each block loops over several.
const MOST_BLOCKS: usize = 1 << 16;

pub(super) const fn kernel(name: &'static str) -> CudaKernel {
    CudaKernel { module: Module::Dense, name, shared: 0 }
}

/// Returns a grid with one block per row, up to the maximum.
pub(super) fn rows_grid(rows: usize) -> [u32; 3] {
    [rows.min(MOST_BLOCKS) as u32, 1, 1]
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TakeArgs {
    table: WeightArgs,
    rows: u64,
    out: u64,
    count: u32,
    scale: f32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct NormArgs {
    x: u64,
    weight: u64,
    out: u64,
    outer: i64,
    inner: i64,
    rows: u32,
    inners: u32,
    width: u32,
    eps: f32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PairArgs {
    x: u64,
    y: u64,
    out: u64,
    count: u64,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AddRowsArgs {
    sum: u64,
    rows: u64,
    factors: u64,
    y: u64,
    count: u32,
    width: u32,
}

impl CudaSteps {
    /// Returns the tokens' embeddings multiplied by `scale`, `[tokens, width]`.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if a token ID is outside the table, or a device error.
    pub fn embed(&self, table: &CudaWeight, tokens: &[u32], scale: f32) -> Result<TensorView> {
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= table.rows) {
            return Err(Error::OutOfRange { what: "token", value: token.into(), limit: table.rows as i128 });
        }
        let out = self.rows(&[tokens.len(), table.width])?;
        let mut args = TakeArgs {
            table: table.args()?,
            rows: 0,
            out: address(&out)?,
            count: narrow(tokens.len())?,
            scale,
        };
        self.enqueue(&[&table.storage, out.storage()], |to| {
            args.rows = to.tokens(tokens, table.rows)?;
            to.launch(Launch::new(kernel("dense_take"), rows_grid(tokens.len()), THREADS, 0, &args));
            Ok(())
        })?;
        Ok(out)
    }

    /// Copies row indices to the device.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn index(&self, rows: &[u32]) -> Result<Arc<dyn Storage>> {
        let storage = self.take(size_of_val(rows).max(1))?;
        let view = TensorView::new(Arc::clone(&storage), kvcore::DType::U8, &[size_of_val(rows)])?;
        kvcore::Stream::write(&self.stream, &view, bytemuck::cast_slice(rows))?;
        self.count();
        Ok(storage)
    }

    /// Returns the `count` rows of `x` whose indices are in `rows`. The caller must ensure that `x` has these
    /// rows.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn select(&self, x: &TensorView, rows: &Arc<dyn Storage>, count: usize) -> Result<TensorView> {
        let x = self.dense(x)?;
        let width: usize = x.shape()[1..].iter().product();
        let mut shape = x.shape().to_vec();
        shape[0] = count;
        let out = self.rows(&shape)?;
        let table = WeightArgs::of_rows(address(&x)?, width)?;
        let args =
            TakeArgs { table, rows: rows.address(), out: address(&out)?, count: narrow(count)?, scale: 1.0 };
        self.enqueue(&[x.storage(), rows, out.storage()], |to| {
            to.launch(Launch::new(kernel("dense_take"), rows_grid(count), THREADS, 0, &args));
            Ok(())
        })?;
        Ok(out)
    }

    /// Returns `x / √(mean(x²) + eps) · weight` over the last axis of `[rows, width]` or
    /// `[rows, heads, dim]`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the weight's width differs from that of `x`, or a device error.
    pub fn rms_norm(&self, x: &TensorView, weight: &CudaWeight, eps: f32) -> Result<TensorView> {
        let (rows, inners, width, inner) = match *x.shape() {
            [rows, width] => (rows, 1, width, 0),
            [rows, heads, dim] => (rows, heads, dim, x.strides()[1]),
            _ => return Err(super::rank(2, x)),
        };
        let out = self.rows(x.shape())?;
        let args = NormArgs {
            x: address(x)?,
            weight: Self::vector(weight, width)?,
            out: address(&out)?,
            outer: x.strides()[0] as i64,
            inner: inner as i64,
            rows: narrow(rows * inners)?,
            inners: narrow(inners)?,
            width: narrow(width)?,
            eps,
        };
        self.enqueue(&[x.storage(), &weight.storage, out.storage()], |to| {
            let kernel = CudaKernel { shared: 4 * THREADS / 32, ..kernel("dense_rms_norm") };
            to.launch(Launch::new(kernel, rows_grid(rows * inners), THREADS, kernel.shared, &args));
            Ok(())
        })?;
        Ok(out)
    }

    /// Returns `silu(gate) ⊙ up`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the shapes differ, or a device error.
    pub fn gated(&self, gate: &TensorView, up: &TensorView) -> Result<TensorView> {
        self.pair("dense_gated", gate, up)
    }

    /// Returns `gelu(gate) ⊙ up`, with the tanh approximation of GELU.
    ///
    /// # Errors
    /// Returns the same errors as [`gated`](Self::gated).
    pub fn gated_gelu(&self, gate: &TensorView, up: &TensorView) -> Result<TensorView> {
        self.pair("dense_gated_gelu", gate, up)
    }

    /// Returns `x + y`.
    ///
    /// # Errors
    /// Returns the same errors as [`gated`](Self::gated).
    pub fn add(&self, x: &TensorView, y: &TensorView) -> Result<TensorView> {
        self.pair("dense_add", x, y)
    }

    fn pair(&self, name: &'static str, x: &TensorView, y: &TensorView) -> Result<TensorView> {
        let (x, y) = (self.dense(x)?, self.dense(y)?);
        if x.shape() != y.shape() {
            return Err(Error::mismatch("elements of a sum or product", x.len(), y.len()));
        }
        let out = self.rows(x.shape())?;
        let args = PairArgs { x: address(&x)?, y: address(&y)?, out: address(&out)?, count: x.len() as u64 };
        self.enqueue(&[x.storage(), y.storage(), out.storage()], |to| {
            let grid = rows_grid(x.len().div_ceil(THREADS as usize));
            to.launch(Launch::new(kernel(name), grid, THREADS, 0, &args));
            Ok(())
        })?;
        Ok(out)
    }

    /// Returns a tensor of zeros with the shape of `x`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn zeros_like(&self, x: &TensorView) -> Result<TensorView> {
        let zeros = self.rows(x.shape())?;
        self.stream.zero(&zeros)?;
        self.count();
        Ok(zeros)
    }

    /// Returns `sum` with `factors[i] · y[i]` added to its row `rows[i]`. The caller must ensure that `sum`
    /// has these rows and that no row is listed twice.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if `factors` does not have one entry per row of `y`, or a device error.
    pub fn add_rows(
        &self,
        sum: &TensorView,
        rows: &Arc<dyn Storage>,
        factors: &[f32],
        y: &TensorView,
    ) -> Result<TensorView> {
        let (_, width) = matrix_shape(sum)?;
        let y = self.dense(y)?;
        let (count, y_width) = matrix_shape(&y)?;
        for (what, expected, got) in
            [("factors of rows", count, factors.len()), ("width of rows to add", width, y_width)]
        {
            if expected != got {
                return Err(Error::mismatch(what, expected, got));
            }
        }
        let out = self.copy(sum)?;
        let mut args = AddRowsArgs {
            sum: address(&out)?,
            rows: rows.address(),
            factors: 0,
            y: address(&y)?,
            count: narrow(count)?,
            width: narrow(width)?,
        };
        self.enqueue(&[rows, y.storage(), out.storage()], |to| {
            args.factors = to.upload(factors)?;
            to.launch(Launch::new(kernel("dense_add_rows"), rows_grid(count), THREADS, 0, &args));
            Ok(())
        })?;
        Ok(out)
    }
}
