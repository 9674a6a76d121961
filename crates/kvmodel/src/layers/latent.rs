//! Absorbed projections of multi-head latent attention (DeepSeek-AI, 2024). The cache holds a token's latent
//! and the rotated part of its key, and attention runs over these.
//!
//! With `k_h = Uᴷ_h c` and `v_h = Uⱽ_h c` of a latent `c`, `q_h·k_h = (Uᴷ_hᵀ q_h)·c` and `Σ p v_h = Uⱽ_h Σ p
//! c`. Queries are projected to the latent's space before attention, and outputs are projected back after it.
//! No head's key or value is ever formed.

use candle_core::Tensor;

use super::{Linear, Projected, RmsNorm, WeightFormat};
use crate::config::{LatentConfig, ModelConfig};
use crate::error::Result;
use crate::weights::Weights;

// Decision: docs/decisions/models.md#norms-inside-latent-attention-have-an-epsilon-of-1e-6
/// The epsilon of norms inside the projections, whatever `rms_norm_eps` is.
const EPS: f64 = 1e-6;

#[derive(Debug)]
pub(super) struct LatentAttention {
    query: Query,
    /// The projection to the latent and the rotated part of the key.
    down: Linear,
    norm: RmsNorm,
    /// `Uᴷ`, `[heads, qk_nope_head_dim, kv_lora_rank]`. Both `Uᴷ` and `Uⱽ` stay f32 in every weight format.
    key: Tensor,
    /// The transpose of `Uⱽ`, `[heads, kv_lora_rank, v_head_dim]`.
    value: Tensor,
    output: Linear,
    widths: LatentConfig,
}

/// The projection to queries, direct or through a compression.
#[derive(Debug)]
enum Query {
    Full(Linear),
    Compressed { down: Linear, norm: RmsNorm, up: Linear },
}

impl Query {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Full(q) => q.forward(x),
            Self::Compressed { down, norm, up } => up.forward(&norm.forward(&down.forward(x)?)?),
        }
    }
}

impl LatentAttention {
    pub(super) fn load(
        w: &mut Weights,
        c: &ModelConfig,
        widths: LatentConfig,
        at: &str,
        format: WeightFormat,
    ) -> Result<Self> {
        let LatentConfig { q_lora_rank, kv_lora_rank: rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim } =
            widths;
        let (hidden, q_width) = (c.hidden_size, c.heads * widths.qk_head_dim());
        let mut linear =
            |name: &str, out, input, bias| Linear::load(w, &format!("{at}.{name}"), out, input, bias, format);
        let down = linear("kv_a_proj_with_mqa", rank + qk_rope_head_dim, hidden, c.qkv_bias)?;
        let output = linear("o_proj", hidden, c.heads * v_head_dim, c.output_bias)?;
        let query = match q_lora_rank {
            None => Query::Full(linear("q_proj", q_width, hidden, false)?),
            Some(q_rank) => Query::Compressed {
                down: linear("q_a_proj", q_rank, hidden, c.qkv_bias)?,
                up: linear("q_b_proj", q_width, q_rank, false)?,
                norm: RmsNorm::load(w, &format!("{at}.q_a_layernorm"), q_rank, EPS)?,
            },
        };
        let norm = RmsNorm::load(w, &format!("{at}.kv_a_layernorm"), rank, EPS)?;
        let height = qk_nope_head_dim + v_head_dim;
        let up = w.take(&format!("{at}.kv_b_proj.weight"), &[c.heads * height, rank])?;
        let up = up.reshape((c.heads, height, rank))?;
        let key = up.narrow(1, 0, qk_nope_head_dim)?.contiguous()?;
        let value = up.narrow(1, qk_nope_head_dim, v_head_dim)?.transpose(1, 2)?.contiguous()?;
        Ok(Self { query, down, norm, key, value, output, widths })
    }

    /// Projects the rows `x` to rotated parts and latents, and the rows `asking` to queries.
    pub(super) fn project(&self, x: &Tensor, asking: &Tensor) -> Result<Projected> {
        let LatentConfig { kv_lora_rank: rank, qk_nope_head_dim: nope, qk_rope_head_dim: rope, .. } =
            self.widths;
        let q = self.query.forward(asking)?;
        let (rows, width) = q.dims2()?;
        let q = q.reshape((rows, width / (nope + rope), nope + rope))?;
        let down = self.down.forward(x)?;
        let latent = self.norm.forward(&down.narrow(1, 0, rank)?.contiguous()?)?;
        Ok(Projected {
            q_latent: Some(by_head(&q.narrow(2, 0, nope)?, &self.key)?),
            q: q.narrow(2, nope, rope)?,
            k: down.narrow(1, rank, rope)?.unsqueeze(1)?,
            v: latent.unsqueeze(1)?,
        })
    }

    /// Projects attention over latents `[rows, heads, kv_lora_rank]` to the residual stream.
    pub(super) fn output(&self, attention: &Tensor) -> Result<Tensor> {
        self.output.forward(&by_head(attention, &self.value)?.flatten_from(1)?)
    }
}

/// Multiplies `[rows, heads, a]` by each head's `[a, b]`. Returns `[rows, heads, b]`.
fn by_head(x: &Tensor, matrices: &Tensor) -> Result<Tensor> {
    let y = x.transpose(0, 1)?.contiguous()?.matmul(matrices)?;
    Ok(y.transpose(0, 1)?.contiguous()?)
}
