//! What an engine keeps keys and values in: a paged cache with its chunks, or a static one.

use std::sync::Arc;

use kvchunk::{ChunkBlockPool, ChunkCacheManager, ChunkCacheMetrics};
use kvcore::{
    Backend, BlockOrder, BlockPool, CacheKind, KvArena, KvCache, KvLayout, MemoryKind, PagedCacheConfig,
    PagedKvCache, PoolCounts, RankInfo, StaticCacheConfig, StaticKvCache,
};
use serde::Serialize;

use super::{DEFAULT_KV_MEMORY, EngineConfig};
use crate::error::Result;
use crate::model::Model;

/// The caches of an engine.
#[derive(Debug)]
pub(super) enum Caches {
    Paged { main: PagedKvCache, chunks: ChunkCacheManager },
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
        config.chunks.check()?;
        match config.cache {
            CacheKind::Paged => Self::paged(model, backend, config),
            CacheKind::Static => Self::fixed(model, backend, config),
        }
    }

    /// Blocks within the budget, two at least: one for each pool.
    fn paged(model: &Model, backend: &dyn Backend, config: &EngineConfig) -> Result<Self> {
        let (extents, rank) = (model.kv_extents(config.kv_format), RankInfo::default());
        let block_bytes = KvLayout::new(extents.shape(&rank, 1, config.block_size)?)?.block_bytes();
        let most = extents.max_positions.saturating_mul(8).div_ceil(config.block_size).max(2);
        let max_memory = config.kv_memory.unwrap_or(most.saturating_mul(block_bytes).min(DEFAULT_KV_MEMORY));
        let paged = PagedCacheConfig {
            max_memory,
            block_size: config.block_size,
            order: BlockOrder::TokenMajor,
            ..PagedCacheConfig::default()
        };
        let layout = paged.layout(&extents, &rank)?;
        let blocks = layout.shape().num_blocks as u32;
        if blocks < 2 {
            let block_bytes = 2 * block_bytes;
            return Err(kvcore::Error::NotEnoughMemory { budget: max_memory, block_bytes }.into());
        }
        let arena = KvArena::allocate(backend, MemoryKind::Device, Arc::new(layout))?;
        let (for_main, for_chunks) = ChunkBlockPool::split(blocks as usize, config.chunks.memory_share)?;
        let pool = |blocks| BlockPool::with_config(blocks, paged.pool());
        let main = PagedKvCache::new(arena, pool(for_main)?)?;
        let pool = ChunkBlockPool::over(pool(for_chunks)?, config.block_size)?;
        let chunks = ChunkCacheManager::new(config.chunks.clone(), pool)?;
        Ok(Self::Paged { main, chunks })
    }

    /// One entry of the longest length.
    fn fixed(model: &Model, backend: &dyn Backend, config: &EngineConfig) -> Result<Self> {
        let order = BlockOrder::TokenMajor;
        let fixed = StaticCacheConfig { max_batch: 1, max_len: config.max_len, order };
        let layout = fixed.layout(&model.kv_extents(config.kv_format), &RankInfo::default())?;
        let (budget, block_bytes) = (config.kv_memory.unwrap_or(DEFAULT_KV_MEMORY), layout.block_bytes());
        if block_bytes > budget {
            return Err(kvcore::Error::NotEnoughMemory { budget, block_bytes }.into());
        }
        let arena = KvArena::allocate(backend, MemoryKind::Device, Arc::new(layout))?;
        Ok(Self::Static(StaticKvCache::new(arena)?))
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

    pub(super) fn chunks(&self) -> Option<&ChunkCacheManager> {
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
            chunks: chunks.map(|chunks| chunks.pool().blocks().counts()),
            chunk_cache: chunks.map(ChunkCacheManager::metrics),
        }
    }

    pub(super) fn check_invariants(&self) -> std::result::Result<(), String> {
        match self {
            Self::Paged { main, chunks } => {
                main.pool().check_invariants()?;
                chunks.check_invariants()
            }
            Self::Static(_) => Ok(()),
        }
    }
}
