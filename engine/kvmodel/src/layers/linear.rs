//! Projections.

use std::sync::Arc;

use crate::dense::{Activation, Dense, Weight};
use crate::error::Result;

/// A projection `x Wᵀ + b`.
#[derive(Debug)]
pub(crate) struct Linear {
    matrix: Arc<dyn Weight>,
    bias: Option<Arc<dyn Weight>>,
}

impl Linear {
    pub(crate) fn new(matrix: Arc<dyn Weight>, bias: Option<Arc<dyn Weight>>) -> Self {
        Self { matrix, bias }
    }

    pub(crate) fn forward(&self, dense: &dyn Dense, x: &Activation) -> Result<Activation> {
        dense.project(x, self.matrix.as_ref(), self.bias.as_deref())
    }
}
