//! Answering many requests at once.
//!
//! ```text
//!  submit ──► waiting, by priority and arrival
//!                │ admitted: there is room for its first piece above the watermark
//!                ▼
//!             running ── each step: one token for each answer, then pieces of prompts, up to `step_tokens`, in one pass
//!                │   ▲
//!                │   └── admitted again: what it has computed is found in the caches or computed again
//!                ▼
//!   out of blocks: the last in the order of service gives its blocks back and waits
//! ```
//!
//! A request is in one of two lists. What it needs next follows from its state alone: [`Parts`] are the documents of a chunked prompt,
//! a [`Branch`] is one sample, with its tokens and the number of those that are computed. A token that is sampled is one more token to
//! compute. A request that gives way loses what is computed and keeps its tokens.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvchunk::PositionPlan;
use kvcore::{LayerRopes, Logits, SequenceInput, SequenceStart};
use kvmodel::{Forward, LogitRows, Observer, PromptTokens};

mod answer;
mod live;
mod parts;
mod plan;

pub use answer::{Answer, AnswerEvent, RequestId};
use live::{Branch, Costs, Live, Parts};
use plan::{Feed, Plan};

use crate::config::Scheduling;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::Context;
use crate::request::{FinishReason, Request};
use crate::sample::{Sampler, Sampling};

/// The time for which a step waits for other engines' work when it has none of its own.
const PAUSE: Duration = Duration::from_millis(2);

/// The place of a request in the order of service: the smaller, the earlier.
type Rank = (Reverse<i32>, RequestId);

/// The requests of an engine.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    limits: Scheduling,
    next: u64,
    waiting: BTreeMap<Rank, Live>,
    /// In the order of service.
    running: Vec<Live>,
    plan: Plan,
    /// Memory of the order of a step.
    ranks: Vec<Rank>,
    /// Memory of the logits of a pass.
    logits: Vec<f32>,
    preemptions: u64,
}

/// An observer of one of the requests.
struct Watch<'a> {
    id: Option<RequestId>,
    observer: &'a mut dyn Observer,
    unwatched: (),
}

impl Watch<'_> {
    /// Returns the observer of a request.
    fn of(&mut self, rank: Rank) -> &mut dyn Observer {
        if self.id == Some(rank.1) { self.observer } else { &mut self.unwatched }
    }
}

/// What a step has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Step {
    /// The number of tokens that were computed.
    pub tokens: usize,
    /// The number of requests that have blocks after the step.
    pub running: usize,
    /// The number of requests that wait for some.
    pub waiting: usize,
    /// The number of times, since the engine was made, that a request gave its blocks to others.
    pub preemptions: u64,
}

impl Step {
    /// Returns whether every request has ended.
    pub fn is_idle(&self) -> bool {
        self.running + self.waiting == 0
    }
}

impl Scheduler {
    pub(crate) fn new(limits: Scheduling) -> Self {
        Self { limits, ..Self::default() }
    }

    pub(crate) fn limits(&self) -> Scheduling {
        self.limits
    }

    fn report(&self, tokens: usize) -> Step {
        let (running, waiting) = (self.running.len(), self.waiting.len());
        Step { tokens, running, waiting, preemptions: self.preemptions }
    }
}

impl Engine {
    /// Takes a request on. [`step`](Self::step) computes it, together with others.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kvbackend_cpu::CpuBackend;
    /// use kvengine::{AnswerEvent, Engine, EngineConfig, Request};
    /// use kvmodel::{Model, ModelConfig, PromptTokens, WeightFormat, Weights};
    ///
    /// let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::Stored)?;
    /// let mut engine = Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default())?;
    /// let ask = |first| Request { max_new_tokens: 3, ..Request::new(PromptTokens::Plain(vec![first, 7, 8])) };
    /// let (mut one, mut other) = (engine.submit(ask(1))?, engine.submit(ask(2))?);
    /// while !engine.step()?.is_idle() {}
    /// let mut tokens = 0;
    /// for answer in [&mut one, &mut other] {
    ///     while let Some(event) = answer.try_next() {
    ///         tokens += usize::from(matches!(event?, AnswerEvent::Token { .. }));
    ///     }
    /// }
    /// assert_eq!(tokens, 6);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`generate`](Self::generate) that the request alone can show, and
    /// - [`Error::Samples`] for several samples on a static cache,
    /// - [`kvcore::Error::OutOfBlocks`] if the pool cannot hold the prompt and a token even without other requests.
    pub fn submit(&mut self, mut request: Request) -> Result<Answer> {
        self.check_awake()?;
        request.samples = request.samples.max(1);
        request.sampling.check()?;
        self.check_vocabulary(&request)?;
        if request.samples > 1 && self.cache().as_paged().is_none() {
            return Err(Error::Samples { samples: request.samples });
        }
        let (mut own, end) = self.own_tokens(&request)?;
        self.check_room(&own)?;
        let ropes = self.ropes(&request, end)?;
        let keys = self.keys(&request, &ropes)?;
        let id = RequestId(self.scheduler.next);
        self.scheduler.next += 1;
        let (sender, answer) = answer::channel(id);
        let limit = request.time_limit.map(|limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
        let now = self.clock.millis();
        let mut sampler = Sampler::new(request.sampling);
        sampler.see(request.prompt.iter());
        let prompt = own.len();
        // The answer is appended without growing.
        own.reserve_exact(request.max_new_tokens.min(self.longest().saturating_sub(end) + 1));
        let first = Branch {
            sample: 0,
            own: None,
            start: SequenceStart::default(),
            prompt,
            tokens: own,
            computed: 0,
            input: None,
            sampler,
            logits: Vec::new(),
            given: None,
            ttft: None,
            over: false,
        };
        let live = Live {
            id,
            deadline: limit.map(|limit| now.saturating_add(limit)),
            request,
            ropes,
            keys,
            sender,
            submitted: Instant::now(),
            parts: Parts::None,
            context: Context::default(),
            branches: vec![first],
            costs: Costs::default(),
        };
        self.scheduler.waiting.insert(live.rank(), live);
        Ok(answer)
    }

    /// Computes one pass for the requests that were submitted: a token for each answer, and pieces of prompts. Errors of single requests
    /// go to their answers.
    ///
    /// # Errors
    /// Returns [`Error::Asleep`] while the pool of sequences [sleeps](Self::sleep).
    pub fn step(&mut self) -> Result<Step> {
        self.check_awake()?;
        let mut scheduler = std::mem::take(&mut self.scheduler);
        let tokens = scheduler.step(self, &mut Watch { id: None, observer: &mut (), unwatched: () });
        self.scheduler = scheduler;
        Ok(self.scheduler.report(tokens))
    }

    /// Computes one pass as [`step`](Self::step) does. `observer` is told of the layers of a request's prefill, and may stop the request.
    pub(crate) fn step_watched(&mut self, id: RequestId, observer: &mut dyn Observer) -> Result<Step> {
        self.check_awake()?;
        let mut scheduler = std::mem::take(&mut self.scheduler);
        let tokens = scheduler.step(self, &mut Watch { id: Some(id), observer, unwatched: () });
        self.scheduler = scheduler;
        Ok(self.scheduler.report(tokens))
    }

    /// Ends the requests that were cancelled, without a pass.
    pub(crate) fn let_go(&mut self) {
        let mut scheduler = std::mem::take(&mut self.scheduler);
        scheduler.end_some(self);
        self.scheduler = scheduler;
    }

    /// Checks a request's prompt. Returns the tokens of its own sequence, and the position behind the prompt.
    fn own_tokens(&self, request: &Request) -> Result<(Vec<u32>, usize)> {
        match &request.prompt {
            PromptTokens::Chunked(prompt) if !request.full_attention => {
                request.scaling.check()?;
                let config = self.model.config();
                let plan = PositionPlan::new(prompt, request.cell, config.max_positions)?;
                let layers = config.num_layers();
                let deepest = request.recompute.evidence().deepest_start(layers);
                if let Some(layer) = deepest.filter(|&layer| layer >= layers) {
                    let (what, value, limit) =
                        ("layer of a recompute strategy", layer as i128, layers as i128);
                    return Err(kvcore::Error::OutOfRange { what, value, limit }.into());
                }
                let question = prompt.question();
                Ok((question.to_vec(), plan.question_position as usize + question.len()))
            }
            prompt => {
                let tokens: Vec<u32> = prompt.iter().collect();
                self.check_length(&tokens)?;
                let end = tokens.len();
                Ok((tokens, end))
            }
        }
    }

    /// Checks that a sequence with these tokens and another one fits into the whole pool.
    fn check_room(&self, tokens: &[u32]) -> Result<()> {
        let Some(cache) = self.cache().as_paged() else { return Ok(()) };
        let (needed, total) =
            (tokens.len().div_ceil(cache.kv_pool().block_size()), cache.pool().counts().total);
        if needed > total {
            return Err(kvcore::Error::OutOfBlocks { asked: needed, free: total, evictable: 0, total }.into());
        }
        Ok(())
    }

    /// Gives a branch a sequence, with what is cached of its tokens.
    fn begin_branch(&mut self, live: &mut Live, branch: usize) -> Result<()> {
        let plain = parts::chunked(live).is_none();
        let root = *live.keys.root();
        let caches = self.caches.sequences_mut();
        let it = &mut live.branches[branch];
        if it.own.is_some() {
            return Ok(());
        }
        let (own, cached) = if plain && live.request.reuse {
            caches.create_with_prefix(root.into(), &it.tokens)?
        } else {
            (caches.create(it.start)?, 0)
        };
        (it.own, it.computed) = (Some(own), cached);
        if plain && branch == 0 {
            live.costs.cached_tokens = cached.min(it.prompt);
        }
        Ok(())
    }

    /// Takes a request's blocks away. Its tokens stay.
    fn withdraw(&mut self, live: &mut Live) {
        for branch in &mut live.branches {
            if let Some(own) = branch.own.take() {
                // The sequence is known: nobody else frees it.
                drop(self.caches.sequences_mut().free(own));
            }
            (branch.computed, branch.input) = (0, None);
        }
        (live.parts, live.context) = (Parts::None, Context::default());
    }

    /// Takes note of what a pass has computed of a request, and chooses the next token if there are logits.
    fn after(
        &mut self,
        live: &mut Live,
        feed: &Feed,
        input: SequenceInput,
        logits: Option<(&LogitRows, Range<usize>)>,
    ) -> Result<()> {
        let Some(branch) = feed.branch else {
            live.parts.add_done(feed.tokens);
            return Ok(());
        };
        if matches!(live.parts, Parts::Missing { .. }) {
            // The documents came in the same pass. Their segments are the stored ones from here on.
            self.advance_parts(live, &mut ())?;
        }
        let it = &mut live.branches[branch];
        if let Some(own) = it.own {
            self.caches.sequences_mut().commit(own, &input.tokens)?;
        }
        it.input = Some(input).filter(|input| input.tokens.len() == 1);
        let Some((rows, range)) = logits else { return Ok(()) };
        if it.given.is_some() {
            if live.request.keep_logits {
                it.logits.extend(range.filter_map(|row| rows.row(row)).map(<[f32]>::to_vec));
            }
            if it.left() == 0 {
                live.end_given(branch);
            }
            return Ok(());
        }
        match rows.row(range.start) {
            Some(logits) if it.answer().is_empty() => self.first_of(live, logits),
            Some(logits) => {
                self.choose(live, branch, logits);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Begins the answer, from the logits behind the prompt.
    fn first_of(&mut self, live: &mut Live, logits: &[f32]) -> Result<()> {
        if live.request.forced.is_none() || live.request.max_new_tokens == 0 {
            return self.fork(live, logits);
        }
        let longest = self.longest();
        live.give(longest, logits);
        Ok(())
    }

    /// Chooses the next token of a branch from its logits, and ends the branch if it is the last.
    fn choose(&self, live: &mut Live, branch: usize, logits: &[f32]) {
        let longest = self.longest() as i64;
        let it = &mut live.branches[branch];
        if live.request.max_new_tokens == 0 {
            live.end(branch, FinishReason::Length);
            return;
        }
        let token = it.sampler.sample(logits);
        it.ttft.get_or_insert_with(|| live.submitted.elapsed());
        if live.request.keep_logits {
            it.logits.push(logits.to_vec());
        }
        if !live.request.ignore_end && self.model.config().eos.contains(&token) {
            live.end(branch, FinishReason::Stop);
            return;
        }
        it.tokens.push(token);
        it.sampler.see([token]);
        live.sender.send(AnswerEvent::Token { sample: it.sample, token });
        let next = it.start.position + it.tokens.len() as i64;
        if it.answer().len() == live.request.max_new_tokens || next > longest {
            live.end(branch, FinishReason::Length);
        }
    }

    /// Chooses the first token of every sample from the logits behind the prompt. The samples share the prompt's blocks.
    fn fork(&mut self, live: &mut Live, logits: &[f32]) -> Result<()> {
        for sample in 1..live.request.samples {
            let Some(own) = live.branches[0].own else { break };
            let Some(cache) = self.caches.paged_mut() else { break };
            let twin = cache.fork(own)?;
            let sampling = live.request.sampling;
            let seed = sampling.seed.wrapping_add(sample as u64);
            let mut sampler = Sampler::new(Sampling { seed, ..sampling });
            sampler.see(live.request.prompt.iter());
            let first = &live.branches[0];
            live.branches.push(Branch {
                sample,
                own: Some(twin),
                start: first.start,
                tokens: first.tokens.clone(),
                prompt: first.prompt,
                computed: first.computed,
                input: None,
                sampler,
                logits: Vec::new(),
                given: None,
                ttft: None,
                over: false,
            });
        }
        for branch in 0..live.branches.len() {
            self.choose(live, branch, logits);
        }
        Ok(())
    }
}

impl Scheduler {
    fn step(&mut self, engine: &mut Engine, watch: &mut Watch<'_>) -> usize {
        self.end_some(engine);
        let mut plan = std::mem::take(&mut self.plan);
        self.plan(engine, &mut plan, watch);
        let mut tokens = 0;
        while !plan.feeds.is_empty() {
            tokens += self.pass(engine, &mut plan, watch);
        }
        for (rank, error) in plan.failed.drain(..) {
            if let Some(at) = self.place(rank) {
                self.fail(engine, at, error);
            }
        }
        self.plan = plan;
        self.leave(engine);
        if tokens == 0 {
            self.pause();
        }
        tokens
    }

    /// Ends what was cancelled, is too late or was declared complete.
    fn end_some(&mut self, engine: &mut Engine) {
        let now = engine.clock.millis();
        let fate = |live: &Live| {
            if live.sender.is_cancelled() {
                return Some(Error::Cancelled);
            }
            let limit =
                live.request.time_limit.filter(|_| live.deadline.is_some_and(|deadline| now >= deadline));
            limit.map(|limit| Error::TimeOut { limit })
        };
        let late: Vec<_> =
            self.waiting.iter().filter_map(|(&rank, live)| Some((rank, fate(live)?))).collect();
        for (rank, error) in late {
            if let Some(live) = self.waiting.remove(&rank) {
                live.sender.fail(error);
            }
        }
        let mut at = 0;
        while at < self.running.len() {
            if let Some(error) = fate(&self.running[at]) {
                self.fail(engine, at, error);
                continue;
            }
            let live = &mut self.running[at];
            for branch in 0..live.branches.len() {
                let it = &live.branches[branch];
                if !it.over && live.sender.is_complete(it.sample) {
                    live.end(branch, FinishReason::StopString);
                }
            }
            at += 1;
        }
        self.leave(engine);
    }

    /// Ends a running request with an error.
    fn fail(&mut self, engine: &mut Engine, at: usize, error: Error) {
        let mut live = self.running.remove(at);
        engine.withdraw(&mut live);
        live.sender.fail(error);
    }

    /// Lets go of the requests and samples that are over.
    fn leave(&mut self, engine: &mut Engine) {
        self.running.retain_mut(|live| {
            if live.is_over() {
                engine.withdraw(live);
                return false;
            }
            for branch in live.branches.iter_mut().filter(|branch| branch.over) {
                if let Some(own) = branch.own.take() {
                    drop(engine.caches.sequences_mut().free(own));
                }
            }
            true
        });
    }

    /// Computes those inputs of a plan that may be in one pass: of requests in the regime of the first. Returns the number of tokens.
    fn pass(&mut self, engine: &mut Engine, plan: &mut Plan, watch: &mut Watch<'_>) -> usize {
        let Some(first) = plan.feeds.first().and_then(|feed| self.place(feed.rank)) else {
            plan.feeds.clear();
            plan.batch.clear();
            return 0;
        };
        let ropes = self.running[first].ropes.clone();
        let together = |feed: &Feed| {
            self.place(feed.rank).is_some_and(|at| self.running[at].same_regime(&self.running[first]))
        };
        let (mut feeds, mut batch) = (std::mem::take(&mut plan.feeds), std::mem::take(&mut plan.batch));
        if !feeds.iter().all(together) {
            let others = feeds.iter().zip(&batch).filter(|(feed, _)| !together(feed));
            (plan.feeds, plan.batch) = others.map(|(feed, input)| (*feed, input.clone())).unzip();
            let mut kept = feeds.iter().map(together);
            batch.retain(|_| kept.next().unwrap_or(false));
            feeds.retain(together);
        }
        let tokens: usize = feeds.iter().map(|feed| feed.tokens).sum();
        let single = feeds.iter().all(|feed| feed.rank == feeds[0].rank);
        let observer = if single { watch.of(feeds[0].rank) } else { &mut () };
        let result = self.compute(engine, &ropes, &feeds, &batch, observer);
        match result {
            Ok(pass) => {
                let (mut row, mut counted) = (0, 0);
                for (feed, input) in feeds.iter().zip(batch.drain(..)) {
                    let wanted = match input.logits {
                        Logits::None => 0,
                        Logits::Last => 1,
                        Logits::All => feed.tokens,
                    };
                    let range = row..row + wanted;
                    row = range.end;
                    let logits = pass.logits.as_ref().filter(|_| wanted > 0).map(|rows| (rows, range));
                    let Some(at) = self.place(feed.rank) else { continue };
                    let live = &mut self.running[at];
                    // Shares by tokens, which add up to the whole.
                    let before = pass.flops * counted / tokens.max(1) as u64;
                    counted += feed.tokens as u64;
                    if feed.branch.is_none_or(|branch| live.branches[branch].answer().is_empty()) {
                        live.costs.flops += pass.flops * counted / tokens.max(1) as u64 - before;
                    }
                    if let Err(error) = engine.after(live, feed, input, logits) {
                        plan.failed.push((feed.rank, error));
                    }
                }
                self.logits = pass.logits.map(LogitRows::into_values).unwrap_or_default();
            }
            Err(error) => {
                if single {
                    plan.failed.push((feeds[0].rank, error));
                } else {
                    let error = Arc::new(error);
                    let of = |feed: &Feed| (feed.rank, Error::Pass(Arc::clone(&error)));
                    plan.failed.extend(feeds.iter().map(of));
                }
            }
        }
        if plan.feeds.is_empty() {
            feeds.clear();
            batch.clear();
            (plan.feeds, plan.batch) = (feeds, batch);
        }
        tokens
    }

    /// Runs one pass: a decode step, for which there may be a graph, if every input is one token of an answer.
    fn compute(
        &mut self,
        engine: &mut Engine,
        ropes: &LayerRopes,
        feeds: &[Feed],
        batch: &[SequenceInput],
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        let answers = |feed: &Feed| {
            let live = self.place(feed.rank).map(|at| &self.running[at]);
            let branch = feed.branch.zip(live).map(|(branch, live)| &live.branches[branch]);
            feed.tokens == 1 && branch.is_some_and(|branch| !branch.answer().is_empty())
        };
        if feeds.iter().all(answers) {
            return engine.decode(ropes, batch, std::mem::take(&mut self.logits));
        }
        Ok(engine.model.forward(&engine.device(), ropes, batch, observer)?)
    }

    /// Returns the place of a running request.
    fn place(&self, rank: Rank) -> Option<usize> {
        self.running.binary_search_by_key(&rank, Live::rank).ok()
    }

    /// Waits a moment for what another engine computes, since there is nothing else to do.
    fn pause(&self) {
        let waiter = self.running.iter().find_map(|live| match &live.parts {
            Parts::Missing { assembly, .. } => assembly.waiters().next(),
            _ => None,
        });
        if let Some(waiter) = waiter {
            waiter.wait_for(PAUSE);
        }
    }
}
