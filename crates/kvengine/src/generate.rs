//! Answering a request: prefill, followed by decode, one token after another.

use std::sync::Arc;
use std::time::Instant;

use kvchunk::{ChunkReport, TenantKeys};
use kvcore::{LayerRopes, Logits, MergeGroup, Segment, SequenceId, SequenceInput, SequenceStart};
use kvmodel::{DecodeMemory, Forward, LogitRows, Observer, PromptTokens};

use crate::error::{Error, Result};
use crate::sample::Sampler;
use crate::{Engine, FinishReason, Generation, Request};

/// A request that is being answered.
pub(crate) struct Asked<'a> {
    pub(crate) request: &'a Request,
    pub(crate) started: Instant,
    /// The rotary embeddings of the request's regime.
    pub(crate) ropes: LayerRopes,
}

/// The context of a question and its answer: the segments that their tokens see besides their own sequence.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) segments: Arc<[Segment]>,
    pub(crate) groups: Arc<[MergeGroup]>,
}

impl Context {
    /// Returns the segments of the context, followed by the segment of an own sequence.
    pub(crate) fn with_own(&self, own: Segment) -> Arc<[Segment]> {
        self.segments.iter().cloned().chain([own]).collect()
    }
}

impl Default for Context {
    fn default() -> Self {
        Self { segments: Arc::default(), groups: [MergeGroup::default()].into() }
    }
}

/// A request after its prefill.
#[derive(Default)]
pub(crate) struct Prefilled {
    pub(crate) context: Context,
    /// The logits of the prompt's last token.
    pub(crate) logits: Vec<f32>,
    /// The logical index and the position of the next token.
    pub(crate) next: SequenceStart,
    pub(crate) cached_tokens: usize,
    pub(crate) recomputed_tokens: usize,
    pub(crate) flops: u64,
    pub(crate) chunks: Vec<ChunkReport>,
}

impl Engine {
    /// Answers a request. Calls `observer` for the layers of the prefill and for each token of the answer.
    /// The observer may stop the request at each call, and end the answer after each token, as a
    /// [`TextStream`](kvmodel::TextStream) does at a stop string.
    ///
    /// # Errors
    /// After each of these errors no block stays held.
    ///
    /// - Returns [`Error::Cancelled`] if the observer stops the request.
    /// - Returns [`Error::Sampling`] for a setting of sampling outside its range.
    /// - Returns [`Error::EmptyPrompt`], [`kvmodel::Error::TokenOutOfVocabulary`] or [`kvchunk::Error::TooLong`] for a
    ///   prompt that cannot be computed.
    /// - Returns [`kvcore::Error::OutOfBlocks`] if the pool is too small for the prompt, and
    ///   [`kvcore::Error::TooLarge`] if a static cache is too short for it.
    /// - Returns [`Error::Asleep`] while the pool of sequences [sleeps](Self::sleep).
    pub fn generate(&mut self, request: &Request, observer: &mut dyn Observer) -> Result<Generation> {
        let started = Instant::now();
        self.check_awake()?;
        request.sampling.check()?;
        self.check_vocabulary(request)?;
        match &request.prompt {
            PromptTokens::Chunked(prompt) if !request.full_attention => {
                self.answer_chunked(request, started, prompt, observer)
            }
            prompt => {
                let tokens = match prompt {
                    PromptTokens::Plain(tokens) => tokens.clone(),
                    PromptTokens::Chunked(prompt) => prompt.flatten(),
                };
                self.check_length(&tokens)?;
                let ropes = self.ropes(request, tokens.len())?;
                let keys = self.keys(request, &ropes)?;
                let (own, cached) = if request.reuse {
                    self.caches.sequences_mut().create_with_prefix((*keys.root()).into(), &tokens)?
                } else {
                    (self.caches.sequences_mut().create(SequenceStart::default())?, 0)
                };
                let result = self.plain(&Asked { request, started, ropes }, &tokens, own, cached, observer);
                self.caches.sequences_mut().free(own)?;
                result
            }
        }
    }

    /// Returns the tenant of a request, with the root of its keys. Tenants share neither chunks nor prefixes.
    pub(crate) fn keys(&self, request: &Request, ropes: &LayerRopes) -> Result<TenantKeys> {
        let root = self.root(ropes);
        match (&request.tenant, self.caches.chunks()) {
            (None, _) => Ok(TenantKeys::shared(root)),
            (Some(tag), Some(cache)) => Ok(cache.tenant_keys(Some(tag), &root)?),
            (Some(tag), None) => Err(kvchunk::Error::UnknownTenant(tag.clone()).into()),
        }
    }

    // Decision: docs/decisions/models.md#a-request-has-one-regime-of-rope
    /// Returns the rotary embeddings in the regime of the longest position that a request may reach. The
    /// request's prompt ends before position `end`. The last token of an answer is never fed back.
    pub(crate) fn ropes(&self, request: &Request, end: usize) -> Result<LayerRopes> {
        let longest = end.saturating_add(request.max_new_tokens.saturating_sub(1));
        Ok(self.model.ropes(longest.min(self.model.config().max_positions))?)
    }

    /// Checks the token ids first, since a request that cannot be computed must not evict anything.
    pub(crate) fn check_vocabulary(&self, request: &Request) -> Result<()> {
        let vocabulary = self.model.config().vocab_size;
        let known = |token: u32| (token as usize) < vocabulary;
        let forced =
            request.forced.iter().flat_map(|forced| forced.iter().copied()).find(|&token| !known(token));
        let stray = forced.or_else(|| match &request.prompt {
            PromptTokens::Plain(tokens) => tokens.iter().copied().find(|&token| !known(token)),
            PromptTokens::Chunked(prompt) => prompt.flatten().into_iter().find(|&token| !known(token)),
        });
        stray.map_or(Ok(()), |token| Err(kvmodel::Error::TokenOutOfVocabulary { token, vocabulary }.into()))
    }

    pub(crate) fn check_length(&self, tokens: &[u32]) -> Result<()> {
        let limit = self.model.config().max_positions;
        match tokens.len() {
            0 => Err(Error::EmptyPrompt),
            n if n > limit => Err(kvchunk::Error::TooLong { largest: n as i64 - 1, limit }.into()),
            _ => Ok(()),
        }
    }

    fn plain(
        &mut self,
        asked: &Asked,
        tokens: &[u32],
        own: SequenceId,
        cached: usize,
        observer: &mut dyn Observer,
    ) -> Result<Generation> {
        let input = self.next_input(own, &tokens[cached..], &Context::default())?;
        let next = end_of(&input);
        let pass = self.model.forward(&self.device(), &asked.ropes, &[input], observer)?;
        self.caches.sequences_mut().commit(own, &tokens[cached..])?;
        let flops = pass.flops;
        let logits = last_row(pass)?;
        let prefilled = Prefilled { logits, next, cached_tokens: cached, flops, ..Prefilled::default() };
        self.decode(asked, tokens.len(), own, prefilled, observer)
    }

    /// Returns the input for `tokens` at the end of the request's own sequence. The tokens also see
    /// `context`. The last token gets logits.
    pub(crate) fn next_input(
        &mut self,
        own: SequenceId,
        tokens: &[u32],
        context: &Context,
    ) -> Result<SequenceInput> {
        let cache = self.caches.sequences_mut();
        let before = cache.len(own)?;
        let slots = cache.grow(own, tokens.len())?;
        let segment = cache.segment(own)?;
        let (logical, position) = (segment.logical_start + before, segment.stored_start + before as i64);
        let segments = context.with_own(segment);
        let input = SequenceInput::new(tokens.to_vec(), logical, position, slots, segments);
        Ok(SequenceInput { groups: Arc::clone(&context.groups), ..input.with_logits(Logits::Last) })
    }

    /// Makes `input` the input of the next token, in its memory. The segments before the last stay.
    pub(crate) fn advance(&mut self, own: SequenceId, token: u32, input: &mut SequenceInput) -> Result<()> {
        let next = end_of(input);
        (input.logical_start, input.position_start) = (next.logical, next.position);
        input.tokens.clear();
        input.tokens.push(token);
        let cache = self.caches.sequences_mut();
        cache.grow_into(own, 1, &mut input.slots)?;
        // No pass holds the list between two tokens, so that it is changed in place.
        if let Some(last) = Arc::make_mut(&mut input.segments).last_mut() {
            *last = cache.segment(own)?;
        }
        Ok(())
    }

    /// Returns the number of positions that a request may have.
    pub(crate) fn longest(&self) -> usize {
        self.model.config().max_positions.min(self.caches.longest())
    }

    /// Answers a request after its prefill.
    pub(crate) fn decode(
        &mut self,
        asked: &Asked,
        prompt_tokens: usize,
        own: SequenceId,
        prefilled: Prefilled,
        observer: &mut dyn Observer,
    ) -> Result<Generation> {
        // Kept from token to token and from request to request: a step allocates nothing of its own, and finds its graph.
        let mut memory = std::mem::take(&mut self.decode_memory);
        let result = self.decode_in(&mut memory, asked, prompt_tokens, own, prefilled, observer);
        self.decode_memory = memory;
        result
    }

    fn decode_in(
        &mut self,
        memory: &mut DecodeMemory,
        asked: &Asked,
        prompt_tokens: usize,
        own: SequenceId,
        prefilled: Prefilled,
        observer: &mut dyn Observer,
    ) -> Result<Generation> {
        let Asked { request, started, ropes } = asked;
        let longest = self.longest();
        let left = (longest as i64).saturating_sub(prefilled.next.position).max(0) as usize;
        let mut generation = Generation {
            tokens: Vec::with_capacity(request.max_new_tokens.min(left.saturating_add(1))),
            finish: FinishReason::Length,
            prompt_tokens,
            cached_tokens: prefilled.cached_tokens,
            recomputed_tokens: prefilled.recomputed_tokens,
            prefill_flops: prefilled.flops,
            ttft: started.elapsed(),
            total: started.elapsed(),
            chunks: prefilled.chunks.clone(),
            logits: Vec::new(),
        };
        if let Some(answer) = &request.forced {
            return self.follow(asked, answer, own, prefilled, generation, observer);
        }
        let Prefilled { context, mut logits, mut next, .. } = prefilled;
        let mut sampler = Sampler::new(request.sampling);
        sampler.see(request.prompt.iter());
        let mut step = None;
        while generation.tokens.len() < request.max_new_tokens {
            let token = sampler.sample(&logits);
            if generation.tokens.is_empty() {
                generation.ttft = started.elapsed();
            }
            if request.keep_logits {
                generation.logits.push(logits.clone());
            }
            if self.model.config().eos.contains(&token) {
                generation.finish = FinishReason::Stop;
                break;
            }
            generation.tokens.push(token);
            sampler.see([token]);
            if observer.token(token).is_break() {
                return Err(Error::Cancelled);
            }
            if observer.is_complete() {
                generation.finish = FinishReason::StopString;
                break;
            }
            let full = next.position >= longest as i64;
            if full || generation.tokens.len() == request.max_new_tokens {
                break;
            }
            let input = match step.take() {
                None => self.next_input(own, &[token], &context)?,
                Some(mut input) => {
                    self.advance(own, token, &mut input)?;
                    input
                }
            };
            next = end_of(&input);
            let device = self.device();
            let batch = std::slice::from_ref(&input);
            logits = last_row(self.model.decode(&device, ropes, batch, memory, logits)?)?;
            self.caches.sequences_mut().commit(own, &[token])?;
            step = Some(input);
        }
        generation.total = started.elapsed();
        Ok(generation)
    }
}

/// Returns the logical index and the position of the token after an input.
pub(crate) fn end_of(input: &SequenceInput) -> SequenceStart {
    let n = input.tokens.len();
    SequenceStart { logical: input.logical_start + n, position: input.position_start + n as i64 }
}

/// Returns the logits of the last row of a pass.
pub(crate) fn last_row(pass: Forward) -> Result<Vec<f32>> {
    pass.logits.map(LogitRows::into_last).ok_or(Error::EmptyPrompt)
}
