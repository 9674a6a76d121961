//! How a pool behaves: everything that has a default.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::clock::{Clock, SystemClock};
use super::event::EventSink;
use super::evict::{EvictionPolicy, PolicyKind};

/// Which blocks an allocation takes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FreeOrder {
    /// Free blocks before cached ones: contents are kept as long as possible. With [`super::Lru`] and
    /// one shard this is the order of vLLM's free block queue since 0.28.
    #[default]
    FreeFirst,
    /// Free and cached blocks wait in one order, that of the eviction policy: what was released longest
    /// ago goes first, whether it holds contents or not. vLLM before 0.28 did so.
    OneQueue,
}

/// What happens when a second block is registered under a known key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Duplicates {
    /// The known block is shared and the second one freed.
    #[default]
    Merge,
    /// Both stay, and lookups find the older: what vLLM does, so that block tables only ever grow.
    Keep,
}

type PolicyMaker = Arc<dyn Fn(usize) -> Box<dyn EvictionPolicy> + Send + Sync>;

/// Settings of a [`super::BlockPool`].
///
/// ```
/// use std::time::Duration;
/// use kvcore::{BlockPool, PolicyKind, PoolConfig};
/// let config = PoolConfig::default()
///     .policy(PolicyKind::TinyLfu)
///     .watermark(2)                            // left to running sequences
///     .ttl(Duration::from_secs(3600));         // unused for an hour: forgotten
/// let pool = BlockPool::with_config(0..16, config)?;
/// assert!(pool.admit(15).is_err());
/// assert_eq!(pool.admit(14)?.len(), 14);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Clone)]
pub struct PoolConfig {
    pub(super) policy: PolicyMaker,
    pub(super) shards: Option<usize>,
    pub(super) free_order: FreeOrder,
    pub(super) duplicates: Duplicates,
    pub(super) watermark: usize,
    pub(super) ttl: Option<Duration>,
    pub(super) events: Option<Arc<dyn EventSink>>,
    pub(super) clock: Option<Arc<dyn Clock>>,
}

impl Default for PoolConfig {
    /// LRU, free blocks first, one block per key, no watermark, no expiry, no events.
    fn default() -> Self {
        Self {
            policy: Arc::new(|blocks| PolicyKind::Lru.build(blocks)),
            shards: None,
            free_order: FreeOrder::default(),
            duplicates: Duplicates::default(),
            watermark: 0,
            ttl: None,
            events: None,
            clock: None,
        }
    }
}

impl fmt::Debug for PoolConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolConfig")
            .field("shards", &self.shards)
            .field("free_order", &self.free_order)
            .field("duplicates", &self.duplicates)
            .field("watermark", &self.watermark)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

impl PoolConfig {
    /// One of the given eviction policies.
    #[must_use]
    pub fn policy(self, kind: PolicyKind) -> Self {
        self.custom_policy(move |blocks| kind.build(blocks))
    }

    /// The caller's eviction policy: `make` gives an empty one for a number of blocks, one per shard.
    #[must_use]
    pub fn custom_policy(
        mut self,
        make: impl Fn(usize) -> Box<dyn EvictionPolicy> + Send + Sync + 'static,
    ) -> Self {
        self.policy = Arc::new(make);
        self
    }

    /// Parts with a lock and an eviction order each; fewer where their sizes, powers of two, need no more. More let more threads work at once; one makes
    /// eviction exact over the whole pool. By default pools below 4,096 blocks have one, larger ones
    /// up to two per processor core.
    #[must_use]
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = Some(shards);
        self
    }

    /// Which blocks are taken first.
    #[must_use]
    pub fn free_order(mut self, order: FreeOrder) -> Self {
        self.free_order = order;
        self
    }

    /// What happens to a second block of a key.
    #[must_use]
    pub fn duplicates(mut self, duplicates: Duplicates) -> Self {
        self.duplicates = duplicates;
        self
    }

    /// Blocks that [`admit`](super::BlockPool::admit) leaves to sequences that run already.
    #[must_use]
    pub fn watermark(mut self, blocks: usize) -> Self {
        self.watermark = blocks;
        self
    }

    /// Cached blocks that nobody used for this long are not found again.
    ///
    /// ```
    /// use std::{sync::Arc, time::Duration};
    /// use kvcore::{BlockPool, KeyScope, ManualClock, PoolConfig};
    /// let clock = ManualClock::default();
    /// let config = PoolConfig::default().ttl(Duration::from_secs(60)).clock(Arc::new(clock.clone()));
    /// let pool = BlockPool::with_config(0..4, config)?;
    /// let key = KeyScope::new("m", b"w").root().child(&[1]);
    /// drop(pool.allocate(1)?.register(None, &[key])?);
    /// clock.advance(Duration::from_secs(59));
    /// assert!(pool.lookup(&key).is_some());           // used again: another minute
    /// clock.advance(Duration::from_secs(60));
    /// assert!(pool.lookup(&key).is_none());
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Where events go.
    #[must_use]
    pub fn events(mut self, sink: Arc<dyn EventSink>) -> Self {
        self.events = Some(sink);
        self
    }

    /// Where the time comes from, for pools that need it.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// The shards of a pool of `blocks` blocks.
    pub(super) fn shards_for(&self, blocks: usize) -> usize {
        const SMALLEST: usize = 2048;
        let wanted = self.shards.unwrap_or_else(|| {
            let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            (blocks / SMALLEST).min(2 * cores)
        });
        wanted.clamp(1, blocks.min(64))
    }

    pub(super) fn clock_or_system(&self) -> Arc<dyn Clock> {
        self.clock.clone().unwrap_or_else(|| Arc::new(SystemClock::default()))
    }
}
