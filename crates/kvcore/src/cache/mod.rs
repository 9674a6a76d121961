//! Caches: where sequences meet blocks and an arena.

use crate::error::{Error, Result};

mod paged;
mod slots;
mod static_cache;

pub use paged::{PagedKvCache, SealedPrefix, SequenceId, SequenceStart};
pub use slots::SlotMapping;
pub use static_cache::StaticKvCache;
