//! Policies, sinks and clocks that lie, panic or call the pool: no block gets two owners, and none is lost.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use kvcore::{
    BlockKey, BlockPool, Clock, EventQueue, EventSink, EvictionPolicy, FreeOrder, KeyScope, KvEvent, Lru,
    MutableBlocks, PolicyEntry, PoolConfig, SharedBlocks,
};

const BLOCKS: u32 = 8;

fn key(n: u32) -> BlockKey {
    KeyScope::new("m", b"").root().child(&[n])
}

/// What a policy says instead of the truth.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Lie {
    /// Always names this block, whatever its state is.
    Block(u32),
    /// Names each block of the shard in turn.
    Turns,
    /// Names a block again that was evicted before.
    Again,
    /// Names a block that has a holder again.
    Removed,
    /// Names none.
    Nothing,
    /// Does not keep every third block.
    Forgets,
    /// Claims to have more or fewer blocks.
    Len(usize),
}

#[derive(Debug)]
struct Liar {
    lie: Lie,
    truth: Vec<u32>,
    seen: Vec<u32>,
    calls: usize,
}

impl EvictionPolicy for Liar {
    fn insert(&mut self, block: u32, _: &PolicyEntry<'_>) {
        self.calls += 1;
        if self.lie != Lie::Forgets || !self.calls.is_multiple_of(3) {
            self.truth.push(block);
        }
    }

    fn remove(&mut self, block: u32) {
        if self.lie == Lie::Removed {
            self.seen.push(block);
        }
        self.truth.retain(|&other| other != block);
    }

    fn evict(&mut self, _: u64) -> Option<u32> {
        self.calls += 1;
        let next = (!self.truth.is_empty()).then(|| self.truth.remove(0));
        let lie = match self.lie {
            Lie::Block(block) => Some(block),
            Lie::Turns => Some(self.calls as u32 % BLOCKS),
            Lie::Again | Lie::Removed => self.seen.pop(),
            Lie::Nothing => return None,
            Lie::Forgets | Lie::Len(_) => None,
        };
        if self.lie == Lie::Again {
            self.seen.extend(next);
        }
        lie.or(next)
    }

    fn hit(&mut self, block: u32, _: &BlockKey) {
        self.seen.push(block);
    }

    fn wants_hits(&self) -> bool {
        true
    }

    fn len(&self) -> usize {
        if let Lie::Len(len) = self.lie { len } else { self.truth.len() }
    }
}

/// The guards of a workload. Operations are chosen by a small generator.
struct Workload {
    pool: BlockPool,
    state: u64,
    mutable: Vec<MutableBlocks>,
    shared: Vec<SharedBlocks>,
}

impl Workload {
    fn new(pool: &BlockPool, seed: u64) -> Self {
        Self { pool: pool.clone(), state: seed, mutable: Vec::new(), shared: Vec::new() }
    }

    fn below(&mut self, n: usize) -> usize {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % n
    }

    fn step(&mut self) {
        let n = self.below(3) + 1;
        match self.below(9) {
            0 | 1 => self.mutable.extend(self.pool.allocate(n).ok()),
            2 | 3 if !self.mutable.is_empty() => {
                let blocks = self.mutable.remove(0);
                let keys: Vec<BlockKey> = (0..blocks.len()).map(|_| key(self.below(12) as u32)).collect();
                self.shared.push(blocks.register(None, &keys).unwrap());
            }
            4 => self.shared.extend(self.pool.lookup(&key(n as u32))),
            5 if !self.shared.is_empty() => {
                let pinned = self.shared[0].pin();
                self.shared[0] = pinned.share();
            }
            6 if !self.shared.is_empty() => drop(self.shared.remove(0)),
            7 => drop(self.mutable.pop()),
            8 if n == 1 => _ = self.pool.clear_cached() + self.pool.expire(),
            8 => {
                if let Ok((found, fresh)) = self.pool.admit_prefix(&[key(n as u32), key(4)], 3, 3) {
                    self.shared.push(found);
                    self.mutable.push(fresh);
                }
            }
            _ => {}
        }
    }

    /// Checks that no block has two owners, and that the pool has lost none.
    fn check(&self, what: &str) {
        self.pool.check_invariants().unwrap_or_else(|fault| panic!("{what}: {fault}"));
        let mine = || self.mutable.iter().flat_map(MutableBlocks::ids);
        let owned: HashSet<_> = mine().collect();
        assert_eq!(owned.len(), mine().count(), "{what}: a block has two owners");
        let read = self.shared.iter().flat_map(SharedBlocks::ids);
        assert!(read.clone().all(|id| !owned.contains(id)), "{what}: a block is written and read");
        let read: HashSet<_> = read.collect();
        let counts = self.pool.counts();
        assert_eq!((counts.mutable, counts.shared), (owned.len(), read.len()), "{what}");
    }

    /// Drops all guards. Every block of the pool must then be available.
    fn finish(mut self, what: &str) {
        self.mutable.clear();
        self.shared.clear();
        self.check(what);
        let all = self.pool.allocate(BLOCKS as usize).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(all.ids().iter().collect::<HashSet<_>>().len(), BLOCKS as usize, "{what}");
    }
}

fn run(config: &PoolConfig, seed: u64, what: &str) {
    let pool = BlockPool::with_config(0..BLOCKS, config.clone()).unwrap();
    let mut work = Workload::new(&pool, seed);
    for _ in 0..120 {
        work.step();
        work.check(what);
    }
    work.finish(what);
}

/// The kinds of pools that order blocks in different ways.
fn pools() -> impl Iterator<Item = (String, PoolConfig)> {
    [FreeOrder::FreeFirst, FreeOrder::OneQueue].into_iter().flat_map(|order| {
        [1, 2].map(|shards| {
            (format!("{order:?}, {shards} shards"), PoolConfig::default().free_order(order).shards(shards))
        })
    })
}

#[test]
fn a_policy_that_lies_gives_no_block_two_owners_and_loses_none() {
    let lies = [
        Lie::Block(0),
        Lie::Block(3),
        Lie::Block(BLOCKS),
        Lie::Block(u32::MAX),
        Lie::Turns,
        Lie::Again,
        Lie::Removed,
        Lie::Nothing,
        Lie::Forgets,
        Lie::Len(0),
        Lie::Len(usize::MAX),
    ];
    for (kind, config) in pools() {
        for lie in lies {
            let liar = move |_| -> Box<dyn EvictionPolicy> {
                Box::new(Liar { lie, truth: Vec::new(), seen: Vec::new(), calls: 0 })
            };
            for seed in 0..20 {
                run(&config.clone().custom_policy(liar), seed, &format!("{lie:?}, {kind}, seed {seed}"));
            }
        }
    }
}

/// A policy, a sink or a clock that panics at one call of its life.
#[derive(Debug, Clone)]
struct PanicAt {
    calls: Arc<AtomicUsize>,
    at: usize,
}

impl PanicAt {
    fn new(at: usize) -> Self {
        Self { calls: Arc::default(), at }
    }

    fn call(&self) {
        assert!(self.calls.fetch_add(1, Ordering::Relaxed) != self.at, "the callback panics");
    }

    /// Runs `each` with a panic at the first call, at the second, and so on until no call is left.
    fn at_every_call(mut each: impl FnMut(Self)) {
        for at in 0.. {
            let panics = Self::new(at);
            each(panics.clone());
            if panics.calls.load(Ordering::Relaxed) <= at {
                assert!(at > 8, "only {at} calls");
                return;
            }
        }
    }
}

#[derive(Debug)]
struct Panicking {
    panics: PanicAt,
    lru: Lru,
    broken: bool,
}

impl Panicking {
    fn boxed(panics: &PanicAt, blocks: usize) -> Box<dyn EvictionPolicy> {
        Box::new(Self { panics: panics.clone(), lru: Lru::new(blocks), broken: false })
    }

    fn call(&mut self) {
        self.broken = true;
        self.panics.call();
        self.broken = false;
    }
}

impl EvictionPolicy for Panicking {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        self.call();
        self.lru.insert(block, entry);
    }

    fn remove(&mut self, block: u32) {
        self.lru.remove(block);
        self.call();
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        let evicted = self.lru.evict(now);
        self.call();
        evicted
    }

    fn hit(&mut self, _: u32, _: &BlockKey) {
        self.call();
    }

    fn wants_hits(&self) -> bool {
        true
    }

    fn len(&self) -> usize {
        self.lru.len()
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        assert!(!self.broken, "a broken policy panics once more");
    }
}

#[test]
fn a_policy_that_panics_at_any_call_leaves_the_pool_whole() {
    for (kind, config) in pools() {
        for seed in [1, 2] {
            PanicAt::at_every_call(|panics| {
                let what = format!("call {}, {kind}, seed {seed}", panics.at);
                let policy = move |blocks| Panicking::boxed(&panics, blocks);
                run(&config.clone().custom_policy(policy), seed, &what);
            });
        }
    }
}

impl EventSink for PanicAt {
    fn record(&self, _: KvEvent) {
        self.call();
    }
}

#[test]
fn a_sink_that_panics_at_any_event_leaves_the_pool_whole() {
    for (kind, config) in pools() {
        PanicAt::at_every_call(|panics| {
            let what = format!("event {}, {kind}", panics.at);
            run(&config.clone().events(Arc::new(panics)), 3, &what);
        });
    }
}

impl Clock for PanicAt {
    fn millis(&self) -> u64 {
        self.call();
        self.calls.load(Ordering::Relaxed) as u64
    }
}

#[test]
fn a_clock_that_panics_at_any_call_leaves_the_pool_whole() {
    for (kind, config) in pools() {
        PanicAt::at_every_call(|panics| {
            let what = format!("call {}, {kind}", panics.at);
            run(&config.clone().ttl(Duration::from_millis(15)).clock(Arc::new(panics)), 4, &what);
        });
    }
}

/// What a sink does with the pool when it is told about an event.
type Act = fn(&BlockPool, &Mutex<Vec<SharedBlocks>>);

/// A sink that calls its own pool.
#[derive(Debug)]
struct Reentrant {
    pool: OnceLock<BlockPool>,
    act: Act,
    held: Mutex<Vec<SharedBlocks>>,
    seen: EventQueue,
}

impl EventSink for Reentrant {
    fn record(&self, event: KvEvent) {
        self.seen.record(event);
        let pool = self.pool.get().unwrap();
        pool.check_invariants().unwrap();
        (self.act)(pool, &self.held);
    }
}

/// Follows events as a router does, and returns the keys that it considers stored.
fn routed(events: Vec<KvEvent>) -> HashSet<BlockKey> {
    let mut known = HashSet::new();
    for event in events {
        match event {
            KvEvent::Stored { keys, .. } => {
                for key in keys {
                    assert!(known.insert(key), "{key} was stored twice");
                }
            }
            KvEvent::Removed { key, .. } => {
                assert!(known.remove(&key), "{key} was removed before it was stored");
            }
            KvEvent::Cleared => known.clear(),
        }
    }
    known
}

const ACTS: [(&str, Act); 5] = [
    ("counts", |pool, _| assert!(pool.counts().total > 0 && pool.evictions() < u64::MAX)),
    ("looks up", |pool, held| held.lock().unwrap().extend(pool.lookup(&key(1)))),
    ("lets go", |_, held| drop(held.lock().unwrap().pop())),
    ("allocates", |pool, _| drop(pool.allocate(2))),
    ("expires", |pool, _| _ = pool.expire() + pool.cached_prefix(&[key(0), key(1)])),
];

#[test]
fn a_sink_may_call_its_pool() {
    for (kind, config) in pools() {
        for (what, act) in ACTS {
            for seed in 0..10 {
                let sink = Arc::new(Reentrant {
                    pool: OnceLock::new(),
                    act,
                    held: Mutex::default(),
                    seen: EventQueue::new(10_000),
                });
                let pool = BlockPool::with_config(0..BLOCKS, config.clone().events(sink.clone())).unwrap();
                sink.pool.set(pool.clone()).unwrap();
                let mut work = Workload::new(&pool, seed);
                (0..120).for_each(|_| work.step());
                sink.held.lock().unwrap().clear();
                work.check(&format!("{what}, {kind}, seed {seed}"));
                let known = routed(sink.seen.drain().0);
                for n in 0..12 {
                    let found = pool.cached_prefix(&[key(n)]) == 1;
                    assert_eq!(found, known.contains(&key(n)), "{what}, {kind}, seed {seed}, key {n}");
                }
                work.finish(what);
            }
        }
    }
}

#[test]
fn events_of_several_threads_reach_a_sink_that_calls_the_pool_in_order() {
    let sink = Arc::new(Reentrant {
        pool: OnceLock::new(),
        act: |pool, _| drop((pool.lookup(&key(1)), pool.allocate(1))),
        held: Mutex::default(),
        seen: EventQueue::new(1_000_000),
    });
    let pool = BlockPool::with_config(0..BLOCKS, PoolConfig::default().events(sink.clone())).unwrap();
    sink.pool.set(pool.clone()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let pool = &pool;
            scope.spawn(move || {
                let mut work = Workload::new(pool, thread);
                (0..2_000).for_each(|_| work.step());
            });
        }
    });
    let known = routed(sink.seen.drain().0);
    assert!((0..12).all(|n| (pool.cached_prefix(&[key(n)]) == 1) == known.contains(&key(n))));
    pool.check_invariants().unwrap();
}

#[test]
fn guards_that_are_dropped_by_a_panic_survive_callbacks_that_panic() {
    for at in 0..8 {
        let panics = PanicAt::new(at);
        let policy = panics.clone();
        let config = PoolConfig::default()
            .events(Arc::new(panics))
            .custom_policy(move |blocks| Panicking::boxed(&policy, blocks));
        let pool = BlockPool::with_config(0..BLOCKS, config).unwrap();
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let stored = pool.allocate(3).unwrap().register(None, &[key(0), key(1), key(2)]).unwrap();
            let _fresh = pool.allocate(4).unwrap();
            let _again = stored.clone();
            panic!("the caller's own panic");
        }));
        assert!(unwound.is_err());
        Workload::new(&pool, 0).finish(&format!("call {at}"));
    }
}
