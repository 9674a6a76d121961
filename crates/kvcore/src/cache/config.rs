//! Which cache, of what size: values that are cloned, stored and read back.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{CacheKind, KvCache, PagedKvCache, StaticKvCache};
use crate::backend::{Backend, MemoryKind};
use crate::block::{BlockPool, PoolConfig};
use crate::error::{Error, Result};
use crate::kernels::KvArena;
use crate::layout::{BlockOrder, KvLayout, KvShape};
use crate::parallel::RankInfo;
use crate::quant::KvFormat;

/// What a cache must know of a model: extents of the whole model, before it is cut among ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvExtents {
    /// Layers.
    pub num_layers: usize,
    /// Heads of K.
    pub k_heads: usize,
    /// Heads of V.
    pub v_heads: usize,
    /// Elements per head of K.
    pub k_dim: usize,
    /// Elements per head of V.
    pub v_dim: usize,
    /// Longest sequence that the model takes.
    pub max_positions: usize,
    /// How elements are stored.
    pub format: KvFormat,
}

impl KvExtents {
    /// The shape of this rank's part, head-major, with blocks as given.
    ///
    /// # Errors
    /// [`Error::Uneven`] where heads or layers do not divide among the ranks.
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

/// Settings of some cache.
pub trait CacheConfig: fmt::Debug + Send + Sync {
    /// Which cache it is for.
    fn kind(&self) -> CacheKind;

    /// A copy of these settings.
    fn boxed_clone(&self) -> Box<dyn CacheConfig>;

    /// Allocates this rank's cache of a model.
    ///
    /// # Errors
    /// [`Error::NotEnoughMemory`] when the budget holds no block, [`Error::Uneven`], [`Error::Zero`],
    /// and what the backend refuses.
    fn build(
        &self,
        backend: &dyn Backend,
        memory: MemoryKind,
        extents: &KvExtents,
        rank: &RankInfo,
    ) -> Result<Box<dyn KvCache>>;
}

/// A length that may be left to the model. In configurations: a number, or `"max"`; 0 means the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "LengthText", into = "LengthText")]
pub enum MaxLen {
    /// The model's longest sequence.
    #[default]
    Model,
    /// So many tokens, or the model's longest sequence if that is shorter.
    Tokens(usize),
}

impl MaxLen {
    /// The length for a model that takes `max_positions` tokens.
    pub fn for_model(self, max_positions: usize) -> usize {
        match self {
            Self::Model => max_positions,
            Self::Tokens(tokens) => tokens.min(max_positions),
        }
    }
}

impl From<usize> for MaxLen {
    fn from(tokens: usize) -> Self {
        if tokens == 0 { Self::Model } else { Self::Tokens(tokens) }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum LengthText {
    Tokens(usize),
    Max(Max),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Max {
    Max,
}

impl From<LengthText> for MaxLen {
    fn from(text: LengthText) -> Self {
        match text {
            LengthText::Tokens(tokens) => tokens.into(),
            LengthText::Max(Max::Max) => Self::Model,
        }
    }
}

impl From<MaxLen> for LengthText {
    fn from(len: MaxLen) -> Self {
        match len {
            MaxLen::Model => Self::Max(Max::Max),
            MaxLen::Tokens(tokens) => Self::Tokens(tokens),
        }
    }
}

/// A static cache: `max_batch` entries of `max_len` tokens, all allocated at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StaticCacheConfig {
    /// Entries of the whole batch, before it is cut among data-parallel ranks.
    pub max_batch: usize,
    /// Tokens of an entry.
    pub max_len: MaxLen,
}

impl Default for StaticCacheConfig {
    /// One entry of the model's longest length.
    fn default() -> Self {
        Self { max_batch: 1, max_len: MaxLen::Model }
    }
}

impl CacheConfig for StaticCacheConfig {
    fn kind(&self) -> CacheKind {
        CacheKind::Static
    }

    fn boxed_clone(&self) -> Box<dyn CacheConfig> {
        Box::new(self.clone())
    }

    fn build(
        &self,
        backend: &dyn Backend,
        memory: MemoryKind,
        extents: &KvExtents,
        rank: &RankInfo,
    ) -> Result<Box<dyn KvCache>> {
        let batch = rank.batch(self.max_batch)?.len();
        let len = self.max_len.for_model(extents.max_positions);
        let layout = KvLayout::new(extents.shape(rank, batch, len)?)?;
        Ok(Box::new(StaticKvCache::new(KvArena::allocate(backend, memory, Arc::new(layout))?)?))
    }
}

/// A paged cache: as many blocks as a memory budget holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PagedCacheConfig {
    /// Bytes for K and V over all layers of this rank, their scales included; never exceeded.
    pub max_memory: usize,
    /// Tokens per block; any number from 1 up.
    pub block_size: usize,
}

impl Default for PagedCacheConfig {
    /// 1 GiB in blocks of 16 tokens.
    fn default() -> Self {
        Self { max_memory: 1 << 30, block_size: 16 }
    }
}

impl CacheConfig for PagedCacheConfig {
    fn kind(&self) -> CacheKind {
        CacheKind::Paged
    }

    fn boxed_clone(&self) -> Box<dyn CacheConfig> {
        Box::new(self.clone())
    }

    fn build(
        &self,
        backend: &dyn Backend,
        memory: MemoryKind,
        extents: &KvExtents,
        rank: &RankInfo,
    ) -> Result<Box<dyn KvCache>> {
        let shape = extents.shape(rank, 1, self.block_size)?;
        let layout = KvLayout::within_budget(&shape, self.max_memory)?;
        let pool = BlockPool::with_config(0..layout.shape().num_blocks as u32, PoolConfig::default())?;
        Ok(Box::new(PagedKvCache::new(KvArena::allocate(backend, memory, Arc::new(layout))?, pool)?))
    }
}

/// Either, as a configuration file names it: `{"cache": "static", "max_len": "max"}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cache", rename_all = "lowercase")]
pub enum CacheChoice {
    /// A static cache.
    Static(StaticCacheConfig),
    /// A paged cache.
    Paged(PagedCacheConfig),
}

impl CacheChoice {
    fn chosen(&self) -> &dyn CacheConfig {
        match self {
            Self::Static(config) => config,
            Self::Paged(config) => config,
        }
    }
}

impl CacheConfig for CacheChoice {
    fn kind(&self) -> CacheKind {
        self.chosen().kind()
    }

    fn boxed_clone(&self) -> Box<dyn CacheConfig> {
        Box::new(self.clone())
    }

    fn build(
        &self,
        backend: &dyn Backend,
        memory: MemoryKind,
        extents: &KvExtents,
        rank: &RankInfo,
    ) -> Result<Box<dyn KvCache>> {
        self.chosen().build(backend, memory, extents, rank)
    }
}

impl FromStr for CacheChoice {
    type Err = Error;

    /// `static` or `paged`, with default settings.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "static" => Ok(Self::Static(StaticCacheConfig::default())),
            "paged" => Ok(Self::Paged(PagedCacheConfig::default())),
            other => Err(Error::Unsupported {
                backend: "kvcore",
                what: format!("cache {other:?} (static and paged are)"),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn a_length_is_the_smaller_of_config_and_model() {
        assert_eq!(MaxLen::from(0).for_model(2048), 2048);
        assert_eq!(MaxLen::from(1024).for_model(2048), 1024);
        assert_eq!(MaxLen::from(4096).for_model(2048), 2048);
        assert_eq!(MaxLen::Model.for_model(77), 77);
    }

    #[test]
    fn defaults_are_one_sequence_and_blocks_of_sixteen() {
        let (fixed, paged) = (StaticCacheConfig::default(), PagedCacheConfig::default());
        assert_eq!((fixed.max_batch, fixed.max_len, paged.block_size), (1, MaxLen::Model, 16));
    }

    #[test]
    fn configs_are_cloned_and_read_back() {
        let choices = [
            CacheChoice::Static(StaticCacheConfig { max_batch: 8, max_len: MaxLen::Tokens(2048) }),
            CacheChoice::Static(StaticCacheConfig::default()),
            CacheChoice::Paged(PagedCacheConfig { max_memory: 10 << 30, block_size: 24 }),
        ];
        for choice in choices {
            let json = serde_json::to_string(&choice).unwrap();
            assert_eq!(serde_json::from_str::<CacheChoice>(&json).unwrap(), choice, "{json}");
            assert_eq!(choice.boxed_clone().kind(), choice.kind());
        }
        let from = |json: &str| serde_json::from_str::<CacheChoice>(json).unwrap();
        assert_eq!(from(r#"{"cache":"static","max_len":"max"}"#), "static".parse().unwrap());
        assert_eq!(from(r#"{"cache":"static","max_len":0}"#), "static".parse().unwrap());
        assert_eq!(from(r#"{"cache":"paged"}"#), "paged".parse().unwrap());
        assert!("hybrid".parse::<CacheChoice>().is_err());
    }

    /// Seed 000's example: 10 GiB, 32 heads of 128 in bf16. Its formula leaves the layers out; ours gives
    /// its 40,960 blocks for one layer and a 32nd of them for 32.
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
}
