//! A pool's settings, each with a default.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::clock::{Clock, SystemClock};
use super::event::EventSink;
use super::evict::{EvictionPolicy, PolicyKind};

// Decision: docs/decisions/paging.md#free-blocks-are-used-before-cached-ones
/// The order in which blocks are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FreeOrder {
    /// Free blocks are allocated before cached blocks, so cached contents are kept as long as possible. With
    /// [`super::Lru`] and one shard, this is the order of vLLM's free block queue since 0.28.
    #[default]
    FreeFirst,
    /// Free and cached blocks are in one queue, ordered by the eviction policy. With LRU, the block released
    /// longest ago is allocated first, whether or not it has contents. vLLM before 0.28 used this order.
    OneQueue,
}

// Decision: docs/decisions/paging.md#duplicates-of-a-key-are-merged
/// The handling of a second block that is registered under a known key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Duplicates {
    /// Shares the known block and frees the second one.
    #[default]
    Merge,
    /// Keeps both blocks; lookups find the older one. vLLM does this because its block tables only ever grow.
    Keep,
}

type PolicyMaker = Arc<dyn Fn(usize) -> Box<dyn EvictionPolicy> + Send + Sync>;

/// The settings of a [`BlockPool`](super::BlockPool).
///
/// ```
/// use std::time::Duration;
/// use kvcore::{BlockPool, PolicyKind, PoolConfig};
/// let config = PoolConfig::default()
///     .policy(PolicyKind::TinyLfu)
///     .watermark(2)                            // left to running sequences
///     .ttl(Duration::from_secs(3600));         // unused for an hour: forgotten
/// let pool = BlockPool::with_config(0..16, config)?;
/// let running = pool.allocate(1)?;
/// assert!(pool.admit_prefix(&[], 14, 0).is_err());
/// assert_eq!(pool.admit_prefix(&[], 13, 0)?.1.len(), 13);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Clone)]
pub struct PoolConfig {
    pub(super) policy: PolicyMaker,
    /// True if the policy is a built-in one.
    pub(super) trusted: bool,
    pub(super) shards: Option<usize>,
    pub(super) chains: bool,
    pub(super) free_order: FreeOrder,
    pub(super) duplicates: Duplicates,
    pub(super) watermark: usize,
    pub(super) ttl: Option<Duration>,
    pub(super) events: Option<Arc<dyn EventSink>>,
    pub(super) clock: Option<Arc<dyn Clock>>,
}

impl Default for PoolConfig {
    /// Returns settings with LRU eviction, chains, free blocks first, one block per key, and no watermark,
    /// expiry or events.
    fn default() -> Self {
        Self {
            policy: Arc::new(|blocks| PolicyKind::Lru.build(blocks)),
            trusted: true,
            shards: None,
            chains: true,
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
            .field("chains", &self.chains)
            .field("free_order", &self.free_order)
            .field("duplicates", &self.duplicates)
            .field("watermark", &self.watermark)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

impl PoolConfig {
    /// Sets the eviction policy to a built-in policy.
    #[must_use]
    pub fn policy(self, kind: PolicyKind) -> Self {
        Self { trusted: true, ..self.custom_policy(move |blocks| kind.build(blocks)) }
    }

    /// Sets a custom eviction policy. `make` is called for each shard, and must return an empty policy for
    /// the given number of blocks.
    #[must_use]
    pub fn custom_policy(
        mut self,
        make: impl Fn(usize) -> Box<dyn EvictionPolicy> + Send + Sync + 'static,
    ) -> Self {
        (self.policy, self.trusted) = (Arc::new(make), false);
        self
    }

    /// Sets the number of shards, each with its own lock and eviction order. A pool has at most 64 shards,
    /// and shard sizes are powers of two, so the pool may have fewer than `shards` shards. With more shards,
    /// more threads can work at once; with a single shard, eviction is exact over the whole pool. By default,
    /// pools below 4,096 blocks have one shard, and larger pools have up to two shards per processor core.
    #[must_use]
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = Some(shards);
        self
    }

    /// Sets the order in which blocks are allocated.
    #[must_use]
    pub fn free_order(mut self, order: FreeOrder) -> Self {
        self.free_order = order;
        self
    }

    /// Sets the handling of a second block that is registered under a known key.
    #[must_use]
    pub fn duplicates(mut self, duplicates: Duplicates) -> Self {
        self.duplicates = duplicates;
        self
    }

    /// Sets the number of blocks that [`admit_prefix`](super::BlockPool::admit_prefix) leaves for running
    /// sequences.
    #[must_use]
    pub fn watermark(mut self, blocks: usize) -> Self {
        self.watermark = blocks;
        self
    }

    /// Sets the time to live: a cached block that has not been used for this long is no longer found.
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

    /// Sets the receiver of the pool's events.
    #[must_use]
    pub fn events(mut self, sink: Arc<dyn EventSink>) -> Self {
        self.events = Some(sink);
        self
    }

    /// Sets the clock, which is used only by pools with a time to live or a policy that needs the time.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Sets whether a block is evicted only after the cached blocks that were registered as following it, which
    /// a lookup would no longer find. Otherwise the blocks are evicted in the order of the policy. This is
    /// the default, because policies know nothing of chains. Turn it off for layers with a window, which do not
    /// need the first blocks of a prompt.
    ///
    /// A block with a time to live expires by itself.
    ///
    /// ```
    /// use kvcore::{BlockPool, KeyScope, PoolConfig};
    /// let keys = KeyScope::new("m", b"w").root().chain(&[7; 3 * 16], 16);
    /// for (chains, found) in [(true, 2), (false, 0)] {
    ///     let pool = BlockPool::with_config(0..3, PoolConfig::default().chains(chains))?;
    ///     for i in 0..3usize {
    ///         // Each block is released before the next one, so the first one is the oldest.
    ///         drop(pool.allocate(1)?.register(i.checked_sub(1).map(|i| keys[i]), &[keys[i]])?);
    ///     }
    ///     drop(pool.allocate(1)?);
    ///     assert_eq!(pool.cached_prefix(&keys), found);
    /// }
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    #[must_use]
    pub fn chains(mut self, chains: bool) -> Self {
        self.chains = chains;
        self
    }

    /// Returns the number of shards for `blocks` blocks.
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
