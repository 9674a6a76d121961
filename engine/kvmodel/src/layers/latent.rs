//! The absorbed projections of multi-head latent attention (DeepSeek-AI, 2024). The cache holds each token's
//! latent and the rotated part of its key, and attention runs over both.
//!
//! With `k_h = Uᴷ_h c` and `v_h = Uⱽ_h c` for a latent `c`, `q_h·k_h = (Uᴷ_hᵀ q_h)·c` and `Σ p v_h = Uⱽ_h Σ p
//! c`. Queries are projected to the latent's space before attention, and outputs are projected back after it.
//! The keys and values of individual heads are never computed.

use std::sync::Arc;

use super::{Linear, Loader, Projected, RmsNorm};
use crate::config::{LatentConfig, ModelConfig};
use crate::dense::{Activation, Dense, Weight, WeightUse};
use crate::error::Result;

// Decision: docs/decisions/models.md#norms-inside-latent-attention-have-an-epsilon-of-1e-6
/// The epsilon for norms inside the projections. It does not depend on `rms_norm_eps`.
const EPS: f64 = 1e-6;

#[derive(Debug)]
pub(super) struct LatentAttention {
    query: Query,
    /// The projection to the latent and the rotated part of the key.
    down: Linear,
    norm: RmsNorm,
    /// `Uᴷ`, `[heads, qk_nope_head_dim, kv_lora_rank]`. Both `Uᴷ` and `Uⱽ` stay f32 in every weight format.
    key: Arc<dyn Weight>,
    /// `Uⱽ`, `[heads, v_head_dim, kv_lora_rank]`. Outputs are multiplied by its transpose.
    value: Arc<dyn Weight>,
    output: Linear,
    widths: LatentConfig,
}

/// The projection to queries, either directly or through a compressed vector.
#[derive(Debug)]
enum Query {
    Full(Linear),
    Compressed { down: Linear, norm: RmsNorm, up: Linear },
}

impl Query {
    fn forward(&self, dense: &dyn Dense, x: &Activation) -> Result<Activation> {
        match self {
            Self::Full(q) => q.forward(dense, x),
            Self::Compressed { down, norm, up } => {
                up.forward(dense, &norm.forward(dense, &down.forward(dense, x)?)?)
            }
        }
    }
}

impl LatentAttention {
    pub(super) fn load(loader: &mut Loader, c: &ModelConfig, widths: LatentConfig, at: &str) -> Result<Self> {
        let LatentConfig { q_lora_rank, kv_lora_rank: rank, qk_nope_head_dim: nope, .. } = widths;
        let (hidden, q_width) = (c.hidden_size, c.heads * widths.qk_head_dim());
        let name = |part: &str| format!("{at}.{part}");
        let down_width = rank + widths.qk_rope_head_dim;
        let down = loader.linear(&name("kv_a_proj_with_mqa"), down_width, hidden, c.qkv_bias)?;
        let output = loader.linear(&name("o_proj"), hidden, c.heads * widths.v_head_dim, c.output_bias)?;
        let query = match q_lora_rank {
            None => Query::Full(loader.linear(&name("q_proj"), q_width, hidden, false)?),
            Some(q_rank) => Query::Compressed {
                down: loader.linear(&name("q_a_proj"), q_rank, hidden, c.qkv_bias)?,
                up: loader.linear(&name("q_b_proj"), q_width, q_rank, false)?,
                norm: loader.norm(&name("q_a_layernorm"), q_rank, EPS)?,
            },
        };
        let norm = loader.norm(&name("kv_a_layernorm"), rank, EPS)?;
        let height = nope + widths.v_head_dim;
        // Decision: docs/decisions/models.md#deepseeks-kv_b_proj-is-split-and-absorbed-at-load-time
        let up = loader.take(&name("kv_b_proj"), &[c.heads * height, rank])?;
        let key = loader.by_head(&up, c.heads, 0..nope, WeightUse::ByHead)?;
        let value = loader.by_head(&up, c.heads, nope..height, WeightUse::ByHeadTransposed)?;
        Ok(Self { query, down, norm, key, value, output, widths })
    }

    /// Projects the rows `x` to latents and to the rotated parts of keys, and the rows `asking` to queries.
    pub(super) fn project(
        &self,
        dense: &dyn Dense,
        x: &Activation,
        asking: &Activation,
    ) -> Result<Projected> {
        let LatentConfig { kv_lora_rank: rank, qk_nope_head_dim: nope, qk_rope_head_dim: rope, .. } =
            self.widths;
        let q = dense.split_heads(&self.query.forward(dense, asking)?, nope + rope)?;
        let down = self.down.forward(dense, x)?;
        let latent = self.norm.forward(dense, &dense.columns(&down, 0..rank)?)?;
        let q_nope = dense.columns(&q, 0..nope)?;
        Ok(Projected {
            q_latent: Some(dense.by_head(&q_nope, self.key.as_ref())?),
            q: dense.columns(&q, nope..nope + rope)?,
            k: dense.split_heads(&dense.columns(&down, rank..rank + rope)?, rope)?,
            v: dense.split_heads(&latent, rank)?,
        })
    }

    /// Projects the output of attention over the latents, `[rows, heads, kv_lora_rank]`, to the residual
    /// stream.
    pub(super) fn output(&self, dense: &dyn Dense, attention: &Activation) -> Result<Activation> {
        let values = dense.by_head(attention, self.value.as_ref())?;
        self.output.forward(dense, &dense.join_heads(&values)?)
    }
}
