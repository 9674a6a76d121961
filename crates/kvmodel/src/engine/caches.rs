//! What an engine keeps keys and values in: a paged cache with its chunks, or a static one.

use std::sync::Arc;

use kvchunk::{ChunkCache, ChunkCacheMetrics};
use kvcore::{
    Backend, BlockPool, CacheKind, KvArena, KvCache, KvLayout, MemoryKind, PagedKvCache, PoolCounts,
    StaticKvCache,
};
use serde::Serialize;

use super::{DEFAULT_KV_MEMORY, EngineConfig};
use crate::error::{Error, Result};
use crate::model::Model;

/// The caches of an engine.
#[derive(Debug)]
pub(super) enum Caches {
    Paged { main: PagedKvCache, chunks: Arc<ChunkCache> },
    Static(StaticKvCache),
}

/// What the caches hold.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CacheReport {
    /// Which cache it is.
    pub cache: CacheKind,
    /// Blocks of sequences and system prompts; a static cache has no pool.
    pub main: Option<PoolCounts>,
    /// Blocks of chunks.
    pub chunks: Option<PoolCounts>,
    /// Counts of the chunk cache.
    pub chunk_cache: Option<ChunkCacheMetrics>,
}

impl Caches {
    pub(super) fn new(model: &Model, backend: &dyn Backend, config: &EngineConfig) -> Result<Self> {
        if !(0.0..1.0).contains(&config.chunk_share) {
            return Err(Error::Config(format!("chunk_share {} is not in 0..1", config.chunk_share)));
        }
        let layout = match config.cache {
            CacheKind::Paged => paged_layout(model, config)?,
            CacheKind::Static => static_layout(model, config)?,
        };
        let blocks = layout.shape().num_blocks as u32;
        let arena = KvArena::allocate(backend, MemoryKind::Device, Arc::new(layout))?;
        if config.cache == CacheKind::Static {
            return Ok(Self::Static(StaticKvCache::new(arena)?));
        }
        let for_chunks = ((f64::from(blocks) * config.chunk_share) as u32).clamp(1, blocks - 1);
        let main = PagedKvCache::new(arena, BlockPool::new(0..blocks - for_chunks)?)?;
        let pool = BlockPool::new(blocks - for_chunks..blocks)?;
        let chunks = Arc::new(ChunkCache::new(config.chunks.clone(), pool, config.block_size)?);
        Ok(Self::Paged { main, chunks })
    }

    /// The cache that holds sequences.
    pub(super) fn sequences(&self) -> &dyn KvCache {
        match self {
            Self::Paged { main, .. } => main,
            Self::Static(cache) => cache,
        }
    }

    pub(super) fn sequences_mut(&mut self) -> &mut dyn KvCache {
        match self {
            Self::Paged { main, .. } => main,
            Self::Static(cache) => cache,
        }
    }

    pub(super) fn chunks(&self) -> Option<&Arc<ChunkCache>> {
        match self {
            Self::Paged { chunks, .. } => Some(chunks),
            Self::Static(_) => None,
        }
    }

    pub(super) fn report(&self) -> CacheReport {
        let chunks = self.chunks();
        CacheReport {
            cache: self.sequences().kind(),
            main: self.sequences().as_paged().map(|main| main.pool().counts()),
            chunks: chunks.map(|chunks| chunks.pool().counts()),
            chunk_cache: chunks.map(|chunks| chunks.metrics()),
        }
    }

    pub(super) fn check_invariants(&self) -> std::result::Result<(), String> {
        match self {
            Self::Paged { main, chunks } => {
                main.pool().check_invariants()?;
                chunks.pool().check_invariants()
            }
            Self::Static(_) => Ok(()),
        }
    }
}

/// A layout within the budget; two blocks at least, one for each pool.
fn paged_layout(model: &Model, config: &EngineConfig) -> Result<KvLayout> {
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

/// One entry of the longest length.
fn static_layout(model: &Model, config: &EngineConfig) -> Result<KvLayout> {
    let len = config.max_len.for_model(model.config().max_positions);
    let layout = KvLayout::new(model.kv_shape(1, len, config.kv_format))?;
    let (budget, block_bytes) = (config.kv_memory.unwrap_or(DEFAULT_KV_MEMORY), layout.block_bytes());
    if block_bytes > budget {
        return Err(kvcore::Error::NotEnoughMemory { budget, block_bytes }.into());
    }
    Ok(layout)
}
