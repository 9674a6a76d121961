//! An engine: a model with its caches.

use std::sync::Arc;

use kvchunk::{ChunkCacheManager, ReplicaDevice, ReplicaLink, ReplicaTransport};
use kvcore::{
    Backend, BlockKey, Clock, GraphCounts, KeyForm, KeyScope, KvCache, LayerRopes, StepBatch, Stream,
    SystemClock,
};
use kvmodel::{ComputeDevice, DecodeMemory, Forward, Model, Observer, PassMemory, Profiler, PromptTokens};

use crate::caches::{CacheReport, Caches};
use crate::calibrate::{StaticScales, calibrate};
use crate::config::EngineConfig;
use crate::error::Result;
use crate::request::Request;
use crate::serve::{Scheduler, StepTimes, SwapSpace};

/// An engine that runs requests on one backend.
#[derive(Debug)]
pub struct Engine {
    pub(crate) model: Model,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) stream: Arc<dyn Stream>,
    pub(crate) caches: Caches,
    pub(crate) keys: KeyForm,
    /// The scales of an fp8 cache.
    scales: Option<StaticScales>,
    /// The parts of every key except the rotary embeddings of a request.
    scope: KeyScope,
    tenant_salt: Vec<u8>,
    pub(crate) profiler: Profiler,
    pub(crate) decode_memory: DecodeMemory,
    pass_memory: PassMemory,
    /// The link to other engines of the model.
    pub(crate) replicas: Option<ReplicaLink>,
    /// The requests that are answered together.
    pub(crate) scheduler: Scheduler,
    /// The clock of time limits.
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) times: StepTimes,
    /// Host memory for requests that give way.
    pub(crate) swap: SwapSpace,
}

impl Engine {
    /// Creates an engine and allocates its caches. `tokenizer` identifies the tokenizer in keys.
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::NotEnoughMemory`] if the budget does not hold one block for each pool, or
    ///   the sequence of a static cache.
    /// - Returns the errors of [`ArenaSleep::new`](kvchunk::ArenaSleep::new), such as a budget for sleep that
    ///   holds no block.
    /// - Returns [`Error::NoChunks`](crate::Error::NoChunks) if
    ///   [`chunk_sleep`](EngineConfig::chunk_sleep) is set for a static or a grouped cache.
    /// - Returns [`Error::NoSleepMode`](crate::Error::NoSleepMode) if sleep mode is on for a
    ///   static or a grouped cache.
    /// - Returns [`kvcore::Error::Unsupported`] for sleep mode on a backend that cannot reserve memory.
    pub fn new(
        model: Model,
        backend: Arc<dyn Backend>,
        tokenizer: &[u8],
        config: &EngineConfig,
    ) -> Result<Self> {
        Self::with_clock(model, backend, tokenizer, config, Arc::new(SystemClock::default()))
    }

    /// Creates an engine as [`new`](Self::new) does, with another clock for time limits, waits and whatever expires: for tests and
    /// simulations.
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
        let stream = backend.stream()?;
        // Before the caches take their memory.
        let device = (backend.as_ref(), stream.as_ref());
        let scales = calibrate(&model, device, (config.kv_format, config.keys))?;
        let caches = Caches::new(&model, &backend, &stream, config, &clock)?;
        if let Some(scales) = &scales {
            scales.set(&model, caches.arenas(), stream.as_ref())?;
        }
        let scope = scope_of(&model, tokenizer, &caches, config.keys, &config.tenant_salt, scales.as_ref());
        let profiler = if config.profile { Profiler::enabled() } else { Profiler::disabled() };
        Ok(Self {
            model,
            backend,
            stream,
            caches,
            keys: config.keys,
            scales,
            scope,
            tenant_salt: config.tenant_salt.clone(),
            profiler,
            decode_memory: DecodeMemory::new(config.graphs),
            pass_memory: PassMemory::default(),
            replicas: None,
            scheduler: Scheduler::new(config.scheduling),
            clock,
            times: StepTimes::default(),
            swap: SwapSpace::new(config.swap_memory),
        })
    }

    /// Creates an engine for another model in the same memory. Both engines share the pools of sequences and
    /// of chunks, and each may evict what the other no longer holds. Neither engine finds what the other has
    /// cached, since every key covers the model, its rotary embeddings and its tokenizer.
    ///
    /// An fp8 cache keeps the scales of this engine's model, so that a replica of the other model that was made
    /// by [`new`](Self::new) does not find its chunks.
    ///
    /// The work of both engines goes to one stream, so one engine may meet a late error of the other. Both
    /// use the tenants and the chunk cache settings of this engine, and [`report`](Self::report) counts the
    /// blocks of both. A request does not wait for blocks that the other engine holds; it fails with
    /// [`OutOfBlocks`](kvcore::Error::OutOfBlocks).
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::Mismatch`] if the model has other extents.
    /// - Returns [`Error::NoChunks`](crate::Error::NoChunks) if this engine has a static or a grouped cache.
    /// - Returns [`Error::NoSleepMode`](crate::Error::NoSleepMode) if the pools of this engine can sleep.
    pub fn beside(&self, model: Model, tokenizer: &[u8]) -> Result<Self> {
        let caches = self.caches.shared(&model)?;
        let scales = self.scales.clone();
        let scope = scope_of(&model, tokenizer, &caches, self.keys, &self.tenant_salt, scales.as_ref());
        let profiler = if self.profiler.is_enabled() { Profiler::enabled() } else { Profiler::disabled() };
        Ok(Self {
            model,
            backend: Arc::clone(&self.backend),
            stream: Arc::clone(&self.stream),
            caches,
            keys: self.keys,
            scales,
            scope,
            tenant_salt: self.tenant_salt.clone(),
            profiler,
            decode_memory: DecodeMemory::new(self.decode_memory.most()),
            pass_memory: PassMemory::default(),
            replicas: None,
            scheduler: Scheduler::new(self.scheduler.limits()),
            clock: Arc::clone(&self.clock),
            times: StepTimes::default(),
            swap: SwapSpace::new(self.swap.memory),
        })
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Creates a request in the compute mode and position strategy of [`EngineConfig::chunks`].
    pub fn request(&self, prompt: PromptTokens) -> Request {
        let cell = self.chunks().map(|chunks| chunks.config().cell()).unwrap_or_default();
        Request { cell, ..Request::new(prompt) }
    }

    /// Returns the backend. Its counters show the bytes that moved.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Returns the profiler. It records only if [`EngineConfig::profile`] is set.
    pub fn profiler(&self) -> &Profiler {
        &self.profiler
    }

    /// Returns the cache of sequences and system prompts; of a grouped cache that of its first group, whose sequences have the ids and
    /// lengths of all. [`report`](Self::report) has the others.
    pub fn cache(&self) -> &dyn KvCache {
        self.caches.sequences()
    }

    /// Returns the chunk cache, or `None` if the engine has a static or a grouped cache.
    pub fn chunks(&self) -> Option<&ChunkCacheManager> {
        self.caches.chunks()
    }

    /// Joins a group of engines of the same model. From now on this engine pulls missing chunks from the
    /// others, and computes only chunks that none of them gives. Each engine serves its
    /// [`chunks`](Self::chunks) with its [`replica_device`](Self::replica_device). Engines with fp8 caches must
    /// have calibrated to the same scales, which needs the same backend and instruction set.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::sync::Arc;
    /// use kvbackend_cpu::CpuBackend;
    /// use kvchunk::{ChunkedPrompt, LocalReplica};
    /// use kvengine::{Engine, EngineConfig};
    /// use kvmodel::{Model, ModelConfig, PromptTokens, WeightFormat, Weights};
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
        self.replicas = Some(ReplicaLink { device: self.replica_device(), transport });
    }

    /// Returns the memory of this engine's chunks, for engines that pull them.
    pub fn replica_device(&self) -> ReplicaDevice {
        ReplicaDevice {
            backend: Arc::clone(&self.backend),
            stream: Arc::clone(&self.stream),
            arena: self.caches.sequences().arena().clone(),
            keys: self.keys,
        }
    }

    /// Returns the numbers of decode steps that graphs could serve, by the way in which they ran. All are 0 where the
    /// backend or the dense steps cannot be captured.
    pub fn graph_counts(&self) -> GraphCounts {
        self.decode_memory.counts()
    }

    /// Returns the present contents of the caches, in numbers.
    pub fn report(&self) -> CacheReport {
        CacheReport { swapped: self.swap.counts(), ..self.caches.report() }
    }

    /// Checks the pools. `Err` says which number is inconsistent.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.caches.check_invariants()?;
        self.swap.check_invariants()
    }

    /// Returns the root of the keys of requests in the regime of `ropes`. Another regime is a miss, for
    /// prefixes and chunks alike.
    pub(crate) fn root(&self, ropes: &LayerRopes) -> BlockKey {
        self.scope.clone().ropes(ropes).root()
    }

    /// Runs a decode step in the memory that stays, by a graph if there may be one. Allocates nothing of its own.
    pub(crate) fn decode(
        &mut self,
        ropes: &LayerRopes,
        batch: StepBatch<'_>,
        logits: Vec<f32>,
    ) -> Result<Forward> {
        let device = device_of(&self.backend, &self.stream, &self.caches, self.keys, &self.profiler);
        Ok(self.model.decode(&device, ropes, batch, &mut self.decode_memory, logits)?)
    }

    /// Runs a pass in memory that stays.
    pub(crate) fn forward(
        &mut self,
        ropes: &LayerRopes,
        batch: StepBatch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        let device = device_of(&self.backend, &self.stream, &self.caches, self.keys, &self.profiler);
        Ok(self.model.begin(&device, ropes, batch, &mut self.pass_memory)?.end(observer)?)
    }

    pub(crate) fn device(&self) -> ComputeDevice<'_> {
        device_of(&self.backend, &self.stream, &self.caches, self.keys, &self.profiler)
    }
}

/// Joins the parts of an engine that a pass runs on, so that the others stay free to be changed.
fn device_of<'a>(
    backend: &'a Arc<dyn Backend>,
    stream: &'a Arc<dyn Stream>,
    caches: &'a Caches,
    keys: KeyForm,
    profiler: &'a Profiler,
) -> ComputeDevice<'a> {
    let arenas = caches.arenas();
    ComputeDevice { backend: backend.as_ref(), stream: stream.as_ref(), arenas, keys, profiler }
}

/// Returns the parts of every key of an engine except the rotary embeddings of a request.
fn scope_of(
    model: &Model,
    tokenizer: &[u8],
    caches: &Caches,
    keys: KeyForm,
    tenant_salt: &[u8],
    scales: Option<&StaticScales>,
) -> KeyScope {
    let scope = KeyScope::new("kvmodel", model.revision()).tokenizer(tokenizer);
    let layouts = caches.arenas().iter().map(|arena| arena.layout().shape());
    let scope = layouts.fold(scope, KeyScope::layout).keys(keys).tenant_salt(tenant_salt);
    match scales {
        Some(StaticScales { k, v }) => scope.static_scales(k, v),
        None => scope,
    }
}
