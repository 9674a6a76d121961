//! A cache with groups of layers: how its memory is divided between them.

use std::sync::Arc;

use kvcore::{
    Backend, BlockOrder, BlockPool, Clock, GroupKind, GroupedKvCache, KvArena, KvLayout, KvShape, MemoryKind,
    PagedKvCache, PoolConfig, RankInfo, Stream,
};
use kvmodel::{LayerGroup, Model};

use crate::DEFAULT_KV_MEMORY;
use crate::calibrate::StaticScales;
use crate::config::EngineConfig;
use crate::error::Result;

/// The part of a group in the memory.
#[derive(Debug)]
struct Part {
    kind: GroupKind,
    shape: KvShape,
    block_bytes: usize,
}

impl Part {
    fn new(model: &Model, group: &LayerGroup, config: &EngineConfig) -> Result<Self> {
        let extents = model.extents_of(group, config.kv_format);
        let shape = extents.shape(&RankInfo::default(), 1, config.block_size)?;
        let shape = KvShape { order: BlockOrder::TokenMajor, ..shape };
        let block_bytes = KvLayout::new(shape.clone())?.block_bytes();
        Ok(Self { kind: group.kind, shape, block_bytes })
    }

    /// Returns the most blocks that a sequence of `tokens` tokens holds while pieces of up to `step` tokens are computed.
    fn blocks_of(&self, tokens: usize, step: usize) -> usize {
        let held = match self.kind {
            GroupKind::SlidingWindow { window } => tokens.min(window.saturating_add(step)),
            GroupKind::Full | GroupKind::Latent => tokens,
        };
        held.div_ceil(self.shape.block_size) + 1
    }
}

/// Creates the cache of a model's groups within the budget, with pools of the given settings.
pub(crate) fn grouped(
    model: &Model,
    backend: &dyn Backend,
    config: &EngineConfig,
    clock: &Arc<dyn Clock>,
) -> Result<GroupedKvCache> {
    let parts = model.groups().iter().map(|group| Part::new(model, group, config));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let (longest, step) = (model.config().max_positions, config.scheduling.step_tokens);
    let most = || {
        let of = |part: &Part| part.blocks_of(longest, step).saturating_mul(part.block_bytes);
        parts.iter().map(of).fold(0, usize::saturating_add).saturating_mul(8)
    };
    let budget = config.kv_memory.unwrap_or_else(|| most().min(DEFAULT_KV_MEMORY));
    let blocks = divide(budget, &parts, config.typical_len.min(longest), step)?;
    let groups = parts.into_iter().zip(blocks).map(|(Part { kind, shape, .. }, num_blocks)| {
        let layout = Arc::new(KvLayout::new(KvShape { num_blocks, ..shape })?);
        let arena = KvArena::allocate(backend, MemoryKind::Device, layout)?;
        let watermark = config.scheduling.watermark.min(num_blocks - 1);
        let of_pool =
            PoolConfig::default().policy(config.cache_policy).watermark(watermark).clock(Arc::clone(clock));
        let of_pool = config.cache_ttl.map_or(of_pool.clone(), |ttl| of_pool.ttl(ttl));
        let pool = BlockPool::with_config(0..num_blocks as u32, of_pool)?;
        Ok((kind, PagedKvCache::new(arena, pool)?))
    });
    Ok(GroupedKvCache::new(groups.collect::<Result<Vec<_>>>()?)?)
}

// Decision: docs/decisions/paging.md#memory-is-divided-between-groups-for-requests-of-a-typical-length
/// Returns the number of blocks of each group: one, and of what is left those of as many sequences of `len` tokens as fit. The rest
/// that rounding leaves goes to the first group without a window.
fn divide(budget: usize, parts: &[Part], len: usize, step: usize) -> Result<Vec<usize>> {
    let block_bytes: usize = parts.iter().map(|part| part.block_bytes).sum();
    let Some(left) = budget.checked_sub(block_bytes) else {
        return Err(kvcore::Error::NotEnoughMemory { budget, block_bytes }.into());
    };
    let bytes = |part: &Part| part.blocks_of(len, step) as u128 * part.block_bytes as u128;
    let sequence = parts.iter().map(bytes).sum::<u128>().max(1);
    let share = |part: &Part| 1 + (left as u128 * part.blocks_of(len, step) as u128 / sequence) as usize;
    let mut blocks: Vec<usize> = parts.iter().map(share).collect();
    let taken: usize = blocks.iter().zip(parts).map(|(blocks, part)| blocks * part.block_bytes).sum();
    let whole = parts.iter().position(|part| !matches!(part.kind, GroupKind::SlidingWindow { .. }));
    let whole = whole.unwrap_or(0);
    blocks[whole] += budget.saturating_sub(taken) / parts[whole].block_bytes;
    Ok(blocks)
}

impl StaticScales {
    /// Sets the scales of arenas, of which there is one for all layers or one for each group.
    pub(crate) fn set(&self, model: &Model, arenas: &[KvArena], stream: &dyn Stream) -> Result<()> {
        if let [arena] = arenas {
            return Ok(arena.set_scales(stream, &self.k, &self.v)?);
        }
        let layers = model.config().num_layers();
        for (arena, group) in arenas.iter().zip(model.groups()) {
            let of = |scales: &[f32]| -> Vec<f32> {
                let each = scales.len() / layers;
                group.layers.iter().flat_map(|layer| &scales[layer * each..][..each]).copied().collect()
            };
            arena.set_scales(stream, &of(&self.k), &of(&self.v))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kvcore::DType;

    use super::*;

    fn part(kind: GroupKind, num_layers: usize) -> Part {
        let shape = KvShape {
            num_layers,
            num_blocks: 1,
            block_size: 4,
            k_heads: 1,
            v_heads: 1,
            k_dim: 8,
            v_dim: 8,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let block_bytes = KvLayout::new(shape.clone()).unwrap().block_bytes();
        Part { kind, shape, block_bytes }
    }

    #[test]
    fn each_group_gets_the_blocks_of_as_many_sequences() {
        let window = GroupKind::SlidingWindow { window: 24 };
        let parts = [part(window, 5), part(GroupKind::Full, 1)];
        let bytes = |blocks: &[usize]| blocks[0] * parts[0].block_bytes + blocks[1] * parts[1].block_bytes;
        for budget in [50_000usize, 1_000_000, 123_456_789] {
            let blocks = divide(budget, &parts, 400, 16).unwrap();
            let taken = bytes(&blocks);
            assert!(taken <= budget && budget - taken < parts[0].block_bytes, "{budget}: {taken}");
            // 40 tokens in ten blocks and one more, 400 in a hundred and one more
            let sequences = [(blocks[0] - 1) / 11, (blocks[1] - 1) / 101];
            assert!(sequences[1].abs_diff(sequences[0]) <= 1 + sequences[0] / 50, "{blocks:?}");
            // requests inside the window need as many blocks of each
            let blocks = divide(budget, &parts, 40, 16).unwrap();
            assert!(blocks[1].abs_diff(blocks[0]) <= 5, "{blocks:?}");
        }
        let least = parts[0].block_bytes + parts[1].block_bytes;
        assert_eq!(divide(least, &parts, 400, 16).unwrap(), [1, 1]);
        assert!(divide(least - 1, &parts, 400, 16).is_err());
    }
}
