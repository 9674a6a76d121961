//! The engine: the public interface to a runner and its scheduler.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;

use kvchunk::{
    ChunkCacheManager, LoadRule, ReplicaDevice, ReplicaLink, ReplicaTransport, TierLink, TierMetrics,
};
use kvcore::{Backend, BlockKey, Clock, GraphCounts, KvCache, SystemClock};
use kvmodel::{Model, Observer, Profiler};
use kvtier::{Slab, SlabConfig};

use crate::config::{EngineConfig, PoolTag, Scheduling};
use crate::error::{Error, Result};
use crate::request::{FinishReason, Generation, PromptTokens, Request};
use crate::runner::{CacheReport, PinnedPrompt, Runner, Slept};
use crate::serve::{
    Answer, AnswerEvent, PreemptionCosts, RestoredPrompt, SavedPrompt, Scheduler, Step, StepTimes,
};

/// An engine that runs requests on one backend.
#[derive(Debug)]
pub struct Engine {
    runner: Runner,
    scheduler: Scheduler,
}

impl Engine {
    /// Creates an engine and allocates its caches. `tokenizer` identifies the tokenizer and becomes part of
    /// every key.
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::NotEnoughMemory`] if the budget is too small for one block per pool, or for
    ///   the sequence of a static cache.
    /// - Returns the errors of [`ArenaSleep::new`](kvchunk::ArenaSleep::new), for example if the budget for
    ///   sleep is too small for one block.
    /// - Returns [`Error::NoChunks`] if [`chunk_sleep`](EngineConfig::chunk_sleep) is set for a static or a
    ///   grouped cache.
    /// - Returns [`Error::NoSleepMode`] if sleep mode is on for a static or a grouped cache.
    /// - Returns [`kvcore::Error::Unsupported`] for sleep mode on a backend that cannot reserve memory.
    pub fn new(
        model: Model,
        backend: Arc<dyn Backend>,
        tokenizer: &[u8],
        config: &EngineConfig,
    ) -> Result<Self> {
        Self::with_clock(model, backend, tokenizer, config, Arc::new(SystemClock::default()))
    }

    /// Creates an engine like [`new`](Self::new), but uses `clock` for time limits, waits and expiry. For
    /// tests and simulations.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    pub fn with_clock(
        model: Model,
        backend: Arc<dyn Backend>,
        tokenizer: &[u8],
        config: &EngineConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let runner = Runner::new(model, backend, tokenizer, config, clock)?;
        Ok(Self { runner, scheduler: Scheduler::new(config) })
    }

    /// Creates an engine for another model in the same memory. Both engines share the pools of sequences and
    /// of chunks, and each may evict cached blocks of the other. Neither engine finds the other's cached
    /// contents, because every key covers the model, its rotary embeddings and its tokenizer.
    ///
    /// An fp8 cache keeps the scales of this engine's model, and scales are part of every key. An engine that
    /// was created with [`new`](Self::new) for the other model therefore does not find the new engine's
    /// chunks.
    ///
    /// Both engines enqueue their work on the same stream, so a delayed error that one engine caused may be
    /// reported to the other. Both use the tenants and the chunk cache settings of this engine, and
    /// [`report`](Self::report) counts the blocks of both engines. A request does not wait for blocks that
    /// the other engine holds; it fails with [`OutOfBlocks`](kvcore::Error::OutOfBlocks), or ends with
    /// [`FinishReason::Length`] if its answer has begun.
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::Mismatch`] if the keys and values of `model` differ in shape from this
    ///   engine's.
    /// - Returns [`Error::NoChunks`] if this engine has a static or a grouped cache.
    /// - Returns [`Error::NoSleepMode`] if this engine's pools can sleep.
    pub fn sharing_memory(&self, model: Model, tokenizer: &[u8]) -> Result<Self> {
        let runner = self.runner.sharing(model, tokenizer)?;
        Ok(Self { runner, scheduler: self.scheduler.like() })
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.runner.model
    }

    /// Creates a request that uses the compute mode and position strategy of [`EngineConfig::chunks`].
    pub fn request(&self, prompt: impl Into<Arc<PromptTokens>>) -> Request {
        let cell = self.chunks().map(|chunks| chunks.config().cell()).unwrap_or_default();
        Request { cell, ..Request::new(prompt) }
    }

    /// Returns the backend. Its counters include the number of bytes copied so far.
    pub fn backend(&self) -> &dyn Backend {
        self.runner.setup.backend.as_ref()
    }

    /// Returns the profiler. It records only if [`EngineConfig::profile`] is set.
    pub fn profiler(&self) -> &Profiler {
        &self.runner.profiler
    }

    /// Returns the cache of sequences and system prompts. If the cache is grouped, returns the first group's
    /// cache; sequences have the same IDs and lengths in all groups. [`report`](Self::report) also describes
    /// the other groups.
    pub fn cache(&self) -> &dyn KvCache {
        self.runner.caches.sequences.first()
    }

    /// Returns the chunk cache, or `None` if the engine has a static or a grouped cache.
    pub fn chunks(&self) -> Option<&ChunkCacheManager> {
        self.runner.caches.chunks()
    }

    /// Joins a group of engines with the same model. After this call, this engine pulls missing chunks from
    /// the other engines, and computes only the chunks that no engine supplies. To share its own chunks, an
    /// engine must serve its [`chunks`](Self::chunks) with its [`replica_device`](Self::replica_device).
    /// Engines with fp8 caches must have been calibrated to the same scales, which requires the same backend
    /// and instruction set.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::sync::Arc;
    /// use kvbackend_cpu::CpuBackend;
    /// use kvchunk::{ChunkedPrompt, LocalReplica};
    /// use kvengine::{Engine, EngineConfig, PromptTokens};
    /// use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
    ///
    /// let mut engines = Vec::new();
    /// for replica in LocalReplica::group(2) {
    ///     let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::Stored)?;
    ///     let mut engine = Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default())?;
    ///     replica.serve(engine.chunks().unwrap(), &engine.replica_device());
    ///     engine.join(Arc::new(replica));
    ///     engines.push(engine);
    /// }
    /// let prompt = ChunkedPrompt::new(vec![9], vec![vec![1, 2, 3]], vec![4])?;
    /// for engine in &mut engines {
    ///     let mut request = engine.request(PromptTokens::Chunked(prompt.clone()));
    ///     request.max_new_tokens = 1;
    ///     engine.generate(&request, &mut ())?;
    /// }
    /// assert_eq!(engines[1].chunks().unwrap().metrics().fetched, 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn join(&mut self, transport: Arc<dyn ReplicaTransport>) {
        self.runner.replicas = Some(ReplicaLink { device: self.replica_device(), transport });
    }

    /// Opens a [slab](kvtier::Slab) in `folder`, so that chunks and prefixes outlive the process. The engine saves
    /// what it computes, and loads what is missing if that is [faster](LoadRule) than computing it. A request that
    /// loads waits for its records before it is admitted, while the steps serve other requests. No request waits
    /// until its chunks are saved; dropping the engine does.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kvbackend_cpu::CpuBackend;
    /// use kvchunk::{ChunkedPrompt, LoadRule};
    /// use kvengine::{Engine, EngineConfig, PromptTokens};
    /// use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
    /// use kvtier::SlabConfig;
    ///
    /// let folder = tempfile::tempdir()?;
    /// let prompt = ChunkedPrompt::new(vec![9], vec![vec![1, 2, 3]], vec![4])?;
    /// let mut found = Vec::new();
    /// for start in 0..2 {
    ///     let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::Stored)?;
    ///     let mut engine = Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default())?;
    ///     engine.open_disk(folder.path(), SlabConfig { limit: 16 << 20, ..SlabConfig::default() })?;
    ///     engine.load_from_disk(LoadRule::Always(std::time::Duration::from_secs(10)));
    ///     let mut request = engine.request(PromptTokens::Chunked(prompt.clone()));
    ///     request.max_new_tokens = 1;
    ///     engine.generate(&request, &mut ())?;
    ///     found.push(engine.disk().unwrap().usage().hits);
    /// }
    /// assert_eq!(found, [0, 2]); // the system prompt and the chunk
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Slab::open`] and of [`use_disk`](Self::use_disk).
    pub fn open_disk(&mut self, folder: &Path, config: SlabConfig) -> Result<()> {
        self.use_disk(|scope| Slab::open(folder, scope, config))
    }

    /// Uses the slab that `open` returns, as [`open_disk`](Self::open_disk) does. `open` gets the key of everything
    /// that each key of this engine covers.
    ///
    /// # Errors
    /// Returns the errors of `open`, and [`Error::NoChunks`] unless the cache is paged, because records contain
    /// all layers of a block.
    pub fn use_disk(&mut self, open: impl FnOnce(BlockKey) -> kvtier::Result<Slab>) -> Result<()> {
        self.runner.caches.paged_cache()?;
        let slab = Arc::new(open(self.runner.scope())?);
        self.runner.tier = Some(TierLink::new(self.replica_device(), slab));
        Ok(())
    }

    /// Returns whether the disk has everything that it can store for a prompt in parts: its system prompt and its
    /// documents. Returns false without a disk.
    ///
    /// # Errors
    /// Returns the errors of [`submit`](Self::submit) about the prompt itself.
    pub fn is_saved(&self, request: &Request) -> Result<bool> {
        crate::serve::is_saved(&self.runner, request)
    }

    /// Saves what the caches have of a prompt to a file, to be [restored](Self::restore_prompt) by another process with
    /// the same model, tokenizer and settings. Of an ordinary prompt, these are its whole blocks; of a prompt in parts,
    /// its system prompt, its decoys and its documents. To save an answer with its prompt, give a request whose prompt
    /// ends with the answer. The file appears when it is complete, in place of an older one.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kvbackend_cpu::CpuBackend;
    /// use kvengine::{Engine, EngineConfig, PromptTokens};
    /// use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let file = folder.path().join("prompt.kv");
    /// let engine = || -> Result<Engine, Box<dyn std::error::Error>> {
    ///     let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::Stored)?;
    ///     Ok(Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default())?)
    /// };
    /// let mut first = engine()?;
    /// let request = first.request(PromptTokens::Plain((0..40).collect()));
    /// first.generate(&request, &mut ())?;
    /// assert_eq!(first.save_prompt(&request, &file)?.tokens, 32); // two blocks of 16
    ///
    /// let mut second = engine()?;
    /// second.restore_prompt(&file, None)?;
    /// assert_eq!(second.generate(&request, &mut ())?.cached_tokens, 32);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - Returns [`Error::NoChunks`] unless the cache is paged.
    /// - Returns the errors of [`submit`](Self::submit) about the prompt itself, of the backend and of the file
    ///   system. An older file stays.
    pub fn save_prompt(&self, request: &Request, path: &Path) -> Result<SavedPrompt> {
        crate::serve::save_prompt(&self.runner, request, path)
    }

    /// Puts the contents of a file that [`save_prompt`](Self::save_prompt) has written into the caches, where prompts
    /// with the same parts find them. Documents count towards the quota of the tenant with this tag. What the caches
    /// have no room for is counted.
    ///
    /// # Errors
    /// - Returns [`kvtier::Error::OtherScope`] for a file of another model, tokenizer or format,
    ///   [`kvtier::Error::DamagedFile`] for a damaged one, and other errors of [`kvtier::RecordReader`]. What was read
    ///   before the damage is in the caches.
    /// - Returns [`Error::NoChunks`] unless the cache is paged, [`kvchunk::Error::UnknownTenant`], and the errors of
    ///   the backend.
    pub fn restore_prompt(&mut self, path: &Path, tenant: Option<&str>) -> Result<RestoredPrompt> {
        self.runner.caches.check_awake()?;
        crate::serve::restore_prompt(&self.runner, path, tenant)
    }

    /// Sets the rule for loading from the [disk](Self::open_disk) instead of computing. Without a disk, nothing
    /// changes.
    pub fn load_from_disk(&mut self, rule: LoadRule) {
        if let Some(tier) = &mut self.runner.tier {
            tier.rule = rule;
        }
    }

    /// Returns the metrics of the [disk](Self::open_disk), or `None` without one.
    pub fn disk_metrics(&self) -> Option<TierMetrics> {
        self.runner.tier.as_ref().map(TierLink::metrics)
    }

    /// Stops using the disk, and waits until everything is saved.
    pub fn close_disk(&mut self) {
        self.runner.tier = None;
    }

    /// Returns the slab that [`open_disk`](Self::open_disk) has opened.
    pub fn disk(&self) -> Option<&Slab> {
        self.runner.tier.as_ref().map(|tier| tier.slab.as_ref())
    }

    /// Returns the memory that holds this engine's chunks, so that other engines can pull them.
    pub fn replica_device(&self) -> ReplicaDevice {
        self.runner.replica_device()
    }

    /// Counts the decode steps that the graph cache has run, by how they ran. All counts are 0 if the backend
    /// or the dense steps do not support capture.
    pub fn graph_counts(&self) -> GraphCounts {
        self.runner.graph_counts()
    }

    /// Returns a report on the current contents of the caches.
    pub fn report(&self) -> CacheReport {
        CacheReport { swapped: self.scheduler.swapped(), ..self.runner.caches.report() }
    }

    /// Checks the pools for consistency. Returns a description of the first inconsistency as `Err`.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.runner.caches.check_invariants()?;
        self.scheduler.check_invariants()
    }

    /// Answers a request. Requests that were submitted earlier are computed in the same steps. Calls
    /// `observer` after each layer of the prefill and after each token of the answer. The observer may stop
    /// the request at any of these calls. It may also end the answer after any token, as a
    /// [`TextStream`](kvmodel::TextStream) does at a stop string. Only one answer is sampled.
    ///
    /// # Errors
    /// After an error, no blocks are held for the request.
    ///
    /// - Returns [`Error::Cancelled`] if the observer stops the request.
    /// - Returns [`Error::Sampling`] if a sampling setting is out of range.
    /// - Returns [`Error::EmptyPrompt`], [`kvmodel::Error::TokenOutOfVocabulary`] or
    ///   [`kvchunk::Error::TooLong`] if the prompt cannot be computed.
    /// - Returns [`kvcore::Error::OutOfBlocks`] if the pool is too small for the prompt, and
    ///   [`kvcore::Error::TooLarge`] if a static cache is too short for the prompt. An answer that outgrows the
    ///   pool is no error: it ends with [`FinishReason::Length`].
    /// - Returns [`Error::CacheOverflow`] or [`Error::NotNumbers`] if the model's logits are not numbers.
    /// - Returns [`Error::Asleep`] if the pool of sequences is [asleep](Self::sleep).
    ///
    /// # Panics
    /// Panics if `observer`, the backend or the request's strategy does. Before the panic continues, the request
    /// is ended, so no blocks are held for it.
    pub fn generate(&mut self, request: &Request, observer: &mut dyn Observer) -> Result<Generation> {
        let generated = catch_unwind(AssertUnwindSafe(|| self.generate_observed(request, observer)));
        generated.unwrap_or_else(|panic| {
            // The answer was dropped, so the request is cancelled.
            self.scheduler.end_some(&mut self.runner);
            resume_unwind(panic)
        })
    }

    fn generate_observed(&mut self, request: &Request, observer: &mut dyn Observer) -> Result<Generation> {
        let mut answer = self.submit(Request { samples: 1, ..request.clone() })?;
        let (mut seen, mut complete) = (0, None);
        loop {
            while let Some(event) = answer.try_next() {
                match event? {
                    AnswerEvent::Token { token, .. } if complete.is_none() => {
                        seen += 1;
                        if observer.token(token).is_break() {
                            drop(answer);
                            self.scheduler.end_some(&mut self.runner);
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
            self.runner.caches.check_awake()?;
            self.scheduler.step(&mut self.runner, Some(answer.id()), observer);
        }
    }

    /// Accepts a request. [`step`](Self::step) computes it together with other requests.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kvbackend_cpu::CpuBackend;
    /// use kvengine::{AnswerEvent, Engine, EngineConfig, PromptTokens, Request};
    /// use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
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
    /// Returns the errors of [`generate`](Self::generate) that depend on the request alone, and
    /// - [`Error::Samples`] for several samples or beams on a static cache,
    /// - [`Error::TooManyAnswers`] for more samples or beams than may run at once,
    /// - [`Error::Beams`] for beams combined with sampling settings, or fewer beams than answers,
    /// - [`Error::Pages`] for sparse decoding that leaves no blocks to choose, for a model whose layers all
    ///   have windows, or on a grouped cache,
    /// - [`kvcore::Error::OutOfBlocks`] if a pool cannot hold the prompt and a token even without other
    ///   requests.
    pub fn submit(&mut self, request: Request) -> Result<Answer> {
        self.runner.caches.check_awake()?;
        self.scheduler.submit(&self.runner, request)
    }

    /// Runs one step for the submitted requests: a token for each answer, and pieces of prompts. An error of
    /// a single request is delivered to its [`Answer`].
    ///
    /// If the backend or a request's strategy panics, the panic continues in the caller after all requests that
    /// have begun have ended with [`Error::Interrupted`]. Waiting requests are answered by later steps.
    ///
    /// # Errors
    /// Returns [`Error::Asleep`] if the pool of sequences is [asleep](Self::sleep).
    pub fn step(&mut self) -> Result<Step> {
        self.runner.caches.check_awake()?;
        Ok(self.scheduler.step(&mut self.runner, None, &mut ()))
    }

    /// Returns the total time of all steps.
    pub fn step_times(&self) -> StepTimes {
        self.scheduler.times()
    }

    /// Replaces the measured costs of preemption with `costs`, for tests and simulations.
    pub fn set_preemption_costs(&mut self, costs: PreemptionCosts) {
        self.scheduler.set_preemption_costs(costs);
    }

    /// Pins the cached blocks at the start of a request's prompt, or the system prompt and the documents of a prompt in
    /// parts. This call computes nothing, so a request with the same start or documents must have been answered
    /// before. Only requests with the same tenant and RoPE regime can find the blocks.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kvbackend_cpu::CpuBackend;
    /// use kvengine::{Engine, EngineConfig, PromptTokens, Request};
    /// use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
    ///
    /// let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::Stored)?;
    /// let mut engine = Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default())?;
    /// let instructions = Request::new(PromptTokens::Plain((0..40).collect()));
    /// engine.generate(&instructions, &mut ())?;
    /// let pinned = engine.pin(&instructions)?;
    /// assert_eq!(pinned.tokens(), 32); // two whole blocks
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::NoChunks`] for a static or a grouped cache, and errors caused by the request's tenant
    /// or positions.
    pub fn pin(&self, request: &Request) -> Result<PinnedPrompt> {
        crate::serve::pin(&self.runner, request)
    }

    /// Returns the limits of the scheduler, within the bounds that are possible.
    pub fn scheduling(&self) -> Scheduling {
        self.scheduler.limits()
    }

    /// Puts whole pools to sleep and releases their device memory. Pools that are already asleep stay asleep.
    /// If one of the pools cannot sleep, this call wakes the pools that it has already put to sleep.
    ///
    /// While the chunk pool sleeps, requests are answered without it. While the pool of sequences sleeps,
    /// [`generate`](Self::generate) returns [`Error::Asleep`].
    ///
    /// ```no_run
    /// # use kvengine::{Engine, PoolTag, Request};
    /// # fn idle(engine: &mut Engine, request: &Request) -> kvengine::Result<()> {
    /// let slept = engine.sleep(&PoolTag::ALL)?;
    /// println!("{} MiB are free for others", slept.released_bytes >> 20);
    /// engine.wake_up(&PoolTag::ALL)?;
    /// engine.generate(request, &mut ())?; // chunks are hits as before
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - Returns [`Error::NoSleepMode`] if [`enable_sleep_mode`](EngineConfig::enable_sleep_mode) is
    ///   not set.
    /// - Returns [`Error::InUse`] or [`kvchunk::Error::PoolInUse`], with the counts, if blocks are held, and
    ///   [`Error::Waiting`] if requests wait for the pool of sequences.
    /// - Returns the errors of [`ReservedArena::sleep`](kvcore::ReservedArena::sleep).
    pub fn sleep(&mut self, tags: &[PoolTag]) -> Result<Slept> {
        let mut sum = Slept::default();
        let mut fallen: Vec<PoolTag> = Vec::new();
        for &tag in tags {
            if self.is_sleeping(tag) {
                continue;
            }
            let slept = match (tag, self.scheduler.report(0).waiting) {
                // Nothing would go on with them, nor end them at their time limit.
                (PoolTag::KvCache, requests @ 1..) => Err(Error::Waiting { requests }),
                _ => self.runner.caches.sleep(tag, self.runner.setup.stream.as_ref()),
            };
            match slept {
                Ok(slept) => {
                    fallen.push(tag);
                    sum.released_bytes += slept.released_bytes;
                    sum.saved_bytes += slept.saved_bytes;
                }
                Err(error) => {
                    self.wake_up(&fallen)?;
                    return Err(error);
                }
            }
        }
        Ok(sum)
    }

    /// Wakes pools. Chunks are restored bit for bit, in the same blocks. Returns true if at least one of the
    /// pools was asleep.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Allocation`] if there is not enough memory, and the errors of the stream. In
    /// these cases, the pool stays asleep and can be woken later. Returns [`Error::NoSleepMode`] if sleep
    /// mode is off.
    pub fn wake_up(&mut self, tags: &[PoolTag]) -> Result<bool> {
        let mut slept = false;
        for &tag in tags {
            slept |= self.runner.caches.wake(tag, self.runner.setup.stream.as_ref())?;
        }
        Ok(slept)
    }

    /// Returns true if the pool is asleep.
    pub fn is_sleeping(&self, tag: PoolTag) -> bool {
        self.runner.caches.is_sleeping(tag)
    }
}
