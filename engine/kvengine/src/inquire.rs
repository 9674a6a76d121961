//! Recomputation by the question: how much the question attends to each reused token.
//!
//! The question is computed once over the keys as they are stored, with everybody's work. In each layer that counts its queries meet the
//! keys at their place, and the weights of the softmax are summed for each token. (`ProphetKV`, 2026.)

use kvcore::{LayerRopes, SequenceInput};
use kvmodel::FreshQueries;
use kvmodel::dense::products;

use crate::Engine;
use crate::error::Result;

// Decision: docs/decisions/chunks.md#the-question-chooses-by-its-own-attention
/// Rows of a question in a pass, to see what they attend to.
pub(crate) struct Inquiry<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) ropes: &'a LayerRopes,
    /// The rows with their context: the system prompt, the chunks, and the question's own sequence last.
    pub(crate) question: &'a SequenceInput,
    /// The first of the rows in the pass.
    pub(crate) first_row: usize,
}

/// The keys that a question sees, and where they are.
struct Seen {
    /// Logical index and position of each token, and the factor on its logits.
    tokens: Vec<(usize, i64, f32)>,
    /// `[tokens, heads, dim]`, at their place.
    k: Vec<f32>,
    /// `[tokens, 1, dim]` with latent attention.
    latents: Option<Vec<f32>>,
}

/// Returns the number of tokens that a question sees before its own sequence.
pub(crate) fn context_tokens(question: &SequenceInput) -> usize {
    let own = question.segments.len().saturating_sub(1);
    question.segments[..own].iter().map(|segment| segment.len).sum()
}

impl Inquiry<'_> {
    /// Adds the weights of one layer, whose keys are stored, to a sum for each token of the context. `queries` are those of all `rows` of the
    /// pass. Returns the operations.
    pub(crate) fn add(
        &self,
        layer: usize,
        (queries, all): (&FreshQueries, usize),
        sums: &mut [f32],
    ) -> Result<u64> {
        let (config, rows) = (self.engine.model.config(), self.question.tokens.len());
        let own = |of_all: &[f32]| {
            let width = of_all.len() / all.max(1);
            of_all[self.first_row * width..(self.first_row + rows) * width].to_vec()
        };
        let (q, latent) = (own(&queries.q), queries.latent.as_deref().map(own));
        let seen = self.seen(layer, latent.is_some())?;
        let (tokens, heads) = (seen.tokens.len(), config.heads);
        let kv_heads = seen.k.len() * heads * rows / (tokens * q.len()).max(1);
        let mut logits = products(&q, &seen.k, (rows, heads, kv_heads, tokens))?;
        let mut flops = 2 * q.len() as u64 * tokens as u64;
        if let (Some(latent), Some(latents)) = (&latent, &seen.latents) {
            let of_latents = products(latent, latents, (rows, heads, 1, tokens))?;
            logits.iter_mut().zip(of_latents).for_each(|(sum, x)| *sum += x);
            flops += 2 * latent.len() as u64 * tokens as u64;
        }
        let window = config.layers[layer].window.map_or(i64::MAX, |window| window as i64);
        // Rows of logits are sorted by key head, then by query row.
        let group = heads / kv_heads;
        for (at, row) in logits.chunks_exact_mut(tokens).enumerate() {
            let i = at % (rows * group) / group;
            let (logical, position) =
                (self.question.logical_start + i, self.question.position_start + i as i64);
            for (x, &(token, place, factor)) in row.iter_mut().zip(&seen.tokens) {
                let visible = token <= logical && position.saturating_sub(place) < window;
                *x = if visible { *x * config.softmax_scale * factor } else { f32::NEG_INFINITY };
            }
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f32 = row.iter().map(|x| (x - most).exp()).sum();
            for (sum, x) in sums.iter_mut().zip(row.iter()) {
                *sum += (x - most).exp() / total;
            }
        }
        Ok(flops)
    }

    /// Reads the keys of a layer, segment by segment, at their place in this prompt.
    fn seen(&self, layer: usize, latent: bool) -> Result<Seen> {
        let mut seen = Seen { tokens: Vec::new(), k: Vec::new(), latents: latent.then(Vec::new) };
        for segment in self.question.segments.iter().filter(|segment| segment.len > 0) {
            let at = |j: usize| (segment.logical_start + j, segment.position(j as i64), segment.logit_scale);
            seen.tokens.extend((0..segment.len).map(at));
            let (k, v) = self.engine.keys_at_place(self.ropes, layer, segment, 0..segment.len)?;
            seen.k.extend(k);
            if let Some(latents) = &mut seen.latents {
                latents.extend(v);
            }
        }
        Ok(seen)
    }
}
