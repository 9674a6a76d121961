//! Matrix products. This crate's kernels, which read the matrix once, compute products with few rows.
//! cuBLAS computes products with many rows.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kvcore::{Error, Result, Storage, TensorView};

use super::blas::{Blas, Gemm, Operand, WORKSPACE};
use super::steps::{THREADS, kernel, rows_grid};
use super::weight::WeightArgs;
use super::{CudaSteps, CudaWeight, StoredKind, address, matrix_shape, narrow};
use crate::module::{CudaKernel, Module};
use crate::queue::Launch;

/// The maximum number of rows in a product that this crate's kernels compute. cuBLAS computes larger
/// products.
const FEW: usize = 8;

/// The maximum number of rows for which the three bf16 terms of the activations are stacked into one
/// product. A stacked product reads the weights only once.
const STACKED: usize = 64;

/// The maximum number of weight elements that are widened to f32 at once.
const WIDENED: usize = 16 << 20;

// Decision: docs/decisions/backend-cuda.md#activations-are-split-into-three-bf16-terms
/// The number of terms that activations are split into.
const TERMS: usize = 3;

/// The number of outputs per thread block in `skinny.cu`.
const WARPS: usize = 8;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SkinnyArgs {
    weight: WeightArgs,
    x: u64,
    bias: u64,
    out: u64,
    stride: i64,
    rows: u32,
    outputs: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SplitArgs {
    x: u64,
    out: u64,
    stride: i64,
    rows: u32,
    width: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct FinishArgs {
    x: u64,
    bias: u64,
    out: u64,
    rows: u32,
    width: u32,
    terms: u32,
    pad: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct WidenArgs {
    weight: WeightArgs,
    out: u64,
    first: u32,
    rows: u32,
}

/// Returns the kernel for a product of `rows` rows. There must be at most eight rows.
fn skinny(kind: StoredKind, rows: usize) -> CudaKernel {
    let names = match kind {
        StoredKind::F32 => ["skinny_f32_1", "skinny_f32_4", "skinny_f32_8"],
        StoredKind::F16 => ["skinny_f16_1", "skinny_f16_4", "skinny_f16_8"],
        StoredKind::BF16 => ["skinny_bf16_1", "skinny_bf16_4", "skinny_bf16_8"],
        StoredKind::Q8_0 => ["skinny_q8_0_1", "skinny_q8_0_4", "skinny_q8_0_8"],
        StoredKind::Q4K => ["skinny_q4_k_1", "skinny_q4_k_4", "skinny_q4_k_8"],
    };
    let name = match rows {
        0..=1 => names[0],
        2..=4 => names[1],
        _ => names[2],
    };
    CudaKernel { module: Module::Skinny, name, shared: 0 }
}

impl CudaSteps {
    /// Returns `x · matrixᵀ + bias`: `[rows, out]` for an `x` of `[rows, input]`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the shapes do not match, or an error of the device or of cuBLAS.
    pub fn project(
        &self,
        x: &TensorView,
        matrix: &CudaWeight,
        bias: Option<&CudaWeight>,
    ) -> Result<TensorView> {
        let (rows, width) = matrix_shape(x)?;
        if width != matrix.width {
            return Err(Error::mismatch("width of a projection", matrix.width, width));
        }
        let out = self.rows(&[rows, matrix.rows])?;
        let bias_at = bias.map_or(Ok(0), |bias| Self::vector(bias, matrix.rows))?;
        if rows == 0 {
            return Ok(out);
        }
        if rows <= FEW {
            self.few(x, matrix, (bias, bias_at), &out)?;
        } else if matrix.kind == StoredKind::BF16 {
            self.split(x, matrix, (bias, bias_at), &out)?;
        } else {
            self.widened(x, matrix, &out)?;
            self.finish(&out, 1, (bias, bias_at), &out)?;
        }
        Ok(out)
    }

    fn few(
        &self,
        x: &TensorView,
        matrix: &CudaWeight,
        (bias, bias_at): (Option<&CudaWeight>, u64),
        out: &TensorView,
    ) -> Result<()> {
        let (rows, outputs) = matrix_shape(out)?;
        let args = SkinnyArgs {
            weight: matrix.args()?,
            x: address(x)?,
            bias: bias_at,
            out: address(out)?,
            stride: x.strides()[0] as i64,
            rows: rows as u32,
            outputs: narrow(outputs)?,
        };
        let mut uses = vec![x.storage(), &matrix.storage, out.storage()];
        uses.extend(bias.map(|bias| &bias.storage));
        self.enqueue(&uses, |to| {
            let grid = rows_grid(outputs.div_ceil(WARPS));
            to.launch(Launch::new(skinny(matrix.kind, rows), grid, THREADS, 0, &args));
            Ok(())
        })
    }

    /// Multiplies activations with bf16 weights. The activations are split into bf16 terms.
    fn split(
        &self,
        x: &TensorView,
        matrix: &CudaWeight,
        bias: (Option<&CudaWeight>, u64),
        out: &TensorView,
    ) -> Result<()> {
        let ((rows, width), outputs) = (matrix_shape(x)?, matrix.rows);
        // The terms have two bytes per element, but `rows` allocates f32 elements.
        let terms = self.rows(&[(TERMS * rows * width).div_ceil(2)])?;
        let args = SplitArgs {
            x: address(x)?,
            out: address(&terms)?,
            stride: x.strides()[0] as i64,
            rows: narrow(rows)?,
            width: narrow(width)?,
        };
        self.enqueue(&[x.storage(), terms.storage()], |to| {
            to.launch(Launch::new(kernel("dense_split"), rows_grid(rows), THREADS, 0, &args));
            Ok(())
        })?;
        let gemm = |rows: usize, term: usize, to: u64, beta: f32| Gemm {
            matrix: Operand::bf16(matrix.address()),
            x: Operand::bf16(args.out + (term * args.rows as usize * width * 2) as u64),
            out: to,
            rows,
            width,
            outputs,
            stride: width,
            beta,
        };
        if rows <= STACKED {
            let products = self.rows(&[TERMS * rows, outputs])?;
            let stacked = gemm(TERMS * rows, 0, address(&products)?, 0.0);
            self.by_library(&[terms.storage(), &matrix.storage, products.storage()], |blas| {
                blas.gemm(&stacked, outputs)
            })?;
            return self.finish(&products, TERMS, bias, out);
        }
        // Adding the smallest term first loses the fewest bits.
        for (term, beta) in [(2, 0.0), (1, 1.0), (0, 1.0)] {
            let product = gemm(rows, term, address(out)?, beta);
            self.by_library(&[terms.storage(), &matrix.storage, out.storage()], |blas| {
                blas.gemm(&product, outputs)
            })?;
        }
        self.finish(out, 1, bias, out)
    }

    /// Multiplies in f32, and widens the weight to f32 a few rows at a time.
    fn widened(&self, x: &TensorView, matrix: &CudaWeight, out: &TensorView) -> Result<()> {
        let (rows, width) = matrix_shape(x)?;
        let at_once = (WIDENED / width.max(1)).clamp(1, matrix.rows.max(1));
        let plain = matrix.kind == StoredKind::F32;
        let room = if plain { None } else { Some(self.rows(&[at_once, width])?) };
        let mut first = 0;
        while first < matrix.rows {
            let count = if plain { matrix.rows } else { at_once.min(matrix.rows - first) };
            let weights = match &room {
                None => matrix.address(),
                Some(room) => {
                    let args = WidenArgs {
                        weight: matrix.args()?,
                        out: address(room)?,
                        first: narrow(first)?,
                        rows: narrow(count)?,
                    };
                    self.enqueue(&[&matrix.storage, room.storage()], |to| {
                        to.launch(Launch::new(kernel("dense_widen"), rows_grid(count), THREADS, 0, &args));
                        Ok(())
                    })?;
                    args.out
                }
            };
            let gemm = Gemm {
                matrix: Operand::f32(weights),
                x: Operand::f32(address(x)?),
                out: address(out)? + (4 * first) as u64,
                rows,
                width,
                outputs: count,
                stride: x.strides()[0],
                beta: 0.0,
            };
            let of_weights = room.as_ref().map_or(&matrix.storage, TensorView::storage);
            self.by_library(&[x.storage(), of_weights, out.storage()], |blas| blas.gemm(&gemm, matrix.rows))?;
            first += count;
        }
        Ok(())
    }

    /// Adds up a product's terms, and adds the bias.
    fn finish(
        &self,
        products: &TensorView,
        terms: usize,
        (bias, bias_at): (Option<&CudaWeight>, u64),
        out: &TensorView,
    ) -> Result<()> {
        if terms == 1 && bias.is_none() {
            return Ok(());
        }
        let (rows, width) = matrix_shape(out)?;
        let args = FinishArgs {
            x: address(products)?,
            bias: bias_at,
            out: address(out)?,
            rows: narrow(rows)?,
            width: narrow(width)?,
            terms: terms as u32,
            pad: 0,
        };
        let mut uses = vec![products.storage(), out.storage()];
        uses.extend(bias.map(|bias| &bias.storage));
        self.enqueue(&uses, |to| {
            to.launch(Launch::new(kernel("dense_finish"), rows_grid(rows), THREADS, 0, &args));
            Ok(())
        })
    }

    /// Enqueues cuBLAS products that use the given storages. Their workspace belongs to the stream or, in a
    /// capture, to the graph. Both workspaces have the same size, because cuBLAS chooses its kernels by that
    /// size.
    fn by_library(
        &self,
        uses: &[&Arc<dyn Storage>],
        products: impl FnOnce(&Blas) -> Result<()>,
    ) -> Result<()> {
        self.enqueue(uses, |to| {
            let mut blas = self.blas.lock();
            blas.work_in(to.scratch(WORKSPACE)?)?;
            products(&blas)
        })
    }

    /// Multiplies each head of `[rows, heads, a]` by its own f32 matrix: `[heads, a, b]`, or `[heads, b, a]`
    /// if `transposed` is true. Returns `[rows, heads, b]`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the shapes do not match, or an error of the device or of cuBLAS.
    pub fn by_head(&self, x: &TensorView, matrices: &CudaWeight, transposed: bool) -> Result<TensorView> {
        let &[rows, heads, a] = x.shape() else { return Err(super::rank(3, x)) };
        let per_head = matrices.rows.checked_div(heads).unwrap_or(0);
        let (wanted, b) = if transposed { (matrices.width, per_head) } else { (per_head, matrices.width) };
        if wanted != a || per_head * heads != matrices.rows || matrices.kind != StoredKind::F32 {
            return Err(Error::mismatch("matrices of heads", a, wanted));
        }
        let out = self.rows(&[rows, heads, b])?;
        if out.is_empty() {
            return Ok(out);
        }
        let strides = (x.strides()[0], x.strides()[1]);
        let at = (address(x)?, matrices.address(), address(&out)?);
        self.by_library(&[x.storage(), &matrices.storage, out.storage()], |blas| {
            blas.by_head((rows, heads, a, b), strides, at, transposed)
        })?;
        Ok(out)
    }
}
