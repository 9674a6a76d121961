//! The documents of a request: looked up, computed with everybody's work, and in part computed anew.

use std::sync::Arc;
use std::time::Instant;

use kvchunk::{AssembledPrompt, Assembler, ChunkedPrompt, Findings, PositionPlan, PositionReindexer};
use kvcore::{SequenceInput, SequenceStart, WriteSlots};
use kvmodel::{Observer, PromptTokens};

use super::live::{Live, Parts};
use crate::blend::{Blend, Blended, Blending};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::Context;
use crate::inquire::context_tokens;

impl Engine {
    /// Looks the parts of a request's prompt up and takes blocks for those that are missing. An ordinary prompt has no parts.
    pub(super) fn begin_parts(&mut self, live: &mut Live) -> Result<()> {
        let Some(prompt) = chunked(live) else { return Ok(()) };
        let plan = PositionPlan::new(prompt, live.request.cell, self.model.config().max_positions)?;
        let start = SequenceStart { logical: plan.question_logical, position: plan.question_position };
        let reindexer = PositionReindexer::for_layers(&live.ropes);
        let assembly = self.assembler_of(live, &reindexer)?.assemble_at(prompt, plan)?;
        live.costs.recomputed_tokens = 0;
        for branch in &mut live.branches {
            branch.start = start;
        }
        live.parts =
            Parts::Missing { assembly: Box::new(assembly), reindexer, done: 0, since: self.clock.millis() };
        Ok(())
    }

    /// Goes on as far as possible without a pass: looks parts up, stores what was computed, asks again for what others computed, and
    /// chooses what is computed anew. After an error it may be asked again; nothing is lost but time.
    pub(super) fn advance_parts(&mut self, live: &mut Live) -> Result<()> {
        while live.parts.left() == 0 {
            match std::mem::replace(&mut live.parts, Parts::None) {
                Parts::None if chunked(live).is_some() => self.begin_parts(live)?,
                Parts::Missing { assembly, .. } if assembly.is_ready() => {
                    live.costs.cached_tokens = assembly.reused_tokens();
                    live.costs.chunks = assembly.reports();
                    live.parts = Parts::Computed { assembled: Box::new(assembly.commit()?) };
                }
                Parts::Missing { mut assembly, reindexer, done, since } => {
                    let stored = done == 0;
                    let waits = assembly.waiters().next().is_some();
                    if stored && waits && !assembly.waiters().any(kvchunk::ChunkWaiter::is_over) {
                        if self.clock.millis().saturating_sub(since) < self.longest_wait() {
                            live.parts = Parts::Missing { assembly, reindexer, done, since };
                            return Ok(());
                        }
                        assembly.stop_waiting();
                    }
                    if let Some(prompt) = chunked(live) {
                        assembly.try_advance(&self.assembler_of(live, &reindexer)?, prompt)?;
                    }
                    let since = self.clock.millis();
                    live.parts = Parts::Missing { assembly, reindexer, done: 0, since };
                }
                Parts::Computed { mut assembled } => match self.choose_anew(live, &mut assembled) {
                    Ok(next) => live.parts = next.with(assembled),
                    Err(error) => {
                        live.parts = Parts::Computed { assembled };
                        return Err(error);
                    }
                },
                Parts::Asking { mut assembled, question, done, sums } => {
                    match self.choose_asked(live, &mut assembled, &sums) {
                        Ok(next) => live.parts = next.with(assembled),
                        Err(error) => {
                            live.parts = Parts::Asking { assembled, question, done, sums };
                            return Err(error);
                        }
                    }
                }
                Parts::Anew { assembled, .. } => {
                    live.context = Context::scaled(live.request.scaling, assembled.segments());
                    live.parts = Parts::Held { _assembled: assembled };
                }
                other => {
                    live.parts = other;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Returns the milliseconds that a request waits for what another one computes.
    fn longest_wait(&self) -> u64 {
        self.chunks().map_or(0, |chunks| chunks.config().max_wait_ms)
    }

    fn assembler_of<'a>(&'a self, live: &Live, reindexer: &'a PositionReindexer) -> Result<Assembler<'a>> {
        self.assembler(&live.request, live.keys, reindexer)
    }

    /// Begins what the request's strategy needs to know before it chooses what is computed anew, or lets it choose.
    fn choose_anew(&mut self, live: &mut Live, assembled: &mut AssembledPrompt) -> Result<Next> {
        if live.request.recompute.evidence().attention.is_none() {
            return self.choose_by(live, assembled, Findings::default());
        }
        let question = self.question(live, assembled)?;
        let sums = vec![0.0; context_tokens(&question)];
        Ok(Next::Asking { question: Box::new([question]), sums })
    }

    /// Goes on when it is known what the question attends to.
    fn choose_asked(
        &mut self,
        live: &mut Live,
        assembled: &mut AssembledPrompt,
        sums: &[f32],
    ) -> Result<Next> {
        let system = assembled.segments().first().map_or(0, |segment| segment.len);
        let scores = assembled.by_chunk(&sums[system..]);
        let found = Findings { attention: Some(scores), ..Findings::default() };
        self.withdraw_question(live)?;
        self.choose_by(live, assembled, found)
    }

    /// Begins a blend, or lets the strategy choose what is computed anew.
    fn choose_by(
        &mut self,
        live: &mut Live,
        assembled: &mut AssembledPrompt,
        found: Findings,
    ) -> Result<Next> {
        let strategy = Arc::clone(&live.request.recompute);
        if let Some(check) = strategy.evidence().deviations {
            let question = self.question(live, assembled)?;
            let blend = Blend::new(&self.blending(live)?, assembled, question, (check, found))?;
            return Ok(Next::Blending { blend: Box::new(blend) });
        }
        let selection = strategy.select(assembled.chunks(), &found);
        let Some(prompt) = chunked(live).filter(|_| !selection.is_empty()) else {
            return Ok(Next::Anew { inputs: Vec::new() });
        };
        let anew = assembled.copy_on_write(prompt, &selection, self.pool()?)?;
        self.copy(&anew.copies)?;
        live.costs.recomputed_tokens = anew.tokens;
        Ok(Next::Anew { inputs: anew.inputs })
    }

    fn blending<'a>(&'a self, live: &'a Live) -> Result<Blending<'a>> {
        let prompt = chunked(live).ok_or(Error::EmptyPrompt)?;
        let (strategy, scaling) = (live.request.recompute.as_ref(), live.request.scaling);
        Ok(Blending { engine: self, ropes: &live.ropes, prompt, strategy, scaling })
    }

    /// Computes up to `most` rows of a request's blend, if it has one. Returns their number.
    pub(super) fn blend(
        &mut self,
        live: &mut Live,
        most: usize,
        observer: &mut dyn Observer,
    ) -> Result<usize> {
        let (mut assembled, mut blend) = match std::mem::replace(&mut live.parts, Parts::None) {
            Parts::Blending { assembled, blend } => (assembled, blend),
            other => {
                live.parts = other;
                return Ok(0);
            }
        };
        let started = Instant::now();
        let blended =
            self.blending(live).and_then(|of| blend.advance(&of, &mut assembled, most.max(1), observer));
        self.times.model += started.elapsed();
        let Blended { rows, flops, end } = match blended {
            Ok(blended) => blended,
            Err(error) => {
                live.parts = Parts::Blending { assembled, blend };
                return Err(error);
            }
        };
        live.costs.flops += flops;
        let Some((tokens, logits)) = end else {
            live.parts = Parts::Blending { assembled, blend };
            return Ok(rows);
        };
        live.costs.recomputed_tokens = tokens;
        live.context = Context::scaled(live.request.scaling, assembled.segments());
        live.parts = Parts::Held { _assembled: assembled };
        self.answer_of_blend(live, &logits)?;
        Ok(rows)
    }

    /// Returns the whole question as an input at the start of the first sample's sequence, which sees the documents as they are stored.
    fn question(&mut self, live: &mut Live, assembled: &AssembledPrompt) -> Result<SequenceInput> {
        self.withdraw_question(live)?;
        live.context = Context::scaled(live.request.scaling, assembled.segments());
        let branch = &mut live.branches[0];
        let own = self.caches.create(branch.start)?;
        branch.own = Some(own);
        let question = branch.tokens[..branch.prompt].to_vec();
        let slots = self.caches.grow(own, question.len())?;
        let segment = self.caches.sequences().segment(own)?;
        let none = WriteSlots::default();
        let mut input = live.context.input(branch.start, 0, &question, none, segment);
        input.set_slots(slots);
        Ok(input)
    }

    /// Takes the question back, which is computed with the final context later.
    fn withdraw_question(&mut self, live: &mut Live) -> Result<()> {
        match live.branches[0].own.take() {
            Some(own) => self.caches.free(own),
            None => Ok(()),
        }
    }

    /// Takes the logits of a question that a blend has computed.
    fn answer_of_blend(&mut self, live: &mut Live, logits: &[f32]) -> Result<()> {
        let branch = &mut live.branches[0];
        branch.computed = branch.prompt;
        if branch.over || branch.left() > 0 {
            return Ok(());
        }
        self.first_of(live, logits)
    }
}

/// The state of a request's documents behind a choice.
enum Next {
    Asking { question: Box<[SequenceInput; 1]>, sums: Vec<f32> },
    Blending { blend: Box<Blend> },
    Anew { inputs: Vec<SequenceInput> },
}

impl Next {
    fn with(self, assembled: Box<AssembledPrompt>) -> Parts {
        match self {
            Self::Asking { question, sums } => Parts::Asking { assembled, question, done: 0, sums },
            Self::Blending { blend } => Parts::Blending { assembled, blend },
            Self::Anew { inputs } => Parts::Anew { assembled, inputs, done: 0 },
        }
    }
}

impl Live {
    /// Lets the question see the documents, if the `fed` rows of this pass are the last of them. Returns false if something is still to be
    /// computed, chosen or waited for.
    pub(super) fn sees_parts(&mut self, fed: usize) -> bool {
        let left = self.parts.left();
        let segments = match &self.parts {
            Parts::None | Parts::Held { .. } => return true,
            _ if fed < left || left == 0 => return false,
            Parts::Missing { assembly, .. } if assembly.is_ready() => {
                let strategy = &self.request.recompute;
                let fixed = strategy.evidence().is_none();
                if !fixed || !strategy.select(&assembly.chunks(), &Findings::default()).is_empty() {
                    return false;
                }
                assembly.segments()
            }
            Parts::Anew { assembled, .. } => assembled.segments(),
            _ => return false,
        };
        self.context = Context::scaled(self.request.scaling, segments);
        true
    }
}

/// Returns the prompt of a request whose documents are parts of their own.
pub(super) fn chunked(live: &Live) -> Option<&ChunkedPrompt> {
    match &live.request.prompt {
        PromptTokens::Chunked(prompt) if !live.request.full_attention => Some(prompt),
        _ => None,
    }
}
