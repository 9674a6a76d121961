//! What a request asks for and what comes back.

use std::sync::Arc;
use std::time::Duration;

use kvchunk::{ChunkReport, ContextScaling, Recompute, RecomputeStrategy, ReuseCell};
use serde::Serialize;

use crate::sample::Sampling;
use crate::text::PromptTokens;

/// A prompt and how to answer it.
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt.
    pub prompt: PromptTokens,
    /// Position strategy and computing mode of chunks.
    pub cell: ReuseCell,
    /// Whether cached KV is used and kept. Without it the same mask is computed anew.
    pub reuse: bool,
    /// Whether chunks see each other after all: the prompt is computed as an ordinary one.
    pub full_attention: bool,
    /// Which chunk tokens are computed anew, with everything before them in sight.
    pub recompute: Arc<dyn RecomputeStrategy>,
    /// How sharply the question looks at chunks.
    pub scaling: ContextScaling,
    /// Tag of the chunk cache's tenant whose chunks they are; `None` for the one that is always there.
    pub tenant: Option<String>,
    /// Most tokens of the answer.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Whether the logits of every answer token are returned.
    pub keep_logits: bool,
}

impl Request {
    /// A greedy request for up to 64 tokens in the default, exact cell.
    pub fn new(prompt: PromptTokens) -> Self {
        Self {
            prompt,
            cell: ReuseCell::default(),
            reuse: true,
            full_attention: false,
            recompute: Arc::new(Recompute::None),
            scaling: ContextScaling::default(),
            tenant: None,
            max_new_tokens: 64,
            sampling: Sampling::default(),
            keep_logits: false,
        }
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model said so.
    Stop,
    /// The token limit, the model's last position, or the end of a static cache.
    Length,
}

/// An answer and what it took.
#[derive(Debug, Clone)]
pub struct Generation {
    /// New tokens, without the one that ended the answer.
    pub tokens: Vec<u32>,
    /// Why the answer ended.
    pub finish: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them whose KV was cached.
    pub cached_tokens: usize,
    /// Chunk tokens that were computed anew by the request's recompute strategy.
    pub recomputed_tokens: usize,
    /// Floating-point operations of the prefill, counted: see [`Forward::flops`](crate::Forward::flops).
    pub prefill_flops: u64,
    /// From the start of the request to its first token.
    pub ttft: Duration,
    /// From the start of the request to its end.
    pub total: Duration,
    /// What happened to each chunk, in the prompt's order; empty for an ordinary prompt.
    pub chunks: Vec<ChunkReport>,
    /// Logits that each answer token was chosen from (the ending one included), if asked for.
    pub logits: Vec<Vec<f32>>,
}
