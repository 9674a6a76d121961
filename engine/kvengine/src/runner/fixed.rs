//! The static cache of an engine, which holds one sequence of the maximum length.

use std::sync::Arc;

use kvcore::{
    Backend, BlockOrder, KvArena, KvCache, MemoryKind, RankInfo, SequenceId, SequenceStart,
    StaticCacheConfig, StaticKvCache, WriteSlots,
};
use kvmodel::Model;

use super::sequence_cache::SequenceCache;
use crate::config::{DEFAULT_KV_MEMORY, EngineConfig};
use crate::error::Result;

/// Creates a static cache for one sequence of the maximum length.
pub(super) fn fixed(model: &Model, backend: &dyn Backend, config: &EngineConfig) -> Result<StaticKvCache> {
    let order = BlockOrder::TokenMajor;
    let fixed = StaticCacheConfig { max_batch: 1, max_len: config.max_len, order };
    let layout = fixed.layout(&model.kv_extents(config.kv_format), &RankInfo::default())?;
    let (budget, block_bytes) = (config.kv_memory.unwrap_or(DEFAULT_KV_MEMORY), layout.block_bytes());
    if block_bytes > budget {
        return Err(kvcore::Error::NotEnoughMemory { budget, block_bytes }.into());
    }
    let arena = KvArena::allocate(backend, MemoryKind::Device, Arc::new(layout))?;
    Ok(StaticKvCache::new(arena)?)
}

impl SequenceCache for StaticKvCache {
    fn first(&self) -> &dyn KvCache {
        self
    }

    fn arenas(&self) -> &[KvArena] {
        std::slice::from_ref(self.arena())
    }

    fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        Ok(KvCache::create(self, start)?)
    }

    fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut Vec<WriteSlots>) -> Result<()> {
        slots.resize_with(1, WriteSlots::default);
        Ok(KvCache::grow_batch(self, batch, &mut slots[0])?)
    }

    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        Ok(KvCache::truncate(self, id, len)?)
    }

    fn free(&mut self, id: SequenceId) -> Result<()> {
        Ok(KvCache::free(self, id)?)
    }
}
