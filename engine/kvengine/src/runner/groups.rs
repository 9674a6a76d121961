//! The grouped cache of an engine, and the division of its memory between groups of layers.

use std::sync::Arc;

use kvcore::{
    Backend, BlockOrder, BlockPool, Clock, GroupKind, GroupedKvCache, KvArena, KvCache, KvLayout, KvShape,
    MemoryKind, PagedKvCache, PoolConfig, PromptKeys, RankInfo, SequenceId, SequenceStart, WriteSlots,
};
use kvmodel::{LayerGroup, Model};

use super::sequence_cache::SequenceCache;
use crate::config::{DEFAULT_KV_MEMORY, EngineConfig};
use crate::error::Result;

/// A group of layers, and the size of its blocks.
#[derive(Debug)]
struct GroupShare {
    kind: GroupKind,
    shape: KvShape,
    block_bytes: usize,
}

impl GroupShare {
    fn new(model: &Model, group: &LayerGroup, config: &EngineConfig) -> Result<Self> {
        let extents = model.extents_of(group, config.kv_format);
        let shape = extents.shape(&RankInfo::default(), 1, config.block_size)?;
        let shape = KvShape { order: BlockOrder::TokenMajor, ..shape };
        let block_bytes = KvLayout::new(shape.clone())?.block_bytes();
        Ok(Self { kind: group.kind, shape, block_bytes })
    }

    /// Returns the maximum number of blocks that a sequence of `tokens` tokens holds while pieces of up to
    /// `step` tokens are computed.
    fn blocks_of(&self, tokens: usize, step: usize) -> usize {
        let held = match self.kind {
            GroupKind::SlidingWindow { window } => tokens.min(window.saturating_add(step)),
            GroupKind::Full | GroupKind::Latent => tokens,
        };
        held.div_ceil(self.shape.block_size) + 1
    }
}

/// Creates a grouped cache for the layer groups of a model, within the memory budget of `config`.
pub(super) fn grouped(
    model: &Model,
    backend: &dyn Backend,
    config: &EngineConfig,
    clock: &Arc<dyn Clock>,
) -> Result<GroupedKvCache> {
    let shares = model.groups().iter().map(|group| GroupShare::new(model, group, config));
    let shares = shares.collect::<Result<Vec<_>>>()?;
    let (longest, step) = (model.config().max_positions, config.scheduling.step_tokens);
    let most = || {
        let bytes = |share: &GroupShare| share.blocks_of(longest, step).saturating_mul(share.block_bytes);
        shares.iter().map(bytes).fold(0, usize::saturating_add).saturating_mul(8)
    };
    let budget = config.kv_memory.unwrap_or_else(|| most().min(DEFAULT_KV_MEMORY));
    let blocks = divide(budget, &shares, config.typical_len.min(longest), step)?;
    let groups = shares.into_iter().zip(blocks).map(|(GroupShare { kind, shape, .. }, num_blocks)| {
        let layout = Arc::new(KvLayout::new(KvShape { num_blocks, ..shape })?);
        let arena = KvArena::allocate(backend, MemoryKind::Device, layout)?;
        let watermark = config.scheduling.watermark.min(num_blocks - 1);
        let settings = PoolConfig::default().policy(config.cache_policy);
        let settings = settings.chains(!matches!(kind, GroupKind::SlidingWindow { .. }));
        let settings = settings.watermark(watermark).clock(Arc::clone(clock));
        let settings = config.cache_ttl.map_or(settings.clone(), |ttl| settings.ttl(ttl));
        let pool = BlockPool::with_config(0..num_blocks as u32, settings)?;
        Ok((kind, PagedKvCache::new(arena, pool)?))
    });
    Ok(GroupedKvCache::new(groups.collect::<Result<Vec<_>>>()?)?)
}

// Decision: docs/decisions/paging.md#memory-is-divided-between-groups-for-requests-of-a-typical-length
/// Returns the number of blocks for each group: one block, plus the blocks for as many sequences of `len`
/// tokens as fit in the rest of the budget. The first group without a window also gets the memory that is
/// left over by rounding.
fn divide(budget: usize, shares: &[GroupShare], len: usize, step: usize) -> Result<Vec<usize>> {
    let block_bytes: usize = shares.iter().map(|share| share.block_bytes).sum();
    let Some(left) = budget.checked_sub(block_bytes) else {
        return Err(kvcore::Error::NotEnoughMemory { budget, block_bytes }.into());
    };
    let bytes = |share: &GroupShare| share.blocks_of(len, step) as u128 * share.block_bytes as u128;
    let sequence = shares.iter().map(bytes).sum::<u128>().max(1);
    let blocks_of =
        |share: &GroupShare| 1 + (left as u128 * share.blocks_of(len, step) as u128 / sequence) as usize;
    let mut blocks: Vec<usize> = shares.iter().map(blocks_of).collect();
    let taken: usize = blocks.iter().zip(shares).map(|(blocks, share)| blocks * share.block_bytes).sum();
    let whole = shares.iter().position(|share| !matches!(share.kind, GroupKind::SlidingWindow { .. }));
    let whole = whole.unwrap_or(0);
    blocks[whole] += budget.saturating_sub(taken) / shares[whole].block_bytes;
    Ok(blocks)
}

impl SequenceCache for GroupedKvCache {
    fn first(&self) -> &dyn KvCache {
        &self.groups()[0].1
    }

    fn arenas(&self) -> &[KvArena] {
        self.arenas()
    }

    fn groups(&self) -> &[(GroupKind, PagedKvCache)] {
        self.groups()
    }

    fn grouped(&mut self) -> Result<&mut GroupedKvCache> {
        Ok(self)
    }

    fn longest(&self) -> usize {
        usize::MAX
    }

    fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        Ok(self.create(start)?)
    }

    fn create_with_prefix(&mut self, prompt: &PromptKeys) -> Result<(SequenceId, usize)> {
        Ok(self.create_with_prefix(prompt)?)
    }

    fn admit(&mut self, prompt: &PromptKeys, piece: usize) -> Result<(SequenceId, usize, Vec<WriteSlots>)> {
        Ok(self.admit(prompt, piece)?)
    }

    fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut Vec<WriteSlots>) -> Result<()> {
        Ok(self.grow_batch(batch, slots)?)
    }

    fn commit(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        Ok(self.commit(id, tokens)?)
    }

    fn free_before(&mut self, id: SequenceId, token: usize) -> Result<()> {
        Ok(self.free_before(id, token).map(drop)?)
    }

    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        Ok(self.truncate(id, len)?)
    }

    fn free(&mut self, id: SequenceId) -> Result<()> {
        Ok(self.free(id)?)
    }
}

#[cfg(test)]
mod tests {
    use kvcore::DType;

    use super::*;

    fn share_of(kind: GroupKind, num_layers: usize) -> GroupShare {
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
        GroupShare { kind, shape, block_bytes }
    }

    #[test]
    fn each_group_gets_the_blocks_of_as_many_sequences() {
        let window = GroupKind::SlidingWindow { window: 24 };
        let shares = [share_of(window, 5), share_of(GroupKind::Full, 1)];
        let bytes = |blocks: &[usize]| blocks[0] * shares[0].block_bytes + blocks[1] * shares[1].block_bytes;
        for budget in [50_000usize, 1_000_000, 123_456_789] {
            let blocks = divide(budget, &shares, 400, 16).unwrap();
            let taken = bytes(&blocks);
            assert!(taken <= budget && budget - taken < shares[0].block_bytes, "{budget}: {taken}");
            // 40 tokens need ten blocks, plus one; 400 need a hundred, plus one
            let sequences = [(blocks[0] - 1) / 11, (blocks[1] - 1) / 101];
            assert!(sequences[1].abs_diff(sequences[0]) <= 1 + sequences[0] / 50, "{blocks:?}");
            // requests that fit in the window need the same number of blocks in each group
            let blocks = divide(budget, &shares, 40, 16).unwrap();
            assert!(blocks[1].abs_diff(blocks[0]) <= 5, "{blocks:?}");
        }
        let least = shares[0].block_bytes + shares[1].block_bytes;
        assert_eq!(divide(least, &shares, 400, 16).unwrap(), [1, 1]);
        assert!(divide(least - 1, &shares, 400, 16).is_err());
    }
}
