//! Caches: where sequences meet blocks and an arena.

use crate::base::{Error, Result};

mod config;
mod groups;
mod kv_cache;
mod manager;
mod max_len;
mod paged;
mod paged_layers;
mod partial;
mod prefix;
mod rows;
mod sequence;
mod sequences;
mod single;
mod slots;
mod spanned;
mod static_cache;
mod swap;

pub use config::{CacheChoice, CacheConfig, KvExtents, PagedCacheConfig, StaticCacheConfig};
pub use groups::{GroupBlocks, GroupKind, GroupedPrefix, PrefixGroups};
pub use kv_cache::{CacheKind, KvCache, LayerViews, Places};
pub use manager::{BlockManager, BlockManagerConfig};
pub use max_len::MaxLen;
pub use paged::PagedKvCache;
pub use prefix::{PrefixFill, SealedPrefix};
pub use sequence::{SequenceId, SequenceStart};
pub use sequences::{DEFAULT_MAX_BLOCKS, PagedSequences};
pub use single::{DenseKv, DenseSequence, SingleSequence};
pub use slots::SlotMapping;
pub use spanned::{Placement, SpannedArena, SpannedPart};
pub use static_cache::StaticKvCache;
pub use swap::SwappedSequence;
