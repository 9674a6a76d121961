//! Caches: where sequences meet blocks and an arena.

use crate::error::{Error, Result};

mod config;
mod kv_cache;
mod paged;
mod prefix;
mod sequence;
mod slots;
mod static_cache;
mod views;

pub use config::{CacheChoice, CacheConfig, KvExtents, MaxLen, PagedCacheConfig, StaticCacheConfig};
pub use kv_cache::{CacheKind, KvCache, LayerViews, Places};
pub use paged::PagedKvCache;
pub use prefix::{PrefixFill, SealedPrefix};
pub use sequence::{SequenceId, SequenceStart};
pub use slots::SlotMapping;
pub use static_cache::StaticKvCache;
use views::layer_views;
