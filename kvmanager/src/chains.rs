//! An order of eviction for chains of blocks: a block is evicted only after the blocks that follow it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use kvcore::{BlockKey, EvictionPolicy, PolicyEntry, PolicyKind};
use parking_lot::Mutex;

/// The chains of a pool's blocks, and a [policy](Self::policy) that evicts them from their ends.
///
/// A lookup finds a block only if it finds all blocks before it. A pool whose policy evicts a block before the
/// blocks that follow it keeps these without use. This happens if blocks of one chain are registered one by one,
/// so that the first block is the oldest, and with policies that count hits. If the policy selects a block that
/// other blocks in the pool follow, the block waits until the last of these has been evicted, and is evicted next.
/// Otherwise, blocks leave in the order of the policy. With [`PolicyKind::Lru`], the pool therefore always evicts the
/// least recently released one of the blocks that nothing follows.
///
/// The pool must have one shard, and no time after which blocks expire. Register a block only while the block before
/// it is in the pool, [link](Self::link) its key before the last hold on it ends, and hold chains from their first
/// block on. If a block is held without the blocks before it, these are evicted last, but before an allocation fails.
///
/// An insertion, a removal and an eviction each take logarithmic time in the number of waiting blocks, on average over
/// all calls.
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
///     let held = pool.allocate(1)?.register(parent, &[*key])?;
///     links.link(parent, &[*key]);
///     drop(held);
/// }
/// drop(pool.allocate(1)?);
/// assert_eq!(pool.cached_prefix(&keys), 3, "the last block was evicted, and not the oldest one");
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ChainLinks(Arc<Mutex<Parents>>);

/// The keys before keys that were linked and have not been released since.
type Parents = HashMap<BlockKey, BlockKey>;

impl ChainLinks {
    /// Records that each of `keys` follows the key before it, and that the first one follows `parent`. The caller
    /// guarantees that it holds the blocks with these keys.
    pub fn link(&self, parent: Option<BlockKey>, keys: &[BlockKey]) {
        let mut parents = self.0.lock();
        for (i, key) in keys.iter().enumerate() {
            if let Some(parent) = i.checked_sub(1).map(|i| keys[i]).or(parent) {
                parents.insert(*key, parent);
            }
        }
    }

    /// Returns a function for [`PoolConfig::custom_policy`](kvcore::PoolConfig::custom_policy): blocks are evicted in
    /// the order of the policy `kind`, but never before the blocks that follow them.
    pub fn policy(
        &self,
        kind: PolicyKind,
    ) -> impl Fn(usize) -> Box<dyn EvictionPolicy> + Send + Sync + 'static {
        let links = self.clone();
        move |blocks| {
            Box::new(TailFirst {
                links: links.clone(),
                policy: kind.build(blocks),
                links_of: vec![None; blocks],
                block_of: HashMap::new(),
                followers: HashMap::new(),
                place_of: vec![None; blocks],
                selected: 0,
                waiting: BTreeMap::new(),
                due: BTreeMap::new(),
            })
        }
    }
}

/// A block's key, and the key before it.
#[derive(Debug, Clone, Copy)]
struct Link {
    key: BlockKey,
    parent: Option<BlockKey>,
}

struct TailFirst {
    links: ChainLinks,
    policy: Box<dyn EvictionPolicy>,
    /// The link of each block that was released at least once since it got its key. It stays while the block is held
    /// again.
    links_of: Vec<Option<Link>>,
    /// The same blocks, by key.
    block_of: HashMap<BlockKey, u32>,
    /// The number of these blocks that follow each key.
    followers: HashMap<BlockKey, usize>,
    /// The place of each block that the policy has selected and that has not been evicted yet, in the order of
    /// selection. The policy no longer has these blocks.
    place_of: Vec<Option<u64>>,
    /// The number of blocks selected so far.
    selected: u64,
    /// The selected blocks that others follow, by place.
    waiting: BTreeMap<u64, u32>,
    /// The selected blocks that nothing follows any more, by place.
    due: BTreeMap<u64, u32>,
}

impl fmt::Debug for TailFirst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TailFirst").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl TailFirst {
    /// Records the link of a block that is released.
    fn enter(&mut self, block: u32, key: Option<BlockKey>) {
        let known = self.links_of[block as usize];
        if known.map(|link| link.key) != key {
            // The block was freed without an eviction.
            self.leave(block);
        }
        let Some(key) = key else { return };
        let parent = self.links.0.lock().remove(&key);
        let link = self.links_of[block as usize].get_or_insert(Link { key, parent: None });
        self.block_of.insert(key, block);
        if link.parent.is_none()
            && let Some(parent) = parent
        {
            link.parent = Some(parent);
            *self.followers.entry(parent).or_default() += 1;
            if let Some(place) = self.place(&parent)
                && let Some(block) = self.due.remove(&place)
            {
                self.waiting.insert(place, block);
            }
        }
    }

    /// Removes the link of a block that no longer has its key.
    fn leave(&mut self, block: u32) {
        let Some(Link { key, parent }) = self.links_of[block as usize].take() else { return };
        self.links.0.lock().remove(&key);
        if self.block_of.get(&key) == Some(&block) {
            self.block_of.remove(&key);
        }
        let Some(parent) = parent else { return };
        let Some(count) = self.followers.get_mut(&parent) else { return };
        *count -= 1;
        if *count == 0 {
            self.followers.remove(&parent);
            if let Some(place) = self.place(&parent)
                && let Some(block) = self.waiting.remove(&place)
            {
                self.due.insert(place, block);
            }
        }
    }

    /// Returns the place of the block with this key, if the policy has selected the block.
    fn place(&self, key: &BlockKey) -> Option<u64> {
        self.block_of.get(key).and_then(|&block| self.place_of[block as usize])
    }

    /// Returns whether other blocks follow a block.
    fn is_followed(&self, block: u32) -> bool {
        self.links_of[block as usize].is_some_and(|link| self.followers.contains_key(&link.key))
    }

    /// Returns the next block that the policy selects and that nothing follows.
    fn select(&mut self, now: u64) -> Option<u32> {
        while let Some(block) = self.policy.evict(now) {
            if !self.is_followed(block) {
                return Some(block);
            }
            self.place_of[block as usize] = Some(self.selected);
            self.waiting.insert(self.selected, block);
            self.selected += 1;
        }
        None
    }
}

impl EvictionPolicy for TailFirst {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        self.enter(block, entry.key.copied());
        self.policy.insert(block, entry);
    }

    fn remove(&mut self, block: u32) {
        match self.place_of[block as usize].take() {
            Some(place) => {
                self.waiting.remove(&place);
                self.due.remove(&place);
            }
            None => self.policy.remove(block),
        }
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        let due = self.due.pop_first().map(|(_, block)| block);
        let block = due.or_else(|| self.select(now));
        // Every block is followed by a held one: the pool needs a block all the same.
        let block = block.or_else(|| self.waiting.pop_first().map(|(_, block)| block))?;
        self.place_of[block as usize] = None;
        self.leave(block);
        Some(block)
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
        self.policy.len() + self.waiting.len() + self.due.len()
    }
}
