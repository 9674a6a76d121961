//! The attention mass of tokens: the total attention that each token gets from a sequence's later
//! rows.
//!
//! In each included layer, the queries are multiplied with the keys at the positions they are used at, and
//! each token's softmax weights are summed. This happens on the host, because no backend operation returns
//! the weights of single tokens.

use kvcore::{AttendWork, LayerRopes};

use super::attention::FreshQueries;
use super::{ComputeDevice, Model};
use crate::dense::products;
use crate::error::Result;

// Decision: docs/decisions/chunks.md#the-question-chooses-by-its-own-attention
/// The attention that one sequence in a pass pays to each token of its earlier segments, summed over
/// rows, query heads and layers.
///
/// [`Pass::observe`](super::Pass::observe) receives it. A sequence that is computed in several passes uses
/// the same mass for all of them.
#[derive(Debug, Default)]
pub struct AttentionMass {
    /// The index of the sequence in the batch.
    pub sequence: usize,
    /// The first layer to include in the sums.
    pub first_layer: usize,
    /// One sum for each token in all segments but the last, which holds the sequence's own rows. The
    /// caller must set the length.
    pub sums: Vec<f32>,
    /// The number of floating-point operations for the sums. The pass does not count them.
    pub flops: u64,
}

/// The keys that a sequence sees in a layer.
struct SeenKeys {
    /// The logical index and position of each token, and the factor on its logits.
    tokens: Vec<(usize, i64, f32)>,
    /// The keys `[tokens, heads, dim]`, rotated to their positions.
    k: Vec<f32>,
    /// The latents `[tokens, 1, dim]`; empty without latent attention.
    latents: Vec<f32>,
}

impl AttentionMass {
    /// Adds one layer's attention weights to the sums. The layer's keys must already be stored. `work` and
    /// `queries` are for all rows in the pass.
    pub(super) fn add(
        &mut self,
        (model, device, ropes): (&Model, &ComputeDevice, &LayerRopes),
        layer: usize,
        work: &AttendWork,
        queries: &FreshQueries,
    ) -> Result<()> {
        let (config, entry) = (model.config(), &work.batch()[self.sequence]);
        let (q, latent) = queries.rows(entry.rows.clone());
        let seen = SeenKeys::read((model, device, ropes), layer, work, self.sequence)?;
        let rows = &work.rows()[entry.rows.clone()];
        let (tokens, heads) = (seen.tokens.len(), config.heads);
        let kv_heads = device.arenas[model.place(device, layer).group].layout().shape().k_heads;
        let mut logits = products(q, &seen.k, (rows.len(), heads, kv_heads, tokens))?;
        self.flops += 2 * q.len() as u64 * tokens as u64;
        if let Some(latent) = latent {
            let of_latents = products(latent, &seen.latents, (rows.len(), heads, 1, tokens))?;
            logits.iter_mut().zip(of_latents).for_each(|(sum, x)| *sum += x);
            self.flops += 2 * latent.len() as u64 * tokens as u64;
        }
        let window = config.layers[layer].window.map_or(i64::MAX, |window| window as i64);
        // Rows of logits are ordered by key head, then by query row.
        let group = heads / kv_heads;
        for (at, logits) in logits.chunks_exact_mut(tokens.max(1)).enumerate() {
            let row = rows[at % (rows.len() * group) / group];
            for (x, &(token, position, factor)) in logits.iter_mut().zip(&seen.tokens) {
                let visible = token <= row.logical && row.position.saturating_sub(position) < window;
                *x = if visible { *x * config.softmax_scale * factor } else { f32::NEG_INFINITY };
            }
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f32 = logits.iter().map(|x| (x - largest).exp()).sum();
            for (sum, x) in self.sums.iter_mut().zip(logits.iter()) {
                *sum += (x - largest).exp() / total;
            }
        }
        Ok(())
    }
}

impl SeenKeys {
    /// Reads the keys of a layer, segment by segment.
    fn read(
        (model, device, ropes): (&Model, &ComputeDevice, &LayerRopes),
        layer: usize,
        work: &AttendWork,
        sequence: usize,
    ) -> Result<Self> {
        let mut seen = Self { tokens: Vec::new(), k: Vec::new(), latents: Vec::new() };
        for segment in work.batch()[sequence].segments.iter().filter(|segment| segment.len > 0) {
            let token =
                |j: usize| (segment.logical_start + j, segment.position(j as i64), segment.logit_scale);
            seen.tokens.extend((0..segment.len).map(token));
            let (k, v) = model.keys_in_use(device, ropes, layer, segment, 0..segment.len)?;
            seen.k.extend(k);
            if model.config().latent.is_some() {
                seen.latents.extend(v);
            }
        }
        Ok(seen)
    }
}
