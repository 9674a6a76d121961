//! The gated feed-forward layer (Shazeer, 2020), dense or with experts.

use candle_core::Tensor;

use super::experts::Experts;
use super::{Linear, WeightFormat};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::weights::Weights;

#[derive(Debug)]
pub(super) enum FeedForward {
    Dense(Gated),
    Experts(Experts),
}

impl FeedForward {
    /// Loads the feed-forward layer of decoder layer `index`.
    pub(super) fn load(
        w: &mut Weights,
        c: &ModelConfig,
        index: usize,
        at: &str,
        format: WeightFormat,
    ) -> Result<Self> {
        if let Some(experts) = c.experts.filter(|experts| index >= experts.dense_layers) {
            return Ok(Self::Experts(Experts::load(w, experts, c.hidden_size, at, format)?));
        }
        Ok(Self::Dense(Gated::load(w, at, c.hidden_size, c.intermediate_size, c.mlp_bias, format)?))
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(gated) => gated.forward(x),
            Self::Experts(experts) => experts.forward(x),
        }
    }
}

/// A gated layer: `down(silu(gate(x)) ⊙ up(x))`.
#[derive(Debug)]
pub(super) struct Gated {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Gated {
    pub(super) fn load(
        w: &mut Weights,
        at: &str,
        hidden: usize,
        inner: usize,
        bias: bool,
        format: WeightFormat,
    ) -> Result<Self> {
        let mut linear =
            |name: &str, out, input| Linear::load(w, &format!("{at}.{name}"), out, input, bias, format);
        Ok(Self {
            gate: linear("gate_proj", inner, hidden)?,
            up: linear("up_proj", inner, hidden)?,
            down: linear("down_proj", hidden, inner)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&(self.gate.forward(x)?.silu()? * self.up.forward(x)?)?)
    }
}
