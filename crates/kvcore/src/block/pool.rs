//! The pool: a quota of an arena's blocks with one lock around its bookkeeping.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::state::State;
use super::{BlockId, EvictionPolicy, Lru, MutableBlock, SharedBlock};
use crate::error::{Error, Result};
use crate::key::BlockKey;

/// A handle to a pool of blocks; clones share the pool.
///
/// A pool owns a contiguous range of an arena's block ids. Pools over disjoint ranges of one arena
/// (the main pool and the chunk pool, say) never take blocks from each other, yet one `attend` reads
/// blocks of all of them.
///
/// ```
/// use kvcore::{BlockPool, KeyScope};
/// let pool = BlockPool::new(0..8)?;
/// let key = KeyScope::new("m", b"w").root().child(&[1, 2, 3, 4]);
/// let block = pool.allocate(1)?.remove(0).complete().register(key);
/// drop(block);                                  // no holder: cached
/// assert_eq!(pool.counts().cached, 1);
/// assert!(pool.lookup(&key).is_some());         // found again
/// pool.check_invariants().unwrap();
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct BlockPool(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) range: Range<u32>,
    pub(super) state: Mutex<State>,
}

/// How many blocks are in which state. `free + mutable + complete + shared + cached = total`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct PoolCounts {
    /// All blocks of the pool.
    pub total: usize,
    /// Blocks that nobody uses.
    pub free: usize,
    /// Blocks being filled.
    pub mutable: usize,
    /// Blocks filled and not yet shared.
    pub complete: usize,
    /// Blocks with at least one holder.
    pub shared: usize,
    /// Blocks without holders whose contents are kept.
    pub cached: usize,
    /// Those of the cached blocks that this pool may evict by itself.
    pub evictable: usize,
}

impl BlockPool {
    /// A pool over the blocks `range`, evicting the least recently used.
    ///
    /// # Errors
    /// [`Error::Zero`] for an empty range.
    pub fn new(range: Range<u32>) -> Result<Self> {
        Self::with_policy(range, |blocks| Box::new(Lru::new(blocks)))
    }

    /// A pool with another eviction policy: `policy` makes an empty one for a number of blocks.
    pub fn with_policy(
        range: Range<u32>,
        policy: impl FnOnce(usize) -> Box<dyn EvictionPolicy>,
    ) -> Result<Self> {
        if range.is_empty() {
            return Err(Error::Zero { what: "blocks of a pool" });
        }
        let policy = policy(range.len());
        let state = Mutex::new(State::new(range.len(), policy));
        Ok(Self(Arc::new(Inner { range, state })))
    }

    /// Takes `n` blocks to fill, evicting cached ones if needed; all or none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; nothing is taken or evicted then.
    pub fn allocate(&self, n: usize) -> Result<Vec<MutableBlock>> {
        let mut blocks = Vec::new();
        let mut state = self.0.state.lock();
        state.allocate(n, |index| blocks.push(MutableBlock::new(self.clone(), index)))?;
        Ok(blocks)
    }

    /// The block with this key, if it is held or cached; the guard is one more holder.
    pub fn lookup(&self, key: &BlockKey) -> Option<SharedBlock> {
        let index = self.0.state.lock().lookup(key)?;
        Some(SharedBlock::new(self.clone(), index))
    }

    /// The blocks of the longest known prefix of a chain of keys, under one lock.
    pub fn lookup_chain(&self, keys: &[BlockKey]) -> Vec<SharedBlock> {
        let mut state = self.0.state.lock();
        keys.iter().map_while(|key| state.lookup(key)).map(|i| SharedBlock::new(self.clone(), i)).collect()
    }

    /// How many blocks are in which state.
    pub fn counts(&self) -> PoolCounts {
        self.0.state.lock().counts()
    }

    /// Blocks evicted since the pool was made.
    pub fn evictions(&self) -> u64 {
        self.0.state.lock().evicted
    }

    /// Frees every cached block that this pool may evict; returns how many.
    pub fn clear_cached(&self) -> usize {
        self.0.state.lock().clear_cached()
    }

    /// Block ids of this pool.
    pub fn range(&self) -> Range<u32> {
        self.0.range.clone()
    }

    /// Recounts all states and looks every key up; `Err` says what is inconsistent.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.0.state.lock().check(self.0.range.start)
    }

    /// Whether both handles are of the same pool.
    pub fn same_pool(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn id(&self, index: u32) -> BlockId {
        BlockId(self.0.range.start + index)
    }
}
