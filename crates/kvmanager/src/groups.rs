//! Prefixes of hybrid models: groups of layers with different attention, whose blocks are hit and evicted
//! together.

use std::collections::{BTreeMap, HashMap};

use kvcore::{BlockId, BlockKey, BlockPool, MutableBlocks, PinnedBlocks, PoolCounts, SharedBlocks};
use parking_lot::Mutex;

use crate::Result;
use crate::error::{CoreError, same};

/// The positions that the layers of a group attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupKind {
    /// All previous positions: a hit needs all blocks.
    Full,
    /// The last `window` positions: a hit holds only the blocks that reach into the window.
    SlidingWindow {
        /// Number of positions, including the token's own.
        window: usize,
    },
    /// All previous positions, with one latent row per token (MLA).
    Latent,
}

impl GroupKind {
    /// Returns the first block that the next token needs, out of `blocks` blocks before it.
    fn first_needed(self, blocks: usize, block_size: usize) -> usize {
        match self {
            Self::Full | Self::Latent => 0,
            // The next token attends to the window − 1 tokens before it.
            Self::SlidingWindow { window } => {
                (blocks * block_size).saturating_sub(window.saturating_sub(1)) / block_size
            }
        }
    }
}

/// The blocks of a hit in one group.
#[derive(Debug)]
pub struct GroupBlocks {
    /// Index of the first block of the prefix that is held. Earlier blocks lie outside the window.
    pub first: usize,
    /// The blocks of the prefix from `first` on.
    pub blocks: SharedBlocks,
}

/// A prefix that is cached in every group.
#[derive(Debug)]
pub struct GroupedPrefix {
    /// Number of full blocks of the prefix.
    pub len: usize,
    /// Blocks of the prefix in each group, in the order of the groups.
    pub groups: Vec<GroupBlocks>,
}

/// One block of a prefix, consisting of one block in every group.
#[derive(Debug)]
struct Node {
    pinned: Vec<PinnedBlocks>,
    tick: u64,
}

#[derive(Debug, Default)]
struct Nodes {
    by_key: HashMap<BlockKey, Node>,
    /// Keys by tick, least recently used first.
    order: BTreeMap<u64, BlockKey>,
    tick: u64,
}

/// A prefix cache over several groups of layers, each with its own pool.
///
/// A block of tokens has one block in every group. These blocks are committed together and evicted
/// together, so a prefix found in one group is found in all. A hybrid model can use a prefix only as far as
/// every kind of layer has it. (vLLM's hybrid memory allocator groups layers in this way.)
///
/// ```
/// use kvcore::{BlockPool, KeyScope};
/// use kvmanager::{GroupKind, PrefixGroups};
/// let groups = PrefixGroups::new(16, vec![
///     (GroupKind::Full, BlockPool::new(0..8)?),
///     (GroupKind::SlidingWindow { window: 20 }, BlockPool::new(0..8)?),
/// ])?;
/// let tokens: Vec<u32> = (0..64).collect();
/// let keys = KeyScope::new("hybrid", b"w").root().chain(&tokens, 16);
/// let filled = groups.allocate(4)?;
/// drop(groups.commit(&keys, filled)?);
/// let hit = groups.lookup(&keys)?;
/// assert_eq!(hit.len, 4);
/// assert_eq!(hit.groups[0].blocks.len(), 4);
/// assert_eq!((hit.groups[1].first, hit.groups[1].blocks.len()), (2, 2)); // 19 tokens back
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug)]
pub struct PrefixGroups {
    block_size: usize,
    groups: Vec<(GroupKind, BlockPool)>,
    nodes: Mutex<Nodes>,
}

impl PrefixGroups {
    /// Creates a prefix cache over groups of layers, each with its pool.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Zero`] if there is no group, or if the block size or a window is 0.
    pub fn new(block_size: usize, groups: Vec<(GroupKind, BlockPool)>) -> Result<Self> {
        if groups.is_empty() {
            return Err(CoreError::Zero { what: "prefix groups" }.into());
        }
        if block_size == 0 {
            return Err(CoreError::Zero { what: "block_size" }.into());
        }
        if groups.iter().any(|(kind, _)| *kind == (GroupKind::SlidingWindow { window: 0 })) {
            return Err(CoreError::Zero { what: "window" }.into());
        }
        Ok(Self { block_size, groups, nodes: Mutex::default() })
    }

    /// Returns the groups and their pools.
    pub fn groups(&self) -> &[(GroupKind, BlockPool)] {
        &self.groups
    }

    /// Holds the longest cached prefix of `keys`. In each group, holds the blocks that the group's layers
    /// need.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::ForeignBlock`] if a cached block is not of its group's pool.
    /// [`commit`](Self::commit) refuses such blocks.
    pub fn lookup(&self, keys: &[BlockKey]) -> Result<GroupedPrefix> {
        let mut nodes = self.nodes.lock();
        let len = keys.iter().take_while(|key| nodes.by_key.contains_key(key)).count();
        let mut groups: Vec<GroupBlocks> = self
            .groups
            .iter()
            .map(|(kind, pool)| GroupBlocks {
                first: kind.first_needed(len, self.block_size),
                blocks: SharedBlocks::none(pool),
            })
            .collect();
        for (i, key) in keys[..len].iter().enumerate() {
            let Some(node) = nodes.by_key.get(key) else { break };
            for (group, pinned) in groups.iter_mut().zip(&node.pinned) {
                if i >= group.first {
                    group.blocks.append(pinned.share()).map_err(CoreError::from)?;
                }
            }
        }
        // The end of a prefix is older than its beginning, so that it is evicted first.
        for key in keys[..len].iter().rev() {
            nodes.touch(key);
        }
        Ok(GroupedPrefix { len, groups })
    }

    /// Takes `n` blocks in every group, or none. Evicts prefix blocks without holders if needed, the least
    /// recently used first.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfBlocks`] of the first group that cannot supply `n` blocks. In that case
    /// nothing is evicted, unless another caller takes blocks of a pool at the same time.
    pub fn allocate(&self, n: usize) -> Result<Vec<MutableBlocks>> {
        let mut nodes = self.nodes.lock();
        let counts: Vec<PoolCounts> = self.groups.iter().map(|(_, pool)| pool.counts()).collect();
        let missing = |counts: &PoolCounts| n.saturating_sub(counts.free + counts.evictable);
        // Each idle prefix block frees one block in every group.
        let idle = nodes.idle(counts.iter().map(missing).max().unwrap_or(0));
        if let Some(short) = counts.iter().find(|counts| missing(counts) > idle.len()) {
            return Err(CoreError::OutOfBlocks {
                asked: n,
                free: short.free,
                evictable: short.evictable + idle.len(),
                total: short.total,
            }
            .into());
        }
        nodes.evict(&idle);
        self.groups.iter().map(|(_, pool)| Ok(pool.allocate(n)?)).collect()
    }

    /// Shares filled blocks in every group at once. `blocks[group]` has exactly `keys.len()` blocks of that
    /// group's pool, one per key. If a key is known already, the known blocks are returned and the new ones
    /// freed.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Mismatch`] if the number of groups is wrong, or if a group does not have one block
    /// per key. Returns [`kvcore::Error::ForeignBlock`] for blocks of another pool than the group's. In these cases
    /// nothing is shared, and the blocks are freed.
    pub fn commit(&self, keys: &[BlockKey], blocks: Vec<MutableBlocks>) -> Result<Vec<SharedBlocks>> {
        same("groups of blocks", self.groups.len(), blocks.len())?;
        for (group, (_, pool)) in blocks.iter().zip(&self.groups) {
            same("blocks of a group", keys.len(), group.len())?;
            match group.ids().first() {
                Some(&block) if !group.pool().same_pool(pool) => {
                    let range = pool.range();
                    return Err(CoreError::ForeignBlock { block, start: range.start, end: range.end }.into());
                }
                _ => {}
            }
        }
        let mut filled: Vec<SharedBlocks> = blocks.into_iter().map(MutableBlocks::share).collect();
        let mut held: Vec<SharedBlocks> =
            self.groups.iter().map(|(_, pool)| SharedBlocks::none(pool)).collect();
        let mut guard = self.nodes.lock();
        let nodes = &mut *guard;
        // From the last to the first, so that the first is the most recently used.
        for key in keys.iter().rev() {
            let own: Vec<SharedBlocks> =
                filled.iter_mut().map(|group| group.split_off(group.len() - 1)).collect::<Result<_, _>>()?;
            let block: Vec<SharedBlocks> = if let Some(known) = nodes.by_key.get(key) {
                known.pinned.iter().map(PinnedBlocks::share).collect()
            } else {
                let pinned = own.iter().map(SharedBlocks::pin).collect();
                nodes.by_key.insert(*key, Node { pinned, tick: 0 });
                own
            };
            nodes.touch(key);
            for (held, mut block) in held.iter_mut().zip(block) {
                block
                    .append(std::mem::replace(held, SharedBlocks::none(block.pool())))
                    .map_err(CoreError::from)?;
                *held = block;
            }
        }
        Ok(held)
    }

    /// Returns the number of cached prefix blocks. Each consists of one block in every group.
    pub fn len(&self) -> usize {
        self.nodes.lock().by_key.len()
    }

    /// Returns whether no prefix is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes every prefix block without holders. Returns the number of blocks freed in each group.
    pub fn clear(&self) -> usize {
        let mut nodes = self.nodes.lock();
        let idle = nodes.idle(usize::MAX);
        nodes.evict(&idle);
        idle.len()
    }

    /// Returns the blocks of a cached key, one per group.
    pub fn blocks(&self, key: &BlockKey) -> Option<Vec<BlockId>> {
        let nodes = self.nodes.lock();
        Some(nodes.by_key.get(key)?.pinned.iter().map(|pinned| pinned.ids()[0]).collect())
    }
}

impl Node {
    fn is_held(&self) -> bool {
        self.pinned.iter().any(PinnedBlocks::is_held)
    }
}

impl Nodes {
    fn touch(&mut self, key: &BlockKey) {
        if let Some(node) = self.by_key.get_mut(key) {
            self.order.remove(&node.tick);
            self.tick += 1;
            node.tick = self.tick;
            self.order.insert(self.tick, *key);
        }
    }

    /// Returns the ticks of at most `n` prefix blocks without holders, the least recently used first.
    fn idle(&self, n: usize) -> Vec<u64> {
        let is_idle = |key: &BlockKey| self.by_key.get(key).is_some_and(|node| !node.is_held());
        self.order.iter().filter(|(_, key)| is_idle(key)).map(|(tick, _)| *tick).take(n).collect()
    }

    fn evict(&mut self, ticks: &[u64]) {
        for key in ticks.iter().filter_map(|tick| self.order.remove(tick)) {
            self.by_key.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvcore::KeyScope;

    use super::*;

    fn groups(blocks: u32) -> PrefixGroups {
        let pool = || BlockPool::new(0..blocks).unwrap();
        PrefixGroups::new(
            4,
            vec![
                (GroupKind::Full, pool()),
                (GroupKind::SlidingWindow { window: 6 }, pool()),
                (GroupKind::Latent, pool()),
            ],
        )
        .unwrap()
    }

    fn keys(first: u32, n: usize) -> Vec<BlockKey> {
        let tokens: Vec<u32> = (0..4 * n as u32).map(|i| first * 1000 + i).collect();
        KeyScope::new("m", b"").root().chain(&tokens, 4)
    }

    fn check(groups: &PrefixGroups) {
        for (_, pool) in groups.groups() {
            pool.check_invariants().unwrap();
        }
    }

    #[test]
    fn groups_commit_and_evict_together() {
        let groups = groups(8);
        let (a, b) = (keys(1, 4), keys(2, 4));
        drop(groups.commit(&a, groups.allocate(4).unwrap()).unwrap());
        drop(groups.commit(&b, groups.allocate(4).unwrap()).unwrap());
        assert_eq!((groups.lookup(&a).unwrap().len, groups.lookup(&b).unwrap().len), (4, 4));
        // room for two more: the end of the least recently used prefix is evicted in all groups
        let fresh = groups.allocate(2).unwrap();
        assert_eq!((groups.lookup(&a).unwrap().len, groups.lookup(&b).unwrap().len), (2, 4));
        assert!(groups.groups().iter().all(|(_, pool)| pool.counts().cached == 6));
        drop(fresh);
        check(&groups);
        assert_eq!((groups.clear(), groups.len()), (6, 0));
        assert!(groups.groups().iter().all(|(_, pool)| pool.counts().free == 8));
    }

    #[test]
    fn a_window_holds_only_what_it_reaches() {
        let groups = groups(8);
        let a = keys(1, 4);
        drop(groups.commit(&a, groups.allocate(4).unwrap()).unwrap());
        let hit = groups.lookup(&a).unwrap();
        let held: Vec<(usize, usize)> = hit.groups.iter().map(|g| (g.first, g.blocks.len())).collect();
        // the next token is number 16 and attends to 11..=15: blocks 2 and 3
        assert_eq!(held, [(0, 4), (2, 2), (0, 4)]);
        // held prefixes are not evicted, whichever group holds them
        assert!(matches!(
            groups.allocate(5),
            Err(crate::Error::Core(CoreError::OutOfBlocks { asked: 5, free: 4, .. }))
        ));
        assert_eq!(groups.lookup(&a).unwrap().len, 4, "a refusal evicts nothing");
        drop(hit);
        assert!(groups.allocate(5).is_ok());
        check(&groups);
    }

    #[test]
    fn a_known_prefix_is_shared_and_wrong_commits_free_their_blocks() {
        let groups = groups(8);
        let a = keys(1, 2);
        let first = groups.commit(&a, groups.allocate(2).unwrap()).unwrap();
        let second = groups.commit(&a, groups.allocate(2).unwrap()).unwrap();
        for (x, y) in first.iter().zip(&second) {
            assert_eq!(x.ids(), y.ids());
        }
        assert!(groups.groups().iter().all(|(_, pool)| pool.counts().shared == 2));
        assert!(groups.commit(&a, groups.allocate(1).unwrap()).is_err());
        let mut two = groups.allocate(2).unwrap();
        two.pop();
        assert!(groups.commit(&keys(2, 2), two).is_err());
        assert!(groups.groups().iter().all(|(_, pool)| pool.counts().free == 6));
        check(&groups);
        assert!(PrefixGroups::new(4, vec![]).is_err());
    }

    #[test]
    fn blocks_of_another_pool_are_refused_before_anything_is_shared() {
        let groups = groups(8);
        let a = keys(1, 2);
        let mut swapped = groups.allocate(2).unwrap();
        swapped.swap(0, 2);
        assert!(matches!(
            groups.commit(&a, swapped),
            Err(crate::Error::Core(CoreError::ForeignBlock { start: 0, end: 8, .. }))
        ));
        let stranger = BlockPool::new(0..8).unwrap();
        let mut last = groups.allocate(2).unwrap();
        last[2] = stranger.allocate(2).unwrap();
        assert!(matches!(groups.commit(&a, last), Err(crate::Error::Core(CoreError::ForeignBlock { .. }))));
        assert_eq!((groups.len(), stranger.counts().free), (0, 8));
        assert!(groups.groups().iter().all(|(_, pool)| pool.counts().free == 8));
        check(&groups);
    }
}
