//! Weights as candle holds them: numbers in f32, or blocks of quantised numbers.

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Tensor};

use super::failed;
use crate::dense::blocks::{blocks_of, in_blocks};
use crate::dense::{StoredWeight, Weight, WeightFormat, WeightUse};
use crate::error::{Error, Result, WeightProblem};

/// A weight on the host.
#[derive(Debug)]
pub(super) struct HostWeight {
    held: Held,
    bytes: usize,
}

/// The numbers of a weight.
#[derive(Debug)]
pub(super) enum Held {
    /// f32. The matrix of a projection is `[input, out]`, which multiplies rows as it is.
    Plain(Tensor),
    /// Blocks, `[out, input]` or `[vocabulary, width]`.
    Blocks(QMatMul),
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
    pub(super) fn held(&self) -> &Held {
        &self.held
    }

    /// Converts a stored weight to the form for its use.
    pub(super) fn load(stored: &StoredWeight, purpose: WeightUse) -> Result<Self> {
        let (expected, got) = (rank_of(purpose), stored.shape().len());
        if expected != got {
            let (name, problem) = (stored.name().to_owned(), WeightProblem::Rank { expected, got });
            return Err(Error::Weight { name, problem });
        }
        let load = || match (purpose, blocks_of(stored.dtype())) {
            (
                WeightUse::Table | WeightUse::Projection(WeightFormat::Stored | WeightFormat::Q8),
                Some(dtype),
            ) => Self::blocks(in_blocks(stored, dtype)?),
            (WeightUse::Projection(WeightFormat::Q8), None) => Self::quantised(&in_f32(stored)?),
            (WeightUse::Projection(_) | WeightUse::ExactProjection, _) => {
                Ok(Self::plain(in_f32(stored)?.t()?))
            }
            (WeightUse::Vector | WeightUse::Table | WeightUse::ByHead, _) => Ok(Self::plain(in_f32(stored)?)),
            (WeightUse::ByHeadTransposed, _) => {
                Ok(Self::plain(in_f32(stored)?.transpose(1, 2)?.contiguous()?))
            }
        };
        load().map_err(failed)
    }

    /// Returns the matrix of a head that is the table of embeddings.
    pub(super) fn tied_head(table: &Held, format: WeightFormat) -> candle_core::Result<Self> {
        match (table, format) {
            (Held::Plain(table), WeightFormat::Q8) if suits_q8(table)? => Self::quantised(table),
            (Held::Plain(table), _) => Ok(Self { held: Held::Plain(table.t()?), bytes: 0 }),
            (Held::Blocks(QMatMul::QTensor(table)), WeightFormat::F32) => {
                Ok(Self::plain(table.dequantize(&Device::Cpu)?.t()?))
            }
            (Held::Blocks(table), _) => Ok(Self { held: Held::Blocks(table.clone()), bytes: 0 }),
        }
    }

    fn plain(weight: Tensor) -> Self {
        let bytes = weight.elem_count() * weight.dtype().size_in_bytes();
        Self { held: Held::Plain(weight), bytes }
    }

    fn blocks(weight: QTensor) -> candle_core::Result<Self> {
        let bytes = weight.storage_size_in_bytes();
        Ok(Self { held: Held::Blocks(QMatMul::from_qtensor(weight)?), bytes })
    }

    /// Rounds a matrix `[out, input]` to eight-bit blocks, if its rows consist of whole blocks.
    fn quantised(matrix: &Tensor) -> candle_core::Result<Self> {
        if suits_q8(matrix)? {
            Self::blocks(QTensor::quantize(matrix, GgmlDType::Q8_0)?)
        } else {
            Ok(Self::plain(matrix.t()?))
        }
    }
}

fn suits_q8(matrix: &Tensor) -> candle_core::Result<bool> {
    Ok(matrix.dim(1)?.is_multiple_of(GgmlDType::Q8_0.block_size()))
}

fn rank_of(purpose: WeightUse) -> usize {
    match purpose {
        WeightUse::Vector => 1,
        WeightUse::Table | WeightUse::Projection(_) | WeightUse::ExactProjection => 2,
        WeightUse::ByHead | WeightUse::ByHeadTransposed => 3,
    }
}

/// Returns the numbers of a weight in f32.
fn in_f32(stored: &StoredWeight) -> candle_core::Result<Tensor> {
    let values = stored.to_f32().map_err(candle_core::Error::wrap)?;
    Tensor::from_vec(values, stored.shape(), &Device::Cpu)
}
