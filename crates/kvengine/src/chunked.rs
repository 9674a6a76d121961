//! The prefill of a chunked prompt: its chunks are found or computed, and some of their tokens are
//! recomputed.

use std::sync::Arc;
use std::time::Instant;

use kvchunk::{
    AssembledPrompt, Assembler, Assembly, ChunkedPrompt, Findings, PositionPlan, PositionReindexer,
    TenantKeys, TokenSelection,
};
use kvcore::{CopyBlocks, PagedKvCache, Segment, SequenceId, SequenceInput, SequenceStart, WritePairs};
use kvmodel::Observer;

use crate::blend::Blend;
use crate::caches::Caches;
use crate::error::{Error, Result};
use crate::generate::{Asked, Context, Prefilled, end_of, last_row};
use crate::inquire::Inquiry;
use crate::{Engine, Generation, Request};

impl Engine {
    /// Answers a prompt whose chunks do not see each other, except for the tokens that are recomputed.
    pub(crate) fn answer_chunked(
        &mut self,
        request: &Request,
        started: Instant,
        prompt: &ChunkedPrompt,
        observer: &mut dyn Observer,
    ) -> Result<Generation> {
        request.scaling.check()?;
        let plan = PositionPlan::new(prompt, request.cell, self.model.config().max_positions)?;
        let ropes = self.ropes(request, plan.question_position as usize + prompt.question().len())?;
        let layers = self.model.config().num_layers();
        let layer = request.recompute.evidence().deepest_start(layers);
        if let Some(layer) = layer.filter(|&layer| layer >= layers) {
            let (what, value, limit) = ("layer of a recompute strategy", layer as i128, layers as i128);
            return Err(kvcore::Error::OutOfRange { what, value, limit }.into());
        }
        let reindexer = PositionReindexer::for_layers(&ropes);
        let assembler = self.assembler(request, self.keys(request, &ropes)?, &reindexer)?;
        let assembly = self.profiler.span("look-up and plan", || assembler.assemble_at(prompt, plan))?;
        let plan = assembly.plan();
        let start = SequenceStart { logical: plan.question_logical, position: plan.question_position };
        let own = self.caches.sequences_mut().create(start)?;
        let asked = Asked { request, started, ropes };
        let prefilled = self.prefill_chunks(&asked, (prompt, &reindexer), assembly, own, observer);
        // The assembled prompt is held until the answer is complete.
        let result = prefilled.and_then(|(_held, prefilled)| {
            self.decode(&asked, prompt.total_tokens(), own, prefilled, observer)
        });
        self.caches.sequences_mut().free(own)?;
        result
    }

    fn main(&self) -> Result<&PagedKvCache> {
        match &self.caches {
            Caches::Paged { main, .. } => Ok(main),
            Caches::Static(_) => Err(Error::NoChunks("ask for full attention, or take a paged cache")),
        }
    }

    pub(crate) fn assembler<'a>(
        &'a self,
        request: &Request,
        tenant: TenantKeys,
        reindexer: &'a PositionReindexer,
    ) -> Result<Assembler<'a>> {
        let main = self.main()?.kv_pool().clone();
        let chunks = self.caches.chunks().filter(|cache| request.reuse && cache.config().enabled);
        let (prefixes, cell, replicas) = (request.reuse, request.cell, self.replicas.as_ref());
        Ok(Assembler { chunks, tenant, main, prefixes, cell, reindexer, ranks: None, replicas })
    }

    fn prefill_chunks(
        &mut self,
        asked: &Asked,
        (prompt, reindexer): (&ChunkedPrompt, &PositionReindexer),
        mut assembly: Assembly,
        own: SequenceId,
        observer: &mut dyn Observer,
    ) -> Result<(AssembledPrompt, Prefilled)> {
        let request = asked.request;
        let mut flops = 0;
        // The request first computes its own pieces, and waits for pieces of other requests after that.
        if !assembly.is_ready() {
            let (device, assembler) =
                (self.device(), self.assembler(request, self.keys(request, &asked.ropes)?, reindexer)?);
            while !assembly.is_ready() {
                flops += self.model.forward(&device, &asked.ropes, assembly.inputs(), observer)?.flops;
                assembly.advance(&assembler, prompt)?;
            }
        }
        let (cached_tokens, chunks) = (assembly.reused_tokens(), assembly.reports());
        let evidence = request.recompute.evidence();
        let selection = if evidence.is_none() {
            request.recompute.select(&assembly.chunks(), &Findings::default())
        } else {
            TokenSelection::default()
        };
        let context = |segments: &Arc<[Segment]>| Context {
            segments: request.scaling.apply(segments),
            groups: request.scaling.groups(),
        };
        if evidence.is_none() && selection.is_empty() {
            // One pass computes all missing parts and the question.
            let context = context(assembly.segments());
            let mut batch = assembly.inputs().to_vec();
            batch.push(self.next_input(own, prompt.question(), &context)?);
            let pass = self.model.forward(&self.device(), &asked.ropes, &batch, observer)?;
            flops += pass.flops;
            let (logits, next) = (last_row(pass)?, end_of(&batch[batch.len() - 1]));
            let assembled = assembly.commit()?;
            let context = Context { segments: request.scaling.apply(assembled.segments()), ..context };
            let prefilled =
                Prefilled { context, logits, next, cached_tokens, recomputed_tokens: 0, flops, chunks };
            return Ok((assembled, prefilled));
        }
        if !assembly.inputs().is_empty() {
            flops += self.model.forward(&self.device(), &asked.ropes, assembly.inputs(), observer)?.flops;
        }
        let mut assembled = assembly.commit()?;
        let question = self.next_input(own, prompt.question(), &context(assembled.segments()))?;
        let attention = match evidence.attention {
            Some(check) => {
                let asked_once = Inquiry { engine: self, ropes: &asked.ropes, question: &question };
                let (scores, spent) = asked_once.scores(&assembled, check, observer)?;
                flops += spent;
                Some(scores)
            }
            None => None,
        };
        let found = Findings { attention, deviations: None };
        let (recomputed_tokens, pass) = if let Some(check) = evidence.deviations {
            Blend::new(self, asked, prompt, &mut assembled, question.clone(), (check, found))?
                .run(observer)?
        } else {
            let selection = if evidence.is_none() {
                selection
            } else {
                request.recompute.select(assembled.chunks(), &found)
            };
            let anew = assembled.copy_on_write(prompt, &selection, self.main()?.pool())?;
            self.copy(&anew.copies)?;
            let mut batch = anew.inputs;
            batch.push(with_context(&question, &context(assembled.segments())));
            (anew.tokens, self.model.forward(&self.device(), &asked.ropes, &batch, observer)?)
        };
        flops += pass.flops;
        let (context, next) = (context(assembled.segments()), end_of(&question));
        let logits = last_row(pass)?;
        Ok((assembled, Prefilled { context, logits, next, cached_tokens, recomputed_tokens, flops, chunks }))
    }

    pub(crate) fn copy(&self, pairs: &WritePairs) -> Result<()> {
        let arena = self.caches.sequences().arena().clone();
        Ok(self.stream.copy_blocks(&CopyBlocks { arena, pairs: pairs.clone() })?)
    }

    pub(crate) fn pool(&self) -> Result<&kvcore::BlockPool> {
        Ok(self.main()?.pool())
    }
}

/// Returns a question that sees `context` and, as before, its own sequence.
pub(crate) fn with_context(question: &SequenceInput, context: &Context) -> SequenceInput {
    let own = question.segments.last().cloned();
    SequenceInput {
        segments: context.segments.iter().cloned().chain(own).collect(),
        groups: Arc::clone(&context.groups),
        ..question.clone()
    }
}
