//! Looks up a request's documents, computes the missing ones in the passes of all requests, and recomputes
//! some of their tokens.
//!
//! ```text
//! None ─► Missing ─► Stored: Open ─┬────────────────────────────┬─► Recomputing ─► Held
//!            └─┘ waits             └─► Asking, for the question ─┴─► Blending ─────► Held
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

use kvchunk::{
    AssembledPrompt, Assembler, Assembly, BeganFetch, ContextScaling, Findings, PinnedParts, PositionPlan,
    PositionReindexer, TenantKeys, TierFetch, recomputed_root,
};
use kvcore::{BlockKey, LayerRopes, SequenceId, SequenceInput, SequenceStart};
use kvmodel::{AttentionMass, Observer};
use kvtier::Record;

use super::blend::{Blend, BlendSource};
use super::context::Context;
use super::costs::PromptCosts;
use crate::error::{Error, Result};
use crate::request::Request;
use crate::runner::Runner;

/// The prompt of a request that is being answered: its documents and their state. An ordinary prompt has no
/// documents, so there is nothing to compute here.
#[derive(Debug)]
pub(crate) struct LivePrompt {
    /// The rotary embeddings for the request's regime.
    ropes: LayerRopes,
    keys: TenantKeys,
    /// The positions of a chunked prompt's parts, or `None` for an ordinary prompt.
    plan: Option<PositionPlan>,
    pub(super) parts: PromptParts,
    /// The segments that the question sees.
    pub(super) context: Context,
    /// The root of the block keys of everything behind the documents, as the question sees them. `None` until they
    /// are final, and if the question's bytes do not follow from them alone.
    behind: Option<BlockKey>,
    pub(super) costs: PromptCosts,
    /// The sequence of a question whose computation started before its documents were final, either to
    /// measure the question's attention or for a blend.
    pub(super) question: Option<SequenceId>,
}

/// The state of a request's system prompt and documents.
#[derive(Debug)]
pub(super) enum PromptParts {
    /// Not looked up: the request is waiting, or its prompt is ordinary.
    None,
    /// Looked up. Missing parts are being computed, by this request or by others.
    Missing {
        assembly: Box<Assembly>,
        reindexer: PositionReindexer,
        rows: PendingRows,
        since: u64,
        /// True once some parts that this request has computed are stored.
        advanced: bool,
    },
    /// All parts are computed and stored.
    Stored { assembled: Box<AssembledPrompt>, stage: Stage },
}

/// The work left on stored documents before the question may see them.
#[derive(Debug)]
pub(super) enum Stage {
    /// The tokens to recompute have not been chosen yet.
    Open,
    /// The question is being computed once, to measure how much it attends to each token before it.
    Asking { question: PendingRows, mass: AttentionMass },
    /// All tokens are computed up to a checkpoint, and only the chosen tokens continue.
    Blending(Box<Blend>),
    /// The chosen tokens are being recomputed.
    Recomputing(PendingRows),
    /// No work is left. The documents are held until the answer is complete.
    Held,
}

/// Inputs that are computed piece by piece, in several passes.
#[derive(Debug, Default)]
pub(super) struct PendingRows {
    /// The inputs with rows that no pass has taken yet.
    inputs: VecDeque<SequenceInput>,
    /// The number of the first input's rows that passes have already taken.
    taken: usize,
    /// The total number of rows in all inputs.
    total: usize,
    /// The number of computed rows.
    done: usize,
}

impl PendingRows {
    pub(super) fn new(inputs: impl IntoIterator<Item = SequenceInput>) -> Self {
        let inputs: VecDeque<_> = inputs.into_iter().filter(|input| !input.tokens.is_empty()).collect();
        let total = inputs.iter().map(|input| input.tokens.len()).sum();
        Self { inputs, total, ..Self::default() }
    }

    /// Returns the number of rows left to compute.
    fn left(&self) -> usize {
        self.total.saturating_sub(self.done)
    }

    /// Removes and returns up to `most` rows of the next input.
    fn take(&mut self, most: usize) -> Result<Option<SequenceInput>> {
        let Some(first) = self.inputs.front() else { return Ok(None) };
        let tokens = first.tokens.len();
        let rows = self.taken..tokens.min(self.taken.saturating_add(most));
        if rows == (0..tokens) {
            return Ok(self.inputs.pop_front());
        }
        if rows.is_empty() {
            return Ok(None);
        }
        let piece = first.part(rows.clone())?;
        self.taken = rows.end;
        if rows.end == tokens {
            self.inputs.pop_front();
            self.taken = 0;
        }
        Ok(Some(piece))
    }
}

impl LivePrompt {
    /// Creates a prompt whose parts have not been looked up. `plan` contains the positions of a chunked
    /// prompt's parts.
    pub(crate) fn new(ropes: LayerRopes, keys: TenantKeys, plan: Option<PositionPlan>) -> Self {
        Self {
            ropes,
            keys,
            plan,
            parts: PromptParts::None,
            context: Context::default(),
            behind: None,
            costs: PromptCosts::default(),
            question: None,
        }
    }

    /// Returns the rotary embeddings for the request's regime.
    pub(crate) fn ropes(&self) -> &LayerRopes {
        &self.ropes
    }

    /// Returns the tenant and the root of its keys.
    pub(crate) fn keys(&self) -> &TenantKeys {
        &self.keys
    }

    /// Returns true if the prompt is chunked and its chunks are computed separately.
    pub(crate) fn is_chunked(&self) -> bool {
        self.plan.is_some()
    }

    /// Returns the logical index and the position of the first token after the documents.
    pub(crate) fn start(&self) -> SequenceStart {
        self.plan.as_ref().map_or_else(SequenceStart::default, |plan| SequenceStart {
            logical: plan.question_logical,
            position: plan.question_position,
        })
    }

    /// Returns the segments that the question sees.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the costs of the prefill so far.
    pub(crate) fn costs(&self) -> &PromptCosts {
        &self.costs
    }

    /// Returns a mutable reference to the costs of the prefill so far.
    pub(crate) fn costs_mut(&mut self) -> &mut PromptCosts {
        &mut self.costs
    }

    /// Returns true if the parts have been looked up but are not stored yet.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self.parts, PromptParts::Missing { .. })
    }

    /// Returns true if a blend is in progress.
    pub(crate) fn is_blending(&self) -> bool {
        matches!(self.parts, PromptParts::Stored { stage: Stage::Blending(_), .. })
    }

    /// Returns a waiter for a part that another request is computing, if there is such a part.
    pub(crate) fn waiter(&self) -> Option<&kvchunk::ChunkWaiter> {
        match &self.parts {
            PromptParts::Missing { assembly, .. } => assembly.waiters().next(),
            _ => None,
        }
    }

    /// Returns the sums of the question's attention, if they are being computed.
    pub(crate) fn mass_mut(&mut self) -> Option<&mut AttentionMass> {
        match &mut self.parts {
            PromptParts::Stored { stage: Stage::Asking { mass, .. }, .. } => Some(mass),
            _ => None,
        }
    }

    /// Keeps the counts of what was found so far, because the next lookup may also find what this request has computed.
    fn settle_counts(&mut self) {
        match &self.parts {
            PromptParts::Missing { assembly, advanced: true, .. } => {
                self.costs.found_parts(assembly.reused_tokens(), assembly.reports());
                self.costs.own_parts = true;
            }
            PromptParts::Stored { .. } => self.costs.own_parts = true,
            PromptParts::None | PromptParts::Missing { .. } => {}
        }
    }

    /// Prepares for a preemption, after which the prompt is looked up again. `begun` is true if the request has begun a
    /// sequence of its own. The counts of what was found stay the same.
    pub(crate) fn give_way(&mut self, begun: bool) {
        self.settle_counts();
        self.costs.own_sequence |= begun;
    }

    /// Releases everything that is held for the documents, which must then be looked up again.
    pub(crate) fn withdraw(&mut self, runner: &mut Runner) {
        if let Some(mass) = self.mass_mut() {
            let flops = mass.flops;
            self.costs.flops += flops;
        }
        (self.parts, self.context, self.behind) = (PromptParts::None, Context::default(), None);
        // This cannot fail, because nothing else frees the sequence.
        drop(self.free_question(runner));
    }

    fn rows_mut(&mut self) -> Option<&mut PendingRows> {
        match &mut self.parts {
            PromptParts::Missing { rows, .. }
            | PromptParts::Stored {
                stage: Stage::Asking { question: rows, .. } | Stage::Recomputing(rows),
                ..
            } => Some(rows),
            PromptParts::None | PromptParts::Stored { .. } => None,
        }
    }

    /// Removes and returns up to `most` rows of the next input that a pass can compute now.
    pub(crate) fn take_rows(&mut self, most: usize) -> Result<Option<SequenceInput>> {
        self.rows_mut().map_or(Ok(None), |rows| rows.take(most))
    }

    /// Records that a pass has computed `rows` rows.
    pub(crate) fn add_done(&mut self, rows: usize) {
        if let Some(pending) = self.rows_mut() {
            pending.done += rows;
        }
    }

    /// Returns the number of rows left to compute in the current state.
    fn left(&self) -> usize {
        match &self.parts {
            PromptParts::Missing { rows, .. }
            | PromptParts::Stored {
                stage: Stage::Asking { question: rows, .. } | Stage::Recomputing(rows),
                ..
            } => rows.left(),
            PromptParts::Stored { stage: Stage::Blending(blend), .. } => blend.left(),
            PromptParts::None | PromptParts::Stored { .. } => 0,
        }
    }

    /// Starts to load the prompt's parts that are on a disk and not in memory. Returns `None` without a disk,
    /// for an ordinary prompt, and if the prompt must not reuse anything.
    pub(crate) fn fetch(&self, runner: &Runner, request: &Request) -> Result<Option<BeganFetch>> {
        let (Some(prompt), Some(plan)) = (request.chunked(), &self.plan) else { return Ok(None) };
        if !request.reuse {
            return Ok(None);
        }
        let reindexer = PositionReindexer::for_layers(&self.ropes);
        Ok(assembler(runner, request, self.keys, &reindexer)?.fetch(prompt, plan)?)
    }

    /// Puts the prompt's parts that a fetch has brought so far into the caches. Does nothing for an ordinary prompt.
    pub(crate) fn put_arrived(&self, runner: &Runner, request: &Request, fetch: &TierFetch) -> Result<()> {
        let (Some(prompt), Some(plan)) = (request.chunked(), &self.plan) else { return Ok(()) };
        let reindexer = PositionReindexer::for_layers(&self.ropes);
        Ok(assembler(runner, request, self.keys, &reindexer)?.put_arrived(prompt, plan, fetch)?)
    }

    /// Returns whether a disk has everything that it can store for the prompt's parts.
    pub(crate) fn is_saved(&self, runner: &Runner, request: &Request) -> Result<bool> {
        let (Some(prompt), Some(plan)) = (request.chunked(), &self.plan) else { return Ok(false) };
        let reindexer = PositionReindexer::for_layers(&self.ropes);
        Ok(assembler(runner, request, self.keys, &reindexer)?.is_saved(prompt, plan)?)
    }

    /// Pins the prompt's parts that are in the caches. Returns `None` for an ordinary prompt.
    pub(crate) fn pin(&self, runner: &Runner, request: &Request) -> Result<Option<PinnedParts>> {
        let (Some(prompt), Some(plan)) = (request.chunked(), &self.plan) else { return Ok(None) };
        let reindexer = PositionReindexer::for_layers(&self.ropes);
        Ok(Some(assembler(runner, request, self.keys, &reindexer)?.pin(prompt, plan)?))
    }

    /// Gives the prompt's parts that are in the caches to `each`, as records. Returns the number of tokens in other
    /// parts, or `None` for an ordinary prompt.
    pub(crate) fn export(
        &self,
        runner: &Runner,
        request: &Request,
        each: &mut dyn FnMut(Record) -> Result<()>,
    ) -> Result<Option<usize>> {
        let (Some(prompt), Some(plan)) = (request.chunked(), &self.plan) else { return Ok(None) };
        let reindexer = PositionReindexer::for_layers(&self.ropes);
        let assembler = assembler(runner, request, self.keys, &reindexer)?;
        assembler.export(&runner.replica_device(), prompt, plan, each).map(Some)
    }

    /// Looks up the prompt's parts, and allocates blocks for the missing parts. Uses what was `fetched` from a
    /// disk. Does nothing for an ordinary prompt.
    pub(crate) fn look_up(
        &mut self,
        runner: &Runner,
        request: &Request,
        fetched: Option<&TierFetch>,
    ) -> Result<()> {
        let (Some(prompt), Some(plan)) = (request.chunked(), &self.plan) else { return Ok(()) };
        let reindexer = PositionReindexer::for_layers(&self.ropes);
        let assembler = Assembler { fetched, ..assembler(runner, request, self.keys, &reindexer)? };
        let mut assembly = assembler.assemble_at(prompt, plan.clone())?;
        (self.costs.recomputed_tokens, self.behind) = (0, None);
        let rows = PendingRows::new(assembly.take_inputs());
        let since = runner.setup.clock.millis();
        let assembly = Box::new(assembly);
        self.parts = PromptParts::Missing { assembly, reindexer, rows, since, advanced: false };
        Ok(())
    }

    /// Does all work that does not need a forward pass: looks up parts, stores computed parts, looks again
    /// for parts that other requests are computing, and chooses the tokens to recompute. After an error, it
    /// is safe to repeat the call.
    pub(crate) fn advance(&mut self, runner: &mut Runner, request: &Request) -> Result<()> {
        while self.left() == 0 {
            match &mut self.parts {
                PromptParts::None if self.plan.is_some() => self.look_up(runner, request, None)?,
                PromptParts::Missing { assembly, .. } if assembly.is_ready() => self.store(request)?,
                PromptParts::Missing { assembly, reindexer, rows, since, advanced } => {
                    let now = runner.setup.clock.millis();
                    let waits = assembly.waiters().next().is_some();
                    if rows.total == 0 && waits && !assembly.waiters().any(kvchunk::ChunkWaiter::is_over) {
                        if now.saturating_sub(*since) < longest_wait(runner) {
                            return Ok(());
                        }
                        assembly.stop_waiting();
                    }
                    let Some(prompt) = request.chunked() else { return Ok(()) };
                    let assembler = assembler(runner, request, self.keys, reindexer)?;
                    *advanced = true;
                    if let Err(error) = assembly.try_advance(&assembler, prompt) {
                        self.settle_counts();
                        self.parts = PromptParts::None;
                        return Err(error.into());
                    }
                    (*rows, *since) = (PendingRows::new(assembly.take_inputs()), now);
                }
                PromptParts::Stored { stage: Stage::Open, .. } => self.choose(runner, request)?,
                PromptParts::Stored { stage: Stage::Asking { .. }, .. } => {
                    self.choose_asked(runner, request)?;
                }
                PromptParts::Stored { assembled, stage: stage @ Stage::Recomputing(_) } => {
                    self.context = Context::scaled(request.scaling, assembled.segments());
                    *stage = Stage::Held;
                }
                PromptParts::None | PromptParts::Stored { .. } => return Ok(()),
            }
        }
        Ok(())
    }

    /// Stores the computed parts, so that other requests can find them.
    fn store(&mut self, request: &Request) -> Result<()> {
        let PromptParts::Missing { assembly, .. } = std::mem::replace(&mut self.parts, PromptParts::None)
        else {
            return Ok(());
        };
        self.behind = root_behind(&assembly, &self.keys, request);
        self.costs.found_parts(assembly.reused_tokens(), assembly.reports());
        self.parts = PromptParts::Stored { assembled: Box::new(assembly.commit()?), stage: Stage::Open };
        Ok(())
    }

    /// Starts a blend if the strategy needs deviations. Otherwise, makes the strategy choose the tokens to
    /// recompute.
    pub(super) fn choose_by(
        &mut self,
        runner: &mut Runner,
        request: &Request,
        found: Findings,
    ) -> Result<()> {
        let strategy = Arc::clone(&request.recompute);
        if let Some(check) = strategy.evidence().deviations {
            let question = self.question(runner, request)?;
            let (source, assembled, stage) = self.stored(runner, request)?;
            *stage = Stage::Blending(Box::new(Blend::new(&source, assembled, question, (check, found))?));
            return Ok(());
        }
        let (source, assembled, stage) = self.stored(runner, request)?;
        let selection = strategy.select(assembled.chunks(), &found);
        if selection.is_empty() {
            *stage = Stage::Recomputing(PendingRows::default());
            return Ok(());
        }
        let pool = runner.caches.paged_cache()?.pool();
        let recomputation = assembled.copy_on_write(source.prompt, &selection, pool)?;
        runner.copy(&recomputation.copies)?;
        *stage = Stage::Recomputing(PendingRows::new(recomputation.inputs));
        self.costs.recomputed_tokens = recomputation.tokens;
        self.behind = self.behind.map(|root| recomputed_root(&root, &selection));
        Ok(())
    }

    /// Returns the source for a blend, the stored documents, and their stage.
    pub(super) fn stored<'a>(
        &'a mut self,
        runner: &'a Runner,
        request: &'a Request,
    ) -> Result<(BlendSource<'a>, &'a mut AssembledPrompt, &'a mut Stage)> {
        let (Some(prompt), PromptParts::Stored { assembled, stage }) = (request.chunked(), &mut self.parts)
        else {
            return Err(Error::EmptyPrompt);
        };
        let (strategy, scaling) = (request.recompute.as_ref(), request.scaling);
        let source = BlendSource { runner, ropes: &self.ropes, prompt, strategy, scaling };
        Ok((source, assembled, stage))
    }

    /// Computes up to `most` rows of a blend. Returns the number of computed rows and, at the end of the
    /// blend, the logits after the question.
    pub(crate) fn blend(
        &mut self,
        runner: &Runner,
        request: &Request,
        most: usize,
        observer: &mut dyn Observer,
    ) -> Result<(usize, Option<Vec<f32>>)> {
        let (source, assembled, stage) = self.stored(runner, request)?;
        let Stage::Blending(blend) = stage else { return Ok((0, None)) };
        let blended = blend.advance(&source, assembled, most.max(1), observer)?;
        let end = blended.end.map(|(tokens, logits)| {
            *stage = Stage::Held;
            (tokens, logits, Context::scaled(request.scaling, assembled.segments()))
        });
        self.costs.flops += blended.flops;
        let logits = end.map(|(tokens, logits, context)| {
            (self.costs.recomputed_tokens, self.context) = (tokens, context);
            logits
        });
        Ok((blended.rows, logits))
    }

    /// Makes the documents visible to the question if they will be complete after the current pass, which
    /// computes `fed` of their rows. Returns false if there is still something else to compute, choose or
    /// wait for.
    pub(crate) fn opens_to_question(&mut self, request: &Request, fed: usize) -> bool {
        let left = self.left();
        let segments = match &self.parts {
            PromptParts::None | PromptParts::Stored { stage: Stage::Held, .. } => return true,
            _ if fed < left || left == 0 => return false,
            PromptParts::Missing { assembly, .. } if assembly.is_ready() => {
                let strategy = &request.recompute;
                let fixed = strategy.evidence().is_none();
                if !fixed || !strategy.select(&assembly.chunks(), &Findings::default()).is_empty() {
                    return false;
                }
                self.behind = root_behind(assembly, &self.keys, request);
                assembly.segments()
            }
            PromptParts::Stored { assembled, stage: Stage::Recomputing(_) } => assembled.segments(),
            _ => return false,
        };
        self.context = Context::scaled(request.scaling, segments);
        true
    }

    /// Returns the root of the block keys of the request's own sequences: of a whole ordinary prompt, or of a chunked
    /// prompt's question behind its final documents. Returns `None` if their blocks must neither be found nor kept.
    pub(crate) fn sequence_root(&self, request: &Request) -> Option<BlockKey> {
        if !request.reuse {
            return None;
        }
        if !self.is_chunked() {
            return Some(*self.keys.root());
        }
        let root = self.behind.filter(|_| request.sparse.is_none())?;
        let ContextScaling { temperature, scale } = request.scaling;
        Some(root.child(&[temperature.to_bits(), scale.to_bits()]).derive("kvengine question v1"))
    }

    /// Removes the question's sequence from the prompt and returns it, if a blend has computed it.
    pub(crate) fn take_question(&mut self) -> Option<SequenceId> {
        self.question.take()
    }
}

/// Returns the maximum time, in milliseconds, that a request waits for parts that another request is
/// computing.
fn longest_wait(runner: &Runner) -> u64 {
    runner.caches.chunks().map_or(0, |chunks| chunks.config().max_wait_ms)
}

// Decision: docs/decisions/serve.md#questions-that-choose-tokens-are-not-kept
/// Returns the root of the block keys behind an assembly that is ready, or `None` if nothing is kept there.
fn root_behind(assembly: &Assembly, keys: &TenantKeys, request: &Request) -> Option<BlockKey> {
    // A strategy with evidence chooses tokens by the whole question, or computes the question in a blend.
    let prompt = request.chunked().filter(|_| request.reuse && request.recompute.evidence().is_none())?;
    assembly.question_root(keys.root(), prompt).ok().flatten()
}

fn assembler<'a>(
    runner: &'a Runner,
    request: &Request,
    tenant: TenantKeys,
    reindexer: &'a PositionReindexer,
) -> Result<Assembler<'a>> {
    let main = runner.caches.paged_cache()?.kv_pool().clone();
    let chunks = runner.caches.chunks().filter(|cache| request.reuse && cache.config().enabled);
    let (prefixes, cell) = (request.reuse, request.cell);
    let (replicas, tier) = (runner.replicas.as_ref(), runner.tier.as_ref());
    let (ranks, fetched) = (None, None);
    Ok(Assembler { chunks, tenant, main, prefixes, cell, reindexer, ranks, replicas, tier, fetched })
}

#[cfg(test)]
mod tests {
    use kvcore::{BlockId, Segment, WriteSlots};

    use super::*;

    #[test]
    fn rows_are_taken_once_and_in_order() {
        let input = |first: u32, tokens: u32| {
            let slots = WriteSlots::unchecked((0..i64::from(tokens)).collect::<Vec<_>>());
            let segment = Segment::new([BlockId(0)].into(), tokens as usize, 0, 0);
            SequenceInput::new((first..first + tokens).collect(), 0, 0, slots, [segment])
        };
        let mut rows = PendingRows::new([input(0, 3), input(10, 0), input(20, 5)]);
        let mut take = |most| rows.take(most).unwrap().map(|input| input.tokens);
        assert_eq!(take(0), None);
        assert_eq!(take(9), Some(vec![0, 1, 2]), "an input at a time");
        assert_eq!(take(2), Some(vec![20, 21]));
        assert_eq!(take(2), Some(vec![22, 23]));
        assert_eq!(take(2), Some(vec![24]));
        assert_eq!(take(2), None);
        assert_eq!(rows.left(), 8, "taken, and not computed");
        rows.done += 8;
        assert_eq!(rows.left(), 0);
    }
}
