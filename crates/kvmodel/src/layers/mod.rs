//! The dense parts of a decoder layer.

use candle_core::{Storage, Tensor};

use crate::config::ModelConfig;
use crate::error::Result;
use crate::weights::Weights;

mod experts;
mod feed_forward;
mod grouped;
mod latent;
mod linear;
mod norm;

use feed_forward::FeedForward;
use grouped::GroupedQuery;
use latent::LatentAttention;
pub(crate) use linear::Linear;
pub use linear::WeightFormat;
pub(crate) use norm::RmsNorm;

/// A decoder layer without its attention, which reads the cache.
#[derive(Debug)]
pub(crate) struct Layer {
    input_norm: RmsNorm,
    attention: Projections,
    mlp_norm: RmsNorm,
    feed_forward: FeedForward,
}

/// The projections around attention.
#[derive(Debug)]
enum Projections {
    Grouped(GroupedQuery),
    Latent(LatentAttention),
}

/// The inputs of attention for a layer's rows, `[rows, heads, dim]` each, not rotated.
#[derive(Debug)]
pub(crate) struct Projected {
    /// The queries; for latent attention, their rotated part.
    pub(crate) q: Tensor,
    /// The queries of latent attention in the latent's space.
    pub(crate) q_latent: Option<Tensor>,
    /// The keys; for latent attention, their rotated part.
    pub(crate) k: Tensor,
    /// The values; for latent attention, the latents.
    pub(crate) v: Tensor,
}

impl Projected {
    /// Returns only the given rows.
    pub(crate) fn select(&self, rows: &Tensor) -> Result<Self> {
        Ok(Self { k: rows_of(&self.k, rows)?, v: rows_of(&self.v, rows)?, ..self.asking(rows)? })
    }

    /// Returns only the queries of the given rows, with all keys and values.
    pub(crate) fn asking(&self, rows: &Tensor) -> Result<Self> {
        let q_latent = self.q_latent.as_ref().map(|q| rows_of(q, rows)).transpose()?;
        Ok(Self { q: rows_of(&self.q, rows)?, q_latent, k: self.k.clone(), v: self.v.clone() })
    }
}

fn rows_of(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    Ok(x.contiguous()?.index_select(rows, 0)?)
}

/// Calls `read` with the elements of a tensor, which are copied only if they do not lie in order.
pub(crate) fn with_values<T>(x: &Tensor, read: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(values) = &*storage else {
        return Err(candle_core::Error::msg("a tensor of the dense layers is not on the host").into());
    };
    read(&values.as_slice::<f32>()?[layout.start_offset()..][..x.elem_count()])
}

impl Layer {
    pub(crate) fn load(w: &mut Weights, c: &ModelConfig, index: usize, format: WeightFormat) -> Result<Self> {
        let at = |part: &str| format!("model.layers.{index}.{part}");
        let attention = match c.latent {
            Some(widths) => {
                Projections::Latent(LatentAttention::load(w, c, widths, &at("self_attn"), format)?)
            }
            None => Projections::Grouped(GroupedQuery::load(w, c, &at("self_attn"), format)?),
        };
        Ok(Self {
            attention,
            feed_forward: FeedForward::load(w, c, index, &at("mlp"), format)?,
            input_norm: RmsNorm::load(w, &at("input_layernorm"), c.hidden_size, c.rms_norm_eps)?,
            mlp_norm: RmsNorm::load(w, &at("post_attention_layernorm"), c.hidden_size, c.rms_norm_eps)?,
        })
    }

    /// Projects all rows to keys and values, and the rows in `wanted` (all, if `None`) to queries.
    pub(crate) fn project(&self, x: &Tensor, wanted: Option<&Tensor>) -> Result<Projected> {
        let x = self.input_norm.forward(x)?;
        let asking = wanted.map_or_else(|| Ok(x.clone()), |rows| x.index_select(rows, 0))?;
        match &self.attention {
            Projections::Grouped(attention) => attention.project(&x, &asking),
            Projections::Latent(attention) => attention.project(&x, &asking),
        }
    }

    /// Returns the residual stream after attention `[rows, heads, dim]` and the feed-forward layer.
    pub(crate) fn finish(&self, x: &Tensor, attention: &Tensor) -> Result<Tensor> {
        let attention = match &self.attention {
            Projections::Grouped(projections) => projections.output(attention)?,
            Projections::Latent(projections) => projections.output(attention)?,
        };
        let x = (x + attention)?;
        let y = self.feed_forward.forward(&self.mlp_norm.forward(&x)?)?;
        Ok((x + y)?)
    }
}
