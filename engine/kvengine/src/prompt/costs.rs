//! The costs of one request's prefill, and the parts of its prompt that its first lookups found.

use kvchunk::{ChunkReport, MissReason};

/// The costs of one request's prefill.
#[derive(Debug, Default, Clone)]
pub(crate) struct PromptCosts {
    /// The number of tokens whose KV was cached; of a chunked prompt, only those of the system prompt and the chunks.
    pub(crate) cached_tokens: usize,
    /// The number of further tokens whose KV was cached: those of a chunked prompt's question.
    pub(crate) cached_question: usize,
    /// The number of chunk tokens that the strategy recomputed.
    pub(crate) recomputed_tokens: usize,
    /// The number of floating-point operations.
    pub(crate) flops: u64,
    /// True once the prompt was looked up for the first time.
    pub(crate) looked_up: bool,
    /// Why the start of the prompt was not found. `None` if all of it was found.
    pub(crate) prefix_missed: Option<MissReason>,
    /// One report per chunk.
    pub(crate) chunks: Vec<ChunkReport>,
    /// True if a lookup of the system prompt and the chunks may find what this request has computed.
    pub(super) own_parts: bool,
    /// True if a lookup of the request's own sequence may find what this request has computed.
    pub(super) own_sequence: bool,
}

impl PromptCosts {
    /// Records what a lookup has found of a chunked prompt's system prompt and chunks. If it may have found what this
    /// request has computed, keeps the counts of the lookup before it.
    pub(super) fn found_parts(&mut self, tokens: usize, mut chunks: Vec<ChunkReport>) {
        if self.own_parts {
            for (chunk, first) in chunks.iter_mut().zip(&self.chunks) {
                (chunk.hit, chunk.missed) = (first.hit, first.missed);
            }
        } else {
            self.cached_tokens = tokens;
        }
        self.chunks = chunks;
    }

    /// Records the number of tokens that a lookup has found of an ordinary prompt or, if `is_question` is true, of a
    /// chunked prompt's question. Changes nothing if the lookup may have found what this request has computed.
    pub(crate) fn found_sequence(&mut self, tokens: usize, is_question: bool) {
        if !self.own_sequence {
            *if is_question { &mut self.cached_question } else { &mut self.cached_tokens } = tokens;
        }
    }
}
