//! Caches, which store sequences of tokens in the blocks of an arena.

use crate::base::{Error, Result};

mod config;
mod grouped;
mod kind;
mod kv_cache;
mod max_len;
mod paged;
mod paged_batch;
mod paged_layers;
mod pool;
mod sequence;
mod static_cache;
mod swap;

pub use config::{KvExtents, PagedCacheConfig, StaticCacheConfig};
pub use grouped::GroupedKvCache;
pub use kind::GroupKind;
pub use kv_cache::{CacheKind, KvCache, LayerViews};
pub use max_len::MaxLen;
pub use paged::PagedKvCache;
pub use pool::KvPool;
pub use sequence::{SequenceId, SequenceStart};
pub use static_cache::StaticKvCache;
pub use swap::SwappedSequence;
