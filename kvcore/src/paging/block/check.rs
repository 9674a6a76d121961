//! Consistency checks that recount the blocks of a pool. They must pass whenever all shards are locked.

use super::PoolCounts;
use super::index::Index;
use super::rules::Rules;
use super::shard::{BlockStage, Shard};

/// Returns the number of blocks in a shard that have keys, or a description of the first inconsistency. Counts the
/// blocks that follow each block of the pool in `followers`.
pub(super) fn shard(
    shard: &Shard,
    rules: &Rules,
    index: &Index,
    followers: &mut [u32],
) -> Result<usize, String> {
    let mut seen = PoolCounts { total: shard.stage.len(), ..PoolCounts::default() };
    let mut keyed = 0;
    for (i, (&stage, meta)) in shard.stage.iter().zip(&shard.meta).enumerate() {
        let id = shard.id(i as u32);
        let claimed = meta.holders > 0 || meta.pins > 0;
        if shard.waits(i as u32) && (claimed || stage != BlockStage::Registered) {
            return Err(format!("block {id} is {stage:?}, and waits to be evicted"));
        }
        match stage {
            BlockStage::Free => seen.free += 1,
            BlockStage::Mutable => seen.mutable += 1,
            BlockStage::Shared | BlockStage::Registered if meta.holders > 0 => seen.shared += 1,
            BlockStage::Shared | BlockStage::Registered => seen.cached += 1,
        }
        match stage {
            BlockStage::Free | BlockStage::Mutable if claimed => {
                return Err(format!("block {id} is {stage:?} and has holders or pins"));
            }
            BlockStage::Shared if !claimed => {
                return Err(format!("nothing keeps block {id}, yet it is not free"));
            }
            BlockStage::Registered => {
                keyed += 1;
                if let Some(block) = shard.chains.linked(meta.before) {
                    followers[block as usize] += 1;
                }
                if !index.holds(&meta.key, id.0 - rules.first) {
                    return Err(format!("the index does not find block {id} under its key"));
                }
                seen.evictable += usize::from(!claimed);
            }
            _ => {}
        }
    }
    let mut free = shard.free.clone();
    free.sort_unstable();
    free.dedup();
    if free.len() != shard.free.len() || free.iter().any(|&i| shard.stage[i as usize] != BlockStage::Free) {
        return Err("the free list holds a block twice or one in use".to_owned());
    }
    let kept = shard.counts();
    if seen == kept { Ok(keyed) } else { Err(format!("counted {seen:?}, kept {kept:?}")) }
}
