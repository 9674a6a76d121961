//! The gated feed-forward layer (Shazeer, 2020), dense or with experts.

use super::experts::Experts;
use super::{Linear, Loader};
use crate::config::{Family, ModelConfig};
use crate::dense::{Activation, Dense, GateActivation};
use crate::error::Result;

#[derive(Debug)]
pub(super) enum FeedForward {
    Dense(Gated),
    Experts(Experts),
}

impl FeedForward {
    /// Loads the feed-forward layer of decoder layer `index`.
    pub(super) fn load(loader: &mut Loader, c: &ModelConfig, index: usize, at: &str) -> Result<Self> {
        if let Some(experts) = c.experts.filter(|experts| index >= experts.dense_layers) {
            return Ok(Self::Experts(Experts::load(loader, experts, c.hidden_size, at)?));
        }
        let activation = match c.family {
            Family::Gemma3 => GateActivation::GeluTanh,
            _ => GateActivation::Silu,
        };
        Ok(Self::Dense(Gated::load(loader, at, c.hidden_size, c.intermediate_size, c.mlp_bias, activation)?))
    }

    pub(super) fn forward(&self, dense: &dyn Dense, x: &Activation) -> Result<Activation> {
        match self {
            Self::Dense(gated) => gated.forward(dense, x),
            Self::Experts(experts) => experts.forward(dense, x),
        }
    }
}

/// A gated layer: `down(activation(gate(x)) ⊙ up(x))`.
#[derive(Debug)]
pub(super) struct Gated {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: GateActivation,
}

impl Gated {
    pub(super) fn load(
        loader: &mut Loader,
        at: &str,
        hidden: usize,
        inner: usize,
        bias: bool,
        activation: GateActivation,
    ) -> Result<Self> {
        let mut linear = |name: &str, out, input| loader.linear(&format!("{at}.{name}"), out, input, bias);
        Ok(Self {
            gate: linear("gate_proj", inner, hidden)?,
            up: linear("up_proj", inner, hidden)?,
            down: linear("down_proj", hidden, inner)?,
            activation,
        })
    }

    pub(super) fn forward(&self, dense: &dyn Dense, x: &Activation) -> Result<Activation> {
        let (gate, up) = (self.gate.forward(dense, x)?, self.up.forward(dense, x)?);
        self.down.forward(dense, &dense.gated(self.activation, &gate, &up)?)
    }
}
