//! An order of eviction for chains of blocks: a block is evicted only after the blocks that follow it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use kvcore::{BlockKey, EvictionPolicy, PolicyEntry, PolicyKind};
use parking_lot::Mutex;

/// The chains of a pool's blocks, and a [policy](Self::policy) that evicts them from their ends.
///
/// A lookup finds a block only if it finds all blocks before it. A pool whose policy evicts a block before the
/// blocks that follow it keeps these without use. This happens if blocks of one chain are registered one by one,
/// so that the first block is the oldest, and with policies that count hits. If the policy selects a block that
/// other cached blocks follow, `ChainLinks` evicts the last of these instead, and inserts the selected block
/// again.
///
/// The pool must have one shard. [Link](Self::link) all keys before they are registered, and hold a chain from its
/// first block on, so that no block is held whose predecessors can be evicted. Register a block only while the block
/// before it is in the pool.
///
/// ```
/// use kvcore::{BlockPool, KeyScope, PolicyKind, PoolConfig};
/// use kvmanager::ChainLinks;
///
/// let links = ChainLinks::default();
/// let config = PoolConfig::default().shards(1).custom_policy(links.policy(PolicyKind::Lru));
/// let pool = BlockPool::with_config(0..4, config)?;
/// let keys = KeyScope::new("m", b"w").root().chain(&[7; 4 * 16], 16);
/// for (i, key) in keys.iter().enumerate() {
///     let parent = i.checked_sub(1).map(|i| keys[i]);
///     links.link(parent, &[*key]);
///     drop(pool.allocate(1)?.register(parent, &[*key])?);
/// }
/// drop(pool.allocate(1)?);
/// assert_eq!(pool.cached_prefix(&keys), 3, "the last block was evicted, and not the oldest one");
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ChainLinks(Arc<Mutex<Links>>);

#[derive(Debug, Default)]
struct Links {
    parents: HashMap<BlockKey, BlockKey>,
    children: HashMap<BlockKey, Vec<BlockKey>>,
}

impl Links {
    fn link(&mut self, parent: BlockKey, key: BlockKey) {
        if self.parents.insert(key, parent) != Some(parent) {
            self.children.entry(parent).or_default().push(key);
        }
    }

    fn unlink(&mut self, key: &BlockKey) {
        let Some(parent) = self.parents.remove(key) else { return };
        if let Some(children) = self.children.get_mut(&parent) {
            children.retain(|child| child != key);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }
}

impl ChainLinks {
    /// Records that each of `keys` follows the key before it, and that the first one follows `parent`. A key that
    /// is evicted must be linked again before it is registered again.
    pub fn link(&self, parent: Option<BlockKey>, keys: &[BlockKey]) {
        let mut links = self.0.lock();
        for (i, key) in keys.iter().enumerate() {
            if let Some(parent) = i.checked_sub(1).map(|i| keys[i]).or(parent) {
                links.link(parent, *key);
            }
        }
    }

    /// Returns a function for [`PoolConfig::custom_policy`](kvcore::PoolConfig::custom_policy): the policy `kind`
    /// selects the chain, and the chain's last block is evicted.
    pub fn policy(
        &self,
        kind: PolicyKind,
    ) -> impl Fn(usize) -> Box<dyn EvictionPolicy> + Send + Sync + 'static {
        let links = self.clone();
        move |blocks| {
            Box::new(TailFirst {
                links: links.clone(),
                policy: kind.build(blocks),
                idle: HashMap::new(),
                entries: vec![None; blocks],
            })
        }
    }
}

/// The part of a [`PolicyEntry`] that is needed to insert a block again.
#[derive(Debug, Clone, Copy)]
struct Idle {
    key: BlockKey,
    priority: u8,
    until: u64,
}

struct TailFirst {
    links: ChainLinks,
    policy: Box<dyn EvictionPolicy>,
    /// The blocks that may be evicted, by key.
    idle: HashMap<BlockKey, u32>,
    /// The same blocks' entries. Blocks without a key have none.
    entries: Vec<Option<Idle>>,
}

impl fmt::Debug for TailFirst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TailFirst").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl TailFirst {
    /// Returns the last block of a chain that goes through `key`, or `None` if blocks that follow are held.
    fn last(&self, links: &Links, key: BlockKey) -> Option<BlockKey> {
        let mut last = key;
        while let Some(children) = links.children.get(&last) {
            last = *children.iter().find(|child| self.idle.contains_key(*child))?;
        }
        Some(last)
    }

    /// Inserts a block again that the policy has selected.
    fn put_back(&mut self, block: u32, now: u64) {
        if let Some(Idle { key, priority, until }) = &self.entries[block as usize] {
            let entry = PolicyEntry { key: Some(key), priority: *priority, until: *until, now };
            self.policy.insert(block, &entry);
        }
    }

    fn forget(&mut self, block: u32) -> Option<BlockKey> {
        let idle = self.entries[block as usize].take()?;
        self.idle.remove(&idle.key);
        Some(idle.key)
    }
}

impl EvictionPolicy for TailFirst {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        self.policy.insert(block, entry);
        if let Some(key) = entry.key {
            self.idle.insert(*key, block);
            self.entries[block as usize] =
                Some(Idle { key: *key, priority: entry.priority, until: entry.until });
        }
    }

    fn remove(&mut self, block: u32) {
        self.policy.remove(block);
        self.forget(block);
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        // Selected blocks that others follow. They go back once a block is found.
        let mut kept = Vec::new();
        let mut evicted = None;
        while let Some(block) = self.policy.evict(now) {
            let Some(Idle { key, .. }) = self.entries[block as usize] else {
                evicted = Some(block);
                break;
            };
            let last = self.last(&self.links.0.lock(), key);
            match last.and_then(|last| self.idle.get(&last).copied()) {
                Some(last) if last == block => evicted = Some(block),
                Some(last) => {
                    // The block goes back before the last one leaves, so that policies see one block less.
                    self.put_back(block, now);
                    self.policy.remove(last);
                    evicted = Some(last);
                }
                None => {
                    kept.push(block);
                    continue;
                }
            }
            break;
        }
        // Every block is followed by a held one: the pool needs a block all the same.
        let evicted = evicted.or_else(|| (!kept.is_empty()).then(|| kept.remove(0)))?;
        for block in kept {
            self.put_back(block, now);
        }
        if let Some(key) = self.forget(evicted) {
            self.links.0.lock().unlink(&key);
        }
        Some(evicted)
    }

    fn hit(&mut self, block: u32, key: &BlockKey) {
        self.policy.hit(block, key);
    }

    fn wants_hits(&self) -> bool {
        self.policy.wants_hits()
    }

    fn wants_time(&self) -> bool {
        self.policy.wants_time()
    }

    fn len(&self) -> usize {
        self.policy.len()
    }
}
