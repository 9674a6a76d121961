//! Projections of grouped-query attention (Ainslie et al., 2023).

use candle_core::Tensor;

use super::{Linear, Projected, RmsNorm, WeightFormat};
use crate::config::{Family, ModelConfig};
use crate::error::Result;
use crate::weights::Weights;

/// The projections to queries, keys and values of every head, and from the output of attention.
#[derive(Debug)]
pub(super) struct GroupedQuery {
    q: Linear,
    k: Linear,
    v: Linear,
    head_norms: Option<(RmsNorm, RmsNorm)>,
    output: Linear,
    head_dim: usize,
}

impl GroupedQuery {
    pub(super) fn load(w: &mut Weights, c: &ModelConfig, at: &str, format: WeightFormat) -> Result<Self> {
        let (q_width, kv_width, hidden) = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.hidden_size);
        let mut linear =
            |name: &str, out, input, bias| Linear::load(w, &format!("{at}.{name}"), out, input, bias, format);
        let q = linear("q_proj", q_width, hidden, c.qkv_bias)?;
        let k = linear("k_proj", kv_width, hidden, c.qkv_bias)?;
        let v = linear("v_proj", kv_width, hidden, c.qkv_bias)?;
        let output = linear("o_proj", hidden, q_width, c.output_bias)?;
        let head_norms = match c.family {
            Family::Qwen3 => Some((
                RmsNorm::load(w, &format!("{at}.q_norm"), c.head_dim, c.rms_norm_eps)?,
                RmsNorm::load(w, &format!("{at}.k_norm"), c.head_dim, c.rms_norm_eps)?,
            )),
            _ => None,
        };
        Ok(Self { q, k, v, head_norms, output, head_dim: c.head_dim })
    }

    /// Projects the rows `x` to keys and values, and the rows `asking` to queries.
    pub(super) fn project(&self, x: &Tensor, asking: &Tensor) -> Result<Projected> {
        let heads = |y: Tensor| -> Result<Tensor> {
            let (rows, width) = y.dims2()?;
            Ok(y.reshape((rows, width / self.head_dim, self.head_dim))?)
        };
        let mut q = heads(self.q.forward(asking)?)?;
        let mut k = heads(self.k.forward(x)?)?;
        let v = heads(self.v.forward(x)?)?;
        if let Some((q_norm, k_norm)) = &self.head_norms {
            (q, k) = (q_norm.forward(&q)?, k_norm.forward(&k)?);
        }
        Ok(Projected { q, q_latent: None, k, v })
    }

    /// Projects attention `[rows, heads, head_dim]` to the residual stream.
    pub(super) fn output(&self, attention: &Tensor) -> Result<Tensor> {
        self.output.forward(&attention.flatten_from(1)?)
    }
}
