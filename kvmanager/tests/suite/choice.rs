//! A cache of the kind that its settings name, and the part of a rank.

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::{
    BlockOrder, CacheKind, DType, Error, KvCache, KvExtents, MemoryKind, PagedCacheConfig, RankInfo,
    StaticCacheConfig,
};
use kvmanager::CacheChoice;
use rstest::rstest;

use crate::common::{DIM, Memory};

fn extents(k_heads: usize, v_heads: usize) -> KvExtents {
    KvExtents {
        num_layers: 2,
        k_heads,
        v_heads,
        k_dim: DIM,
        v_dim: DIM,
        max_positions: 32,
        format: DType::F32.into(),
    }
}

fn build(m: &Memory, config: &CacheChoice, extents: &KvExtents, rank: &RankInfo) -> Box<dyn KvCache> {
    config.build(m.backend.as_ref(), MemoryKind::Device, extents, rank).unwrap()
}

#[rstest]
fn configs_build_the_rank_they_are_asked_for(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let fixed = StaticCacheConfig { max_batch: 8, max_len: 1000.into(), ..StaticCacheConfig::default() };
    let fixed = CacheChoice::Static(fixed);
    let rank = RankInfo { tp_rank: 1, tp_size: 4, dp_rank: 2, dp_size: 3, ..RankInfo::default() };
    let cache = build(&m, &fixed, &extents(8, 2), &rank);
    let s = cache.arena().layout().shape().clone();
    assert_eq!((cache.kind(), cache.max_len()), (CacheKind::Static, 32), "the model's length is shorter");
    assert_eq!((s.num_blocks, s.k_heads, s.v_heads), (2, 2, 1), "heads divided or replicated, batch sliced");

    let paged = CacheChoice::Paged(PagedCacheConfig {
        max_memory: 100_000,
        block_size: 5,
        ..PagedCacheConfig::default()
    });
    let cache = build(&m, &paged, &extents(2, 2), &RankInfo::default());
    let layout = cache.arena().layout();
    assert!(layout.k_bytes() + layout.v_bytes() <= 100_000);
    assert!(layout.k_bytes() + layout.v_bytes() + layout.block_bytes() > 100_000, "as many as fit");
    assert_eq!(cache.max_len(), layout.shape().num_blocks * 5);

    let order = BlockOrder::TokenMajor;
    let configs = [
        CacheChoice::Static(StaticCacheConfig { order, ..StaticCacheConfig::default() }),
        CacheChoice::Paged(PagedCacheConfig { order, max_memory: 100_000, ..PagedCacheConfig::default() }),
    ];
    for config in &configs {
        let cache = build(&m, config, &extents(2, 2), &RankInfo::default());
        assert_eq!(cache.arena().layout().shape().order, order, "{}", cache.kind());
    }

    let uneven = RankInfo::tensor_parallel(0, 3).unwrap();
    let refused = |config: &CacheChoice, extents: &KvExtents, rank: &RankInfo| match config.build(
        m.backend.as_ref(),
        MemoryKind::Device,
        extents,
        rank,
    ) {
        Err(kvmanager::Error::Core(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refused(&fixed, &extents(8, 8), &uneven),
        Error::Uneven { what: "KV heads", count: 8, ranks: 3 }
    );
    let poor = CacheChoice::Paged(PagedCacheConfig { max_memory: 10, ..PagedCacheConfig::default() });
    assert!(matches!(
        refused(&poor, &extents(2, 2), &RankInfo::default()),
        Error::NotEnoughMemory { budget: 10, .. }
    ));
    let none = CacheChoice::Paged(PagedCacheConfig { block_size: 0, ..PagedCacheConfig::default() });
    assert_eq!(refused(&none, &extents(2, 2), &RankInfo::default()), Error::Zero { what: "block_size" });
}
