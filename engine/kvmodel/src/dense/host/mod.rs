//! The dense steps on the host, in f32: computed by the CPU backend on candle tensors.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{D, Device, Storage, Tensor};
use kvbackend_cpu::CpuBackend;
use kvbackend_cpu::dense::{ComputeType, Products};
use kvcore::Backend;

use super::{
    Activation, Border, BorderExtents, Dense, GateActivation, RowIndex, StoredWeight, Weight, WeightFormat,
    WeightUse,
};
use crate::error::{Error, Result};

mod border;
mod tensors;
#[cfg(test)]
mod tests;
mod weight;

use border::HostBorder;
pub use tensors::{OutputTensor, lend_tensor};
use weight::{HeadMatrices, HeldForm, HostWeight, StoredMatrix};

/// The dense steps on the host.
///
/// Projection and embedding matrices keep their stored type, unless a [`WeightFormat`] asks for another one,
/// and are multiplied in f32: weights are not widened in memory, and activations are not rounded. With
/// another [`ComputeType`], activations are rounded for matrices in bf16 or in blocks, except for those that a model asks to
/// be exact ([`WeightUse::ExactProjection`]).
///
/// Matrix products and the steps between them run on a CPU backend's threads, which live as long as the
/// backend. candle stores the tensors and copies their rows, but does not start threads.
#[derive(Debug, Clone, Default)]
pub struct HostDense {
    products: Products,
    /// True if rows are rounded for a loaded matrix.
    rounds: Arc<AtomicBool>,
}

impl HostDense {
    /// Creates steps that run on a backend's threads and use its instruction set.
    pub fn on(backend: &CpuBackend) -> Self {
        Self { products: Products::on(backend), rounds: Arc::default() }
    }

    /// Returns these steps with another precision of projections.
    #[must_use]
    pub fn with_compute(self, compute: ComputeType) -> Self {
        Self { products: self.products.with_compute(compute), ..self }
    }

    /// Notes whether rows are rounded for a weight.
    fn note_rounding(&self, weight: &HostWeight) {
        if let HeldForm::Matrix(matrix) = weight.held() {
            self.rounds.fetch_or(matrix.is_rounded_for(self.products.compute()), Ordering::Relaxed);
        }
    }

    /// Returns the products of a projection's matrix.
    fn products_with(&self, matrix: &StoredMatrix) -> Products {
        let compute = if matrix.is_exact { ComputeType::Exact } else { self.products.compute() };
        self.products.clone().with_compute(compute)
    }
}

const NAME: &str = "host";

/// The rows of an [`Activation`] on the host.
#[derive(Debug, Clone)]
pub(super) struct HostRows(Tensor);

impl HostRows {
    pub(super) fn shape(&self) -> &[usize] {
        self.0.dims()
    }
}

/// The indices of a [`RowIndex`] on the host.
#[derive(Debug, Clone)]
pub(super) struct HostIndex(Tensor);

impl HostIndex {
    pub(super) fn len(&self) -> usize {
        self.0.elem_count()
    }
}

/// Wraps rows as an activation.
fn activation(rows: candle_core::Result<Tensor>) -> Result<Activation> {
    Ok(Activation::on_host(HostRows(rows.map_err(failed)?)))
}

/// Converts an error from candle.
fn failed(error: candle_core::Error) -> Error {
    Error::Dense { implementation: NAME, source: Box::new(error) }
}

fn foreign(what: &'static str) -> Error {
    kvcore::Error::ForeignHandle { what, backend: NAME }.into()
}

fn rows_of(x: &Activation) -> Result<&Tensor> {
    x.host().map(|rows| &rows.0).ok_or_else(|| foreign("an activation"))
}

fn index_of(rows: &RowIndex) -> Result<&Tensor> {
    rows.host().map(|rows| &rows.0).ok_or_else(|| foreign("a list of rows"))
}

fn held(weight: &dyn Weight) -> Result<&HeldForm> {
    let own = weight.as_any().downcast_ref::<HostWeight>().ok_or_else(|| foreign("a weight"))?;
    Ok(own.held())
}

/// Returns a weight that is held as a plain tensor, or an error for any other form.
fn plain(weight: &dyn Weight) -> Result<&Tensor> {
    match held(weight)? {
        HeldForm::Plain(weight) => Ok(weight),
        _ => Err(failed(candle_core::Error::msg("a matrix only projects or embeds"))),
    }
}

/// Returns a weight that is held as one matrix per head, or an error for any other form.
fn head_matrices(weight: &dyn Weight) -> Result<&HeadMatrices> {
    match held(weight)? {
        HeldForm::Heads(matrices) => Ok(matrices),
        _ => Err(failed(candle_core::Error::msg("a weight without a matrix for each head"))),
    }
}

/// Returns a weight that is held as a single matrix, or an error for any other form.
fn matrix(weight: &dyn Weight) -> Result<&StoredMatrix> {
    match held(weight)? {
        HeldForm::Matrix(matrix) => Ok(matrix),
        _ => Err(failed(candle_core::Error::msg("a vector does not project"))),
    }
}

/// Calls `read` with a tensor's elements, which are copied only if they are not contiguous.
fn with_values<T>(x: &Tensor, read: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let x = x.contiguous().map_err(failed)?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(values) = &*storage else {
        return Err(failed(candle_core::Error::msg("a tensor of the dense steps is not on the host")));
    };
    read(&values.as_slice::<f32>().map_err(failed)?[layout.start_offset()..][..x.elem_count()])
}

/// Applies `of` to the elements of two activations, which must have the same shape.
fn pairwise(
    a: &Activation,
    b: &Activation,
    of: impl Fn(&[f32], &[f32]) -> kvcore::Result<Vec<f32>>,
) -> Result<Activation> {
    let (a, b) = (rows_of(a)?, rows_of(b)?);
    let y = with_values(a, |a| with_values(b, |b| Ok(of(a, b)?)))?;
    activation(Tensor::from_vec(y, a.shape(), &Device::Cpu))
}

impl Dense for HostDense {
    fn name(&self) -> &'static str {
        match self.products.compute() {
            ComputeType::Exact => NAME,
            ComputeType::Bf16 => "host, bf16",
            ComputeType::Int8 => "host, int8",
        }
    }

    fn note(&self) -> Option<String> {
        let (products, weights, cure, why) = match self.products.compute() {
            ComputeType::Exact => return None,
            ComputeType::Bf16 => (
                "bf16",
                "in bf16",
                "use the file in bf16",
                "has no AVX512_BF16, or a matrix unit (AMX) that multiplies exactly",
            ),
            ComputeType::Int8 => {
                ("eight-bit", "in ggml blocks", "--weights q8 stores weights in blocks", "has no AVX512_VNNI")
            }
        };
        if !self.rounds.load(Ordering::Relaxed) {
            return Some(format!(
                "{products} products need weights {weights}, and this model has none: products are exact; {cure}"
            ));
        }
        (!self.products.is_faster_than_exact()).then(|| {
            format!(
                "activations are rounded, but {products} products are no faster than exact ones for prompts on this \
                 processor, which {why}"
            )
        })
    }

    fn load(&self, stored: &StoredWeight, purpose: WeightUse) -> Result<Arc<dyn Weight>> {
        let weight = HostWeight::load(stored, purpose)?;
        // A table does not multiply, unless it is tied to the head.
        if !matches!(purpose, WeightUse::Table) {
            self.note_rounding(&weight);
        }
        Ok(Arc::new(weight))
    }

    fn tied_head(&self, table: &dyn Weight, format: WeightFormat) -> Result<Arc<dyn Weight>> {
        let weight = HostWeight::tied_head(held(table)?, format)?;
        self.note_rounding(&weight);
        Ok(Arc::new(weight))
    }

    fn border(&self, backend: &dyn Backend, extents: &BorderExtents) -> Result<Box<dyn Border>> {
        Ok(Box::new(HostBorder::new(backend, extents)?))
    }

    fn index(&self, rows: Vec<u32>) -> Result<RowIndex> {
        let len = rows.len();
        let rows = Tensor::from_vec(rows, len, &Device::Cpu).map_err(failed)?;
        Ok(RowIndex::on_host(HostIndex(rows)))
    }

    fn embed(&self, table: &dyn Weight, tokens: &[u32], scale: f32) -> Result<Activation> {
        let table = matrix(table)?;
        let mut rows = vec![0.0; tokens.len() * table.input];
        for (row, &token) in rows.chunks_exact_mut(table.input.max(1)).zip(tokens) {
            table.row(token as usize, row);
        }
        if scale != 1.0 {
            for x in &mut rows {
                *x *= scale;
            }
        }
        activation(Tensor::from_vec(rows, (tokens.len(), table.input), &Device::Cpu))
    }

    fn rms_norm(&self, x: &Activation, weight: &dyn Weight, eps: f64) -> Result<Activation> {
        let (x, weight) = (rows_of(x)?, plain(weight)?);
        let norm = |x: &[f32]| with_values(weight, |w| Ok(self.products.rms_norm(x, w, eps)?));
        activation(Tensor::from_vec(with_values(x, norm)?, x.shape(), &Device::Cpu))
    }

    fn project(&self, x: &Activation, matrix: &dyn Weight, bias: Option<&dyn Weight>) -> Result<Activation> {
        let (x, matrix) = (rows_of(x)?, self::matrix(matrix)?);
        let (rows, out) = (x.dim(0).map_err(failed)?, matrix.out);
        let products = self.products_with(matrix);
        let mut y = with_values(x, |x| Ok(products.multiplied(x, rows, &matrix.view()?)?))?;
        if let Some(bias) = bias.map(plain).transpose()? {
            with_values(bias, |bias| {
                for row in y.chunks_exact_mut(out.max(1)) {
                    row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
                }
                Ok(())
            })?;
        }
        activation(Tensor::from_vec(y, (rows, out), &Device::Cpu))
    }

    fn by_head(&self, x: &Activation, matrices: &dyn Weight) -> Result<Activation> {
        let (x, matrices) = (rows_of(x)?, head_matrices(matrices)?);
        let (rows, heads, _) = x.dims3().map_err(failed)?;
        let y = with_values(x, |x| matrices.multiply(&self.products, x, (rows, heads)))?;
        activation(Tensor::from_vec(y, (rows, heads, matrices.out), &Device::Cpu))
    }

    fn gated(&self, activation: GateActivation, gate: &Activation, up: &Activation) -> Result<Activation> {
        pairwise(gate, up, |gate, up| match activation {
            GateActivation::Silu => self.products.gated(gate, up),
            GateActivation::GeluTanh => self.products.gated_gelu(gate, up),
        })
    }

    fn add(&self, x: &Activation, y: &Activation) -> Result<Activation> {
        pairwise(x, y, |x, y| self.products.sums(x, y))
    }

    fn split_heads(&self, x: &Activation, dim: usize) -> Result<Activation> {
        let x = rows_of(x)?;
        let split = || {
            let (rows, width) = x.dims2()?;
            x.reshape((rows, width / dim, dim))
        };
        activation(split())
    }

    fn join_heads(&self, x: &Activation) -> Result<Activation> {
        activation(rows_of(x)?.flatten_from(1))
    }

    fn columns(&self, x: &Activation, columns: Range<usize>) -> Result<Activation> {
        activation(rows_of(x)?.narrow(D::Minus1, columns.start, columns.len()))
    }

    fn select(&self, x: &Activation, rows: &RowIndex) -> Result<Activation> {
        let (x, rows) = (rows_of(x)?, index_of(rows)?);
        activation(x.contiguous().and_then(|x| x.index_select(rows, 0)))
    }

    fn zeros_like(&self, x: &Activation) -> Result<Activation> {
        activation(rows_of(x)?.zeros_like())
    }

    fn add_rows(
        &self,
        sum: &Activation,
        rows: &RowIndex,
        factors: Vec<f32>,
        y: &Activation,
    ) -> Result<Activation> {
        let (sum, rows, y) = (rows_of(sum)?, index_of(rows)?, rows_of(y)?);
        let add = || {
            let count = factors.len();
            let factors = Tensor::from_vec(factors, (count, 1), &Device::Cpu)?;
            sum.index_add(rows, &y.broadcast_mul(&factors)?, 0)
        };
        activation(add())
    }

    fn read(&self, x: &Activation, values: &mut Vec<f32>) -> Result<()> {
        with_values(rows_of(x)?, |elements| {
            values.clear();
            values.extend_from_slice(elements);
            Ok(())
        })
    }
}
