//! The engine: a model with its caches, which answers one request after another.

use std::sync::Arc;

use kvchunk::{ChunkCacheConfig, ChunkCacheManager, ReplicaDevice, ReplicaLink, ReplicaTransport, SleepForm};
use kvcore::{
    Backend, BlockKey, CacheKind, DType, GraphCounts, KeyForm, KeyScope, KvCache, KvFormat, LayerRopes,
    MaxLen, Stream,
};

use crate::error::Result;
use crate::model::{ComputeDevice, DecodeMemory, Model};
use crate::profile::Profiler;
use crate::text::PromptTokens;

mod blend;
mod caches;
mod calibrate;
mod chunked;
mod follow;
mod generate;
mod inquire;
mod request;
mod sleep;
mod tuned;

pub use caches::CacheReport;
use caches::Caches;
use calibrate::{StaticScales, calibrate};
pub use request::{FinishReason, Generation, Request};
pub use sleep::{PoolTag, Slept};
pub use tuned::{TunedBy, TunedReuse};

/// The settings of an engine: the memory of its caches, and their layout.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// The format in which keys and values are stored. The scales of an fp8 format are set when the engine is
    /// made, by a pass over 256 sample tokens.
    pub kv_format: KvFormat,
    /// The form in which keys are stored, rotated or not.
    pub keys: KeyForm,
    /// The number of tokens per block.
    pub block_size: usize,
    /// The kind of cache that holds sequences. A static cache keeps no chunks, so a chunked prompt must ask
    /// for full attention.
    pub cache: CacheKind,
    /// The longest sequence of a static cache.
    pub max_len: MaxLen,
    /// The memory for keys and values in bytes. `None` takes enough for eight prompts of the model's longest
    /// length, or at most [`DEFAULT_KV_MEMORY`].
    pub kv_memory: Option<usize>,
    /// The settings of the chunk cache.
    pub chunks: ChunkCacheConfig,
    /// The place where chunks sleep; `None` for none. Chunks fall asleep by a call of
    /// [`sleep_cold_chunks`](ChunkCacheManager::sleep_cold_chunks) on [`Engine::chunks`]. A hit wakes them.
    pub chunk_sleep: Option<ChunkSleep>,
    /// Lets whole pools [sleep](Engine::sleep). For this, address space is reserved, so that memory can be
    /// released and come back at the same addresses.
    pub enable_sleep_mode: bool,
    /// The salt that separates tenants in keys. The operator of the engine chooses it, never a client.
    pub tenant_salt: Vec<u8>,
    /// The largest number of graphs of decode steps, where backend and dense steps can be captured. 0 runs every step
    /// operation by operation. Answers are the same.
    pub graphs: usize,
    /// Turns on the recording of spans.
    pub profile: bool,
}

/// A place in host memory for chunks that are seldom used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSleep {
    /// The form in which chunks sleep.
    pub form: SleepForm,
    /// The largest number of bytes of host memory. `None` takes as many as chunks have on the device. All of
    /// it is allocated at once, unless chunks are compressed.
    pub memory: Option<usize>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            kv_format: KvFormat::Dense(DType::F32),
            keys: KeyForm::default(),
            block_size: 16,
            cache: CacheKind::Paged,
            max_len: MaxLen::Model,
            kv_memory: None,
            chunks: ChunkCacheConfig::default(),
            chunk_sleep: None,
            enable_sleep_mode: false,
            tenant_salt: Vec::new(),
            graphs: DEFAULT_GRAPHS,
            profile: false,
        }
    }
}

/// The number of graphs that an engine keeps by default. The steps of a request of 4,000 tokens need five.
pub const DEFAULT_GRAPHS: usize = 16;

/// The largest memory in bytes that an engine takes for keys and values by default: 2 GiB.
pub const DEFAULT_KV_MEMORY: usize = 2 << 30;

/// An engine that runs requests on one backend.
#[derive(Debug)]
pub struct Engine {
    model: Model,
    backend: Arc<dyn Backend>,
    stream: Arc<dyn Stream>,
    caches: Caches,
    keys: KeyForm,
    /// The scales of an fp8 cache.
    scales: Option<StaticScales>,
    /// The parts of every key except the rotary embeddings of a request.
    scope: KeyScope,
    tenant_salt: Vec<u8>,
    profiler: Profiler,
    decode_memory: DecodeMemory,
    /// The link to other engines of the model.
    replicas: Option<ReplicaLink>,
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
    ///   [`chunk_sleep`](EngineConfig::chunk_sleep) is set for a static cache.
    /// - Returns [`Error::NoSleepMode`](crate::Error::NoSleepMode) if sleep mode is on for a
    ///   static cache.
    /// - Returns [`kvcore::Error::Unsupported`] for sleep mode on a backend that cannot reserve memory.
    pub fn new(
        model: Model,
        backend: Arc<dyn Backend>,
        tokenizer: &[u8],
        config: &EngineConfig,
    ) -> Result<Self> {
        let stream = backend.stream()?;
        // Before the caches take their memory.
        let device = (backend.as_ref(), stream.as_ref());
        let scales = calibrate(&model, device, (config.kv_format, config.keys))?;
        let caches = Caches::new(&model, &backend, &stream, config)?;
        if let Some(StaticScales { k, v }) = &scales {
            caches.sequences().arena().set_scales(stream.as_ref(), k, v)?;
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
            replicas: None,
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
    /// - Returns [`Error::NoChunks`](crate::Error::NoChunks) if this engine has a static cache.
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
            replicas: None,
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

    /// Returns the cache of sequences and system prompts.
    pub fn cache(&self) -> &dyn KvCache {
        self.caches.sequences()
    }

    /// Returns the chunk cache, or `None` if the engine has a static cache.
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
    /// use kvmodel::{Engine, EngineConfig, Model, ModelConfig, PromptTokens, WeightFormat, Weights};
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
        self.caches.report()
    }

    /// Checks the pools. `Err` says which number is inconsistent.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.caches.check_invariants()
    }

    /// Returns the root of the keys of requests in the regime of `ropes`. Another regime is a miss, for
    /// prefixes and chunks alike.
    fn root(&self, ropes: &LayerRopes) -> BlockKey {
        self.scope.clone().ropes(ropes).root()
    }

    fn device(&self) -> ComputeDevice<'_> {
        ComputeDevice {
            backend: self.backend.as_ref(),
            stream: self.stream.as_ref(),
            arena: self.caches.sequences().arena(),
            keys: self.keys,
            profiler: &self.profiler,
        }
    }
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
    let scope = KeyScope::new("kvmodel", model.revision())
        .tokenizer(tokenizer)
        .layout(caches.sequences().arena().layout().shape())
        .keys(keys)
        .tenant_salt(tenant_salt);
    match scales {
        Some(StaticScales { k, v }) => scope.static_scales(k, v),
        None => scope,
    }
}
