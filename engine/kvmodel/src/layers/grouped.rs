//! The projections of grouped-query attention (Ainslie et al., 2023).

use super::{Linear, Loader, Projected, RmsNorm};
use crate::config::{Family, ModelConfig};
use crate::dense::{Activation, Dense};
use crate::error::Result;

/// The projections from the residual stream to every head's queries, keys and values, and from
/// attention's output back to the residual stream.
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
    pub(super) fn load(loader: &mut Loader, c: &ModelConfig, at: &str) -> Result<Self> {
        let (q_width, kv_width, hidden) = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.hidden_size);
        let mut linear =
            |name: &str, out, input, bias| loader.linear(&format!("{at}.{name}"), out, input, bias);
        let q = linear("q_proj", q_width, hidden, c.qkv_bias)?;
        let k = linear("k_proj", kv_width, hidden, c.qkv_bias)?;
        let v = linear("v_proj", kv_width, hidden, c.qkv_bias)?;
        let output = linear("o_proj", hidden, q_width, c.output_bias)?;
        let head_norms = match c.family {
            Family::Qwen3 | Family::Gemma3 => Some((
                loader.norm(&format!("{at}.q_norm"), c.head_dim, c.rms_norm_eps)?,
                loader.norm(&format!("{at}.k_norm"), c.head_dim, c.rms_norm_eps)?,
            )),
            _ => None,
        };
        Ok(Self { q, k, v, head_norms, output, head_dim: c.head_dim })
    }

    /// Projects the rows `x` to keys and values, and the rows `asking` to queries.
    pub(super) fn project(
        &self,
        dense: &dyn Dense,
        x: &Activation,
        asking: &Activation,
    ) -> Result<Projected> {
        let heads =
            |linear: &Linear, x: &Activation| dense.split_heads(&linear.forward(dense, x)?, self.head_dim);
        let mut q = heads(&self.q, asking)?;
        let mut k = heads(&self.k, x)?;
        let v = heads(&self.v, x)?;
        if let Some((q_norm, k_norm)) = &self.head_norms {
            (q, k) = (q_norm.forward(dense, &q)?, k_norm.forward(dense, &k)?);
        }
        Ok(Projected { q, q_latent: None, k, v })
    }

    /// Projects the output of attention, `[rows, heads, head_dim]`, to the residual stream.
    pub(super) fn output(&self, dense: &dyn Dense, attention: &Activation) -> Result<Activation> {
        self.output.forward(dense, &dense.join_heads(attention)?)
    }
}
