//! The block pool: a share of an arena's blocks, and the locks that protect the bookkeeping.
//!
//! A pool has one or more shards. Each shard is a run of the pool's blocks with a lock, a free list and an
//! eviction order. The pool also has an index from keys to blocks, with its own locks. Locks are acquired in
//! this order: shards by index (only slow paths lock more than one shard), then one table of the index, or
//! the blocks of a shard that no longer wait for others (`chains`), then the queue of events. The event sink is
//! called without locks.

use std::collections::HashSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use smallvec::SmallVec;

use super::chains::{Chains, NO_BLOCK};
use super::clock::{Clock, millis};
use super::event::KvEvent;
use super::event::Outbox;
use super::guard::{Ids, MutableBlocks, SharedBlocks, discard};
use super::index::Index;
use super::rules::{Moment, Rules};
use super::shard::Shard;
use super::{Duplicates, FreeOrder, PoolConfig, PoolCounts, check};
use crate::base::{BlockId, Error, Result};
use crate::paging::key::BlockKey;
use crate::paging::sync::{Arc, Mutex, MutexGuard, turn};

/// A handle to a pool of blocks. Clones share the pool.
///
/// A pool owns a contiguous range of an arena's block IDs. Pools over disjoint ranges of one arena (for
/// example the main pool and the chunk pool) never take blocks from each other, but one `attend` can read
/// blocks of all of them.
///
/// ```
/// use kvcore::{BlockPool, KeyScope};
/// let pool = BlockPool::new(0..8)?;
/// let key = KeyScope::new("m", b"w").root().child(&[1, 2, 3, 4]);
/// let block = pool.allocate(1)?.register(None, &[key])?;
/// drop(block);                                  // no holder: cached
/// assert_eq!(pool.counts().cached, 1);
/// assert!(pool.lookup(&key).is_some());         // found again
/// pool.check_invariants().unwrap();
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct BlockPool(pub(super) Arc<SharedPool>);

#[derive(Debug)]
pub(super) struct SharedPool {
    range: Range<u32>,
    /// Shifting a block's index right by this number of bits gives the index of its shard.
    shift: u32,
    shards: Box<[ShardCell]>,
    pub(super) index: Index,
    chains: Arc<Chains>,
    pub(super) rules: Rules,
    watermark: usize,
}

/// A shard in its own cache lines.
#[derive(Debug)]
#[repr(align(128))]
struct ShardCell {
    shard: Mutex<Shard>,
    /// Number of free blocks in the shard when it was last unlocked: a hint for searches.
    free: AtomicUsize,
    /// Number of keys found by lookups that are counted in this cell. The first key of a lookup selects the
    /// cell, so that threads do not contend.
    hits: AtomicU64,
    misses: AtomicU64,
}

/// A locked shard.
pub(super) struct LockedShard<'a> {
    shard: MutexGuard<'a, Shard>,
    hint: &'a AtomicUsize,
}

impl std::ops::Deref for LockedShard<'_> {
    type Target = Shard;

    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl std::ops::DerefMut for LockedShard<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

impl Drop for LockedShard<'_> {
    fn drop(&mut self) {
        self.hint.store(self.shard.free_blocks(), Ordering::Relaxed);
    }
}

/// Counts of the keys looked up by [`lookup_chain`](BlockPool::lookup_chain) and by all other methods that
/// hold the blocks they find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Lookups {
    /// Number of keys whose blocks were found.
    pub hits: u64,
    /// Number of keys whose blocks were not found.
    pub misses: u64,
}

/// The maximum number of blocks, which bounds the memory for their bookkeeping.
const MOST: usize = 1 << 24;

impl BlockPool {
    /// Creates a pool over the blocks in `range`, with the default settings.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if the range is empty.
    pub fn new(range: Range<u32>) -> Result<Self> {
        Self::with_config(range, PoolConfig::default())
    }

    /// Creates a pool over the blocks in `range`, with the given settings.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if the range is empty, and [`Error::TooLarge`] if the watermark exceeds
    /// the size of the pool, or if the pool has more than 16,777,216 blocks. The bookkeeping of so many blocks
    /// takes about 2 GiB.
    pub fn with_config(range: Range<u32>, config: PoolConfig) -> Result<Self> {
        let blocks = range.len();
        match config.watermark {
            _ if blocks == 0 => return Err(Error::Zero { what: "blocks of a pool" }),
            _ if blocks > MOST => return Err(Error::too_large("blocks of a pool", blocks, MOST)),
            watermark if watermark > blocks => return Err(Error::too_large("watermark", watermark, blocks)),
            _ => {}
        }
        let size = blocks.div_ceil(config.shards_for(blocks)).next_power_of_two();
        let timed = config.ttl.is_some() || (config.policy)(1).wants_time();
        let rules = Rules {
            first: range.start,
            free_order: config.free_order,
            ttl: config.ttl.map(millis),
            clock: timed.then(|| config.clock_or_system()),
            events: config.events.map(Outbox::new),
        };
        let chains = Arc::new(Chains::new(blocks, size.trailing_zeros(), config.chains));
        let cell = |start: usize| {
            let blocks = size.min(blocks - start);
            let policy = ((config.policy)(blocks), config.trusted);
            let shard = Shard::new(range.start + start as u32, blocks, policy, &rules, &chains);
            ShardCell {
                shard: Mutex::new(shard),
                free: AtomicUsize::new(blocks),
                hits: AtomicU64::new(0),
                misses: AtomicU64::new(0),
            }
        };
        let shards: Box<[ShardCell]> = (0..blocks).step_by(size).map(cell).collect();
        let tables = if shards.len() == 1 { 1 } else { 4 * shards.len() };
        Ok(Self(Arc::new(SharedPool {
            shift: size.trailing_zeros(),
            index: Index::new(tables, blocks, config.duplicates == Duplicates::Keep),
            chains,
            watermark: config.watermark,
            range,
            shards,
            rules,
        })))
    }

    /// Allocates `n` blocks to fill, evicting cached blocks if needed. Allocates either all `n` blocks or
    /// none.
    ///
    /// # Errors
    /// Returns [`Error::OutOfBlocks`] if there are too few free and evictable blocks. Nothing is allocated in
    /// that case, and nothing is evicted unless other threads take the blocks at the same time.
    pub fn allocate(&self, n: usize) -> Result<MutableBlocks> {
        let mut blocks = MutableBlocks::none(self);
        self.take(&mut blocks.ids, n, 0)?;
        Ok(blocks)
    }

    /// Admits a prompt in one step: holds the blocks of the longest known prefix of `keys`, and allocates the
    /// missing blocks, so that there are `blocks` blocks in total. Unlike [`allocate`](Self::allocate), this
    /// leaves the watermark's blocks for running sequences, so that a newly admitted sequence does not soon
    /// preempt another. If no block of the pool is held, the watermark is ignored. The pool must have room
    /// for `room` blocks in total. If only the first part of a prompt is computed now, `room` should be the
    /// number of blocks that the whole prompt needs.
    ///
    /// # Errors
    /// Returns [`Error::OutOfBlocks`] if there is not enough room. Nothing changes in that case, not even the
    /// eviction order, which a lookup followed by a drop would change.
    pub fn admit_prefix(
        &self,
        keys: &[BlockKey],
        blocks: usize,
        room: usize,
    ) -> Result<(SharedBlocks, MutableBlocks)> {
        self.admit_with(keys, true, |found| {
            let missing = blocks.saturating_sub(found);
            (missing, blocks.max(room).saturating_sub(found))
        })
    }

    /// Admits the first piece of a prompt like [`admit_prefix`](Self::admit_prefix): holds the longest known
    /// prefix, and allocates up to `piece` of the missing blocks. `blocks` is the total number of blocks.
    pub(crate) fn admit_piece(
        &self,
        keys: &[BlockKey],
        blocks: usize,
        piece: usize,
    ) -> Result<(SharedBlocks, MutableBlocks)> {
        self.admit_with(keys, true, |found| {
            let missing = blocks.saturating_sub(found).min(piece);
            (missing, missing)
        })
    }

    /// Checks that an admission could hold the known blocks of `keys` and allocate `missing` more blocks.
    /// Changes nothing.
    pub(crate) fn check_room(&self, keys: &[BlockKey], missing: usize) -> Result<()> {
        self.admit_with(keys, false, |_| (missing, missing)).map(drop)
    }

    /// Holds the longest known prefix and allocates blocks, or only checks that this is possible if `take` is
    /// false. `wanted` receives the number of blocks found, and returns the number of blocks to allocate and
    /// the number that the pool must have room for.
    fn admit_with(
        &self,
        keys: &[BlockKey],
        take: bool,
        wanted: impl FnOnce(usize) -> (usize, usize),
    ) -> Result<(SharedBlocks, MutableBlocks)> {
        let inner = &*self.0;
        let moment = inner.moment();
        let (mut found, mut fresh) = (SharedBlocks::none(self), MutableBlocks::none(self));
        let mut shards = inner.lock_all();
        let mut idle: SmallVec<[BlockId; 64]> = SmallVec::new();
        for (key, block) in keys.iter().zip(inner.index.find_prefix(keys)) {
            let id = inner.id(block);
            let Some(is_idle) = shards[inner.shard_of(id)].findable(inner.local(id), key, &moment) else {
                break;
            };
            found.ids.push(id);
            if is_idle {
                idle.push(id);
            }
        }
        // A key may occur twice, but its block is counted only once.
        idle.sort_unstable();
        idle.dedup();
        let (missing, needed) = wanted(found.ids.len());
        let available: usize = shards.iter().map(|shard| shard.available()).sum();
        // An idle block that is found becomes unavailable for allocation, just like a block that is
        // allocated. If no blocks are held, there is no running sequence that could need the watermark.
        let total: usize = shards.iter().map(|shard| shard.stage.len()).sum();
        let watermark = if available == total { 0 } else { inner.watermark };
        let leaves = idle.len().checked_add(needed).and_then(|n| n.checked_add(watermark));
        let admits_nothing = idle.is_empty() && needed == 0;
        if !admits_nothing && leaves.is_none_or(|wanted| wanted > available) {
            found.ids.clear();
            return Err(out_of_blocks(&shards, needed.saturating_add(watermark)));
        }
        if !take {
            found.ids.clear();
            return Ok((found, fresh));
        }
        for (id, key) in found.ids.iter().zip(keys) {
            shards[inner.shard_of(*id)].hold_keyed(inner.local(*id), key, &moment);
        }
        inner.count_lookup(keys, found.ids.len());
        let home = inner.home(missing);
        SharedPool::take_from(&mut shards, home, &mut fresh.ids, missing, &moment, true);
        Ok((found, fresh))
    }

    pub(super) fn take(&self, out: &mut Ids, n: usize, spare: usize) -> Result<()> {
        if n == 0 {
            return Ok(());
        }
        let len = out.len();
        let mut left = n;
        let inner = &*self.0;
        let moment = inner.moment();
        let mut home = inner.home(n);
        if spare == 0 {
            let mut shard = inner.lock_near(&mut home);
            let elsewhere = || {
                let free =
                    |(i, cell): (usize, &ShardCell)| i != home && cell.free.load(Ordering::Relaxed) > 0;
                inner.shards.iter().enumerate().any(free)
            };
            if inner.rules.free_order == FreeOrder::FreeFirst && shard.free.len() >= n {
                shard.take_free(n, out);
                return Ok(());
            }
            // Cached contents must not be evicted while other shards have free blocks. The slow path checks
            // for that.
            if shard.available() >= n && !elsewhere() {
                left -= SharedPool::take_from(&mut [shard], 0, out, n, &moment, inner.shards.len() == 1);
                if left == 0 {
                    return Ok(());
                }
                // The shard's other blocks wait for blocks in other shards.
            }
        }
        let mut shards = inner.lock_all();
        let available: usize = shards.iter().map(|shard| shard.available()).sum();
        // If the sum with the spare blocks overflows, there are not enough blocks.
        if left.checked_add(spare).is_none_or(|wanted| wanted > available) {
            let error = out_of_blocks(&shards, n);
            drop(shards);
            discard(self, &out[len..]);
            out.truncate(len);
            return Err(error);
        }
        SharedPool::take_from(&mut shards, home, out, left, &moment, true);
        Ok(())
    }

    /// Returns the block with this key if it is held or cached. The guard adds a holder to the block.
    pub fn lookup(&self, key: &BlockKey) -> Option<SharedBlocks> {
        let found = self.lookup_chain(std::slice::from_ref(key));
        (!found.is_empty()).then_some(found)
    }

    /// Holds the blocks of the longest known prefix of a chain of keys.
    pub fn lookup_chain(&self, keys: &[BlockKey]) -> SharedBlocks {
        let mut found = SharedBlocks::none(self);
        let inner = &*self.0;
        let moment = inner.moment();
        let known = inner.index.find_prefix(keys);
        // The index may have changed since it was read, so each block's key is compared while its shard is
        // locked.
        found.ids.reserve_exact(known.len());
        let mut walk = inner.walk();
        for (block, key) in known.into_iter().zip(keys) {
            let id = inner.id(block);
            let (shard, block) = walk.shard(id);
            if !shard.hold_keyed(block, key, &moment) {
                break;
            }
            found.ids.push(id);
        }
        drop(walk);
        inner.count_lookup(keys, found.ids.len());
        found
    }

    /// Returns the number of blocks that a lookup of this chain would find now, without holding the blocks.
    /// Schedulers can use this to compare requests.
    pub fn cached_prefix(&self, keys: &[BlockKey]) -> usize {
        let inner = &*self.0;
        let moment = inner.moment();
        let known = inner.index.find_prefix(keys);
        let mut walk = inner.walk();
        let found = known.into_iter().zip(keys).take_while(|(block, key)| {
            let (shard, block) = walk.shard(inner.id(*block));
            shard.findable(block, key, &moment).is_some()
        });
        found.count()
    }

    /// Returns the number of blocks in each state.
    pub fn counts(&self) -> PoolCounts {
        self.0.lock_all().iter().map(|shard| shard.counts()).sum()
    }

    /// Returns the number of blocks evicted since the pool was created.
    pub fn evictions(&self) -> u64 {
        self.0.lock_all().iter().map(|shard| shard.evicted).sum()
    }

    /// Returns how many of the keys looked up since the pool was created were found, and how many were not.
    /// All keys of a chain after its first unknown key count as misses. Rejected admissions and
    /// [`cached_prefix`](Self::cached_prefix) do not count.
    pub fn lookups(&self) -> Lookups {
        let sum = |of: fn(&ShardCell) -> &AtomicU64| {
            self.0.shards.iter().map(|cell| of(cell).load(Ordering::Relaxed)).sum()
        };
        Lookups { hits: sum(|cell| &cell.hits), misses: sum(|cell| &cell.misses) }
    }

    /// Frees every cached block that the pool may evict, and returns the number of freed blocks.
    pub fn clear_cached(&self) -> usize {
        let inner = &*self.0;
        let moment = inner.moment();
        let mut shards = inner.lock_all();
        let all = shards.iter().all(|shard| shard.keyed_are_evictable());
        if let Some(events) = &inner.rules.events
            && all
        {
            events.push(KvEvent::Cleared);
        }
        shards.iter_mut().map(|shard| shard.clear_cached(!all, &moment)).sum()
    }

    /// Frees the cached blocks that have not been used for the configured time to live, and returns the
    /// number of freed blocks. Only lookups and this method check the time; nothing runs in the background.
    pub fn expire(&self) -> usize {
        let inner = &*self.0;
        let moment = inner.moment();
        (0..inner.shards.len()).map(|i| inner.lock(i).expire_all(&moment)).sum()
    }

    /// Returns the range of the pool's block IDs.
    pub fn range(&self) -> Range<u32> {
        self.0.range.clone()
    }

    /// Recounts all states and looks up every key. Returns a description of the first inconsistency as `Err`.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        let shards = self.0.lock_all();
        let (mut keyed, mut followers) = (0, vec![0; self.0.range.len()]);
        for shard in &shards {
            keyed += check::shard(shard, &self.0.rules, &self.0.index, &mut followers)?;
        }
        for (block, count) in followers.into_iter().enumerate() {
            self.0.chains.check(block, count)?;
        }
        match self.0.index.len() {
            known if known == keyed => Ok(()),
            known => Err(format!("{keyed} blocks have keys, the index holds {known}")),
        }
    }

    /// Returns whether both handles refer to the same pool.
    pub(super) fn same_pool(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Reads a clock that may panic.
#[inline(never)]
fn read(clock: &dyn Clock) -> u64 {
    catch_unwind(AssertUnwindSafe(|| clock.millis())).unwrap_or(0)
}

fn out_of_blocks(shards: &[LockedShard<'_>], asked: usize) -> Error {
    let sum = |of: fn(&Shard) -> usize| shards.iter().map(|shard| of(shard)).sum();
    Error::OutOfBlocks {
        asked,
        free: sum(Shard::free_blocks),
        evictable: sum(Shard::evictable),
        total: sum(|shard| shard.stage.len()),
    }
}

impl SharedPool {
    /// Returns the time, or 0 if the pool does not need the time or the clock panics.
    pub(super) fn now(&self) -> u64 {
        self.rules.clock.as_deref().map_or(0, read)
    }

    pub(super) fn moment(&self) -> Moment<'_> {
        Moment { now: self.now(), rules: &self.rules, index: &self.index }
    }

    fn count_lookup(&self, keys: &[BlockKey], found: usize) {
        let Some(first) = keys.first() else { return };
        let cell = &self.shards[first.word() as usize % self.shards.len()];
        for (counter, n) in [(&cell.hits, found), (&cell.misses, keys.len() - found)] {
            if n > 0 {
                counter.fetch_add(n as u64, Ordering::Relaxed);
            }
        }
    }

    fn lock(&self, shard: usize) -> LockedShard<'_> {
        let cell = &self.shards[shard];
        LockedShard { shard: cell.shard.lock(), hint: &cell.free }
    }

    /// Returns the shard where a thread starts to allocate `n` blocks. A thread stays with a shard until it
    /// has asked for a sixteenth as many blocks as the shard has, so that the bookkeeping stays in its core's
    /// cache while contents are still evicted evenly from all shards.
    fn home(&self, n: usize) -> usize {
        if self.shards.len() == 1 {
            return 0;
        }
        let stay = (1usize << self.shift) / 16;
        turn(n) / stay.max(1) % self.shards.len()
    }

    /// Locks the shard `home`. If another thread holds its lock, locks the next unlocked shard instead and
    /// updates `home`.
    fn lock_near(&self, home: &mut usize) -> LockedShard<'_> {
        let count = self.shards.len();
        for i in (0..count).map(|i| (*home + i) % count) {
            let cell = &self.shards[i];
            if let Some(shard) = cell.shard.try_lock() {
                *home = i;
                return LockedShard { shard, hint: &cell.free };
            }
        }
        self.lock(*home)
    }

    fn lock_all(&self) -> Vec<LockedShard<'_>> {
        (0..self.shards.len()).map(|shard| self.lock(shard)).collect()
    }

    /// Allocates up to `n` blocks, and returns their number: first free blocks of all shards, then evicted
    /// blocks. Blocks that wait for others are taken only if `all` is true and nothing else is left.
    fn take_from(
        shards: &mut [LockedShard<'_>],
        home: usize,
        out: &mut Ids,
        n: usize,
        moment: &Moment<'_>,
        all: bool,
    ) -> usize {
        let count = shards.len();
        let mut left = n;
        for i in 0..count {
            left -= shards[(home + i) % count].take_free(left, out);
        }
        while left > 0 {
            let (share, before) = (left.div_ceil(count), left);
            for i in 0..count {
                let shard = &mut shards[(home + i) % count];
                left -= shard.take_next(share.min(left), moment, out);
            }
            if left == before {
                if !all {
                    break;
                }
                // Held blocks follow all others. The next round takes the rest of the chain.
                let Some(id) = Self::take_waiting(shards, home, moment) else { break };
                out.push(id);
                left -= 1;
            }
        }
        n - left
    }

    /// Allocates a block that waits for others, if possible the last one of its chain that is not held.
    fn take_waiting(shards: &mut [LockedShard<'_>], home: usize, moment: &Moment<'_>) -> Option<BlockId> {
        let mut before = HashSet::new();
        for shard in shards.iter() {
            shard.before_waiting(&mut before);
        }
        // Wrong keys can make a chain follow itself.
        [before, HashSet::new()].iter().find_map(|before| {
            let (later, first) = shards.split_at_mut(home);
            first.iter_mut().chain(later).find_map(|shard| shard.take_waiting(before, moment))
        })
    }

    fn id(&self, index: u32) -> BlockId {
        BlockId(self.rules.first + index)
    }

    pub(super) fn shard_of(&self, id: BlockId) -> usize {
        ((id.0 - self.range.start) >> self.shift) as usize
    }

    /// Returns the index of the block that a lookup of `key` finds, or [`NO_BLOCK`].
    pub(super) fn block_of(&self, key: Option<BlockKey>) -> u32 {
        let found = key.map(|key| self.index.find_prefix(&[key]));
        found.and_then(|found| found.first().copied()).unwrap_or(NO_BLOCK)
    }

    /// Returns the index of a block in its shard.
    pub(super) fn local(&self, id: BlockId) -> u32 {
        (id.0 - self.range.start) & ((1 << self.shift) - 1)
    }

    /// Returns a cursor that visits blocks one after another. It keeps a shard locked while consecutive
    /// blocks are in that shard.
    pub(super) fn walk(&self) -> Walk<'_> {
        Walk { pool: self, at: usize::MAX, shard: None }
    }
}

/// A cursor that visits blocks one after another; see [`SharedPool::walk`].
pub(super) struct Walk<'a> {
    pool: &'a SharedPool,
    at: usize,
    shard: Option<LockedShard<'a>>,
}

impl Walk<'_> {
    /// Returns a block's locked shard, and the block's index in the shard.
    pub(super) fn shard(&mut self, id: BlockId) -> (&mut Shard, u32) {
        let at = self.pool.shard_of(id);
        if self.at != at {
            self.shard = None;
            self.at = at;
        }
        (self.shard.get_or_insert_with(|| self.pool.lock(at)), self.pool.local(id))
    }
}
