//! The norm that all supported families use.

use candle_core::{D, Tensor};

use crate::error::Result;
use crate::weights::Weights;

/// A root-mean-square norm over the last axis.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    pub(crate) fn load(w: &mut Weights, name: &str, width: usize, eps: f64) -> Result<Self> {
        Ok(Self { weight: w.take(&format!("{name}.weight"), &[width])?, eps })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        Ok(x.broadcast_div(&(mean_square + self.eps)?.sqrt()?)?.broadcast_mul(&self.weight)?)
    }
}
