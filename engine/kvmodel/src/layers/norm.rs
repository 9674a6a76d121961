//! The norm that all supported families use.

use std::sync::Arc;

use crate::dense::{Activation, Dense, Weight};
use crate::error::Result;

/// A root-mean-square norm over the last axis.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Arc<dyn Weight>,
    eps: f64,
}

impl RmsNorm {
    pub(crate) fn new(weight: Arc<dyn Weight>, eps: f64) -> Self {
        Self { weight, eps }
    }

    pub(crate) fn forward(&self, dense: &dyn Dense, x: &Activation) -> Result<Activation> {
        dense.rms_norm(x, self.weight.as_ref(), self.eps)
    }
}
