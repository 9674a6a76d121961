//! The documents of a request: looked up, computed with everybody's work, and in part computed anew.

use std::sync::Arc;
use std::time::Instant;

use kvchunk::{AssembledPrompt, Assembler, ChunkedPrompt, Findings, PositionPlan, PositionReindexer};
use kvcore::{Logits, SequenceInput, SequenceStart, WriteSlots};
use kvmodel::{Observer, PromptTokens};

use super::live::{Live, Parts};
use crate::blend::Blend;
use crate::engine::Engine;
use crate::error::Result;
use crate::generate::{Asked, Context, last_row};
use crate::inquire::Inquiry;

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
    pub(super) fn advance_parts(&mut self, live: &mut Live, observer: &mut dyn Observer) -> Result<()> {
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
                Parts::Computed { mut assembled } => match self.choose_anew(live, &mut assembled, observer) {
                    Ok(inputs) => live.parts = Parts::Anew { assembled, inputs, done: 0 },
                    Err(error) => {
                        live.parts = Parts::Computed { assembled };
                        return Err(error);
                    }
                },
                Parts::Anew { assembled, .. } => {
                    live.context = context(live, assembled.segments());
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

    /// Lets the request's strategy choose what is computed anew. Returns the inputs of what it chose, none if a blend has computed them.
    fn choose_anew(
        &mut self,
        live: &mut Live,
        assembled: &mut AssembledPrompt,
        observer: &mut dyn Observer,
    ) -> Result<Vec<SequenceInput>> {
        let strategy = Arc::clone(&live.request.recompute);
        let (evidence, mut found) = (strategy.evidence(), Findings::default());
        let Some(prompt) = chunked(live).cloned() else { return Ok(Vec::new()) };
        if let Some(check) = evidence.attention {
            live.context = context(live, assembled.segments());
            let question = self.question(live)?;
            let asked = Inquiry { engine: self, ropes: &live.ropes, question: &question };
            let started = Instant::now();
            let scored = asked.scores(assembled, check, observer);
            self.times.model += started.elapsed();
            let (scores, spent) = scored?;
            live.costs.flops += spent;
            found.attention = Some(scores);
        }
        if let Some(check) = evidence.deviations {
            live.context = context(live, assembled.segments());
            let question = self.question(live)?;
            let asked = Asked { request: &live.request, ropes: live.ropes.clone() };
            let mut blend = Blend::new(self, &asked, &prompt, assembled, question, (check, found))?;
            let started = Instant::now();
            let blended = blend.run(observer);
            self.times.model += started.elapsed();
            let (tokens, pass) = blended?;
            live.costs.recomputed_tokens = tokens;
            live.costs.flops += pass.flops;
            live.context = context(live, assembled.segments());
            self.answer_of_blend(live, &last_row(pass)?)?;
            return Ok(Vec::new());
        }
        if evidence.attention.is_some() {
            self.withdraw_question(live)?;
        }
        let selection = strategy.select(assembled.chunks(), &found);
        if selection.is_empty() {
            return Ok(Vec::new());
        }
        let anew = assembled.copy_on_write(&prompt, &selection, self.pool()?)?;
        self.copy(&anew.copies)?;
        live.costs.recomputed_tokens = anew.tokens;
        Ok(anew.inputs)
    }

    /// Returns the whole question as an input at the start of the first sample's sequence.
    fn question(&mut self, live: &mut Live) -> Result<SequenceInput> {
        self.withdraw_question(live)?;
        let branch = &mut live.branches[0];
        let own = self.caches.create(branch.start)?;
        branch.own = Some(own);
        let question = branch.tokens[..branch.prompt].to_vec();
        let slots = self.caches.grow(own, question.len())?;
        let segment = self.caches.sequences().segment(own)?;
        let none = WriteSlots::default();
        let mut input =
            live.context.input(branch.start, 0, &question, none, segment).with_logits(Logits::Last);
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
        self.context = context(self, segments);
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

fn context(live: &Live, segments: &Arc<[kvcore::Segment]>) -> Context {
    let scaling = &live.request.scaling;
    Context { segments: scaling.apply(segments), groups: scaling.groups() }
}
