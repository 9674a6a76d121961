//! The caches of an engine: a paged cache with chunks and their place to sleep, a static cache, or a grouped one.

use std::sync::Arc;

use kvchunk::{ArenaSleep, ChunkBlockPool, ChunkCacheManager, ChunkCacheMetrics, SleepStore, SleepUsage};
use kvcore::{
    Backend, BlockOrder, BlockPool, CacheKind, Clock, GroupKind, GroupedKvCache, KvArena, KvLayout,
    MemoryKind, PagedCacheConfig, PagedKvCache, PoolCounts, RankInfo, ReservedArena, StaticCacheConfig,
    StaticKvCache, Stream,
};
use kvmodel::Model;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::grouped::grouped;
use crate::sleep::SleepMode;
use crate::{ChunkSleep, DEFAULT_KV_MEMORY, EngineConfig};

/// The caches of an engine.
#[derive(Debug)]
pub(crate) enum Caches {
    Paged {
        main: PagedKvCache,
        /// The tokens that some layer attends to.
        kind: GroupKind,
        chunks: ChunkCacheManager,
        sleep: Option<Arc<ArenaSleep>>,
        /// The sleep mode of an engine whose pools can sleep.
        mode: Option<Box<SleepMode>>,
    },
    Static(StaticKvCache),
    Grouped(GroupedKvCache),
}

/// A group of layers in a grouped cache, in numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupReport {
    /// The tokens that the layers attend to.
    pub kind: GroupKind,
    /// The number of layers.
    pub layers: usize,
    /// The bytes of the arena.
    pub kv_bytes: usize,
    /// The blocks.
    pub blocks: PoolCounts,
}

/// The contents of an engine's caches, in numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CacheReport {
    /// The kind of cache.
    pub cache: CacheKind,
    /// The bytes of the arena: keys and values of sequences and chunks, with the scales of quantised ones.
    pub kv_bytes: usize,
    /// The blocks of sequences and system prompts, of all groups together; `None` for a static cache, which has no pool.
    pub main: Option<PoolCounts>,
    /// The groups of layers of a grouped cache.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupReport>,
    /// The blocks of chunks.
    pub chunks: Option<PoolCounts>,
    /// The metrics of the chunk cache.
    pub chunk_cache: Option<ChunkCacheMetrics>,
    /// The numbers of sleeping chunks, if chunks have a place to sleep.
    pub chunk_sleep: Option<SleepUsage>,
    /// The blocks of host memory for requests that give way; `None` as long as none was needed.
    pub swapped: Option<PoolCounts>,
}

impl Caches {
    /// Creates the caches. `stream` is the stream that computes; chunks that fall asleep or wake are copied
    /// in its order.
    pub(crate) fn new(
        model: &Model,
        backend: &Arc<dyn Backend>,
        stream: &Arc<dyn Stream>,
        config: &EngineConfig,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self> {
        config.chunks.check()?;
        match config.cache {
            CacheKind::Paged => Self::paged(model, backend, stream, config, clock),
            CacheKind::Static | CacheKind::Grouped if config.chunk_sleep.is_some() => {
                Err(Error::NoChunks("let none sleep, or take a paged cache"))
            }
            CacheKind::Static if config.enable_sleep_mode => {
                Err(Error::NoSleepMode("a static cache is not cut into blocks; take a paged one"))
            }
            CacheKind::Grouped if config.enable_sleep_mode => {
                Err(Error::NoSleepMode("a grouped cache has several arenas; take a paged one"))
            }
            CacheKind::Grouped => Ok(Self::Grouped(grouped(model, backend.as_ref(), config, clock)?)),
            CacheKind::Static => Self::fixed(model, backend.as_ref(), config),
        }
    }

    /// Creates a paged cache within the budget. It has at least two blocks: one for each pool.
    fn paged(
        model: &Model,
        backend: &Arc<dyn Backend>,
        stream: &Arc<dyn Stream>,
        config: &EngineConfig,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self> {
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
        let (layout, kind) = (Arc::new(layout), MemoryKind::Device);
        let (arena, mode) = if config.enable_sleep_mode {
            let reserved = ReservedArena::create(Arc::clone(backend), kind, layout)?;
            (reserved.arena().clone(), Some(Box::new(SleepMode::new(reserved))))
        } else {
            (KvArena::allocate(backend.as_ref(), kind, layout)?, None)
        };
        let (for_main, for_chunks) = ChunkBlockPool::split(blocks as usize, config.chunks.memory_share)?;
        let on_device = for_chunks.len() * arena.layout().block_bytes();
        let place = |ChunkSleep { form, memory }: ChunkSleep| {
            let (backend, stream) = (Arc::clone(backend), Arc::clone(stream));
            ArenaSleep::new(backend, arena.clone(), stream, form, memory.unwrap_or(on_device)).map(Arc::new)
        };
        let sleep = config.chunk_sleep.map(place).transpose()?;
        let watermark = config.scheduling.watermark.min(for_main.len() - 1);
        let mut of_main =
            paged.pool().policy(config.cache_policy).watermark(watermark).clock(Arc::clone(clock));
        if let Some(ttl) = config.cache_ttl {
            of_main = of_main.ttl(ttl);
        }
        let main = BlockPool::with_config(for_main, of_main)?;
        let main = PagedKvCache::new(arena, main)?;
        let of_chunks = BlockPool::with_config(for_chunks, paged.pool().clock(Arc::clone(clock)))?;
        let pool = ChunkBlockPool::over(of_chunks, config.block_size)?;
        let store = sleep.clone().map(|sleep| sleep as Arc<dyn SleepStore>);
        let chunks = ChunkCacheManager::build(config.chunks.clone(), pool, store, Arc::clone(clock))?;
        Ok(Self::Paged { main, kind: kind_of(model), chunks, sleep, mode })
    }

    /// Returns the same pools for another model of the same extents. Keys tell the models' blocks apart.
    pub(crate) fn shared(&self, model: &Model) -> Result<Self> {
        let Self::Paged { main, chunks, sleep, mode, .. } = self else {
            return Err(Error::NoChunks("take a paged cache to share it"));
        };
        if mode.is_some() {
            return Err(Error::NoSleepMode(
                "an engine cannot know what another one holds; share without sleep mode",
            ));
        }
        let arena = main.arena().clone();
        let own = arena.layout().shape();
        let extents = model.kv_extents(own.format);
        let same = [
            ("layers of a model that shares caches", own.num_layers, extents.num_layers),
            ("key heads of a model that shares caches", own.k_heads, extents.k_heads),
            ("value heads of a model that shares caches", own.v_heads, extents.v_heads),
            ("key dimension of a model that shares caches", own.k_dim, extents.k_dim),
            ("value dimension of a model that shares caches", own.v_dim, extents.v_dim),
        ];
        if let Some((what, expected, got)) = same.into_iter().find(|(_, expected, got)| expected != got) {
            return Err(kvcore::Error::Mismatch { what, expected, got }.into());
        }
        let main = PagedKvCache::new(arena.clone(), main.pool().clone())?;
        Ok(Self::Paged {
            main,
            kind: kind_of(model),
            chunks: chunks.clone(),
            sleep: sleep.clone(),
            mode: None,
        })
    }

    /// Creates a static cache with one entry of the longest length.
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

    pub(crate) fn chunks(&self) -> Option<&ChunkCacheManager> {
        match self {
            Self::Paged { chunks, .. } => Some(chunks),
            Self::Static(_) | Self::Grouped(_) => None,
        }
    }

    /// Returns the largest number of tokens of a sequence that the cache could hold.
    pub(crate) fn longest(&self) -> usize {
        match self {
            Self::Paged { .. } | Self::Grouped(_) => usize::MAX,
            Self::Static(cache) => cache.max_len(),
        }
    }

    pub(crate) fn report(&self) -> CacheReport {
        let chunks = self.chunks();
        let bytes = |arena: &KvArena| arena.storages().map(|storage| storage.len()).sum::<usize>();
        let (cache, chunk_sleep) = match self {
            Self::Paged { sleep, .. } => (CacheKind::Paged, sleep.as_ref().map(|sleep| sleep.usage())),
            Self::Static(_) => (CacheKind::Static, None),
            Self::Grouped(_) => (CacheKind::Grouped, None),
        };
        let group = |(kind, group): (GroupKind, &PagedKvCache)| {
            let (arena, blocks) = (group.arena(), group.pool().counts());
            GroupReport { kind, layers: arena.layout().shape().num_layers, kv_bytes: bytes(arena), blocks }
        };
        let groups: Vec<_> = self.groups().map(group).collect();
        CacheReport {
            cache,
            kv_bytes: self.arenas().iter().map(bytes).sum(),
            main: (!groups.is_empty()).then(|| groups.iter().map(|group| group.blocks).sum()),
            groups: if cache == CacheKind::Grouped { groups } else { Vec::new() },
            chunks: chunks.map(|chunks| chunks.pool().blocks().counts()),
            chunk_cache: chunks.map(ChunkCacheManager::metrics),
            chunk_sleep,
            swapped: None,
        }
    }

    pub(crate) fn check_invariants(&self) -> std::result::Result<(), String> {
        self.groups().try_for_each(|(_, cache)| cache.pool().check_invariants())?;
        self.chunks().map_or(Ok(()), ChunkCacheManager::check_invariants)
    }
}

/// Returns the tokens that some layer of a model attends to.
fn kind_of(model: &Model) -> GroupKind {
    model.config().widest_window().map_or(GroupKind::Full, |window| GroupKind::SlidingWindow { window })
}
