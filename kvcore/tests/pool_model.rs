//! Random operations on a pool, compared with a plain model of the pool.
//!
//! `KVCORE_MODEL_OPS` sets the number of operations per configuration. By default all configurations
//! together run at least a million operations.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvcore::{
    BlockId, BlockKey, BlockPool, Duplicates, Error, EventQueue, FreeOrder, KeyScope, KvEvent, ManualClock,
    MutableBlocks, PinnedBlocks, PolicyKind, PoolConfig, Retention, SharedBlocks,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use pool_ops::{Op, op};
use watched::{Faults, Watched};

mod pool_ops;
mod watched;

const BLOCKS: u32 = 13;
const FIRST: u32 = 10;
const KEYS: u32 = 9;
const TTL: u64 = 50;
const WATERMARK: usize = 2;

/// The settings of a pool under test.
#[derive(Debug, Clone, Copy)]
struct Setup {
    policy: PolicyKind,
    shards: usize,
    order: FreeOrder,
    duplicates: Duplicates,
    ttl: bool,
}

/// The guards that are held, and the model's state of each block.
struct World {
    pool: BlockPool,
    setup: Setup,
    clock: ManualClock,
    events: Arc<EventQueue>,
    /// What the policy did against its contract.
    faults: Faults,
    /// The keys that a router considers stored, by block.
    router: HashMap<u32, BlockKey>,
    mutable: Vec<MutableBlocks>,
    shared: Vec<SharedBlocks>,
    pinned: Vec<PinnedBlocks>,
    /// Keys by block, in the order of registration.
    keys: BTreeMap<u64, (u32, BlockKey)>,
    stamp: u64,
    /// The block that each registered block follows.
    before: HashMap<u32, u32>,
    /// The time at which the last holder of each cached block was dropped.
    released: HashMap<u32, u64>,
    now: u64,
    /// Cached blocks, starting with the block released longest ago: the order in which LRU with one shard
    /// must evict blocks.
    lru: Vec<u32>,
    /// Cached blocks that LRU has selected while others followed them. They leave next, in any order, once nothing
    /// follows them.
    passed: HashSet<u32>,
    /// Blocks that the last operation released, in order.
    releasing: Vec<u32>,
}

fn key(n: u32) -> BlockKey {
    KeyScope::new("m", b"").root().child(&[n])
}

fn keys(first: u32, n: usize) -> Vec<BlockKey> {
    (0..n as u32).map(|i| key((first + i) % KEYS)).collect()
}

fn take<T>(list: &mut Vec<T>, i: usize) -> Option<T> {
    (i < list.len()).then(|| list.remove(i))
}

fn ids(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|id| id.0).collect()
}

impl World {
    fn new(setup: Setup) -> Self {
        let (clock, events) = (ManualClock::default(), Arc::new(EventQueue::new(10_000)));
        let faults = Faults::default();
        let reported = Arc::clone(&faults);
        let watched = move |blocks| Watched::boxed(setup.policy.build(blocks), &reported);
        let mut config = PoolConfig::default()
            .custom_policy(watched)
            .shards(setup.shards)
            .free_order(setup.order)
            .duplicates(setup.duplicates)
            .watermark(WATERMARK)
            .events(events.clone())
            .clock(Arc::new(clock.clone()));
        if setup.ttl {
            config = config.ttl(Duration::from_millis(TTL));
        }
        let pool = BlockPool::with_config(FIRST..FIRST + BLOCKS, config).unwrap();
        Self {
            pool,
            setup,
            clock,
            events,
            faults,
            router: HashMap::new(),
            mutable: Vec::new(),
            shared: Vec::new(),
            pinned: Vec::new(),
            keys: BTreeMap::new(),
            stamp: 0,
            before: HashMap::new(),
            released: HashMap::new(),
            now: 0,
            lru: Vec::new(),
            passed: HashSet::new(),
            releasing: Vec::new(),
        }
    }

    fn holders(&self) -> HashMap<u32, usize> {
        let mut holders = HashMap::new();
        for id in self.shared.iter().flat_map(|s| ids(s.ids())) {
            *holders.entry(id).or_default() += 1;
        }
        holders
    }

    fn pins(&self) -> HashSet<u32> {
        self.pinned.iter().flat_map(|p| ids(p.ids())).collect()
    }

    fn key_of(&self, block: u32) -> Option<BlockKey> {
        self.keys.values().find(|(b, _)| *b == block).map(|(_, key)| *key)
    }

    fn forget(&mut self, block: u32) {
        self.keys.retain(|_, (b, _)| *b != block);
        self.before.retain(|&follows, &mut before| follows != block && before != block);
        self.released.remove(&block);
    }

    fn is_followed(&self, block: u32) -> bool {
        self.before.values().any(|&before| before == block)
    }

    /// Returns the block that a lookup of a key finds, which is the block that was registered first.
    fn find(&self, key: &BlockKey) -> Option<u32> {
        self.keys.values().find(|(_, k)| k == key).map(|(b, _)| *b)
    }

    fn expired(&self, block: u32) -> bool {
        self.setup.ttl
            && !self.holders().contains_key(&block)
            && !self.pins().contains(&block)
            && self.released.get(&block).is_some_and(|at| self.now - at >= TTL)
    }

    /// Checks the blocks that an allocation returned, and removes evicted blocks from the model.
    fn taken(&mut self, before: &[u32], blocks: &[BlockId]) {
        let exact = self.setup.policy == PolicyKind::Lru && self.setup.shards == 1;
        for id in ids(blocks) {
            assert!((FIRST..FIRST + BLOCKS).contains(&id) && !before.contains(&id), "block {id} was in use");
            let keyed = self.key_of(id).is_some();
            let first = self.lru.iter().find(|&&block| !self.is_followed(block)).copied();
            if keyed {
                assert!(!self.is_followed(id) || first.is_none(), "{id} leaves before its followers");
                let right =
                    |first| first == id || [first, id].iter().all(|block| self.passed.contains(block));
                assert!(!exact || first.is_none_or(right), "{id} leaves instead of {first:?}");
            }
            // The place of a free block in the order of a pool with one queue is not known.
            let selected = match self.lru.iter().position(|&block| block == id) {
                Some(place) if first.is_some() => place,
                None if self.setup.order == FreeOrder::FreeFirst => 0,
                _ => self.lru.len(),
            };
            let passed: Vec<u32> =
                self.lru[..selected].iter().copied().filter(|&b| self.is_followed(b)).collect();
            self.passed.extend(passed);
            self.lru.retain(|&block| block != id);
            self.forget(id);
        }
    }

    fn in_use(&self) -> Vec<u32> {
        let owned = self.mutable.iter().flat_map(|b| ids(b.ids()));
        owned.chain(self.holders().into_keys()).chain(self.pins()).collect()
    }

    /// Checks the blocks that a registration returned. `held` contains the blocks that the current guard held
    /// before. During the call, that guard must not be among the model's guards.
    fn registered(&mut self, held: &[u32], own: &[u32], got: &[u32], parent: Option<u32>, keys: &[BlockKey]) {
        let mut before = parent;
        for ((&own, &got), key) in own.iter().zip(got).zip(keys) {
            let known = self.find(key).filter(|&b| held.contains(&b) || !self.expired(b));
            match known {
                Some(known) if self.setup.duplicates == Duplicates::Merge => {
                    assert_eq!(got, known, "a known key gives the known block");
                    self.before.extend(before.map(|before| (known, before)));
                }
                _ => {
                    assert_eq!(got, own, "an unknown key stays with its block");
                    if let Some(old) = self.find(key).filter(|_| self.setup.duplicates == Duplicates::Merge) {
                        self.forget(old);
                    }
                    self.keys.insert(self.stamp, (own, *key));
                    self.stamp += 1;
                    self.before.extend(before.map(|before| (own, before)));
                }
            }
            before = Some(got);
        }
    }

    #[expect(clippy::too_many_lines, reason = "one arm an operation")]
    fn apply(&mut self, op: &Op) {
        let counts = self.pool.counts();
        match *op {
            Op::Allocate(n) => self.allocate(n, 0, BlockPool::allocate),
            Op::Admit(n) => self.allocate(n, WATERMARK, |pool, n| Ok(pool.admit_prefix(&[], n, 0)?.1)),
            Op::AllocateMore(i, n) => {
                let before = self.in_use();
                if let Some(mut guard) = take(&mut self.mutable, i) {
                    let len = guard.len();
                    let result = guard.allocate(n);
                    assert_eq!(result.is_ok(), counts.available() >= n);
                    assert_eq!(guard.len(), if result.is_ok() { len + n } else { len });
                    self.taken(&before, &guard.ids()[len..]);
                    self.mutable.push(guard);
                }
            }
            Op::Split(i, n) => {
                if let Some(guard) = self.mutable.get_mut(i) {
                    match guard.split_off(n) {
                        Ok(rest) => self.mutable.push(rest),
                        Err(error) => {
                            assert!(n > guard.len() && matches!(error, Error::TooLarge { .. }));
                        }
                    }
                }
            }
            Op::Register(i, k) => {
                if let Some(guard) = take(&mut self.mutable, i) {
                    let (own, keys) = (ids(guard.ids()), keys(k, guard.len()));
                    let shared = guard.register(None, &keys).unwrap();
                    self.registered(&[], &own, &ids(shared.ids()), None, &keys);
                    self.shared.push(shared);
                }
            }
            Op::RegisterAfter(i, k) => {
                if let Some(guard) = take(&mut self.mutable, i) {
                    let (own, keys) = (ids(guard.ids()), keys(k, guard.len()));
                    let parent = self.find(&key(k));
                    let shared = guard.register(Some(key(k)), &keys).unwrap();
                    self.registered(&[], &own, &ids(shared.ids()), parent, &keys);
                    self.shared.push(shared);
                }
            }
            Op::RegisterWrong(i) => {
                if let Some(guard) = take(&mut self.mutable, i) {
                    let own = ids(guard.ids());
                    let rejected = guard.register(None, &keys(0, own.len() + 1)).unwrap_err();
                    assert_eq!(ids(rejected.blocks.ids()), own, "the blocks come back");
                    self.mutable.push(rejected.blocks);
                    assert_eq!(self.pool.counts(), counts);
                }
            }
            Op::Share(i) => self.shared.extend(take(&mut self.mutable, i).map(MutableBlocks::share)),
            Op::AdmitPrefix(k, n, blocks, room) => self.admit_prefix(k, n, blocks, room),
            Op::AppendShared(a, b) => {
                if let Some(other) = take(&mut self.shared, a) {
                    match self.shared.get_mut(b) {
                        Some(guard) => guard.append(other).unwrap(),
                        None => self.shared.push(other),
                    }
                }
            }
            Op::SplitShared(i, n) => {
                if let Some(Ok(rest)) = self.shared.get_mut(i).map(|guard| guard.split_off(n)) {
                    self.shared.push(rest);
                }
            }
            Op::Reclaim(i) => {
                let (holders, pins) = (self.holders(), self.pins());
                if let Some(guard) = self.shared.get_mut(i) {
                    let last = guard.ids().last().map(|id| id.0);
                    let own = guard.reclaim_last();
                    let alone = last.is_some_and(|block| {
                        holders[&block] == 1 && !pins.contains(&block) && self.key_of(block).is_none()
                    });
                    assert_eq!(
                        own.as_ref().map(|own| ids(own.ids())),
                        last.filter(|_| alone).map(|b| vec![b])
                    );
                    self.mutable.extend(own);
                }
            }
            Op::RegisterShared(i, k) => {
                if let Some(mut guard) = take(&mut self.shared, i) {
                    // Blocks that already have a key keep it.
                    let own = ids(guard.ids());
                    let unkeyed = own.iter().position(|&b| self.key_of(b).is_none()).unwrap_or(own.len());
                    let end = own[unkeyed..].iter().position(|&b| self.key_of(b).is_some());
                    let n = end.unwrap_or(own.len() - unkeyed);
                    let keys = keys(k, n);
                    let distinct: HashSet<u32> = own[unkeyed..unkeyed + n].iter().copied().collect();
                    let result = guard.register(unkeyed, None, &keys);
                    assert_eq!(result.is_ok(), distinct.len() == n, "a block twice is refused");
                    if result.is_err() {
                        assert_eq!((self.pool.counts(), ids(guard.ids())), (counts, own));
                        self.shared.push(guard);
                        return;
                    }
                    let got = ids(guard.ids());
                    self.registered(
                        &own,
                        &own[unkeyed..unkeyed + n],
                        &got[unkeyed..unkeyed + n],
                        None,
                        &keys,
                    );
                    self.shared.push(guard);
                }
            }
            Op::Lookup(k, n) => {
                let keys = keys(k, n);
                let mut expected = Vec::new();
                for key in &keys {
                    let Some(block) = self.find(key) else { break };
                    if self.expired(block) {
                        self.forget(block);
                        break;
                    }
                    expected.push(block);
                }
                let found = self.pool.lookup_chain(&keys);
                assert_eq!(ids(found.ids()), expected);
                self.shared.push(found);
            }
            Op::Clone(i) => self.shared.extend(self.shared.get(i).cloned()),
            Op::Truncate(i, n) => {
                if let Some(guard) = self.shared.get_mut(i) {
                    self.releasing = ids(&guard.ids()[n.min(guard.len())..]).into_iter().rev().collect();
                    guard.truncate(n);
                }
            }
            Op::Pin(i) => self.pinned.extend(self.shared.get(i).map(SharedBlocks::pin)),
            Op::SharePinned(i) => self.shared.extend(self.pinned.get(i).map(PinnedBlocks::share)),
            Op::Retain(i, priority) => {
                if let Some(guard) = self.shared.get(i) {
                    guard.retain(Retention { priority, lasts: Some(Duration::from_millis(20)) });
                }
            }
            Op::DropMutable(i) => drop(take(&mut self.mutable, i)),
            Op::DropShared(i) => {
                if let Some(guard) = take(&mut self.shared, i) {
                    self.releasing = ids(guard.ids()).into_iter().rev().collect();
                }
            }
            Op::DropPinned(i) => {
                if let Some(guard) = take(&mut self.pinned, i) {
                    self.releasing = ids(guard.ids()).into_iter().rev().collect();
                }
            }
            Op::ClearCached => {
                let (holders, pins) = (self.holders(), self.pins());
                let gone: Vec<u32> = self.keys.values().map(|(block, _)| *block).collect();
                let gone: Vec<u32> =
                    gone.into_iter().filter(|b| !holders.contains_key(b) && !pins.contains(b)).collect();
                for &block in &gone {
                    self.forget(block);
                }
                assert_eq!(self.pool.clear_cached(), gone.len());
            }
            Op::Wait(ms) => {
                self.now += ms;
                self.clock.advance(Duration::from_millis(ms));
            }
            Op::Expire => {
                let gone: Vec<u32> = self.keys.values().map(|(block, _)| *block).collect();
                let gone: Vec<u32> = gone.into_iter().filter(|&block| self.expired(block)).collect();
                for &block in &gone {
                    self.forget(block);
                }
                assert_eq!(self.pool.expire(), gone.len());
            }
        }
    }

    /// Admits a chain that may contain a key twice: the key's block must be counted only once.
    fn admit_prefix(&mut self, k: u32, n: usize, blocks: usize, room: usize) {
        let mut keys = keys(k, n);
        if n == 4 {
            keys[3] = keys[1];
        }
        let mut known: Vec<u32> = Vec::new();
        for key in &keys {
            match self.find(key) {
                Some(block) if !self.expired(block) => known.push(block),
                _ => break,
            }
        }
        let (holders, pins) = (self.holders(), self.pins());
        let idle: HashSet<u32> =
            known.iter().copied().filter(|b| !holders.contains_key(b) && !pins.contains(b)).collect();
        let missing = blocks.saturating_sub(known.len());
        let needed = blocks.max(room).saturating_sub(known.len());
        let (counts, before) = (self.pool.counts(), [self.in_use(), known.clone()].concat());
        // If no block is held, there is no running sequence that could need the watermark.
        let watermark = if counts.available() == counts.total { 0 } else { WATERMARK };
        let fits = (idle.is_empty() && needed == 0) || idle.len() + needed + watermark <= counts.available();
        match self.pool.admit_prefix(&keys, blocks, room) {
            Ok((shared, fresh)) => {
                assert!(fits, "the watermark is left");
                assert_eq!((ids(shared.ids()), fresh.len()), (known, missing));
                self.lru.retain(|block| !idle.contains(block));
                self.taken(&before, fresh.ids());
                self.shared.push(shared);
                self.mutable.push(fresh);
            }
            Err(error) => {
                assert!(
                    !fits && matches!(error, Error::OutOfBlocks { asked, .. } if asked == needed + watermark)
                );
                assert_eq!(self.pool.counts(), counts, "a refusal changes nothing");
            }
        }
    }

    fn allocate(
        &mut self,
        n: usize,
        spare: usize,
        take: fn(&BlockPool, usize) -> kvcore::Result<MutableBlocks>,
    ) {
        let (counts, before) = (self.pool.counts(), self.in_use());
        let spare = if counts.available() == counts.total { 0 } else { spare };
        match take(&self.pool, n) {
            Ok(blocks) => {
                assert_eq!(blocks.len(), n);
                assert!(n == 0 || counts.available() >= n + spare);
                if self.setup.order == FreeOrder::FreeFirst {
                    let evicted = counts.evictable - self.pool.counts().evictable;
                    assert_eq!(evicted, n.saturating_sub(counts.free), "no more is evicted than needed");
                }
                self.taken(&before, blocks.ids());
                self.mutable.push(blocks);
            }
            Err(error) => {
                assert!(matches!(error, Error::OutOfBlocks { asked, .. } if asked == n + spare));
                assert!(counts.available() < n + spare);
                assert_eq!(self.pool.counts(), counts, "a failed allocation changes nothing");
            }
        }
    }

    /// Compares all observable state of the pool with the model.
    fn check(&mut self) {
        self.pool.check_invariants().unwrap();
        assert_eq!(*self.faults.lock().unwrap(), Vec::<String>::new());
        let (holders, pins) = (self.holders(), self.pins());
        let keyed: HashSet<u32> = self.keys.values().map(|(block, _)| *block).collect();
        let cached: HashSet<u32> =
            keyed.iter().chain(&pins).copied().filter(|b| !holders.contains_key(b)).collect();
        let evictable: Vec<u32> =
            keyed.iter().copied().filter(|b| !holders.contains_key(b) && !pins.contains(b)).collect();
        let counts = self.pool.counts();
        assert_eq!(counts.mutable, self.mutable.iter().map(MutableBlocks::len).sum::<usize>());
        assert_eq!((counts.shared, counts.cached), (holders.len(), cached.len()));
        assert_eq!(counts.evictable, evictable.len());
        let sum = counts.free + counts.mutable + counts.shared + counts.cached;
        assert_eq!(sum, counts.total);
        for guard in &self.shared {
            for (place, id) in guard.ids().iter().enumerate() {
                assert_eq!(guard.holders(place).unwrap(), holders[&id.0]);
            }
        }
        self.lru.retain(|block| evictable.contains(block));
        self.passed.retain(|block| evictable.contains(block));
        // After merges, a guard may hold a block twice. In that case the last release counts.
        let releasing = std::mem::take(&mut self.releasing);
        for (i, &block) in releasing.iter().enumerate() {
            if releasing[i + 1..].contains(&block) {
                continue;
            }
            if evictable.contains(&block) && !self.lru.contains(&block) {
                self.lru.push(block);
                self.released.insert(block, self.now);
            }
        }
        assert_eq!(self.lru.len(), evictable.len());
        self.check_router();
    }

    /// Checks the state of a router that only sees events.
    fn check_router(&mut self) {
        let (events, lost) = self.events.drain();
        assert_eq!(lost, 0);
        for event in events {
            match event {
                KvEvent::Stored { keys, blocks, .. } => {
                    assert_eq!(keys.len(), blocks.len());
                    self.router.extend(blocks.iter().map(|block| block.0).zip(keys));
                }
                KvEvent::Removed { key, block } => {
                    assert_eq!(self.router.remove(&block.0), Some(key), "removed after it was stored");
                }
                KvEvent::Cleared => self.router.clear(),
            }
        }
        let held: HashMap<u32, BlockKey> = self.keys.values().copied().collect();
        assert_eq!(self.router, held, "a router knows what is stored where");
    }
}

const SETUP: Setup = Setup {
    policy: PolicyKind::Lru,
    shards: 1,
    order: FreeOrder::FreeFirst,
    duplicates: Duplicates::Merge,
    ttl: false,
};

fn setups() -> Vec<Setup> {
    let mut setups = Vec::new();
    for policy in PolicyKind::ALL {
        setups.push(Setup { policy, ..SETUP });
        setups.push(Setup { policy, shards: 4, ttl: true, ..SETUP });
    }
    setups.push(Setup { order: FreeOrder::OneQueue, duplicates: Duplicates::Keep, ..SETUP });
    setups.push(Setup { order: FreeOrder::OneQueue, ttl: true, ..SETUP });
    setups.push(Setup { duplicates: Duplicates::Keep, shards: 4, ttl: true, ..SETUP });
    setups.push(Setup { policy: PolicyKind::S3Fifo, order: FreeOrder::OneQueue, shards: 2, ..SETUP });
    setups
}

#[test]
fn a_pool_agrees_with_its_model() {
    const LENGTH: usize = 250;
    let setups = setups();
    let ops = std::env::var("KVCORE_MODEL_OPS").ok().and_then(|ops| ops.parse().ok());
    let ops: usize = ops.unwrap_or(1_000_000 / setups.len() + LENGTH);
    let agrees = |setup: Setup| {
        let cases = ops.div_ceil(LENGTH) as u32;
        let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
        let sequences = prop::collection::vec(op(), LENGTH..=LENGTH);
        let outcome = runner.run(&sequences, |ops| {
            let mut world = World::new(setup);
            for op in &ops {
                world.apply(op);
                world.check();
            }
            let pool = world.pool.clone();
            drop(world);
            pool.check_invariants().unwrap();
            pool.clear_cached();
            prop_assert_eq!(pool.counts().free, BLOCKS as usize);
            Ok(())
        });
        if let Err(error) = outcome {
            panic!("{setup:?}: {error}");
        }
    };
    std::thread::scope(|scope| {
        for setup in setups {
            scope.spawn(move || agrees(setup));
        }
    });
}
