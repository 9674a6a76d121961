//! The choice between a static and a paged cache, as a setting that can be stored and read back.

use std::str::FromStr;
use std::sync::Arc;

use kvcore::{
    Backend, BlockPool, CacheKind, KvArena, KvCache, KvExtents, MemoryKind, PagedCacheConfig, PagedKvCache,
    RankInfo, StaticCacheConfig, StaticKvCache,
};
use serde::{Deserialize, Serialize};

use crate::error::{CoreError, Error, Result};

/// The settings of a cache of either kind, as a configuration file gives them.
///
/// ```
/// use kvcore::{CacheKind, PolicyKind};
/// use kvmanager::CacheChoice;
/// let text = r#"{"cache": "paged", "block_size": 32, "policy": "tiny-lfu", "watermark": 4}"#;
/// let choice: CacheChoice = serde_json::from_str(text)?;
/// let CacheChoice::Paged(paged) = &choice else { unreachable!("it says paged") };
/// assert_eq!((paged.block_size, paged.policy), (32, PolicyKind::TinyLfu));
/// let fixed: CacheChoice = serde_json::from_str(r#"{"cache": "static", "max_len": "max"}"#)?;
/// assert_eq!((choice.kind(), fixed.kind()), (CacheKind::Paged, CacheKind::Static));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cache", rename_all = "lowercase")]
#[doc(alias = "CacheConfig")]
pub enum CacheChoice {
    /// A static cache.
    Static(StaticCacheConfig),
    /// A paged cache.
    Paged(PagedCacheConfig),
}

impl CacheChoice {
    /// Returns the kind of cache that the settings describe.
    pub fn kind(&self) -> CacheKind {
        match self {
            Self::Static(_) => CacheKind::Static,
            Self::Paged(_) => CacheKind::Paged,
        }
    }

    /// Allocates this rank's cache of a model.
    ///
    /// # Errors
    /// Returns [`NotEnoughMemory`](kvcore::Error::NotEnoughMemory) if the budget does not hold one block,
    /// [`Uneven`](kvcore::Error::Uneven) if the model does not divide evenly among the ranks,
    /// [`Zero`](kvcore::Error::Zero) if an extent is 0, and the errors of the backend.
    pub fn build(
        &self,
        backend: &dyn Backend,
        memory: MemoryKind,
        extents: &KvExtents,
        rank: &RankInfo,
    ) -> Result<Box<dyn KvCache>> {
        let arena = |layout| KvArena::allocate(backend, memory, Arc::new(layout));
        match self {
            Self::Static(config) => Ok(Box::new(StaticKvCache::new(arena(config.layout(extents, rank)?)?)?)),
            Self::Paged(config) => {
                let layout = config.layout(extents, rank)?;
                let pool = BlockPool::with_config(0..layout.shape().num_blocks as u32, config.pool())?;
                Ok(Box::new(PagedKvCache::new(arena(layout)?, pool)?))
            }
        }
    }
}

impl FromStr for CacheChoice {
    type Err = Error;

    /// Parses `static` or `paged` into default settings.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "static" => Ok(Self::Static(StaticCacheConfig::default())),
            "paged" => Ok(Self::Paged(PagedCacheConfig::default())),
            other => {
                let what = format!("cache {other:?} (static and paged are)");
                Err(CoreError::Unsupported { backend: "kvmanager", what }.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvcore::{BlockOrder, PolicyKind};

    use super::*;

    #[test]
    fn configs_are_cloned_and_read_back() {
        let choices = [
            CacheChoice::Static(StaticCacheConfig {
                max_batch: 8,
                max_len: 2048.into(),
                order: BlockOrder::TokenMajor,
            }),
            CacheChoice::Static(StaticCacheConfig::default()),
            CacheChoice::Static(StaticCacheConfig { max_batch: 2, max_len: 0.into(), ..Default::default() }),
            CacheChoice::Paged(PagedCacheConfig {
                max_memory: 10 << 30,
                block_size: 24,
                order: BlockOrder::TokenMajor,
                policy: PolicyKind::TinyLfu,
                watermark: 7,
                ttl_seconds: Some(3600),
            }),
        ];
        for choice in choices {
            let json = serde_json::to_string(&choice).unwrap();
            assert_eq!(serde_json::from_str::<CacheChoice>(&json).unwrap(), choice, "{json}");
            assert_eq!(choice.clone().kind(), choice.kind());
        }
        let from = |json: &str| serde_json::from_str::<CacheChoice>(json).unwrap();
        assert_eq!(from(r#"{"cache":"static","max_len":"max"}"#), "static".parse().unwrap());
        assert_eq!(from(r#"{"cache":"static","max_len":0}"#), "static".parse().unwrap());
        assert_eq!(from(r#"{"cache":"paged"}"#), "paged".parse().unwrap());
        let policy = PagedCacheConfig { policy: PolicyKind::S3Fifo, ..PagedCacheConfig::default() };
        assert_eq!(from(r#"{"cache":"paged","policy":"s3-fifo"}"#), CacheChoice::Paged(policy));
        assert!("hybrid".parse::<CacheChoice>().is_err());
    }
}
