//! The engine: a model, its caches, and requests one after another.

use std::sync::Arc;

use kvchunk::{ChunkCache, ChunkCacheConfig, ChunkCacheMetrics};
use kvcore::{
    Backend, BlockKey, BlockPool, DType, KeyScope, KvArena, KvFormat, KvLayout, MemoryKind, PagedKvCache,
    PoolCounts, Profiler, Stream,
};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::model::{ComputeDevice, Model};

mod generate;
mod request;

pub use request::{FinishReason, Generation, Request};

/// How much memory the caches take and how they are cut.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// How keys and values are stored.
    pub kv_format: KvFormat,
    /// Tokens per block.
    pub block_size: usize,
    /// Bytes for keys and values, or `None` for eight prompts of the model's longest length, at most
    /// [`DEFAULT_KV_MEMORY`].
    pub kv_memory: Option<usize>,
    /// Share of the blocks that belong to chunks.
    pub chunk_share: f64,
    /// Settings of the chunk cache.
    pub chunks: ChunkCacheConfig,
    /// Separates tenants in keys; given by whoever runs the engine, never by a client.
    pub tenant_salt: Vec<u8>,
    /// Whether spans are recorded.
    pub profile: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            kv_format: KvFormat::Dense(DType::F32),
            block_size: 16,
            kv_memory: None,
            chunk_share: 0.15,
            chunks: ChunkCacheConfig::default(),
            tenant_salt: Vec::new(),
            profile: false,
        }
    }
}

/// Most memory that an engine takes for keys and values unless it is told otherwise: 2 GiB.
pub const DEFAULT_KV_MEMORY: usize = 2 << 30;

/// Blocks of both pools, and what the chunk cache did.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CacheReport {
    /// Blocks of sequences and system prompts.
    pub main: PoolCounts,
    /// Blocks of chunks.
    pub chunks: PoolCounts,
    /// Counts of the chunk cache.
    pub chunk_cache: ChunkCacheMetrics,
}

/// Runs requests on one backend.
#[derive(Debug)]
pub struct Engine {
    model: Model,
    backend: Arc<dyn Backend>,
    stream: Arc<dyn Stream>,
    main: PagedKvCache,
    chunks: Arc<ChunkCache>,
    root: BlockKey,
    profiler: Profiler,
}

impl Engine {
    /// Allocates the caches. `tokenizer` identifies the tokenizer in keys.
    ///
    /// # Errors
    /// [`kvcore::Error::NotEnoughMemory`] when the budget does not hold a block for each pool.
    pub fn new(
        model: Model,
        backend: Arc<dyn Backend>,
        tokenizer: &[u8],
        config: &EngineConfig,
    ) -> Result<Self> {
        if !(0.0..1.0).contains(&config.chunk_share) {
            return Err(Error::Config(format!("chunk_share {} is not in 0..1", config.chunk_share)));
        }
        let layout = Arc::new(layout(&model, config)?);
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::clone(&layout))?;
        let total = layout.shape().num_blocks as u32;
        let for_chunks = ((f64::from(total) * config.chunk_share) as u32).clamp(1, total - 1);
        let main = PagedKvCache::new(arena, BlockPool::new(0..total - for_chunks)?)?;
        let pool = BlockPool::new(total - for_chunks..total)?;
        let chunks = Arc::new(ChunkCache::new(config.chunks.clone(), pool, config.block_size)?);
        let mut scope = KeyScope::new("kvmodel", model.revision())
            .tokenizer(tokenizer)
            .layout(layout.shape())
            .tenant_salt(&config.tenant_salt);
        for layer in 0..model.config().num_layers {
            scope = scope.rope(layer, model.rope());
        }
        let profiler = if config.profile { Profiler::enabled() } else { Profiler::disabled() };
        let stream = backend.stream()?;
        Ok(Self { root: scope.root(), model, backend, stream, main, chunks, profiler })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The backend, whose counters show what moved.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Where time went, if [`EngineConfig::profile`] was set.
    pub fn profiler(&self) -> &Profiler {
        &self.profiler
    }

    /// The chunk cache.
    pub fn chunks(&self) -> &ChunkCache {
        &self.chunks
    }

    /// The cache of sequences and system prompts.
    pub fn main(&self) -> &PagedKvCache {
        &self.main
    }

    /// Blocks of both pools, and what the chunk cache did.
    pub fn report(&self) -> CacheReport {
        CacheReport {
            main: self.main.pool().counts(),
            chunks: self.chunks.pool().counts(),
            chunk_cache: self.chunks.metrics(),
        }
    }

    /// Checks both pools; `Err` says what is inconsistent.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.main.pool().check_invariants()?;
        self.chunks.pool().check_invariants()
    }

    fn device(&self) -> ComputeDevice<'_> {
        ComputeDevice {
            backend: self.backend.as_ref(),
            stream: self.stream.as_ref(),
            arena: self.main.arena(),
            profiler: &self.profiler,
        }
    }
}

/// A layout within the budget; two blocks at least, one for each pool.
fn layout(model: &Model, config: &EngineConfig) -> Result<KvLayout> {
    if config.block_size == 0 {
        return Err(kvcore::Error::Zero { what: "block_size" }.into());
    }
    let shape = model.kv_shape(1, config.block_size, config.kv_format);
    let most = model.config().max_positions.saturating_mul(8).div_ceil(config.block_size).max(2);
    let block_bytes = KvLayout::new(shape.clone())?.block_bytes();
    let budget = config.kv_memory.unwrap_or(most.saturating_mul(block_bytes).min(DEFAULT_KV_MEMORY));
    let layout = KvLayout::within_budget(&shape, budget)?;
    if layout.shape().num_blocks < 2 {
        return Err(kvcore::Error::NotEnoughMemory { budget, block_bytes: 2 * layout.block_bytes() }.into());
    }
    Ok(layout)
}
