//! Recomputation by the question: how much the question attends to each reused token.
//!
//! The question is computed once over the keys as they are stored. In each layer that counts its queries meet the keys at their
//! place, and the weights of the softmax are summed for each token. (`ProphetKV`, 2026.)

use kvchunk::{AssembledPrompt, AttentionCheck, TokenScores};
use kvcore::{LayerRopes, Logits, SequenceInput};
use kvmodel::dense::products;
use kvmodel::{FreshQueries, Observer, PassMemory};

use crate::Engine;
use crate::error::Result;

// Decision: docs/decisions/chunks.md#the-question-chooses-by-its-own-attention
/// A question that is asked once, to see what it attends to.
pub(crate) struct Inquiry<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) ropes: &'a LayerRopes,
    /// The question with its context: the system prompt, the chunks, and its own sequence last.
    pub(crate) question: &'a SequenceInput,
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

impl Inquiry<'_> {
    /// Returns the attention to each chunk token, and the operations that it took.
    pub(crate) fn scores(
        &self,
        assembled: &AssembledPrompt,
        check: AttentionCheck,
        observer: &mut dyn Observer,
    ) -> Result<(TokenScores, u64)> {
        let (model, device) = (&self.engine.model, self.engine.device());
        let (layers, mut memory) = (model.config().num_layers(), PassMemory::default());
        let own = self.question.segments.len().saturating_sub(1);
        let system = self.question.segments.first().map_or(0, |segment| segment.len);
        let context: usize = self.question.segments[..own].iter().map(|segment| segment.len).sum();
        let mut sums = vec![0.0f32; context];
        // Nothing follows the last layer's queries: no row of it goes on to the head.
        let batch = [SequenceInput { logits: Logits::None, ..self.question.clone() }];
        let mut pass = Some(model.begin(&device, self.ropes, &batch, &mut memory)?);
        let mut flops = 0;
        for layer in check.first_layer(layers)..layers {
            let Some(mut running) = pass.take() else { break };
            running.run_to(layer, observer)?;
            let queries = running.queries()?;
            // The layer's own keys are stored when it has run.
            if layer + 1 < layers {
                running.run_to(layer + 1, observer)?;
                pass = Some(running);
            } else {
                flops += running.end(observer)?.flops;
            }
            flops += self
                .engine
                .profiler
                .span("attention of the question", || self.add(layer, &queries, &mut sums))?;
        }
        Ok((assembled.by_chunk(&sums[system..]), flops))
    }

    /// Adds the weights of one layer. Returns the operations.
    fn add(&self, layer: usize, queries: &FreshQueries, sums: &mut [f32]) -> Result<u64> {
        let (config, rows) = (self.engine.model.config(), self.question.tokens.len());
        let seen = self.seen(layer, queries.latent.is_some())?;
        let (tokens, heads) = (seen.tokens.len(), config.heads);
        let kv_heads = seen.k.len() * heads * rows / (tokens * queries.q.len()).max(1);
        let mut logits = products(&queries.q, &seen.k, (rows, heads, kv_heads, tokens))?;
        let mut flops = 2 * queries.q.len() as u64 * tokens as u64;
        if let (Some(latent), Some(latents)) = (&queries.latent, &seen.latents) {
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
