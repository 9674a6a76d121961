//! The engine: a model, its caches, and requests one after another.

use std::sync::Arc;

use kvchunk::{ChunkCacheConfig, ChunkCacheManager, ReplicaDevice, ReplicaLink, ReplicaTransport, SleepForm};
use kvcore::{
    Backend, BlockKey, CacheKind, DType, KeyForm, KeyScope, KvCache, KvFormat, LayerRopes, MaxLen, Stream,
};

use crate::error::Result;
use crate::model::{ComputeDevice, Model};
use crate::profile::Profiler;
use crate::text::PromptTokens;

mod blend;
mod caches;
mod chunked;
mod generate;
mod request;
mod sleep;

pub use caches::CacheReport;
use caches::Caches;
pub use request::{FinishReason, Generation, Request};
pub use sleep::{PoolTag, Slept};

/// How much memory the caches take and how they are cut.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// How keys and values are stored.
    pub kv_format: KvFormat,
    /// Whether keys are stored rotated.
    pub keys: KeyForm,
    /// Tokens per block.
    pub block_size: usize,
    /// Which cache holds sequences. A static one keeps no chunks: a prompt in parts must ask for full
    /// attention then.
    pub cache: CacheKind,
    /// Longest sequence of a static cache.
    pub max_len: MaxLen,
    /// Bytes for keys and values, or `None` for eight prompts of the model's longest length, at most
    /// [`DEFAULT_KV_MEMORY`].
    pub kv_memory: Option<usize>,
    /// Settings of the chunk cache.
    pub chunks: ChunkCacheConfig,
    /// Where chunks sleep; nowhere if `None`. They do when
    /// [`sleep_cold_chunks`](ChunkCacheManager::sleep_cold_chunks) is called on [`Engine::chunks`], and a hit wakes
    /// them.
    pub chunk_sleep: Option<ChunkSleep>,
    /// Whether whole pools can [sleep](Engine::sleep): their memory is reserved then, so that it can be released and
    /// come back at the same addresses.
    pub enable_sleep_mode: bool,
    /// Separates tenants in keys; given by whoever runs the engine, never by a client.
    pub tenant_salt: Vec<u8>,
    /// Whether spans are recorded.
    pub profile: bool,
}

/// A place in host memory for chunks that are seldom used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSleep {
    /// In which form they sleep.
    pub form: SleepForm,
    /// Most bytes of host memory, or `None` for as many as chunks have on the device. All of it is allocated at
    /// once, unless chunks are compressed.
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
            profile: false,
        }
    }
}

/// Most memory that an engine takes for keys and values unless it is told otherwise: 2 GiB.
pub const DEFAULT_KV_MEMORY: usize = 2 << 30;

/// Runs requests on one backend.
#[derive(Debug)]
pub struct Engine {
    model: Model,
    backend: Arc<dyn Backend>,
    stream: Arc<dyn Stream>,
    caches: Caches,
    keys: KeyForm,
    /// What is in every key, but for the rotary embeddings of a request.
    scope: KeyScope,
    tenant_salt: Vec<u8>,
    separator: String,
    profiler: Profiler,
    /// The way to other engines of the model.
    replicas: Option<ReplicaLink>,
}

impl Engine {
    /// Allocates the caches. `tokenizer` identifies the tokenizer in keys.
    ///
    /// # Errors
    /// [`kvcore::Error::NotEnoughMemory`] when the budget does not hold a block for each pool, or the one for sleep
    /// none in its form; those of [`ArenaSleep::new`](kvchunk::ArenaSleep::new); [`Error::NoChunks`](crate::Error) for a
    /// place to sleep beside a static cache, which keeps no chunks, [`Error::NoSleepMode`](crate::Error) for sleep mode
    /// with one, and [`kvcore::Error::Unsupported`] for sleep mode on a backend that cannot reserve memory.
    pub fn new(
        model: Model,
        backend: Arc<dyn Backend>,
        tokenizer: &[u8],
        config: &EngineConfig,
    ) -> Result<Self> {
        let stream = backend.stream()?;
        let caches = Caches::new(&model, &backend, &stream, config)?;
        let scope = scope_of(&model, tokenizer, &caches, config.keys, &config.tenant_salt);
        let profiler = if config.profile { Profiler::enabled() } else { Profiler::disabled() };
        let (keys, separator) = (config.keys, config.chunks.separator.clone());
        let tenant_salt = config.tenant_salt.clone();
        let replicas = None;
        Ok(Self { model, backend, stream, caches, keys, scope, tenant_salt, separator, profiler, replicas })
    }

    /// An engine of another model in the same memory: both have the pools of sequences and of chunks in common, and
    /// one evicts what the other lets go. Neither finds what the other has cached, since models, their rotary embeddings
    /// and their tokenizers are in every key.
    ///
    /// Work of both goes to one stream, so that a late error of one may be met by the other. Tenants and the settings of
    /// the chunk cache are those of this engine, and [`report`](Self::report) counts what both hold. A request does not
    /// wait for blocks that the other engine holds; it fails with
    /// [`OutOfBlocks`](kvcore::Error::OutOfBlocks).
    ///
    /// # Errors
    /// [`kvcore::Error::Mismatch`] for a model of other extents; [`Error::NoChunks`](crate::Error) for a static cache, and
    /// [`Error::NoSleepMode`](crate::Error) where pools may sleep.
    pub fn beside(&self, model: Model, tokenizer: &[u8]) -> Result<Self> {
        let caches = self.caches.shared(&model)?;
        let scope = scope_of(&model, tokenizer, &caches, self.keys, &self.tenant_salt);
        let profiler = if self.profiler.is_enabled() { Profiler::enabled() } else { Profiler::disabled() };
        let (backend, stream) = (Arc::clone(&self.backend), Arc::clone(&self.stream));
        let (keys, tenant_salt, separator) = (self.keys, self.tenant_salt.clone(), self.separator.clone());
        let replicas = None;
        Ok(Self { model, backend, stream, caches, keys, scope, tenant_salt, separator, profiler, replicas })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// A request in the mode and strategy of [`EngineConfig::chunks`].
    pub fn request(&self, prompt: PromptTokens) -> Request {
        let cell = self.chunks().map(|chunks| chunks.config().cell()).unwrap_or_default();
        Request { cell, ..Request::new(prompt) }
    }

    /// What stands between the parts of a prompt: that of [`EngineConfig::chunks`]. For
    /// [`TextCodec::prompt`](crate::TextCodec::prompt).
    pub fn separator(&self) -> &str {
        &self.separator
    }

    /// The backend, whose counters show what moved.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Where time went, if [`EngineConfig::profile`] was set.
    pub fn profiler(&self) -> &Profiler {
        &self.profiler
    }

    /// The cache of sequences and system prompts.
    pub fn cache(&self) -> &dyn KvCache {
        self.caches.sequences()
    }

    /// The chunk cache; a static cache has none.
    pub fn chunks(&self) -> Option<&ChunkCacheManager> {
        self.caches.chunks()
    }

    /// Pulls chunks that are missing here from other engines of the same model, and computes only what none of them
    /// gives. They serve [`Self::chunks`] with their [`replica_device`](Self::replica_device).
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
    ///     let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::F32)?;
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

    /// Where the chunks of this engine lie, for those who pull them.
    pub fn replica_device(&self) -> ReplicaDevice {
        ReplicaDevice {
            backend: Arc::clone(&self.backend),
            stream: Arc::clone(&self.stream),
            arena: self.caches.sequences().arena().clone(),
            keys: self.keys,
        }
    }

    /// What the caches hold.
    pub fn report(&self) -> CacheReport {
        self.caches.report()
    }

    /// Checks the pools; `Err` says what is inconsistent.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.caches.check_invariants()
    }

    /// Root of the keys of requests in the regime of `ropes`: another regime is a miss, for prefixes and
    /// chunks alike.
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

/// What is in every key of an engine, but for the rotary embeddings of a request.
fn scope_of(model: &Model, tokenizer: &[u8], caches: &Caches, keys: KeyForm, tenant_salt: &[u8]) -> KeyScope {
    KeyScope::new("kvmodel", model.revision())
        .tokenizer(tokenizer)
        .layout(caches.sequences().arena().layout().shape())
        .keys(keys)
        .tenant_salt(tenant_salt)
}
