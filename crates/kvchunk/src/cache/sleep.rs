//! Sleep: pieces that are seldom used are kept in a lower memory.

use std::fmt;
use std::time::Duration;

use kvcore::{BlockId, MutableBlocks};

use crate::error::Result;

/// A place where pieces sleep.
///
/// The cache calls a store without any lock of its own, and drops saved contents without one. A store that
/// uses its cache must hold a [`WeakChunkCache`](crate::WeakChunkCache); otherwise neither would ever be
/// freed.
///
/// A store may enqueue its copies instead of waiting for them, if the copies are ordered with everything that
/// reads or writes the blocks later. [`ArenaSleep`](crate::ArenaSleep) enqueues them on the stream that
/// computes.
pub trait SleepStore: Send + Sync + fmt::Debug {
    /// Saves the contents of blocks.
    ///
    /// # Errors
    /// Returns the error of the store. In that case nothing is kept, and the blocks are unchanged.
    fn save(&self, blocks: &[BlockId]) -> Result<Box<dyn Sleeping>>;
}

/// The saved contents of a piece. Dropping them gives their memory back.
pub trait Sleeping: Send + Sync + fmt::Debug {
    /// Writes the contents into blocks, as many as the contents came from.
    ///
    /// # Errors
    /// Returns the error of the store if the contents cannot be read back. In that case the contents of the
    /// blocks do not matter.
    fn restore(&self, blocks: &MutableBlocks) -> Result<()>;

    /// Returns the number of bytes that the saved contents take.
    fn bytes(&self) -> usize;

    /// Returns true if the restored contents are bit for bit the saved ones.
    fn is_exact(&self) -> bool {
        true
    }
}

/// The rule by which pieces are cold. A held piece is never cold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColdRule {
    /// The number of uses below which a piece is cold.
    pub min_accesses: u64,
    /// The time without a use after which a piece is cold.
    pub idle: Duration,
    /// The time after storing or waking during which a piece is never cold, because it has not had the time
    /// to be used.
    pub spare_younger_than: Duration,
}

impl Default for ColdRule {
    /// Calls pieces cold that had fewer than 5 uses, or no use for an hour. Spares pieces that were stored or
    /// woken within the last minute.
    fn default() -> Self {
        Self { min_accesses: 5, idle: Duration::from_secs(3600), spare_younger_than: Duration::from_secs(60) }
    }
}

impl ColdRule {
    /// The rule that calls every piece cold that nobody holds.
    pub const EVERYTHING: Self =
        Self { min_accesses: u64::MAX, idle: Duration::ZERO, spare_younger_than: Duration::ZERO };

    /// Returns true if a piece is cold. The piece was stored or woken `awake` ago.
    pub(super) fn is_cold(&self, awake: Duration, idle: Duration, accesses: u64) -> bool {
        awake >= self.spare_younger_than && (accesses < self.min_accesses || idle >= self.idle)
    }
}

/// The reason why a piece was not woken.
#[derive(Debug, Clone, PartialEq)]
pub enum NotWoken {
    /// No piece has this hash.
    Unknown,
    /// There is no room, even after every piece that nobody holds was evicted.
    NoRoom,
    /// The whole pool sleeps; see [`wake_pool`](crate::ChunkCacheManager::wake_pool).
    PoolAsleep,
    /// Another thread was still putting the piece to sleep or waking it when the time to wait was over.
    Moving {
        /// The longest time to wait, [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms).
        limit: Duration,
    },
    /// The saved contents cannot be read back. The piece is gone and will be recomputed.
    Lost(crate::Error),
}

impl fmt::Display for NotWoken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no chunk has this hash"),
            Self::NoRoom => f.write_str("the chunk pool has no room, even after evicting what nobody holds"),
            Self::PoolAsleep => f.write_str("the whole chunk pool sleeps; wake it first"),
            Self::Moving { limit } => {
                write!(f, "another thread still moves it after {limit:?}; ask again, or raise max_wait_ms")
            }
            Self::Lost(error) => write!(f, "it could not be read back and is gone: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cold_is_seldom_or_long_ago_but_never_new() {
        let rule = ColdRule::default();
        let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3600));
        assert!(!rule.is_cold(minute / 2, minute / 2, 0), "just made");
        assert!(rule.is_cold(minute, Duration::ZERO, 4), "seldom used");
        assert!(!rule.is_cold(minute, Duration::ZERO, 5));
        assert!(!rule.is_cold(2 * hour, 59 * minute, 100));
        assert!(rule.is_cold(2 * hour, hour, 100), "not used for an hour");
        assert!(ColdRule::EVERYTHING.is_cold(Duration::ZERO, Duration::ZERO, 1 << 40));
    }
}
