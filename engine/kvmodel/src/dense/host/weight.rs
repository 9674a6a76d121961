//! Weights on the host: candle tensors, and matrices in their stored type.

use candle_core::{Device, Tensor};
use kvbackend_cpu::dense::{ComputeType, Matrix, Products, SharedBytes, StoredType};

use super::failed;
use crate::dense::{StoredWeight, Weight, WeightFormat, WeightUse};
use crate::error::{Error, Result, WeightProblem};

/// A weight on the host.
#[derive(Debug)]
pub(super) struct HostWeight {
    held: HeldForm,
    bytes: usize,
}

/// The forms in which a weight is held.
#[derive(Debug)]
pub(super) enum HeldForm {
    /// A tensor in f32, for candle's steps.
    Plain(Tensor),
    /// The matrix of a projection or table, `[out, input]`.
    Matrix(StoredMatrix),
    /// One matrix per head.
    Heads(HeadMatrices),
}

/// Matrices in f32, `[heads, out, input]`.
#[derive(Debug)]
pub(super) struct HeadMatrices {
    values: Vec<f32>,
    pub(super) out: usize,
    input: usize,
}

impl HeadMatrices {
    /// Multiplies each head of `[rows, heads, input]` by its matrix. Returns `[rows, heads, out]`.
    pub(super) fn multiply(
        &self,
        products: &Products,
        x: &[f32],
        (rows, heads): (usize, usize),
    ) -> Result<Vec<f32>> {
        let (out, input) = (self.out, self.input);
        if x.len() != rows * heads * input || self.values.len() != heads * out * input {
            return Err(failed(candle_core::Error::msg("heads that do not match their matrices")));
        }
        let mut y = vec![0.0; rows * heads * out];
        let (mut own, mut product) = (vec![0.0; rows * input], vec![0.0; rows * out]);
        let matrices = self.values.chunks_exact((out * input).max(1)).take(heads);
        for (head, matrix) in matrices.enumerate() {
            for (own, row) in own.chunks_exact_mut(input.max(1)).zip(x.chunks_exact((heads * input).max(1))) {
                own.copy_from_slice(&row[head * input..][..input]);
            }
            let matrix = Matrix::new(StoredType::F32, out, input, bytemuck::cast_slice(matrix))?;
            products.multiply(&own, &matrix, &mut product)?;
            for (product, row) in
                product.chunks_exact(out.max(1)).zip(y.chunks_exact_mut((heads * out).max(1)))
            {
                row[head * out..][..out].copy_from_slice(product);
            }
        }
        Ok(y)
    }
}

/// A matrix in its stored type. Its bytes may be shared with other weights, such as a tied table.
#[derive(Debug, Clone)]
pub(super) struct StoredMatrix {
    dtype: StoredType,
    pub(super) out: usize,
    pub(super) input: usize,
    bytes: SharedBytes,
    /// True if rows must not be rounded when they are multiplied by the matrix.
    pub(super) is_exact: bool,
}

impl StoredMatrix {
    pub(super) fn view(&self) -> Result<Matrix<'_>> {
        Ok(Matrix::new(self.dtype, self.out, self.input, &self.bytes)?)
    }

    /// Returns whether rows are rounded when they are multiplied by the matrix.
    pub(super) fn is_rounded_for(&self, compute: ComputeType) -> bool {
        !self.is_exact && compute.rounds_for(self.dtype)
    }

    /// Decodes a row into `to`.
    pub(super) fn row(&self, row: usize, to: &mut [f32]) {
        let bytes = self.bytes.len() / self.out.max(1);
        if let Some(bytes) = self.bytes.get(row * bytes..(row + 1) * bytes) {
            self.dtype.decode(bytes, to);
        }
    }

    /// Returns the matrix in a format, and true if the result has its own bytes instead of sharing the bytes
    /// of this matrix.
    fn in_format(&self, format: WeightFormat) -> Result<(Self, bool)> {
        let known = || {
            let shape = [self.out, self.input];
            StoredWeight::new("", self.dtype, &shape, self.bytes.clone())
        };
        let made = |dtype, bytes: Vec<u8>| (Self { dtype, bytes: bytes.into(), ..*self }, true);
        match format {
            WeightFormat::F32 if self.dtype != StoredType::F32 => {
                Ok(made(StoredType::F32, bytemuck::cast_slice(&known()?.to_f32()).to_vec()))
            }
            WeightFormat::Q8 if !self.dtype.is_blocks() => {
                let blocks = known()?.to_q8_0();
                Ok(blocks.map_or_else(|| (self.clone(), false), |blocks| made(StoredType::Q8_0, blocks)))
            }
            _ => Ok((self.clone(), false)),
        }
    }
}

impl Weight for HostWeight {
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl HostWeight {
    pub(super) fn held(&self) -> &HeldForm {
        &self.held
    }

    /// Converts a stored weight to the form that its use needs.
    pub(super) fn load(stored: &StoredWeight, purpose: WeightUse) -> Result<Self> {
        let (expected, got) = (rank_of(purpose), stored.shape().len());
        if expected != got {
            let (name, problem) = (stored.name().to_owned(), WeightProblem::Rank { expected, got });
            return Err(Error::Weight { name, problem });
        }
        match purpose {
            WeightUse::Table => Self::matrix(stored, WeightFormat::Stored, false),
            WeightUse::ExactProjection => Self::matrix(stored, WeightFormat::Stored, true),
            WeightUse::Projection(format) => Self::matrix(stored, format, false),
            WeightUse::Vector => Ok(Self::plain(in_f32(stored).map_err(failed)?)),
            WeightUse::ByHead => {
                let turned = || in_f32(stored)?.transpose(1, 2)?.flatten_all()?.to_vec1();
                Ok(Self::heads(turned().map_err(failed)?, stored.shape()[2], stored.shape()[1]))
            }
            WeightUse::ByHeadTransposed => {
                Ok(Self::heads(stored.to_f32(), stored.shape()[1], stored.shape()[2]))
            }
        }
    }

    /// Returns the matrix for an output head that is tied to the embedding table.
    pub(super) fn tied_head(table: &HeldForm, format: WeightFormat) -> Result<Self> {
        let HeldForm::Matrix(table) = table else {
            return Err(failed(candle_core::Error::msg("a table that is not a matrix")));
        };
        let (matrix, is_new) = table.in_format(format)?;
        let bytes = if is_new { matrix.bytes.len() } else { 0 };
        Ok(Self { held: HeldForm::Matrix(matrix), bytes })
    }

    fn plain(weight: Tensor) -> Self {
        let bytes = weight.elem_count() * weight.dtype().size_in_bytes();
        Self { held: HeldForm::Plain(weight), bytes }
    }

    fn heads(values: Vec<f32>, out: usize, input: usize) -> Self {
        let bytes = size_of_val(&values[..]);
        Self { held: HeldForm::Heads(HeadMatrices { values, out, input }), bytes }
    }

    fn matrix(stored: &StoredWeight, format: WeightFormat, is_exact: bool) -> Result<Self> {
        let (out, input) = (stored.shape()[0], stored.width());
        let (dtype, bytes) = (stored.dtype(), stored.bytes().clone());
        let as_stored = StoredMatrix { dtype, out, input, bytes, is_exact };
        let (matrix, _) = as_stored.in_format(format)?;
        Ok(Self { bytes: matrix.bytes.len(), held: HeldForm::Matrix(matrix) })
    }
}

fn rank_of(purpose: WeightUse) -> usize {
    match purpose {
        WeightUse::Vector => 1,
        WeightUse::Table | WeightUse::Projection(_) | WeightUse::ExactProjection => 2,
        WeightUse::ByHead | WeightUse::ByHeadTransposed => 3,
    }
}

/// Returns a weight as a tensor in f32.
fn in_f32(stored: &StoredWeight) -> candle_core::Result<Tensor> {
    Tensor::from_vec(stored.to_f32(), stored.shape(), &Device::Cpu)
}
