//! Eviction policies: the order in which cached blocks are evicted.
//!
//! | policy | evicts first | suits |
//! |---|---|---|
//! | [`Lru`] | the block released longest ago | chat traffic, where recent prompts return; the default |
//! | [`TinyLfu`] | the rarest key, by an ageing sketch | scans and one-off prompts mixed with popular prefixes |
//! | [`S3Fifo`] | blocks without hits, in two queues | like `TinyLfu`, but hits do not move blocks |
//! | [`PriorityLru`] | the lowest [`Retention`] priority, then like `Lru` | prefixes ranked by the caller |

use std::fmt;
use std::time::Duration;

use crate::paging::BlockKey;

mod lists;
mod lru;
mod priority;
mod s3fifo;
mod sketch;
mod tinylfu;

pub use lru::Lru;
pub use priority::PriorityLru;
pub use s3fifo::S3Fifo;
pub use tinylfu::TinyLfu;

/// A cached block's priority, and the time for which it applies.
///
/// ```
/// use std::time::Duration;
/// use kvcore::{BlockPool, KeyScope, PolicyKind, PoolConfig, Retention};
/// let pool = BlockPool::with_config(0..2, PoolConfig::default().policy(PolicyKind::Priority))?;
/// let key = |n| KeyScope::new("m", b"w").root().child(&[n]);
/// let system_prompt = pool.allocate(1)?.register(None, &[key(0)])?;
/// system_prompt.retain(Retention { priority: 90, lasts: Some(Duration::from_secs(600)) });
/// drop(system_prompt);
/// for n in 1..5 {
///     drop(pool.allocate(1)?.register(None, &[key(n)])?);      // the others take turns in the other block
/// }
/// assert!(pool.lookup(&key(0)).is_some());
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Blocks with a lower priority are evicted first; see [`Retention::DEFAULT`].
    pub priority: u8,
    /// Duration of the priority, starting when it is set. Afterwards the default priority applies. `None`
    /// means that the priority does not end.
    pub lasts: Option<Duration>,
}

impl Retention {
    /// The priority of blocks without a retention (as in TensorRT-LLM's retention policy).
    pub const DEFAULT_PRIORITY: u8 = 35;

    /// The retention of blocks for which the caller has set none.
    pub const DEFAULT: Self = Self { priority: Self::DEFAULT_PRIORITY, lasts: None };
}

impl Default for Retention {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The information that a policy gets about a block that has lost its last holder.
#[derive(Debug, Clone, Copy)]
pub struct PolicyEntry<'a> {
    /// The block's key. `None` for a block without contents, which occurs only with
    /// [`FreeOrder::OneQueue`](super::FreeOrder::OneQueue).
    pub key: Option<&'a BlockKey>,
    /// The block's priority.
    pub priority: u8,
    /// Time at which the priority ends, in milliseconds of the pool's clock, or `u64::MAX` if it does not
    /// end.
    pub until: u64,
    /// Current time, in milliseconds of the pool's clock, or 0 if the pool does not need a clock.
    pub now: u64,
}

impl Default for PolicyEntry<'_> {
    fn default() -> Self {
        Self { key: None, priority: Retention::DEFAULT_PRIORITY, until: u64::MAX, now: 0 }
    }
}

/// A policy that decides the order in which cached blocks are evicted. Each block is identified by its index
/// in a shard of the pool.
///
/// The pool holds a lock while it calls the policy: every method should return quickly, and MUST NOT call the
/// pool. `insert` and `remove` alternate for each index (an eviction counts as a removal), and every index is
/// below the number of blocks that the policy was created for.
///
/// The pool may keep a block that the policy evicts, because other blocks follow it
/// ([`PoolConfig::chains`](super::PoolConfig::chains)), and then asks for another one. The policy no longer has such a
/// block, and gets it back if the block is held and released again.
///
/// The pool checks every eviction. It replaces a policy by [`Lru`] if the policy panics, returns a block that
/// it does not have, or returns `None` although it has blocks. No block gets two owners or is lost.
///
/// ```
/// use kvcore::{BlockPool, EvictionPolicy, KeyScope, PolicyEntry, PoolConfig};
///
/// /// Most recently used first.
/// #[derive(Debug, Default)]
/// struct Mru(Vec<u32>);
///
/// impl EvictionPolicy for Mru {
///     fn insert(&mut self, block: u32, _: &PolicyEntry<'_>) { self.0.push(block) }
///     fn remove(&mut self, block: u32) { self.0.retain(|&other| other != block) }
///     fn evict(&mut self, _now: u64) -> Option<u32> { self.0.pop() }
///     fn len(&self) -> usize { self.0.len() }
/// }
///
/// let pool = BlockPool::with_config(0..2, PoolConfig::default().custom_policy(|_| Box::<Mru>::default()))?;
/// let key = |n| KeyScope::new("m", b"w").root().child(&[n]);
/// for n in 0..3 {
///     drop(pool.allocate(1)?.register(None, &[key(n)])?);
/// }
/// assert!(pool.lookup(&key(0)).is_some() && pool.lookup(&key(1)).is_none());
/// # Ok::<(), kvcore::Error>(())
/// ```
pub trait EvictionPolicy: Send + fmt::Debug {
    /// Adds a block that has lost its last holder.
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>);

    /// Removes a block that has a holder again, or was freed.
    fn remove(&mut self, block: u32);

    /// Removes and returns the block to evict next. Must return a block unless the policy has no blocks.
    fn evict(&mut self, now: u64) -> Option<u32>;

    /// Records that a lookup found the block, whether or not the block was held. The pool calls this only if
    /// [`wants_hits`](Self::wants_hits) returns true.
    fn hit(&mut self, _block: u32, _key: &BlockKey) {}

    /// Returns whether the policy counts hits.
    fn wants_hits(&self) -> bool {
        false
    }

    /// Returns whether the policy uses the clock and priorities.
    fn wants_time(&self) -> bool {
        false
    }

    /// Returns the number of blocks that the policy could evict. The pool keeps its own count.
    fn len(&self) -> usize;

    /// Returns whether the policy has no blocks to evict.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The word used for blocks that have no key, in policies that remember keys.
const NO_KEY: u64 = 0;

fn word(key: &BlockKey) -> u64 {
    key.word().max(1)
}

/// A built-in policy, which configurations can name.
///
/// ```
/// use kvcore::{BlockPool, PolicyKind, PoolConfig};
/// for name in ["lru", "tiny-lfu", "s3-fifo", "priority"] {
///     let kind: PolicyKind = serde_json::from_str(&format!("{name:?}")).unwrap();
///     let pool = BlockPool::with_config(0..1000, PoolConfig::default().policy(kind))?;
///     assert_eq!(pool.counts().free, 1000);
/// }
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// The policy [`Lru`].
    #[default]
    Lru,
    /// The policy [`TinyLfu`].
    TinyLfu,
    /// The policy [`S3Fifo`].
    S3Fifo,
    /// The policy [`PriorityLru`].
    Priority,
}

impl PolicyKind {
    /// All built-in policies.
    pub const ALL: [Self; 4] = [Self::Lru, Self::TinyLfu, Self::S3Fifo, Self::Priority];

    /// Creates an empty policy for `blocks` blocks.
    pub fn build(self, blocks: usize) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new(blocks)),
            Self::TinyLfu => Box::new(TinyLfu::new(blocks)),
            Self::S3Fifo => Box::new(S3Fifo::new(blocks)),
            Self::Priority => Box::new(PriorityLru::new(blocks)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paging::KeyScope;

    #[test]
    fn every_policy_gives_back_each_block_once() {
        let key = KeyScope::new("m", b"").root();
        for kind in PolicyKind::ALL {
            let mut policy = kind.build(50);
            for round in 0..3u32 {
                for block in 0..50 {
                    let key = key.child(&[round, block]);
                    policy.insert(block, &PolicyEntry { key: Some(&key), ..PolicyEntry::default() });
                }
                for block in (0..50).step_by(3) {
                    policy.remove(block);
                }
                assert_eq!(policy.len(), 33, "{kind:?}");
                let mut gone: Vec<u32> = std::iter::from_fn(|| policy.evict(0)).collect();
                gone.sort_unstable();
                assert_eq!(gone, (0..50).filter(|b| b % 3 != 0).collect::<Vec<_>>(), "{kind:?}");
                assert!(policy.is_empty());
            }
        }
    }
}
