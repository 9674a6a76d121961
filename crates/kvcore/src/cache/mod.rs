//! Caches: where sequences meet blocks and an arena.

use crate::error::{Error, Result};

mod paged;
mod prefix;
mod slots;
mod static_cache;

pub use paged::{PagedKvCache, SequenceId, SequenceStart};
pub use prefix::{PrefixFill, SealedPrefix};
pub use slots::SlotMapping;
pub use static_cache::StaticKvCache;
