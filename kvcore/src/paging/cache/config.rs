//! Cache settings, which can be cloned, stored and loaded.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::MaxLen;
use crate::base::{BlockOrder, KvFormat, KvLayout, KvShape, RankInfo, Result};
use crate::paging::{PolicyKind, PoolConfig};

/// The dimensions of a model that a cache depends on. They describe the whole model, before it is split among
/// ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvExtents {
    /// Number of layers.
    pub num_layers: usize,
    /// Number of heads of K.
    pub k_heads: usize,
    /// Number of heads of V.
    pub v_heads: usize,
    /// Number of elements per head of K.
    pub k_dim: usize,
    /// Number of elements per head of V.
    pub v_dim: usize,
    /// Maximum sequence length that the model supports, in tokens.
    pub max_positions: usize,
    /// Storage format of the elements.
    pub format: KvFormat,
}

impl KvExtents {
    /// Returns the head-major shape of this rank's part of the model, with `num_blocks` blocks of
    /// `block_size` tokens.
    ///
    /// # Errors
    /// Returns [`Error::Uneven`](crate::Error::Uneven) if heads or layers cannot be divided among the ranks,
    /// and the errors of [`RankInfo::checked`].
    pub fn shape(&self, rank: &RankInfo, num_blocks: usize, block_size: usize) -> Result<KvShape> {
        Ok(KvShape {
            num_layers: rank.layers(self.num_layers)?.len(),
            num_blocks,
            block_size,
            k_heads: rank.kv_heads(self.k_heads)?.count,
            v_heads: rank.kv_heads(self.v_heads)?.count,
            k_dim: self.k_dim,
            v_dim: self.v_dim,
            format: self.format,
            order: BlockOrder::HeadMajor,
        })
    }
}

/// The settings of a static cache: `max_batch` entries of `max_len` tokens, all allocated at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StaticCacheConfig {
    /// Number of entries in the whole batch, before it is split among data-parallel ranks.
    pub max_batch: usize,
    /// Number of tokens per entry.
    pub max_len: MaxLen,
    /// Order of heads and tokens in memory.
    pub order: BlockOrder,
}

impl Default for StaticCacheConfig {
    /// Returns settings for one head-major entry of the model's maximum length.
    fn default() -> Self {
        Self { max_batch: 1, max_len: MaxLen::Model, order: BlockOrder::HeadMajor }
    }
}

impl StaticCacheConfig {
    /// Returns the layout of this rank's part of the cache: one block per batch entry, with the length of the
    /// entry.
    ///
    /// # Errors
    /// Returns [`Error::Uneven`](crate::Error::Uneven) if the batch or the model cannot be divided among the
    /// ranks, [`Error::Zero`](crate::Error::Zero) if an extent or the length is 0, and
    /// [`Error::Overflow`](crate::Error::Overflow) if a size does not fit in the address space.
    pub fn layout(&self, extents: &KvExtents, rank: &RankInfo) -> Result<KvLayout> {
        let batch = rank.batch(self.max_batch)?.len();
        let len = self.max_len.for_model(extents.max_positions);
        KvLayout::new(KvShape { order: self.order, ..extents.shape(rank, batch, len)? })
    }
}

/// The settings of a paged cache, which uses as many blocks as fit in a memory budget.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PagedCacheConfig {
    /// Maximum size of K, V and their scales in all layers of this rank, in bytes.
    pub max_memory: usize,
    /// Number of tokens per block, at least 1.
    pub block_size: usize,
    /// Order of heads and tokens in a block.
    pub order: BlockOrder,
    /// Eviction policy for cached blocks.
    pub policy: PolicyKind,
    /// Number of blocks to leave for running sequences when a new sequence is admitted.
    pub watermark: usize,
    /// Seconds after which an unused cached block is no longer found. `None` means that blocks do not
    /// expire.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

impl Default for PagedCacheConfig {
    /// Returns settings for 1 GiB of head-major blocks of 16 tokens, with LRU eviction, no watermark and no
    /// expiry.
    fn default() -> Self {
        Self {
            max_memory: 1 << 30,
            block_size: 16,
            order: BlockOrder::HeadMajor,
            policy: PolicyKind::Lru,
            watermark: 0,
            ttl_seconds: None,
        }
    }
}

impl PagedCacheConfig {
    /// Returns the layout of this rank's part of the cache, with as many blocks as fit in
    /// [`max_memory`](Self::max_memory).
    ///
    /// # Errors
    /// Returns [`Error::NotEnoughMemory`](crate::Error::NotEnoughMemory) if the budget is too small for one
    /// block, [`Error::Uneven`](crate::Error::Uneven) if the model cannot be divided among the ranks, and
    /// [`Error::Zero`](crate::Error::Zero) if an extent is 0.
    pub fn layout(&self, extents: &KvExtents, rank: &RankInfo) -> Result<KvLayout> {
        let shape = KvShape { order: self.order, ..extents.shape(rank, 1, self.block_size)? };
        KvLayout::within_budget(&shape, self.max_memory)
    }

    /// Returns the settings of the pool. Events and a clock, which cannot be stored in a file, must be added
    /// by the caller.
    pub fn pool(&self) -> PoolConfig {
        let config = PoolConfig::default().policy(self.policy).watermark(self.watermark);
        self.ttl_seconds.map_or(config.clone(), |ttl| config.ttl(Duration::from_secs(ttl)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::base::{DType, Error};
    use crate::paging::{BlockPool, KeyScope, ManualClock, Retention};

    #[test]
    fn a_length_is_the_smaller_of_config_and_model() {
        assert_eq!(MaxLen::from(0).for_model(2048), 2048);
        assert_eq!(MaxLen::from(1024).for_model(2048), 1024);
        assert_eq!(MaxLen::from(4096).for_model(2048), 2048);
        assert_eq!(MaxLen::Model.for_model(77), 77);
        for len in [0, 1, 2048].map(MaxLen::from) {
            let json = serde_json::to_string(&len).unwrap();
            assert_eq!(serde_json::from_str::<MaxLen>(&json).unwrap(), len, "{json}");
        }
        assert_eq!(serde_json::from_str::<MaxLen>("0").unwrap(), MaxLen::Model);
    }

    #[test]
    fn defaults_are_one_sequence_and_blocks_of_sixteen() {
        let (fixed, paged) = (StaticCacheConfig::default(), PagedCacheConfig::default());
        assert_eq!((fixed.max_batch, fixed.max_len, paged.block_size), (1, MaxLen::Model, 16));
        assert_eq!((fixed.order, paged.order), (BlockOrder::HeadMajor, BlockOrder::HeadMajor));
    }

    #[test]
    fn the_settings_of_the_pool_take_effect() {
        let config = PagedCacheConfig {
            policy: PolicyKind::Priority,
            watermark: 3,
            ttl_seconds: Some(60),
            ..Default::default()
        };
        let clock = ManualClock::default();
        let pool = BlockPool::with_config(0..8, config.pool().clock(Arc::new(clock.clone()))).unwrap();
        let held = pool.allocate(1).unwrap();
        assert!(
            pool.admit_prefix(&[], 5, 0).is_err() && pool.admit_prefix(&[], 4, 0).is_ok(),
            "the watermark"
        );
        drop(held);
        let keys = KeyScope::new("m", b"").root().chain(&[1, 2, 3, 4], 2);
        let wanted = pool.allocate(2).unwrap().register(None, &keys).unwrap();
        wanted.retain(Retention { priority: 100, lasts: None });
        drop(wanted);
        let others = KeyScope::new("m", b"").root().chain(&[5, 6, 7, 8], 2);
        drop(pool.allocate(2).unwrap().register(None, &others).unwrap());
        drop(pool.allocate(6).unwrap());
        assert_eq!((pool.cached_prefix(&keys), pool.cached_prefix(&others)), (2, 0), "the policy");
        clock.advance(Duration::from_secs(61));
        assert_eq!(pool.lookup_chain(&keys).len(), 0, "the time to live");
    }

    /// Checks an example of the project's first documents: 10 GiB, 32 heads of 128 elements in bf16. Their
    /// formula, which ignores the layers, gives 40,960 blocks. With 32 layers, only 1/32 of them fit.
    #[test]
    fn seed_000s_block_count_is_the_one_of_a_single_layer() {
        let extents = |num_layers| KvExtents {
            num_layers,
            k_heads: 32,
            v_heads: 32,
            k_dim: 128,
            v_dim: 128,
            max_positions: 4096,
            format: DType::BF16.into(),
        };
        let blocks = |num_layers, rank: &RankInfo| {
            let shape = extents(num_layers).shape(rank, 1, 16).unwrap();
            let layout = KvLayout::within_budget(&shape, 10 << 30).unwrap();
            assert!(layout.k_bytes() + layout.v_bytes() <= 10 << 30);
            layout.shape().num_blocks
        };
        assert_eq!(blocks(1, &RankInfo::default()), 40_960);
        assert_eq!(blocks(32, &RankInfo::default()), 40_960 / 32);
        assert_eq!(blocks(32, &RankInfo::tensor_parallel(1, 4).unwrap()), 40_960 / 32 * 4);
        assert_eq!(blocks(32, &RankInfo::pipeline(3, 4).unwrap()), 40_960 / 8);
    }

    #[test]
    fn k_and_v_may_differ_in_heads_and_dims() {
        let extents = KvExtents {
            num_layers: 2,
            k_heads: 4,
            v_heads: 8,
            k_dim: 192,
            v_dim: 128,
            max_positions: 64,
            format: DType::F16.into(),
        };
        let shape = extents.shape(&RankInfo::tensor_parallel(0, 4).unwrap(), 1, 16).unwrap();
        assert_eq!((shape.k_heads, shape.v_heads), (1, 2));
        let block = 2 * 16 * (192 + 2 * 128) * 2;
        assert_eq!(KvLayout::within_budget(&shape, 3 * block + 1).unwrap().shape().num_blocks, 3);
        assert_eq!(
            KvLayout::within_budget(&shape, block - 1),
            Err(Error::NotEnoughMemory { budget: block - 1, block_bytes: block })
        );
    }

    #[test]
    fn configs_are_cloned_and_read_back() {
        let order = BlockOrder::TokenMajor;
        for config in [
            StaticCacheConfig { max_batch: 8, max_len: 2048.into(), order },
            StaticCacheConfig { max_batch: 2, max_len: 0.into(), ..Default::default() },
        ] {
            let json = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::from_str::<StaticCacheConfig>(&json).unwrap(), config.clone(), "{json}");
        }
        let paged = PagedCacheConfig {
            max_memory: 10 << 30,
            block_size: 24,
            order,
            policy: PolicyKind::TinyLfu,
            watermark: 7,
            ttl_seconds: Some(3600),
        };
        let json = serde_json::to_string(&paged).unwrap();
        assert_eq!(serde_json::from_str::<PagedCacheConfig>(&json).unwrap(), paged.clone(), "{json}");
        let policy = PagedCacheConfig { policy: PolicyKind::S3Fifo, ..Default::default() };
        assert_eq!(serde_json::from_str::<PagedCacheConfig>(r#"{"policy":"s3-fifo"}"#).unwrap(), policy);
        let fixed = serde_json::from_str::<StaticCacheConfig>(r#"{"max_len":"max"}"#).unwrap();
        assert_eq!(fixed, StaticCacheConfig::default());
    }

    #[test]
    fn configs_lay_out_the_rank_they_are_asked_for() {
        let extents = |k_heads, v_heads| KvExtents {
            num_layers: 2,
            k_heads,
            v_heads,
            k_dim: 3,
            v_dim: 3,
            max_positions: 32,
            format: DType::F32.into(),
        };
        let fixed = StaticCacheConfig { max_batch: 8, max_len: 1000.into(), ..Default::default() };
        let rank = RankInfo { tp_rank: 1, tp_size: 4, dp_rank: 2, dp_size: 3, ..RankInfo::default() };
        let layout = fixed.layout(&extents(8, 2), &rank).unwrap();
        let s = layout.shape();
        assert_eq!(s.block_size, 32, "the model's length is shorter");
        assert_eq!(
            (s.num_blocks, s.k_heads, s.v_heads),
            (2, 2, 1),
            "heads divided or replicated, batch sliced"
        );
        let uneven = fixed.layout(&extents(8, 8), &RankInfo::tensor_parallel(0, 3).unwrap());
        assert_eq!(uneven, Err(Error::Uneven { what: "KV heads", count: 8, ranks: 3 }));

        let paged = |max_memory, block_size| {
            let config = PagedCacheConfig { max_memory, block_size, ..PagedCacheConfig::default() };
            config.layout(&extents(2, 2), &RankInfo::default())
        };
        let layout = paged(100_000, 5).unwrap();
        let bytes = layout.k_bytes() + layout.v_bytes();
        assert!(bytes <= 100_000 && bytes + layout.block_bytes() > 100_000, "as many as fit");
        assert!(matches!(paged(10, 16), Err(Error::NotEnoughMemory { budget: 10, .. })));
        assert_eq!(paged(100_000, 0), Err(Error::Zero { what: "block_size" }));
    }
}
