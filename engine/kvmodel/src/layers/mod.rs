//! The dense parts of a decoder layer.

use crate::config::{Family, ModelConfig};
use crate::dense::{Activation, Dense, RowIndex};
use crate::error::Result;

mod experts;
mod feed_forward;
mod grouped;
mod latent;
mod linear;
mod load;
mod norm;

use feed_forward::FeedForward;
use grouped::GroupedQuery;
use latent::LatentAttention;
pub(crate) use linear::Linear;
pub(crate) use load::Loader;
pub(crate) use norm::RmsNorm;

/// A decoder layer without the attention itself, which runs on the backend that stores the cache.
#[derive(Debug)]
pub(crate) struct Layer {
    input_norm: RmsNorm,
    attention: Projections,
    mlp_norm: RmsNorm,
    feed_forward: FeedForward,
    /// The norms over the outputs of attention and of the feed-forward layer, if the family has them.
    output_norms: Option<(RmsNorm, RmsNorm)>,
}

/// The projections before and after attention.
#[derive(Debug)]
enum Projections {
    Grouped(GroupedQuery),
    Latent(LatentAttention),
}

/// The inputs to attention for a layer's rows, each `[rows, heads, dim]` and not rotated.
#[derive(Debug)]
pub(crate) struct Projected {
    /// The queries; for latent attention, their rotated part.
    pub(crate) q: Activation,
    /// The queries of latent attention, in the latent's space.
    pub(crate) q_latent: Option<Activation>,
    /// The keys; for latent attention, their rotated part.
    pub(crate) k: Activation,
    /// The values; for latent attention, the latents.
    pub(crate) v: Activation,
}

impl Projected {
    /// Returns the queries, keys and values of only the given rows.
    pub(crate) fn select(&self, dense: &dyn Dense, rows: &RowIndex) -> Result<Self> {
        let (k, v) = (dense.select(&self.k, rows)?, dense.select(&self.v, rows)?);
        Ok(Self { k, v, ..self.asking(dense, rows)? })
    }

    /// Returns the queries of only the given rows, and the keys and values of all rows.
    pub(crate) fn asking(&self, dense: &dyn Dense, rows: &RowIndex) -> Result<Self> {
        let q_latent = self.q_latent.as_ref().map(|q| dense.select(q, rows)).transpose()?;
        Ok(Self { q: dense.select(&self.q, rows)?, q_latent, k: self.k.clone(), v: self.v.clone() })
    }
}

impl Layer {
    pub(crate) fn load(loader: &mut Loader, c: &ModelConfig, index: usize) -> Result<Self> {
        let at = |part: &str| format!("model.layers.{index}.{part}");
        let attention = match c.latent {
            Some(widths) => Projections::Latent(LatentAttention::load(loader, c, widths, &at("self_attn"))?),
            None => Projections::Grouped(GroupedQuery::load(loader, c, &at("self_attn"))?),
        };
        let feed_forward = FeedForward::load(loader, c, index, &at("mlp"))?;
        let mut norm = |name: &str| loader.norm(&at(name), c.hidden_size, c.rms_norm_eps);
        let (input_norm, after_attention) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        // In Gemma 3, this norm applies to attention's output. In the other families, it applies to the
        // feed-forward layer's input.
        let (mlp_norm, output_norms) = match c.family {
            Family::Gemma3 => (
                norm("pre_feedforward_layernorm")?,
                Some((after_attention, norm("post_feedforward_layernorm")?)),
            ),
            _ => (after_attention, None),
        };
        Ok(Self { input_norm, attention, mlp_norm, feed_forward, output_norms })
    }

    /// Projects all rows to keys and values, and the `wanted` rows (all rows if `None`) to queries.
    pub(crate) fn project(
        &self,
        dense: &dyn Dense,
        x: &Activation,
        wanted: Option<&RowIndex>,
    ) -> Result<Projected> {
        let x = self.input_norm.forward(dense, x)?;
        let asking = wanted.map_or_else(|| Ok(x.clone()), |rows| dense.select(&x, rows))?;
        match &self.attention {
            Projections::Grouped(attention) => attention.project(dense, &x, &asking),
            Projections::Latent(attention) => attention.project(dense, &x, &asking),
        }
    }

    /// Adds the output of attention, `[rows, heads, dim]`, and then the feed-forward layer to the residual
    /// stream `x`. Returns the new residual stream.
    pub(crate) fn finish(
        &self,
        dense: &dyn Dense,
        x: &Activation,
        attention: &Activation,
    ) -> Result<Activation> {
        let mut attention = match &self.attention {
            Projections::Grouped(projections) => projections.output(dense, attention)?,
            Projections::Latent(projections) => projections.output(dense, attention)?,
        };
        if let Some((norm, _)) = &self.output_norms {
            attention = norm.forward(dense, &attention)?;
        }
        let x = dense.add(x, &attention)?;
        let mut y = self.feed_forward.forward(dense, &self.mlp_norm.forward(dense, &x)?)?;
        if let Some((_, norm)) = &self.output_norms {
            y = norm.forward(dense, &y)?;
        }
        dense.add(&x, &y)
    }
}
