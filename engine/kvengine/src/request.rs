//! Requests, their settings and their answers.

use std::sync::Arc;
use std::time::Duration;

use kvchunk::{
    ChunkReport, ChunkedPrompt, ContextScaling, MissReason, Recompute, RecomputeStrategy, ReuseCell,
};
use kvcore::Retention;
use serde::Serialize;

use crate::constraint::AnswerConstraint;
use crate::error::{Error, Result};

/// A prompt as token IDs, ordinary or chunked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptTokens {
    /// An ordinary prompt, computed under full attention.
    Plain(Vec<u32>),
    /// A chunked prompt, whose chunks do not attend to each other.
    Chunked(ChunkedPrompt),
}

impl PromptTokens {
    /// Returns the number of tokens in the prompt.
    pub fn len(&self) -> usize {
        match self {
            Self::Plain(tokens) => tokens.len(),
            Self::Chunked(prompt) => prompt.total_tokens(),
        }
    }

    /// Returns the prompt with decoys: documents that its chunks may see while they are computed; see
    /// [`ChunkedPrompt::with_decoys`]. An ordinary prompt is returned unchanged.
    ///
    /// # Errors
    /// Returns the errors of [`ChunkedPrompt::with_decoys`].
    pub fn with_decoys(self, decoys: Arc<[Vec<u32>]>) -> Result<Self> {
        Ok(match self {
            Self::Plain(tokens) => Self::Plain(tokens),
            Self::Chunked(prompt) => Self::Chunked(prompt.with_decoys(decoys)?),
        })
    }

    /// Returns true if the prompt has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns an iterator over all tokens, in the prompt's order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let (first, chunked) = match self {
            Self::Plain(tokens) => (tokens.as_slice(), None),
            Self::Chunked(prompt) => (prompt.system(), Some(prompt)),
        };
        let rest =
            chunked.into_iter().flat_map(|prompt| prompt.chunks().iter().flatten().chain(prompt.question()));
        first.iter().chain(rest).copied()
    }
}

/// A prompt with the settings for its answer. Clones share the prompt.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Request {
    /// The prompt.
    pub prompt: Arc<PromptTokens>,
    /// The compute mode and position strategy for chunks.
    pub cell: ReuseCell,
    /// True if the request may use cached KV and leave KV in the caches. If false, everything is computed
    /// from scratch under the same mask.
    pub reuse: bool,
    /// True if chunks attend to each other. If true, a chunked prompt is computed like an ordinary prompt.
    pub full_attention: bool,
    /// The strategy that chooses chunk tokens to recompute. Recomputed tokens see everything before them.
    pub recompute: Arc<dyn RecomputeStrategy>,
    /// The temperature and scale for the question's attention to chunks.
    pub scaling: ContextScaling,
    /// The tag of the chunk cache tenant that owns the chunks; `None` for the default tenant.
    pub tenant: Option<String>,
    /// A salt that divides what the tenant has in the caches: only requests of the tenant with the same salt find
    /// what this request leaves there. A client may choose it. `None` for what all of the tenant's requests share.
    pub cache_salt: Option<Arc<[u8]>>,
    /// The number of answers to sample. The prompt is computed once. The answer with index `i` uses the seed
    /// [`Sampling::seed`] plus `i`. [`Engine::generate`](crate::Engine::generate) returns only one answer. A
    /// request with a [forced](Self::forced) answer has one sample.
    pub samples: usize,
    /// The settings of a beam search for the most likely whole answers. The search returns the best
    /// [`samples`](Self::samples) answers, best first. If `None`, answers are chosen token by token.
    pub beams: Option<BeamSearch>,
    /// The request's priority. Requests with a higher priority are served first; requests with the same
    /// priority are served in order of arrival. If there are too few blocks, the last request in this order
    /// is preempted.
    pub priority: i32,
    /// The time after which the request ends with [`Error::TimeOut`].
    pub time_limit: Option<Duration>,
    /// The eviction priority of the prompt's cached blocks while no request holds them, and the time for
    /// which this priority lasts. This setting only has an effect if
    /// [`EngineConfig::cache_policy`](crate::EngineConfig::cache_policy) evicts by priority. For a chunked
    /// prompt, it applies to the blocks of the question.
    pub retention: Option<Retention>,
    /// The maximum number of tokens in the answer.
    pub max_new_tokens: usize,
    /// The sampling settings.
    pub sampling: Sampling,
    /// The maximum number of tokens to guess in each step (prompt lookup decoding). The guesses are the
    /// tokens that followed an earlier occurrence of the last few tokens, in the prompt or the answer. The
    /// answer does not change, but takes fewer steps if it quotes its documents. 0 turns guessing off.
    pub lookup: usize,
    /// The settings for page-sparse decoding: answer tokens attend to only part of a long context, which is
    /// faster but approximate. If `None`, answer tokens attend to everything. Tokens of a step with
    /// [guesses](Self::lookup) also attend to everything.
    pub sparse: Option<SparseDecode>,
    /// The answer to compute, regardless of what the model would choose (teacher forcing). The answer ends
    /// after these tokens. If the answer is shorter than [`max_new_tokens`](Self::max_new_tokens), the logits
    /// after its last token are computed as well.
    pub forced: Option<Arc<[u32]>>,
    /// The constraint that every answer obeys: only tokens that may follow are chosen. Sampling filters see these tokens
    /// alone; [`logprobs`](Self::logprobs) and [`keep_logits`](Self::keep_logits) report the model's own numbers. With a
    /// constraint, there are no [guesses](Self::lookup). A constraint cannot be combined with beams, a forced answer or
    /// [`ignore_end`](Self::ignore_end).
    pub constraint: Option<Arc<dyn AnswerConstraint>>,
    /// True to ignore end tokens, to measure answers of a fixed length.
    pub ignore_end: bool,
    /// Biases to add to the logits of individual tokens, as `(token, bias)`, before a token is chosen.
    /// Negative infinity excludes a token. At least one token must not be excluded.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// The number of most likely tokens to report at each position, with their log-probabilities, in addition
    /// to the log-probability of the answer's token. `None` reports no log-probabilities.
    pub logprobs: Option<usize>,
    /// True to keep the logits of every answer token in [`Generation::logits`].
    pub keep_logits: bool,
}

impl Request {
    /// Creates a greedy request for up to 64 tokens, with the default compute mode and position strategy. Up
    /// to rounding, the answer is the same as without reuse under the request's attention mask, but it may
    /// differ from the answer under full attention. [`reusing`](Self::reusing) applies measured settings,
    /// such as the default of [`kvchunk::Reuse`].
    pub fn new(prompt: impl Into<Arc<PromptTokens>>) -> Self {
        Self {
            prompt: prompt.into(),
            cell: ReuseCell::default(),
            reuse: true,
            full_attention: false,
            recompute: Arc::new(Recompute::None),
            scaling: ContextScaling::default(),
            tenant: None,
            cache_salt: None,
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
            constraint: None,
            ignore_end: false,
            logit_bias: Arc::default(),
            logprobs: None,
            keep_logits: false,
        }
    }

    /// Returns the prompt if its chunks are computed separately, or `None` if it is computed like an ordinary
    /// prompt.
    pub(crate) fn chunked(&self) -> Option<&ChunkedPrompt> {
        match &*self.prompt {
            PromptTokens::Chunked(prompt) if !self.full_attention => Some(prompt),
            _ => None,
        }
    }

    /// Returns the tag of the tenant and the salt that separate the request's cached contents from others.
    pub(crate) fn owner(&self) -> (Option<&str>, Option<&[u8]>) {
        (self.tenant.as_deref(), self.cache_salt.as_deref())
    }

    /// Returns the number of sequences that the request decodes.
    pub(crate) fn width(&self) -> usize {
        self.beams.map_or(self.samples, |beams| beams.width)
    }
}

/// The sampling settings. By default, the most likely token is chosen.
///
/// ```
/// use kvengine::Sampling;
/// let careful = Sampling { temperature: 0.7, top_p: 0.9, ..Sampling::default() };
/// careful.check()?;
/// assert!(Sampling { top_p: -0.5, ..careful }.check().is_err());
/// # Ok::<(), kvengine::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The temperature. 0 chooses the most likely token. Above 0, the logits are divided by the temperature
    /// and a token is drawn.
    pub temperature: f32,
    /// The number of most likely tokens to keep. Tokens that are exactly as likely as the least likely kept
    /// token are kept too. 0 keeps all tokens.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens whose total probability reaches this fraction. Ties are
    /// broken in favour of the lowest IDs. 1 keeps all tokens.
    pub top_p: f32,
    /// The minimum probability of a kept token, as a fraction of the most likely token's probability. 0 keeps
    /// all tokens.
    pub min_p: f32,
    /// The repetition penalty for tokens that occur in the prompt or the answer: positive logits are divided
    /// by it, and negative logits are multiplied by it. 1 changes nothing.
    pub repetition_penalty: f32,
    /// The value to subtract from the logits of all tokens that occur in the answer. 0 changes nothing;
    /// negative values make these tokens more likely. (As in `OpenAI`'s API.)
    pub presence_penalty: f32,
    /// The value to subtract from a token's logit for each occurrence of the token in the answer. 0 changes
    /// nothing. (As in `OpenAI`'s API.)
    pub frequency_penalty: f32,
    /// Random seed.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}

impl Sampling {
    /// The default settings, which choose the most likely token without penalties.
    pub(crate) const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        seed: 0,
    };

    /// Checks every setting.
    ///
    /// # Errors
    /// Returns [`Error::Sampling`] for the first setting that is out of range.
    pub fn check(&self) -> Result<()> {
        let share = |x: f32| (0.0..=1.0).contains(&x);
        let warm = self.temperature.is_finite() && self.temperature >= 0.0;
        let positive = self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0;
        for (setting, value, fits, needed) in [
            ("temperature", self.temperature, warm, "a finite number, 0 or more"),
            ("top_p", self.top_p, share(self.top_p) && self.top_p > 0.0, "above 0 and at most 1"),
            ("min_p", self.min_p, share(self.min_p), "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty, positive, "above 0"),
            ("presence_penalty", self.presence_penalty, self.presence_penalty.is_finite(), "a finite number"),
            (
                "frequency_penalty",
                self.frequency_penalty,
                self.frequency_penalty.is_finite(),
                "a finite number",
            ),
        ] {
            if !fits {
                return Err(Error::Sampling { setting, value, needed });
            }
        }
        Ok(())
    }
}

/// The settings of a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamSearch {
    /// The number of beams.
    pub width: usize,
    /// The exponent of the length penalty. An answer's log-probability is divided by its length raised to
    /// this power. Values above 0 favour longer answers.
    pub length_penalty: f32,
}

impl Default for BeamSearch {
    /// Returns settings for four beams and a length penalty of 1: answers are compared by their average
    /// log-probability per token.
    fn default() -> Self {
        Self { width: 4, length_penalty: 1.0 }
    }
}

impl BeamSearch {
    /// Checks that the other settings of a request are compatible with a beam search.
    ///
    /// # Errors
    /// Returns [`Error::Beams`] if there are no beams or fewer beams than answers, if sampling settings are
    /// given, or if logits or log-probabilities are requested.
    pub(crate) fn check(&self, request: &Request) -> Result<()> {
        let plain = Sampling { seed: request.sampling.seed, ..Sampling::default() } == request.sampling;
        let reason = match request {
            _ if self.width == 0 => "the width must be at least 1",
            _ if !self.length_penalty.is_finite() => "the length penalty must be a finite number",
            _ if request.samples > self.width => "there are fewer beams than requested answers",
            _ if !plain || !request.logit_bias.is_empty() => {
                "beams use the most likely tokens; leave temperature, top-k, top-p, min-p, penalties and biases at their \
                 defaults"
            }
            _ if request.logprobs.is_some() || request.keep_logits => {
                "beam search cannot keep logits or log-probabilities of tokens"
            }
            _ => return Ok(()),
        };
        Err(Error::Beams(reason))
    }
}

/// The settings for decode steps that attend to only part of a long context.
///
/// The answer is approximate; `cargo bench -p kvlab --bench sparse_decode` measures its error. Prompts still
/// attend to everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseDecode {
    /// The number of blocks that a token attends to in each layer, at least 4. If the context has no more
    /// blocks than this, the token attends to all of them.
    pub pages: usize,
    /// The number of initial layers that attend to everything, because their attention is spread out.
    pub dense_layers: usize,
}

impl SparseDecode {
    /// The number of blocks at the end of a sequence that are always attended to: the one being filled, and
    /// the one before it.
    pub(crate) const LAST: usize = 2;

    /// Returns settings for attention to `pages` blocks in all layers but the first two.
    pub fn new(pages: usize) -> Self {
        Self { pages, dense_layers: 2 }
    }

    /// Checks that the settings suit a model. `widest_window` must be set if all of the model's layers have a
    /// window, and `None` otherwise.
    pub(crate) fn check(self, widest_window: Option<usize>) -> Result<()> {
        // The settings must leave room for the first block, the last blocks, and at least one block to
        // choose.
        if self.pages < 1 + Self::LAST + 1 {
            return Err(Error::Pages(
                "use at least 4 blocks: the first block, the last two blocks and one chosen block",
            ));
        }
        match widest_window {
            Some(_) => Err(Error::Pages(
                "all layers of this model have a sliding window, so they see few tokens already",
            )),
            None => Ok(()),
        }
    }
}

/// The reason why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model produced an end token, or all tokens of a [forced](Request::forced) answer were computed.
    Stop,
    /// The answer was declared complete, for example because its text contains a stop string.
    #[serde(rename = "stop-string")]
    StopString,
    /// The answer reached the token limit, the model's last position, or the end of a static cache, or the pool
    /// has no room for another token.
    Length,
}

/// An answer, with its costs.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The new tokens, without the end token. Tokens of a stop string are included.
    pub tokens: Vec<u32>,
    /// The reason why the answer ended.
    pub finish: FinishReason,
    /// The number of tokens in the prompt.
    pub prompt_tokens: usize,
    /// The number of prompt tokens whose KV was cached when the request began. What the request itself had computed
    /// before a preemption does not count.
    pub cached_tokens: usize,
    /// The number of these tokens that are in the question of a chunked prompt.
    pub cached_question: usize,
    /// The number of chunk tokens that the request's recompute strategy recomputed.
    pub recomputed_tokens: usize,
    /// The number of guessed tokens; see [`Request::lookup`].
    pub drafted_tokens: usize,
    /// The number of correct guesses.
    pub accepted_tokens: usize,
    /// The number of floating-point operations in the prefill; see
    /// [`Forward::flops`](kvmodel::Forward::flops).
    pub prefill_flops: u64,
    /// The time to first token (TTFT), measured from the submission of the request.
    pub ttft: Duration,
    /// The time from the submission of the request to its admission: the time that it waited for other requests and
    /// for a disk.
    pub queued: Duration,
    /// The time from the submission of the request to the end of the answer.
    pub total: Duration,
    /// The reason why the start of the prompt was not found: the first missing block of an ordinary prompt, or of the
    /// system prompt of a chunked one. `None` if all blocks were found, or nothing was looked up.
    pub prefix_missed: Option<MissReason>,
    /// One report per chunk, in the prompt's order; empty for an ordinary prompt.
    pub chunks: Vec<ChunkReport>,
    /// The score of the answer, if it was found by a [beam search](Request::beams).
    pub score: Option<f32>,
    /// The log-probabilities of the tokens; empty unless [`Request::logprobs`] is set.
    pub logprobs: Vec<TokenLogprobs>,
    /// The logits that each answer token, including the end token, was chosen from; empty unless
    /// [`Request::keep_logits`] is set.
    pub logits: Vec<Vec<f32>>,
}

/// The log-probabilities of an answer token and of the likeliest tokens at its position, according to the
/// model itself: before temperature, penalties and filters are applied.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The likeliest tokens with their log-probabilities, likeliest first.
    pub top: Vec<(u32, f32)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_settings_that_leave_no_choice_are_refused() {
        assert!(matches!(SparseDecode::new(3).check(None), Err(Error::Pages(_))));
        assert!(matches!(SparseDecode::new(4).check(Some(24)), Err(Error::Pages(_))));
        assert!(SparseDecode::new(4).check(None).is_ok());
    }
}
