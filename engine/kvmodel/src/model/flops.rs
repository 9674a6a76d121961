//! Counts the floating-point operations of a pass, from the config.

use super::Model;

/// The number of operations in a multiplication plus an addition.
const MULTIPLY_ADD: u64 = 2;

impl Model {
    /// Counts the operations of the projections before attention, which project `rows` rows to keys and
    /// values, and `asking` of these rows to queries.
    pub(super) fn projection_flops(&self, rows: usize, asking: usize) -> u64 {
        let c = &self.config;
        let (key_value, query) = match c.latent {
            Some(l) => {
                let full = c.heads * l.qk_head_dim();
                let query = match l.q_lora_rank {
                    Some(rank) => c.hidden_size * rank + rank * full,
                    None => c.hidden_size * full,
                };
                let absorbed = c.heads * l.qk_nope_head_dim * l.kv_lora_rank;
                (c.hidden_size * (l.kv_lora_rank + l.qk_rope_head_dim), query + absorbed)
            }
            None => (2 * c.hidden_size * c.kv_heads * c.head_dim, c.hidden_size * c.heads * c.head_dim),
        };
        MULTIPLY_ADD * (rows as u64 * key_value as u64 + asking as u64 * query as u64)
    }

    /// Counts the operations of attention over `visible` pairs of a row and a token visible to it.
    pub(super) fn attention_flops(&self, visible: u64) -> u64 {
        let c = &self.config;
        let width = match c.latent {
            Some(l) => c.heads * (2 * l.kv_lora_rank + l.qk_rope_head_dim),
            None => 2 * c.heads * c.head_dim,
        };
        MULTIPLY_ADD * visible * width as u64
    }

    /// Counts the operations of `layer` after attention, for `rows` rows: the output projection and the
    /// feed-forward layer.
    pub(super) fn finish_flops(&self, layer: usize, rows: usize) -> u64 {
        let c = &self.config;
        let output = match c.latent {
            Some(l) => c.heads * (l.kv_lora_rank * l.v_head_dim) + c.heads * l.v_head_dim * c.hidden_size,
            None => c.heads * c.head_dim * c.hidden_size,
        };
        let feed_forward = 3 * c.hidden_size * c.active_width(layer);
        MULTIPLY_ADD * rows as u64 * (output + feed_forward) as u64
    }

    /// Counts the operations of a pass that computes logits for all of its `rows` rows, which see `visible`
    /// tokens in total.
    pub(super) fn step_flops(&self, rows: usize, visible: u64) -> u64 {
        let attention = self.projection_flops(rows, rows) + self.attention_flops(visible);
        let layers = (0..self.config.num_layers()).map(|layer| attention + self.finish_flops(layer, rows));
        layers.sum::<u64>() + self.head_flops(rows)
    }

    /// Counts the operations of the output head for `rows` rows.
    pub(super) fn head_flops(&self, rows: usize) -> u64 {
        MULTIPLY_ADD * rows as u64 * (self.config.hidden_size * self.config.vocab_size) as u64
    }
}
