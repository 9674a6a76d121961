//! Tests of eviction policies in a pool: a custom policy, priorities that expire, and the policies' hit rates
//! under a workload.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use kvcore::{
    BlockKey, BlockPool, EvictionPolicy, FreeOrder, KeyScope, ManualClock, PolicyEntry, PolicyKind,
    PoolConfig, Retention,
};

fn key(n: u32) -> BlockKey {
    KeyScope::new("m", b"").root().child(&[n])
}

/// Registers a block under key `n` and releases it.
fn store(pool: &BlockPool, n: u32) {
    drop(pool.allocate(1).unwrap().register(None, &[key(n)]).unwrap());
}

fn cached(pool: &BlockPool, of: impl IntoIterator<Item = u32>) -> Vec<u32> {
    of.into_iter().filter(|&n| pool.cached_prefix(&[key(n)]) == 1).collect()
}

/// A policy that evicts the most recently used block first.
#[derive(Debug, Default)]
struct Mru(Vec<u32>);

impl EvictionPolicy for Mru {
    fn insert(&mut self, block: u32, _: &PolicyEntry<'_>) {
        self.0.push(block);
    }

    fn remove(&mut self, block: u32) {
        self.0.retain(|&other| other != block);
    }

    fn evict(&mut self, _: u64) -> Option<u32> {
        self.0.pop()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn a_policy_of_the_users_own_decides() {
    let config = PoolConfig::default().custom_policy(|_| Box::<Mru>::default());
    let pool = BlockPool::with_config(0..3, config).unwrap();
    (0..3).for_each(|n| store(&pool, n));
    drop(pool.lookup(&key(1)).unwrap());
    store(&pool, 3);
    assert_eq!(cached(&pool, 0..4), [0, 2, 3], "block 1 was used last");
    pool.check_invariants().unwrap();
}

/// A policy that claims to hold blocks but evicts none.
#[derive(Debug, Default)]
struct Broken(usize);

impl EvictionPolicy for Broken {
    fn insert(&mut self, _: u32, _: &PolicyEntry<'_>) {
        self.0 += 1;
    }

    fn remove(&mut self, _: u32) {
        self.0 -= 1;
    }

    fn evict(&mut self, _: u64) -> Option<u32> {
        None
    }

    fn len(&self) -> usize {
        self.0
    }
}

#[test]
fn a_policy_that_breaks_its_contract_is_replaced() {
    let config = PoolConfig::default().custom_policy(|_| Box::<Broken>::default());
    let pool = BlockPool::with_config(0..3, config).unwrap();
    (0..2).for_each(|n| store(&pool, n));
    let (found, fresh) = pool.admit_prefix(&[key(0)], 3, 0).unwrap();
    assert_eq!((found.len(), fresh.len()), (1, 2), "the least recently used block is evicted");
    drop((found, fresh));
    store(&pool, 2);
    assert_eq!(cached(&pool, 0..3), [0, 2]);
    assert_eq!(pool.allocate(3).unwrap().len(), 3);
    pool.check_invariants().unwrap();
}

#[test]
fn priorities_hold_for_their_time() {
    let clock = ManualClock::default();
    let config = PoolConfig::default().policy(PolicyKind::Priority).clock(Arc::new(clock.clone()));
    let pool = BlockPool::with_config(0..3, config).unwrap();
    let wanted = pool.allocate(1).unwrap().register(None, &[key(0)]).unwrap();
    wanted.retain(Retention { priority: 80, lasts: Some(Duration::from_secs(60)) });
    drop(wanted);
    (1..5).for_each(|n| store(&pool, n));
    assert_eq!(cached(&pool, 0..5), [0, 3, 4], "the wanted block outlives newer ones");
    clock.advance(Duration::from_secs(61));
    store(&pool, 5);
    store(&pool, 6);
    store(&pool, 7);
    assert_eq!(cached(&pool, 0..8), [5, 6, 7], "its time is over");
    pool.check_invariants().unwrap();
}

#[test]
fn one_queue_takes_the_block_released_first() {
    let pool = BlockPool::with_config(0..4, PoolConfig::default().free_order(FreeOrder::OneQueue)).unwrap();
    store(&pool, 0);
    // Blocks 1, 2 and 3 were never used and come before block 0 in the queue. A block released now goes after
    // block 0.
    drop(pool.allocate(1).unwrap());
    let taken = pool.allocate(2).unwrap();
    assert_eq!(cached(&pool, 0..1), [0]);
    let next = pool.allocate(1).unwrap();
    assert_eq!(
        (cached(&pool, 0..1), pool.counts().free),
        (vec![], 1),
        "contents go although a block is free"
    );
    drop((taken, next));
    pool.check_invariants().unwrap();
}

#[test]
fn a_block_twice_in_a_guard_gets_no_keys() {
    let pool = BlockPool::new(0..3).unwrap();
    let mut twice = pool.allocate(1).unwrap().share();
    twice.append(twice.clone()).unwrap();
    let refused = twice.register(0, None, &[key(1), key(2)]);
    let block = twice.ids()[0];
    assert_eq!(refused, Err(kvcore::Error::Twice { what: "block to register", number: u64::from(block.0) }));
    assert!(cached(&pool, 0..3).is_empty());
    twice.register(1, None, &[key(2)]).unwrap();
    assert_eq!(cached(&pool, 0..3), [2]);
    drop(twice);
    pool.check_invariants().unwrap();
}

/// Returns the hit rate for popular prefixes, in a workload that also has prompts that occur only once.
fn hit_rate(kind: PolicyKind) -> f64 {
    let pool = BlockPool::with_config(0..200, PoolConfig::default().policy(kind)).unwrap();
    let (mut hits, mut asked, mut once) = (0, 0, 1_000_000);
    let mut state = 7u64;
    for _ in 0..20_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let draw = (state >> 33) as u32;
        if draw % 10 < 3 {
            // 150 popular blocks
            let n = (draw >> 8) % 150;
            asked += 1;
            match pool.lookup(&key(n)) {
                Some(_) => hits += 1,
                None => store(&pool, n),
            }
        } else {
            once += 1;
            store(&pool, once);
        }
    }
    pool.check_invariants().unwrap();
    f64::from(hits) / f64::from(asked)
}

#[test]
fn frequency_keeps_blocks_that_recency_loses_to_a_scan() {
    let [lru, tiny, s3, priority] = PolicyKind::ALL.map(hit_rate);
    println!("hit rates: LRU {lru:.2}, TinyLFU {tiny:.2}, S3-FIFO {s3:.2}, priority {priority:.2}");
    assert!(tiny > lru + 0.2 && s3 > lru + 0.2, "LRU {lru:.2}, TinyLFU {tiny:.2}, S3-FIFO {s3:.2}");
    assert!((priority - lru).abs() < 0.02, "equal priorities are LRU: {priority:.2} and {lru:.2}");
}
