//! One request: prefill, then one token after another.

use std::time::Instant;

use kvchunk::{Assembler, ChunkReport, ChunkedPrompt, PositionPlan};
use kvcore::{LayerRopes, Logits, Segment, SequenceId, SequenceInput, SequenceStart};

use super::caches::Caches;
use super::{Engine, FinishReason, Generation, Request};
use crate::error::{Error, Result};
use crate::model::Observer;
use crate::sample::Sampler;
use crate::text::PromptTokens;

/// A request being answered.
struct Asked<'a> {
    request: &'a Request,
    started: Instant,
    /// Rotary embeddings of the request's regime.
    ropes: LayerRopes,
}

/// A request after its prefill.
struct Prefilled {
    /// What the answer's tokens see besides their own sequence.
    context: Vec<Segment>,
    /// Logits of the prompt's last token.
    logits: Vec<f32>,
    /// Logical index and position of the next token.
    next: SequenceStart,
    cached_tokens: usize,
    chunks: Vec<ChunkReport>,
}

impl Engine {
    /// Answers a request. `observer` is told the layers of the prefill and each token of the answer.
    ///
    /// # Errors
    /// A prompt that is empty, too long, or outside the vocabulary; a pool too small for it. No block
    /// is held then.
    pub fn generate(&mut self, request: &Request, observer: &mut dyn Observer) -> Result<Generation> {
        let started = Instant::now();
        self.check_vocabulary(&request.prompt)?;
        match &request.prompt {
            PromptTokens::Chunked(prompt) if !request.full_attention => {
                let Caches::Paged { main, chunks } = &self.caches else {
                    return Err(Error::Config(
                        "a static cache keeps no chunks: ask for full attention, or take a paged cache"
                            .to_owned(),
                    ));
                };
                let max_positions = self.model.config().max_positions;
                let plan = PositionPlan::new(prompt, request.cell, max_positions)?;
                let end = plan.question_position as usize + prompt.question().len();
                let ropes = self.ropes(request, end)?;
                let assembler = Assembler {
                    chunks: request.reuse.then_some(chunks),
                    main,
                    root: self.root(&ropes),
                    cell: request.cell,
                    max_positions,
                };
                let assembly = self.profiler.span("look-up and plan", || assembler.assemble(prompt))?;
                let (logical, position) =
                    (assembly.plan().question_logical, assembly.plan().question_position);
                let own = self.caches.sequences_mut().create(SequenceStart { logical, position })?;
                let result =
                    self.chunked(&Asked { request, started, ropes }, prompt, assembly, own, observer);
                self.caches.sequences_mut().free(own)?;
                result
            }
            prompt => {
                let tokens = match prompt {
                    PromptTokens::Plain(tokens) => tokens.clone(),
                    PromptTokens::Chunked(prompt) => prompt.flatten(),
                };
                self.check_length(&tokens)?;
                let ropes = self.ropes(request, tokens.len())?;
                let root = self.root(&ropes);
                let (own, cached) = if request.reuse {
                    self.caches.sequences_mut().create_with_prefix(root.into(), &tokens)?
                } else {
                    (self.caches.sequences_mut().create(SequenceStart::default())?, 0)
                };
                let result = self.plain(&Asked { request, started, ropes }, &tokens, own, cached, observer);
                self.caches.sequences_mut().free(own)?;
                result
            }
        }
    }

    /// Rotary embeddings in the regime of the longest position that a request may reach, whose prompt
    /// ends before position `end`. The last token of an answer is never fed back.
    fn ropes(&self, request: &Request, end: usize) -> Result<LayerRopes> {
        let longest = end.saturating_add(request.max_new_tokens.saturating_sub(1));
        self.model.ropes(longest.min(self.model.config().max_positions))
    }

    /// A request that cannot be computed must not evict anything on its way.
    fn check_vocabulary(&self, prompt: &PromptTokens) -> Result<()> {
        let vocabulary = self.model.config().vocab_size;
        let known = |token: u32| (token as usize) < vocabulary;
        let stray = match prompt {
            PromptTokens::Plain(tokens) => tokens.iter().copied().find(|&token| !known(token)),
            PromptTokens::Chunked(prompt) => prompt.flatten().into_iter().find(|&token| !known(token)),
        };
        stray.map_or(Ok(()), |token| Err(Error::TokenOutOfVocabulary { token, vocabulary }))
    }

    fn check_length(&self, tokens: &[u32]) -> Result<()> {
        let limit = self.model.config().max_positions;
        match tokens.len() {
            0 => Err(Error::EmptyPrompt),
            n if n > limit => Err(kvchunk::Error::TooLong { largest: n as i64 - 1, limit }.into()),
            _ => Ok(()),
        }
    }

    fn chunked(
        &mut self,
        asked: &Asked,
        prompt: &ChunkedPrompt,
        assembly: kvchunk::Assembly,
        own: SequenceId,
        observer: &mut dyn Observer,
    ) -> Result<Generation> {
        let question = prompt.question();
        let mut batch = assembly.inputs().to_vec();
        batch.push(self.next_input(own, question, assembly.segments(), Logits::Last)?);
        let logits = self.forward(&asked.ropes, &batch, observer)?;
        let (chunks, cached_tokens, next) =
            (assembly.reports().to_vec(), assembly.reused_tokens(), end_of(&batch[batch.len() - 1]));
        // Held until the answer is complete.
        let assembled = assembly.commit()?;
        let prefilled =
            Prefilled { context: assembled.segments().to_vec(), logits, next, cached_tokens, chunks };
        self.decode(asked, prompt.total_tokens(), own, prefilled, observer)
    }

    fn plain(
        &mut self,
        asked: &Asked,
        tokens: &[u32],
        own: SequenceId,
        cached: usize,
        observer: &mut dyn Observer,
    ) -> Result<Generation> {
        let input = self.next_input(own, &tokens[cached..], &[], Logits::Last)?;
        let next = end_of(&input);
        let logits = self.forward(&asked.ropes, &[input], observer)?;
        self.caches.sequences_mut().commit(own, &tokens[cached..])?;
        let prefilled =
            Prefilled { context: Vec::new(), logits, next, cached_tokens: cached, chunks: Vec::new() };
        self.decode(asked, tokens.len(), own, prefilled, observer)
    }

    /// The input for `tokens` at the end of the request's own sequence, which sees `context`.
    fn next_input(
        &mut self,
        own: SequenceId,
        tokens: &[u32],
        context: &[Segment],
        logits: Logits,
    ) -> Result<SequenceInput> {
        let cache = self.caches.sequences_mut();
        let before = cache.len(own)?;
        let slots = cache.grow(own, tokens.len())?;
        let segment = cache.segment(own)?;
        Ok(SequenceInput {
            tokens: tokens.to_vec(),
            logical_start: segment.logical_start + before,
            position_start: segment.stored_start + before as i64,
            slots,
            segments: context.iter().cloned().chain([segment]).collect(),
            logits,
        })
    }

    /// Logits of the last row of the last sequence.
    fn forward(
        &self,
        ropes: &LayerRopes,
        batch: &[SequenceInput],
        observer: &mut dyn Observer,
    ) -> Result<Vec<f32>> {
        let logits = self.model.forward(&self.device(), ropes, batch, observer)?;
        let last = logits.last().ok_or(Error::EmptyPrompt)?;
        Ok(last.get(last.dim(0)? - 1)?.to_vec1()?)
    }

    fn decode(
        &mut self,
        asked: &Asked,
        prompt_tokens: usize,
        own: SequenceId,
        prefilled: Prefilled,
        observer: &mut dyn Observer,
    ) -> Result<Generation> {
        let Asked { request, started, ropes } = asked;
        let Prefilled { context, mut logits, mut next, cached_tokens, chunks } = prefilled;
        let mut sampler = Sampler::new(request.sampling);
        let mut generation = Generation {
            tokens: Vec::new(),
            finish: FinishReason::Length,
            prompt_tokens,
            cached_tokens,
            ttft: started.elapsed(),
            total: started.elapsed(),
            chunks,
            logits: Vec::new(),
        };
        while generation.tokens.len() < request.max_new_tokens {
            let token = sampler.sample(&logits);
            if generation.tokens.is_empty() {
                generation.ttft = started.elapsed();
            }
            if request.keep_logits {
                generation.logits.push(logits);
            }
            if self.model.config().eos.contains(&token) {
                generation.finish = FinishReason::Stop;
                break;
            }
            generation.tokens.push(token);
            observer.token(token);
            let full = next.position >= self.model.config().max_positions as i64;
            if full || generation.tokens.len() == request.max_new_tokens {
                break;
            }
            let input = self.next_input(own, &[token], &context, Logits::Last)?;
            next = end_of(&input);
            logits = self.forward(ropes, &[input], &mut ())?;
            self.caches.sequences_mut().commit(own, &[token])?;
        }
        generation.total = started.elapsed();
        Ok(generation)
    }
}

/// Where the token after an input stands.
fn end_of(input: &SequenceInput) -> SequenceStart {
    let n = input.tokens.len();
    SequenceStart { logical: input.logical_start + n, position: input.position_start + n as i64 }
}
