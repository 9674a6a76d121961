//! The caches of an engine: a cache for sequences and, if it is paged, a chunk cache in the same memory.

use std::sync::Arc;

use kvchunk::{ArenaSleep, ChunkBlockPool, ChunkCacheManager, ChunkCacheMetrics, SleepStore, SleepUsage};
use kvcore::{
    Backend, BlockOrder, BlockPool, CacheKind, Clock, GroupKind, GroupedKvCache, KvArena, KvLayout,
    MemoryKind, PagedCacheConfig, PagedKvCache, PoolCounts, RankInfo, ReservedArena, Stream,
};
use kvmodel::Model;
use serde::Serialize;

use super::fixed::fixed;
use super::groups::grouped;
use super::sequence_cache::SequenceCache;
use super::sleep::{SleepMode, Slept};
use super::tiers::ChunkTiers;
use crate::config::{ChunkSleep, DEFAULT_KV_MEMORY, EngineConfig, PoolTag};
use crate::error::{Error, Result};

/// The caches of an engine.
#[derive(Debug)]
pub(crate) struct Caches {
    kind: CacheKind,
    /// The cache of sequences. A plain paged cache is a grouped cache with one group, of all layers.
    pub(crate) sequences: Box<dyn SequenceCache>,
    /// The chunk cache. It exists only with a paged cache.
    chunks: Option<ChunkCacheManager>,
    /// The host memory in which single chunks sleep.
    tiers: Option<ChunkTiers>,
    /// Sleep mode for whole pools, if they can sleep.
    mode: Option<Box<SleepMode>>,
}

/// The size and the block counts of one group of layers in a grouped cache.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupReport {
    /// The kind of tokens that the layers attend to.
    pub kind: GroupKind,
    /// The number of layers in the group.
    pub layers: usize,
    /// The size of the arena in bytes.
    pub kv_bytes: usize,
    /// The number of blocks in each state.
    pub blocks: PoolCounts,
}

/// The sizes and block counts of an engine's caches.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CacheReport {
    /// The kind of cache.
    pub cache: CacheKind,
    /// The total size of the arenas in bytes: the keys and values of sequences and chunks, including their
    /// scales if they are quantised.
    pub kv_bytes: usize,
    /// The number of blocks for sequences and system prompts in each state, summed over all groups. `None`
    /// for a static cache, which has no pool.
    pub main: Option<PoolCounts>,
    /// The reports on the layer groups of a grouped cache.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupReport>,
    /// The number of blocks for chunks in each state.
    pub chunks: Option<PoolCounts>,
    /// The metrics of the chunk cache.
    pub chunk_cache: Option<ChunkCacheMetrics>,
    /// The number of sleeping chunks and their sizes, if chunks can sleep.
    pub chunk_sleep: Option<SleepUsage>,
    /// The number of host memory blocks for preempted requests in each state. `None` until some are needed.
    pub swapped: Option<PoolCounts>,
}

impl Caches {
    /// Creates the caches. `stream` must be the compute stream; copies of chunks that are put to sleep or
    /// woken are enqueued on it.
    pub(super) fn new(
        model: &Model,
        backend: &Arc<dyn Backend>,
        stream: &Arc<dyn Stream>,
        config: &EngineConfig,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self> {
        config.chunks.check()?;
        let sequences: Box<dyn SequenceCache> = match config.cache {
            CacheKind::Paged => return Self::paged(model, backend, stream, config, clock),
            CacheKind::Static | CacheKind::Grouped if config.chunk_sleep.is_some() => {
                return Err(Error::NoChunks("turn chunk sleep off, or use a paged cache"));
            }
            CacheKind::Static if config.enable_sleep_mode => {
                return Err(Error::NoSleepMode("a static cache has no blocks; use a paged cache"));
            }
            CacheKind::Grouped if config.enable_sleep_mode => {
                return Err(Error::NoSleepMode("a grouped cache has several arenas; use a paged cache"));
            }
            CacheKind::Grouped => Box::new(grouped(model, backend.as_ref(), config, clock)?),
            CacheKind::Static => Box::new(fixed(model, backend.as_ref(), config)?),
        };
        Ok(Self { kind: config.cache, sequences, chunks: None, tiers: None, mode: None })
    }

    /// Creates a paged cache and a chunk cache within the budget. There must be room for at least two blocks,
    /// one for each pool.
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
        let (layout, memory) = (Arc::new(layout), MemoryKind::Device);
        let (arena, mode) = if config.enable_sleep_mode {
            let reserved = ReservedArena::create(Arc::clone(backend), memory, layout)?;
            (reserved.arena().clone(), Some(Box::new(SleepMode::new(reserved))))
        } else {
            (KvArena::allocate(backend.as_ref(), memory, layout)?, None)
        };
        let (for_main, for_chunks) = ChunkBlockPool::split(blocks as usize, config.chunks.memory_share)?;
        let on_device = for_chunks.len() * arena.layout().block_bytes();
        let place = |ChunkSleep { form, memory, .. }: ChunkSleep| {
            let (backend, stream) = (Arc::clone(backend), Arc::clone(stream));
            ArenaSleep::new(backend, arena.clone(), stream, form, memory.unwrap_or(on_device)).map(Arc::new)
        };
        let sleep = config.chunk_sleep.map(place).transpose()?;
        let watermark = config.scheduling.watermark.min(for_main.len() - 1);
        let settings =
            paged.pool().policy(config.cache_policy).chains(model.config().widest_window().is_none());
        let mut settings = settings.watermark(watermark).clock(Arc::clone(clock));
        if let Some(ttl) = config.cache_ttl {
            settings = settings.ttl(ttl);
        }
        let main = PagedKvCache::new(arena, BlockPool::with_config(for_main, settings)?)?;
        let chunk_pool = BlockPool::with_config(for_chunks, paged.pool().clock(Arc::clone(clock)))?;
        let chunk_pool = ChunkBlockPool::over(chunk_pool, config.block_size)?;
        let store = sleep.clone().map(|sleep| sleep as Arc<dyn SleepStore>);
        let chunks = ChunkCacheManager::build(config.chunks.clone(), chunk_pool, store, Arc::clone(clock))?;
        Ok(Self {
            kind: CacheKind::Paged,
            sequences: one_group(model, main)?,
            chunks: Some(chunks),
            tiers: sleep
                .zip(config.chunk_sleep)
                .map(|(store, config)| ChunkTiers::new(store, config.thresholds)),
            mode,
        })
    }

    /// Returns caches over the same pools for another model, whose KV must have the same shape. Keys keep the
    /// blocks of the two models apart.
    pub(super) fn shared(&self, model: &Model) -> Result<Self> {
        let main = self.main("use a paged cache to share it")?;
        if self.mode.is_some() {
            return Err(Error::NoSleepMode(
                "engines that share caches do not know which blocks the others use; share them without sleep mode",
            ));
        }
        let arena = main.arena().clone();
        let shape = arena.layout().shape();
        let extents = model.kv_extents(shape.format);
        let same = [
            ("layers of a model that shares caches", shape.num_layers, extents.num_layers),
            ("key heads of a model that shares caches", shape.k_heads, extents.k_heads),
            ("value heads of a model that shares caches", shape.v_heads, extents.v_heads),
            ("key dimension of a model that shares caches", shape.k_dim, extents.k_dim),
            ("value dimension of a model that shares caches", shape.v_dim, extents.v_dim),
        ];
        if let Some((what, expected, got)) = same.into_iter().find(|(_, expected, got)| expected != got) {
            return Err(kvcore::Error::mismatch(what, expected, got).into());
        }
        let main = PagedKvCache::new(arena.clone(), main.pool().clone())?;
        Ok(Self {
            kind: CacheKind::Paged,
            sequences: one_group(model, main)?,
            chunks: self.chunks.clone(),
            tiers: self.tiers.clone(),
            mode: None,
        })
    }

    /// Returns the kind of cache that holds the sequences.
    pub(crate) fn kind(&self) -> CacheKind {
        self.kind
    }

    /// Returns the paged cache that holds sequences and system prompts, in the same arena as documents.
    ///
    /// # Errors
    /// Returns [`Error::NoChunks`] if the engine does not keep chunks.
    pub(crate) fn paged_cache(&self) -> Result<&PagedKvCache> {
        self.main("request full attention, or use a paged cache")
    }

    fn main(&self, instead: &'static str) -> Result<&PagedKvCache> {
        let main = self.sequences.first().as_paged().filter(|_| self.chunks.is_some());
        main.ok_or(Error::NoChunks(instead))
    }

    /// Returns the chunk cache, or `None` with a static or a grouped cache.
    pub(crate) fn chunks(&self) -> Option<&ChunkCacheManager> {
        self.chunks.as_ref()
    }

    /// Moves a few chunks between device and host memory if their thresholds ask for it. `now` is the time in
    /// milliseconds.
    pub(crate) fn tend(&mut self, now: u64) {
        if let (Some(tiers), Some(chunks)) = (&mut self.tiers, &self.chunks) {
            tiers.tend(chunks, now);
        }
    }

    pub(crate) fn report(&self) -> CacheReport {
        let bytes = |arena: &KvArena| arena.storages().map(|storage| storage.len()).sum::<usize>();
        let group = |&(kind, ref group): &(GroupKind, PagedKvCache)| {
            let (arena, blocks) = (group.arena(), group.pool().counts());
            GroupReport { kind, layers: arena.layout().shape().num_layers, kv_bytes: bytes(arena), blocks }
        };
        let groups: Vec<_> = self.sequences.groups().iter().map(group).collect();
        let chunks = self.chunks();
        CacheReport {
            cache: self.kind,
            kv_bytes: self.sequences.arenas().iter().map(bytes).sum(),
            main: (!groups.is_empty()).then(|| groups.iter().map(|group| group.blocks).sum()),
            groups: if self.kind == CacheKind::Grouped { groups } else { Vec::new() },
            chunks: chunks.map(|chunks| chunks.pool().blocks().counts()),
            chunk_cache: chunks.map(ChunkCacheManager::metrics),
            chunk_sleep: self.tiers.as_ref().map(ChunkTiers::usage),
            swapped: None,
        }
    }

    pub(crate) fn check_invariants(&self) -> std::result::Result<(), String> {
        self.sequences.groups().iter().try_for_each(|(_, cache)| cache.pool().check_invariants())?;
        self.chunks().map_or(Ok(()), ChunkCacheManager::check_invariants)
    }

    /// Puts a pool to sleep.
    pub(crate) fn sleep(&mut self, tag: PoolTag, stream: &dyn Stream) -> Result<Slept> {
        let Self { sequences, chunks: Some(chunks), mode: Some(mode), .. } = self else {
            return Err(NO_MODE);
        };
        mode.sleep(tag, (&sequences.groups()[0].1, chunks), stream)
    }

    /// Wakes a pool. Returns true if it was asleep.
    pub(crate) fn wake(&mut self, tag: PoolTag, stream: &dyn Stream) -> Result<bool> {
        let (Some(chunks), Some(mode)) = (&self.chunks, &mut self.mode) else { return Err(NO_MODE) };
        mode.wake(tag, chunks, stream)
    }

    /// Returns true if the pool is asleep.
    pub(crate) fn is_sleeping(&self, tag: PoolTag) -> bool {
        match tag {
            PoolTag::KvCache => self.mode.as_ref().is_some_and(|mode| mode.main_sleeps()),
            PoolTag::ChunkCache => self.chunks.as_ref().is_some_and(|chunks| !chunks.is_pool_awake()),
        }
    }

    /// Checks that the pool of sequences is awake, because every request needs it.
    pub(crate) fn check_awake(&self) -> Result<()> {
        if self.is_sleeping(PoolTag::KvCache) { Err(Error::Asleep(PoolTag::KvCache)) } else { Ok(()) }
    }
}

const NO_MODE: Error = Error::NoSleepMode("set enable_sleep_mode in the EngineConfig");

/// Wraps a paged cache of all layers as a grouped cache with one group.
fn one_group(model: &Model, cache: PagedKvCache) -> Result<Box<dyn SequenceCache>> {
    let widest = model.config().widest_window();
    let kind = widest.map_or(GroupKind::Full, |window| GroupKind::SlidingWindow { window });
    Ok(Box::new(GroupedKvCache::new(vec![(kind, cache)])?))
}
