//! Projections in f32 or eight-bit blocks.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Module, Tensor};

use crate::error::Result;
use crate::weights::{Weights, bytes};

/// The format of projection weights in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub enum WeightFormat {
    /// f32.
    #[default]
    F32,
    /// Eight-bit blocks of 32 elements (ggml's `Q8_0`), with about a quarter of the memory traffic in decode.
    /// Projections whose input width is no multiple of 32 stay f32.
    Q8,
}

/// A projection `x Wᵀ + b`.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Matrix,
    bias: Option<Tensor>,
}

#[derive(Debug)]
enum Matrix {
    Dense(Tensor),
    Quantised { weight: QMatMul, bytes: usize },
}

impl Matrix {
    fn new(weight: &Tensor, format: WeightFormat) -> Result<Self> {
        let width = weight.dim(1)?;
        if format == WeightFormat::Q8 && width.is_multiple_of(GgmlDType::Q8_0.block_size()) {
            let quantised = QTensor::quantize(weight, GgmlDType::Q8_0)?;
            let bytes = quantised.storage_size_in_bytes();
            Ok(Self::Quantised { weight: QMatMul::from_arc(Arc::new(quantised))?, bytes })
        } else {
            Ok(Self::Dense(weight.t()?))
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Dense(weight) => bytes(weight),
            Self::Quantised { bytes, .. } => *bytes,
        }
    }
}

impl Linear {
    pub(crate) fn new(weight: &Tensor, bias: Option<Tensor>, format: WeightFormat) -> Result<Self> {
        Ok(Self { weight: Matrix::new(weight, format)?, bias })
    }

    pub(super) fn load(
        w: &mut Weights,
        name: &str,
        out: usize,
        input: usize,
        bias: bool,
        format: WeightFormat,
    ) -> Result<Self> {
        let weight = w.take(&format!("{name}.weight"), &[out, input])?;
        let bias = if bias { Some(w.take(&format!("{name}.bias"), &[out])?) } else { None };
        let linear = Self::new(&weight, bias, format)?;
        w.held_as(&weight, linear.weight.bytes());
        Ok(linear)
    }

    /// Returns the bytes of the matrix.
    pub(crate) fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.weight {
            Matrix::Dense(w) => x.matmul(w)?,
            Matrix::Quantised { weight, .. } => weight.forward(x)?,
        };
        Ok(match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }
}
