//! One request from start to end, and what the inputs of its passes are.

use std::sync::Arc;

use kvchunk::{ContextScaling, TenantKeys};
use kvcore::{LayerRopes, MergeGroup, Segment, SequenceInput, SequenceStart, WriteSlots};
use kvmodel::{Forward, LogitRows, Observer, PromptTokens};

use crate::error::{Error, Result};
use crate::serve::AnswerEvent;
use crate::{Engine, FinishReason, Generation, Request};

/// The context of a question and its answer: the segments that their tokens see besides their own sequence.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) segments: Arc<[Segment]>,
    pub(crate) groups: Arc<[MergeGroup]>,
}

impl Context {
    /// Returns the segments of a prompt's documents as a request weighs them.
    pub(crate) fn scaled(scaling: ContextScaling, segments: &Arc<[Segment]>) -> Self {
        Self { segments: scaling.apply(segments), groups: scaling.groups() }
    }

    /// Returns the segments of the context, followed by the segment of an own sequence.
    pub(crate) fn with_own(&self, own: Segment) -> Arc<[Segment]> {
        self.segments.iter().cloned().chain([own]).collect()
    }

    /// Returns tokens behind the first `before` of a sequence as an input that sees the context and its own sequence, in the segment
    /// `own`. The sequence begins at `start`.
    pub(crate) fn input(
        &self,
        start: SequenceStart,
        before: usize,
        tokens: &[u32],
        slots: WriteSlots,
        own: Segment,
    ) -> SequenceInput {
        let (logical, position) = (start.logical + before, start.position + before as i64);
        let input = SequenceInput::new(tokens.to_vec(), logical, position, slots, self.with_own(own));
        SequenceInput { groups: Arc::clone(&self.groups), ..input }
    }
}

impl Default for Context {
    fn default() -> Self {
        Self { segments: Arc::default(), groups: [MergeGroup::default()].into() }
    }
}

impl Engine {
    /// Answers a request, and steps the requests that were submitted before along with it. Calls `observer` for the layers of the prefill
    /// and for each token of the answer. The observer may stop the request at each call, and end the answer after each token, as a
    /// [`TextStream`](kvmodel::TextStream) does at a stop string. Of several samples the first is given.
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
        let mut answer = self.submit(Request { samples: 1, ..request.clone() })?;
        let (mut seen, mut complete) = (0, None);
        loop {
            while let Some(event) = answer.try_next() {
                match event? {
                    AnswerEvent::Token { token, .. } if complete.is_none() => {
                        seen += 1;
                        if observer.token(token).is_break() {
                            drop(answer);
                            self.let_go();
                            return Err(Error::Cancelled);
                        }
                        if observer.is_complete() {
                            answer.complete(0);
                            complete = Some(seen);
                        }
                    }
                    AnswerEvent::Token { .. } => {}
                    AnswerEvent::End { mut generation, .. } => {
                        if let Some(tokens) = complete {
                            generation.finish = FinishReason::StopString;
                            generation.tokens.truncate(tokens);
                            generation.logits.truncate(tokens);
                            generation.logprobs.truncate(tokens);
                        }
                        return Ok(*generation);
                    }
                }
            }
            self.step_watched(answer.id(), observer)?;
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
        let biased = request.logit_bias.iter().map(|&(token, _)| token).find(|&token| !known(token));
        let stray = forced.or(biased).or_else(|| match &request.prompt {
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

    /// Returns the number of positions that a request may have.
    pub(crate) fn longest(&self) -> usize {
        self.model.config().max_positions.min(self.caches.longest())
    }
}

/// Returns the logits of the last row of a pass.
pub(crate) fn last_row(pass: Forward) -> Result<Vec<f32>> {
    pass.logits.map(LogitRows::into_last).ok_or(Error::EmptyPrompt)
}
