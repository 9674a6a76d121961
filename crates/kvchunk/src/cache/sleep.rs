//! Sleep: pieces that are seldom used wait in a lower memory.

use std::fmt;
use std::time::Duration;

use kvcore::BlockId;

use crate::error::Result;

/// Where pieces sleep. What it does runs without any lock of the cache, dropping what is saved included. A store that
/// uses its cache holds a [`WeakChunkCache`](crate::WeakChunkCache), or neither would ever be freed.
///
/// Copies may be enqueued instead of done, if they are ordered with whatever reads and writes the blocks
/// later: [`ArenaSleep`](crate::ArenaSleep) enqueues them on the stream that computes.
pub trait SleepStore: Send + Sync + fmt::Debug {
    /// Saves the contents of blocks.
    ///
    /// # Errors
    /// Nothing is kept then, and the blocks are as before.
    fn save(&self, blocks: &[BlockId]) -> Result<Box<dyn Sleeping>>;
}

/// Saved contents. Dropping it gives its memory back.
pub trait Sleeping: Send + Sync + fmt::Debug {
    /// Writes the contents into as many blocks as they came from.
    ///
    /// # Errors
    /// The contents cannot be had; what the blocks hold then does not matter.
    fn restore(&self, blocks: &[BlockId]) -> Result<()>;

    /// Bytes that it takes.
    fn bytes(&self) -> usize;

    /// Whether what is restored is bit for bit what was saved.
    fn is_exact(&self) -> bool {
        true
    }
}

/// Which pieces are cold. Pieces that somebody holds never are, nor are those just stored or woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColdRule {
    /// Pieces used less often than this are cold.
    pub min_accesses: u64,
    /// Pieces not used for this long are cold.
    pub idle: Duration,
    /// Pieces that were stored or woken more recently are spared: they have not had the time to be used.
    pub spare_younger_than: Duration,
}

impl Default for ColdRule {
    /// Fewer than 5 uses, or none for an hour; pieces of the last minute are spared.
    fn default() -> Self {
        Self { min_accesses: 5, idle: Duration::from_secs(3600), spare_younger_than: Duration::from_secs(60) }
    }
}

impl ColdRule {
    /// Everything that nobody holds is cold.
    pub const EVERYTHING: Self =
        Self { min_accesses: u64::MAX, idle: Duration::ZERO, spare_younger_than: Duration::ZERO };

    /// `awake` is the time since the piece was stored or woken.
    pub(super) fn is_cold(&self, awake: Duration, idle: Duration, accesses: u64) -> bool {
        awake >= self.spare_younger_than && (accesses < self.min_accesses || idle >= self.idle)
    }
}

/// Why a piece was not woken.
#[derive(Debug, Clone, PartialEq)]
pub enum NotWoken {
    /// No piece has this hash.
    Unknown,
    /// Even after evicting what nobody holds there is no room.
    NoRoom,
    /// The whole pool sleeps: see [`wake_pool`](crate::ChunkCacheManager::wake_pool).
    PoolAsleep,
    /// Another thread was still putting it to sleep or waking it when the time to wait was over.
    Moving {
        /// [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms).
        limit: Duration,
    },
    /// What was saved cannot be read back; the piece is gone and will be computed anew.
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
