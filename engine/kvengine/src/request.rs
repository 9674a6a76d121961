//! Requests and their answers.

use std::sync::Arc;
use std::time::Duration;

use kvchunk::{ChunkReport, ContextScaling, Recompute, RecomputeStrategy, ReuseCell};
use kvcore::Retention;
use kvmodel::PromptTokens;
use serde::Serialize;

use crate::logprobs::TokenLogprobs;
use crate::sample::Sampling;
use crate::serve::{BeamSearch, SparseDecode};

/// A prompt, with the settings for its answer.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Request {
    /// The prompt.
    pub prompt: PromptTokens,
    /// The compute mode and position strategy of chunks.
    pub cell: ReuseCell,
    /// Allows the use and keeping of cached KV. If false, everything is recomputed under the same mask.
    pub reuse: bool,
    /// Lets chunks see each other: the prompt is computed as an ordinary one.
    pub full_attention: bool,
    /// The strategy that chooses chunk tokens to recompute, with everything before them in sight.
    pub recompute: Arc<dyn RecomputeStrategy>,
    /// The temperature and scale of the question's attention to chunks.
    pub scaling: ContextScaling,
    /// The tag of the chunk cache's tenant that owns the chunks; `None` for the default tenant.
    pub tenant: Option<String>,
    /// The number of answers that are sampled from the prompt, which is computed once. Each has a seed of its own, counted up from
    /// [`Sampling::seed`]. [`Engine::generate`](crate::Engine::generate) gives the first. A [given](Self::forced) answer is one.
    pub samples: usize,
    /// Looks for the likeliest answers as a whole, of which [`samples`](Self::samples) are given, the best first, when all have ended.
    /// `None` chooses token by token.
    pub beams: Option<BeamSearch>,
    /// The order among requests that wait: larger numbers first, then in the order of their arrival. Where memory is short, the last
    /// in this order gives way.
    pub priority: i32,
    /// The time after which the request ends with [`Error::TimeOut`](crate::Error::TimeOut).
    pub time_limit: Option<Duration>,
    /// The worth of the prompt's blocks when no request holds them, and the time for which it lasts, where
    /// [`EngineConfig::cache_policy`](crate::EngineConfig::cache_policy) goes by priority. Of a chunked prompt, the question's.
    pub retention: Option<Retention>,
    /// The largest number of tokens of the answer.
    pub max_new_tokens: usize,
    /// The settings of sampling.
    pub sampling: Sampling,
    /// The most tokens that are guessed ahead of the answer in a step, because they followed the last ones before, in the prompt or the
    /// answer. The answer is the same; one that quotes its documents takes fewer steps. 0 guesses none.
    pub lookup: usize,
    /// Lets tokens of the answer attend to a part of a long context, which is faster and approximate. `None` attends to everything.
    /// A step with [guesses](Self::lookup) attends to everything, too.
    pub sparse: Option<SparseDecode>,
    /// Tokens that are taken as the answer, whatever the model would choose (teacher forcing). The answer ends after them; the
    /// logits of the token behind them are kept, too, if there is room for it.
    pub forced: Option<Arc<[u32]>>,
    /// Goes on where the model would end its answer, for measurements of answers of a given length.
    pub ignore_end: bool,
    /// Added to the logits of single tokens before a token is chosen. Negative infinity excludes a token.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Gives the log-probability of each token of the answer, with those of as many likeliest ones.
    pub logprobs: Option<usize>,
    /// Keeps the logits of every answer token in [`Generation::logits`].
    pub keep_logits: bool,
}

impl Request {
    /// Creates a greedy request for up to 64 tokens in the default cell, whose reuse is exact for its mask. That is not to say that it
    /// answers as full attention does: [`reusing`](Self::reusing) takes a way that was measured, such as [`kvchunk::Reuse`]'s
    /// default.
    pub fn new(prompt: PromptTokens) -> Self {
        Self {
            prompt,
            cell: ReuseCell::default(),
            reuse: true,
            full_attention: false,
            recompute: Arc::new(Recompute::None),
            scaling: ContextScaling::default(),
            tenant: None,
            samples: 1,
            beams: None,
            priority: 0,
            time_limit: None,
            retention: None,
            max_new_tokens: 64,
            sampling: Sampling::default(),
            lookup: 0,
            sparse: None,
            forced: None,
            ignore_end: false,
            logit_bias: Arc::default(),
            logprobs: None,
            keep_logits: false,
        }
    }
}

impl Request {
    /// Returns the number of sequences that the request has when it decodes.
    pub(crate) fn width(&self) -> usize {
        self.beams.map_or(self.samples, |beams| beams.width)
    }
}

/// The reason why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model gave an end token.
    Stop,
    /// The observer saw that the answer is complete: its text has a stop string.
    #[serde(rename = "stop-string")]
    StopString,
    /// The answer reached the token limit, the model's last position or the end of a static cache.
    Length,
}

/// An answer, with its costs.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The new tokens, without the end token, and with those of a stop string.
    pub tokens: Vec<u32>,
    /// The reason why the answer ended.
    pub finish: FinishReason,
    /// The number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// The number of prompt tokens whose KV was cached.
    pub cached_tokens: usize,
    /// The number of chunk tokens that the request's recompute strategy recomputed.
    pub recomputed_tokens: usize,
    /// The number of tokens that were guessed ahead of the answer; see [`Request::lookup`].
    pub drafted_tokens: usize,
    /// The number of guesses that were right.
    pub accepted_tokens: usize,
    /// The counted floating-point operations of the prefill; see [`Forward::flops`](kvmodel::Forward::flops).
    pub prefill_flops: u64,
    /// The time to first token (TTFT), from the start of the request.
    pub ttft: Duration,
    /// The time from the start of the request to its end.
    pub total: Duration,
    /// One report per chunk, in the prompt's order; empty for an ordinary prompt.
    pub chunks: Vec<ChunkReport>,
    /// The score of an answer that a [beam search](Request::beams) found.
    pub score: Option<f32>,
    /// The log-probabilities of the tokens; empty unless [`Request::logprobs`] asks for them.
    pub logprobs: Vec<TokenLogprobs>,
    /// The logits that each answer token was chosen from, including the end token; empty unless
    /// [`Request::keep_logits`] is set.
    pub logits: Vec<Vec<f32>>,
}
