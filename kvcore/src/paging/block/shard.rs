//! The bookkeeping of one shard, protected by its lock: the states of a run of blocks, their free list and
//! their eviction order. Methods identify a block by its index in the shard.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use smallvec::SmallVec;

use super::chains::{Chains, NO_BLOCK};
use super::clock::millis;
use super::event::KvEvent;
use super::evict::{EvictionPolicy, Lru, PolicyEntry, Retention};
use super::rules::{Moment, Rules};
use super::{FreeOrder, PoolCounts};
use crate::base::BlockId;
use crate::paging::BlockKey;
use crate::paging::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum BlockStage {
    Free,
    Mutable,
    /// The block has no key. It is shared while it has holders, and cached while only pins keep it.
    Shared,
    /// The block is registered in the index under its key. It is shared while it has holders, and cached
    /// otherwise.
    Registered,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Meta {
    /// The block's key, valid only in stage `Registered`. `holders` and `pins` are 0 in all stages before
    /// `Shared`. A count that reaches `u32::MAX` stays there, so that the block is kept for good.
    pub(super) key: BlockKey,
    pub(super) holders: u32,
    pub(super) pins: u32,
    /// The link to the block that this one follows, valid only in stage `Registered`.
    pub(super) before: u32,
}

const FRESH: Meta = Meta { key: BlockKey::from_bytes([0; 32]), holders: 0, pins: 0, before: NO_BLOCK };

/// A block's release time and retention. Only pools with a clock store these values.
#[derive(Debug, Clone, Copy)]
struct BlockTimes {
    released: u64,
    /// The priority in the upper byte, and the end of the priority in milliseconds in the other bytes.
    retention: u64,
}

const PRIORITY_SHIFT: u32 = 56;
const FOREVER: u64 = (1 << PRIORITY_SHIFT) - 1;

impl BlockTimes {
    const NONE: Self = Self::new(Retention::DEFAULT_PRIORITY, FOREVER);

    const fn new(priority: u8, until: u64) -> Self {
        let until = if until < FOREVER { until } else { FOREVER };
        Self { released: 0, retention: (priority as u64) << PRIORITY_SHIFT | until }
    }

    fn priority(&self) -> u8 {
        (self.retention >> PRIORITY_SHIFT) as u8
    }

    fn until(&self) -> u64 {
        match self.retention & FOREVER {
            FOREVER => u64::MAX,
            until => until,
        }
    }
}

// Decision: docs/decisions/paging.md#a-pool-has-shards
#[derive(Debug)]
pub(super) struct Shard {
    /// ID of the shard's first block.
    first: u32,
    /// Index of this block in the pool.
    offset: u32,
    pub(super) chains: Arc<Chains>,
    pub(super) stage: Box<[BlockStage]>,
    pub(super) meta: Box<[Meta]>,
    times: Box<[BlockTimes]>,
    /// Free blocks that are not in the policy's order.
    pub(super) free: Vec<u32>,
    /// Number of free blocks in the policy's order.
    queued_free: usize,
    /// Number of blocks that have a key and can be evicted: those in the policy's order, and those that wait.
    evictable: usize,
    /// Number of blocks that the policy has selected, and that wait for the blocks that follow them.
    waiting: usize,
    policy: Box<dyn EvictionPolicy>,
    /// True for a built-in policy, whose calls need no guard against panics.
    trusted: bool,
    wants_hits: bool,
    mutable: usize,
    shared: usize,
    pub(super) evicted: u64,
}

impl Shard {
    pub(super) fn new(
        first: u32,
        blocks: usize,
        (policy, trusted): (Box<dyn EvictionPolicy>, bool),
        rules: &Rules,
        chains: &Arc<Chains>,
    ) -> Self {
        let wants_hits = policy.wants_hits();
        let timed = if rules.clock.is_some() { blocks } else { 0 };
        let mut shard = Self {
            first,
            offset: first - rules.first,
            chains: Arc::clone(chains),
            stage: vec![BlockStage::Mutable; blocks].into(),
            meta: vec![FRESH; blocks].into(),
            times: vec![BlockTimes::NONE; timed].into(),
            free: Vec::new(),
            queued_free: 0,
            evictable: 0,
            waiting: 0,
            policy,
            trusted,
            wants_hits,
            mutable: 0,
            shared: 0,
            evicted: 0,
        };
        match rules.free_order {
            FreeOrder::FreeFirst => (0..blocks as u32).rev().for_each(|block| shard.release(block, rules, 0)),
            FreeOrder::OneQueue => (0..blocks as u32).for_each(|block| shard.release(block, rules, 0)),
        }
        shard
    }

    pub(super) fn id(&self, block: u32) -> BlockId {
        BlockId(self.first + block)
    }

    pub(super) fn free_blocks(&self) -> usize {
        self.free.len() + self.queued_free
    }

    pub(super) fn evictable(&self) -> usize {
        self.evictable
    }

    /// Returns the number of blocks that can be allocated.
    pub(super) fn available(&self) -> usize {
        self.free_blocks() + self.evictable
    }

    pub(super) fn counts(&self) -> PoolCounts {
        let (free, total) = (self.free_blocks(), self.stage.len());
        PoolCounts {
            total,
            free,
            mutable: self.mutable,
            shared: self.shared,
            cached: total - free - self.mutable - self.shared,
            evictable: self.evictable,
        }
    }

    /// Allocates up to `n` blocks from the free list, and returns the number of allocated blocks.
    pub(super) fn take_free(&mut self, n: usize, out: &mut impl Extend<BlockId>) -> usize {
        let n = n.min(self.free.len());
        let (first, stage) = (self.first, &mut self.stage);
        out.extend(self.free.drain(self.free.len() - n..).rev().map(|block| {
            stage[block as usize] = BlockStage::Mutable;
            BlockId(first + block)
        }));
        self.mutable += n;
        n
    }

    /// Allocates up to `n` blocks in the policy's order, and returns the number of allocated blocks. Blocks that
    /// wait for others are not allocated.
    pub(super) fn take_next(
        &mut self,
        n: usize,
        moment: &Moment<'_>,
        out: &mut impl Extend<BlockId>,
    ) -> usize {
        let mut taken = 0;
        let mut evicted: SmallVec<[(BlockKey, u32); 64]> = SmallVec::new();
        while taken < n
            && let Some((block, keyed)) = self.next(moment.now)
        {
            if keyed {
                evicted.push(self.forgotten(block, moment.rules, true));
            }
            out.extend([self.id(block)]);
            taken += 1;
        }
        moment.index.remove(&evicted);
        self.mutable += taken;
        self.evicted += evicted.len() as u64;
        taken
    }

    /// Returns whether the block is in the policy's order.
    fn is_queued(&self, block: u32) -> bool {
        match (self.stage.get(block as usize), self.meta.get(block as usize)) {
            (Some(BlockStage::Free), _) => self.queued_free > 0,
            (Some(BlockStage::Registered), Some(meta)) => {
                meta.holders == 0 && meta.pins == 0 && !self.waits(block)
            }
            _ => false,
        }
    }

    /// Returns whether the policy has selected the block, and the block waits for others.
    pub(super) fn waits(&self, block: u32) -> bool {
        self.chains.waits(self.offset + block)
    }

    /// Makes the next block mutable: one that no longer waits for others, or the next one of the policy's order that
    /// nothing follows. Also returns whether the block had a key.
    fn next(&mut self, now: u64) -> Option<(u32, bool)> {
        if let Some(block) = self.chains.pop_due(self.offset) {
            self.waiting -= 1;
            return Some(self.open(block - self.offset));
        }
        while self.queued_free + self.evictable > self.waiting {
            let block = self.select(now)?;
            if !self.has_key(block) || !self.chains.wait(self.offset + block) {
                return Some(self.open(block));
            }
            self.waiting += 1;
        }
        None
    }

    /// Returns the blocks that wait for others.
    fn waiting(&self) -> impl Iterator<Item = u32> {
        (0..if self.waiting > 0 { self.stage.len() as u32 } else { 0 }).filter(|&block| self.waits(block))
    }

    /// Adds the indices in the pool of the blocks that waiting blocks follow.
    pub(super) fn before_waiting(&self, out: &mut HashSet<u32>) {
        out.extend(self.waiting().filter_map(|block| self.chains.linked(self.meta[block as usize].before)));
    }

    /// Allocates a block that waits for others, if possible one that is not in `before`.
    pub(super) fn take_waiting(&mut self, before: &HashSet<u32>, moment: &Moment<'_>) -> Option<BlockId> {
        let mut ends = self.waiting().filter(|block| !before.contains(&(self.offset + block)));
        let block = ends.next()?;
        drop(ends);
        self.chains.resume(self.offset + block);
        self.waiting -= 1;
        self.open(block);
        moment.index.remove(&[self.forgotten(block, moment.rules, true)]);
        self.mutable += 1;
        self.evicted += 1;
        Some(self.id(block))
    }

    /// Returns the next block of the policy's order, which is no longer in that order.
    fn select(&mut self, now: u64) -> Option<u32> {
        let chosen = self.ask(|policy| policy.evict(now)).filter(|&block| self.is_queued(block));
        chosen.or_else(|| {
            self.replace_policy();
            self.policy.evict(now)
        })
    }

    /// Makes a block that can be evicted mutable. Also returns whether the block had a key.
    fn open(&mut self, block: u32) -> (u32, bool) {
        let keyed = self.has_key(block);
        *(if keyed { &mut self.evictable } else { &mut self.queued_free }) -= 1;
        self.stage[block as usize] = BlockStage::Mutable;
        (block, keyed)
    }

    /// Calls the policy, once the state of the block in question is up to date. Replaces a policy that
    /// panics, and returns the default value in that case.
    #[inline]
    fn ask<T: Default>(&mut self, call: impl FnOnce(&mut dyn EvictionPolicy) -> T) -> T {
        if self.trusted { call(&mut *self.policy) } else { self.ask_guarded(call) }
    }

    #[inline(never)]
    fn ask_guarded<T: Default>(&mut self, call: impl FnOnce(&mut dyn EvictionPolicy) -> T) -> T {
        catch_unwind(AssertUnwindSafe(|| call(&mut *self.policy))).unwrap_or_else(|_| {
            self.replace_policy();
            T::default()
        })
    }

    // Decision: docs/decisions/paging.md#a-policy-that-breaks-its-contract-is-replaced
    #[cold]
    fn replace_policy(&mut self) {
        let mut lru = Lru::new(self.stage.len());
        let queued = (0..self.stage.len() as u32).filter(|&block| self.is_queued(block));
        queued.for_each(|block| lru.insert(block, &PolicyEntry::default()));
        let broken = std::mem::replace(&mut self.policy, Box::new(lru));
        (self.trusted, self.wants_hits) = (true, false);
        // A policy that panics when it is dropped has nothing left to break.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
    }

    /// Unlinks a cached block, and returns the index entry to remove. If `tell` is set, queues the removal event first,
    /// so that routers get it before the key can be stored again.
    fn forgotten(&self, block: u32, rules: &Rules, tell: bool) -> (BlockKey, u32) {
        let Meta { key, before, .. } = self.meta[block as usize];
        self.chains.unfollow(before);
        self.chains.leave(self.offset + block);
        if let Some(events) = rules.events.as_ref().filter(|_| tell) {
            events.push(KvEvent::Removed { key, block: self.id(block) });
        }
        (key, block + self.first - rules.first)
    }

    /// Frees a mutable block. Does nothing in other stages.
    pub(super) fn discard(&mut self, block: u32, moment: &Moment<'_>) {
        match self.stage[block as usize] {
            BlockStage::Mutable => self.mutable -= 1,
            BlockStage::Free | BlockStage::Shared | BlockStage::Registered => return,
        }
        self.release(block, moment.rules, moment.now);
    }

    fn release(&mut self, block: u32, rules: &Rules, now: u64) {
        self.stage[block as usize] = BlockStage::Free;
        match rules.free_order {
            FreeOrder::FreeFirst => self.free.push(block),
            FreeOrder::OneQueue => self.enqueue_free(block, now),
        }
    }

    #[inline(never)]
    fn enqueue_free(&mut self, block: u32, now: u64) {
        self.queued_free += 1;
        self.ask(|policy| policy.insert(block, &PolicyEntry { now, ..PolicyEntry::default() }));
    }

    /// Gives a mutable block its first holder.
    pub(super) fn share(&mut self, block: u32) {
        self.mutable -= 1;
        self.shared += 1;
        self.stage[block as usize] = BlockStage::Shared;
        self.meta[block as usize].holders = 1;
        if let Some(times) = self.times.get_mut(block as usize) {
            *times = BlockTimes::NONE;
        }
    }

    /// Makes a shared block mutable again if it has one holder, no key and no pin. Returns whether it did so.
    pub(super) fn reclaim(&mut self, block: u32) -> bool {
        let meta = &mut self.meta[block as usize];
        let alone = self.stage[block as usize] == BlockStage::Shared && meta.holders == 1 && meta.pins == 0;
        if alone {
            meta.holders = 0;
            self.stage[block as usize] = BlockStage::Mutable;
            self.shared -= 1;
            self.mutable += 1;
        }
        alone
    }

    pub(super) fn has_key(&self, block: u32) -> bool {
        self.stage[block as usize] == BlockStage::Registered
    }

    /// Returns whether the index, which compares only the first words of keys, found this block under a key
    /// that is not its own.
    pub(super) fn collides(&self, block: u32, key: &BlockKey) -> bool {
        let own = &self.meta[block as usize].key;
        self.has_key(block) && own.word() == key.word() && own != key
    }

    /// Sets the key of a held block that has no key. The block follows the block with the index `before` in the pool.
    pub(super) fn set_key(&mut self, block: u32, key: BlockKey, before: u32) {
        self.stage[block as usize] = BlockStage::Registered;
        let meta = &mut self.meta[block as usize];
        (meta.key, meta.before) = (key, self.chains.follow(before));
    }

    /// Adds a holder to a held or cached block.
    pub(super) fn hold(&mut self, block: u32) {
        let meta = &mut self.meta[block as usize];
        meta.holders = meta.holders.saturating_add(1);
        if meta.holders == 1 {
            self.shared += 1;
            if meta.pins == 0 {
                self.keep(block);
            }
        }
    }

    /// Makes a block with a key follow the block with the index `before` in the pool.
    pub(super) fn relink(&mut self, block: u32, before: u32) {
        let old = self.meta[block as usize].before;
        if self.has_key(block) && before != NO_BLOCK && self.chains.linked(old) != Some(before) {
            self.meta[block as usize].before = self.chains.follow(before);
            self.chains.unfollow(old);
        }
    }

    /// Removes a block from the blocks that can be evicted.
    fn keep(&mut self, block: u32) {
        self.evictable -= 1;
        if self.chains.resume(self.offset + block) {
            self.waiting -= 1;
        } else {
            self.ask(|policy| policy.remove(block));
        }
    }

    /// Adds a holder to a block if it still has this key and has not expired. Returns whether it did so.
    pub(super) fn hold_keyed(&mut self, block: u32, key: &BlockKey, moment: &Moment<'_>) -> bool {
        if self.stage[block as usize] != BlockStage::Registered || self.meta[block as usize].key != *key {
            return false;
        }
        if self.has_expired(block, moment) {
            self.expire(block, moment);
            return false;
        }
        if self.wants_hits {
            self.ask(|policy| policy.hit(block, key));
        }
        self.hold(block);
        true
    }

    /// Returns `None` if a lookup would not find the block. Otherwise returns whether the block has neither
    /// holders nor pins.
    pub(super) fn findable(&self, block: u32, key: &BlockKey, moment: &Moment<'_>) -> Option<bool> {
        let meta = &self.meta[block as usize];
        let found = self.has_key(block) && meta.key == *key && !self.has_expired(block, moment);
        found.then_some(meta.holders == 0 && meta.pins == 0)
    }

    fn has_expired(&self, block: u32, moment: &Moment<'_>) -> bool {
        let (Some(ttl), meta) = (moment.rules.ttl, &self.meta[block as usize]) else { return false };
        let unused = || moment.now.saturating_sub(self.times[block as usize].released);
        meta.holders == 0 && meta.pins == 0 && unused() >= ttl
    }

    fn expire(&mut self, block: u32, moment: &Moment<'_>) {
        self.stage[block as usize] = BlockStage::Mutable;
        self.keep(block);
        moment.index.remove(&[self.forgotten(block, moment.rules, true)]);
        self.release(block, moment.rules, moment.now);
    }

    /// Frees the cached blocks that have expired, and returns the number of freed blocks.
    pub(super) fn expire_all(&mut self, moment: &Moment<'_>) -> usize {
        let over = |shard: &Self, block: u32| {
            shard.stage[block as usize] == BlockStage::Registered && shard.has_expired(block, moment)
        };
        let gone: Vec<u32> = (0..self.stage.len() as u32).filter(|&block| over(self, block)).collect();
        for &block in &gone {
            self.expire(block, moment);
        }
        gone.len()
    }

    /// Removes a holder from a block.
    pub(super) fn drop_holder(&mut self, block: u32, moment: &Moment<'_>) {
        let meta = &mut self.meta[block as usize];
        meta.holders -= u32::from(meta.holders < u32::MAX);
        if meta.holders == 0 {
            self.shared -= 1;
            if meta.pins == 0 {
                self.settle(block, moment);
            }
        }
    }

    /// Caches a block without holders and pins if it has a key, and frees it otherwise.
    fn settle(&mut self, block: u32, moment: &Moment<'_>) {
        if self.stage[block as usize] != BlockStage::Registered {
            return self.release(block, moment.rules, moment.now);
        }
        self.evictable += 1;
        let (key, now) = (Some(&self.meta[block as usize].key), moment.now);
        let entry = match self.times.get_mut(block as usize) {
            Some(times) => {
                times.released = now;
                PolicyEntry { key, priority: times.priority(), until: times.until(), now }
            }
            None => PolicyEntry { key, now, ..PolicyEntry::default() },
        };
        if self.trusted {
            return self.policy.insert(block, &entry);
        }
        let (own, entry) = (self.meta[block as usize].key, PolicyEntry { key: None, ..entry });
        self.ask(|policy| policy.insert(block, &PolicyEntry { key: Some(&own), ..entry }));
    }

    pub(super) fn pin(&mut self, block: u32) {
        let meta = &mut self.meta[block as usize];
        meta.pins = meta.pins.saturating_add(1);
    }

    pub(super) fn unpin(&mut self, block: u32, moment: &Moment<'_>) {
        let meta = &mut self.meta[block as usize];
        meta.pins -= u32::from(meta.pins < u32::MAX);
        if meta.pins == 0 && meta.holders == 0 {
            self.settle(block, moment);
        }
    }

    /// Sets a held block's retention, which applies once the block is cached.
    pub(super) fn retain(&mut self, block: u32, retention: Retention, now: u64) {
        if let Some(times) = self.times.get_mut(block as usize) {
            let until = retention.lasts.map_or(FOREVER, |lasts| now.saturating_add(millis(lasts)));
            times.retention = BlockTimes::new(retention.priority, until).retention;
        }
    }

    /// Frees all cached blocks that the pool may evict, and returns their number. They will be allocated
    /// after the blocks that are already free, in the order in which they would have been evicted.
    pub(super) fn clear_cached(&mut self, tell_each: bool, moment: &Moment<'_>) -> usize {
        let (mut order, mut cleared) = (Vec::new(), Vec::new());
        let mut clear = |shard: &Self, (block, keyed)| {
            if keyed {
                cleared.push(shard.forgotten(block, moment.rules, tell_each));
            }
            order.push(block);
        };
        while let Some(next) = self.next(moment.now) {
            clear(self, next);
        }
        // The blocks that held blocks, or blocks of other shards, follow.
        let waiting: Vec<u32> = self.waiting().collect();
        self.waiting = 0;
        for block in waiting {
            self.chains.resume(self.offset + block);
            let next = self.open(block);
            clear(self, next);
        }
        moment.index.remove(&cleared);
        let before = std::mem::take(&mut self.free);
        match moment.rules.free_order {
            FreeOrder::FreeFirst => order.reverse(),
            FreeOrder::OneQueue => {}
        }
        for block in order {
            self.release(block, moment.rules, moment.now);
        }
        self.free.extend(before);
        cleared.len()
    }

    /// Returns whether no block with a key is held or pinned.
    pub(super) fn keyed_are_evictable(&self) -> bool {
        let keyed = self.stage.iter().filter(|&&stage| stage == BlockStage::Registered).count();
        keyed == self.evictable
    }
}

#[cfg(test)]
mod tests {
    use crate::paging::{BlockPool, KeyScope};

    #[test]
    fn counts_of_holders_and_pins_stay_at_their_maximum() {
        let key = KeyScope::new("m", b"").root();
        for keyed in [true, false] {
            for pinned in [true, false] {
                let pool = BlockPool::new(0..2).unwrap();
                let block = pool.allocate(1).unwrap();
                let block = if keyed { block.register(None, &[key]).unwrap() } else { block.share() };
                let at = {
                    let mut walk = pool.0.walk();
                    let (shard, at) = walk.shard(block.ids()[0]);
                    let meta = &mut shard.meta[at as usize];
                    *(if pinned { &mut meta.pins } else { &mut meta.holders }) = u32::MAX - 1;
                    at
                };
                let more: Vec<_> = (0..3).map(|_| (block.clone(), block.pin())).collect();
                let found = pool.lookup(&key);
                assert_eq!(found.is_some(), keyed);
                drop((more, found, block));
                assert_eq!(at, pool.0.local(crate::base::BlockId(0)));
                // A count that is no longer known must not reach 0 while holders are left.
                let counts = pool.counts();
                assert_eq!((counts.available(), counts.shared + counts.cached), (1, 1), "{keyed} {pinned}");
                assert!(pool.allocate(2).is_err());
                assert_eq!(pool.clear_cached(), 0);
                pool.check_invariants().unwrap();
            }
        }
    }
}
