//! Threads that run all operations concurrently on one pool. The blocks that a thread holds must stay its
//! own, and the counts must add up at the end.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kvcore::{
    BlockKey, BlockPool, EventQueue, KeyScope, KvEvent, PinnedBlocks, PolicyKind, PoolConfig, SharedBlocks,
};

const BLOCKS: u32 = 96;
const THREADS: u64 = 4;
const STEPS: u64 = 15_000;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn chain(n: u64) -> Vec<BlockKey> {
    let tokens: Vec<u32> = (0..16).map(|i| n as u32 * 100 + i).collect();
    KeyScope::new("m", b"").root().chain(&tokens, 4)
}

/// Asserts that each held block is found under its key.
fn still_ours(pool: &BlockPool, held: &SharedBlocks, keys: &[BlockKey]) {
    let again = pool.lookup_chain(&keys[..held.len()]);
    assert_eq!(again.ids(), held.ids());
}

fn work(pool: &BlockPool, seed: u64) {
    let mut random = Random(seed);
    let mut held: Vec<(SharedBlocks, u64)> = Vec::new();
    let mut pinned: Vec<PinnedBlocks> = Vec::new();
    for _ in 0..STEPS {
        let n = random.below(30);
        let keys = chain(n);
        match random.below(12) {
            0..=2 => held.push((pool.lookup_chain(&keys), n)),
            3..=5 => {
                if let Ok(blocks) = pool.allocate(keys.len()) {
                    held.push((blocks.register(None, &keys).unwrap(), n));
                }
            }
            6 => {
                if let Ok((mut shared, fresh)) = pool.admit_prefix(&keys, keys.len(), 0) {
                    let known = shared.len();
                    shared.append(fresh.register(None, &keys[known..]).unwrap()).unwrap();
                    held.push((shared, n));
                }
            }
            7 => drop(pool.allocate(random.below(20) as usize)),
            8 => pinned.extend(held.last().map(|(blocks, _)| blocks.pin())),
            9 => {
                pinned.pop();
            }
            10 => {
                pool.expire();
            }
            _ => {
                if random.below(50) == 0 {
                    pool.clear_cached();
                }
            }
        }
        if let Some((blocks, n)) = held.last() {
            still_ours(pool, blocks, &chain(*n));
        }
        while held.len() > 3 {
            let one = random.below(held.len() as u64) as usize;
            drop(held.swap_remove(one));
        }
        pinned.truncate(2);
    }
}

#[test]
fn blocks_that_threads_hold_stay_theirs_and_all_adds_up() {
    for policy in PolicyKind::ALL {
        for shards in [1, 4] {
            let events = Arc::new(EventQueue::new(10_000_000));
            let config = PoolConfig::default()
                .policy(policy)
                .shards(shards)
                .ttl(Duration::from_millis(2))
                .events(events.clone());
            let pool = BlockPool::with_config(0..BLOCKS, config).unwrap();
            std::thread::scope(|scope| {
                for seed in 0..THREADS {
                    let pool = &pool;
                    scope.spawn(move || work(pool, seed));
                }
                for _ in 0..50 {
                    pool.check_invariants().unwrap();
                    let c = pool.counts();
                    assert_eq!(c.free + c.mutable + c.shared + c.cached, c.total);
                }
            });
            pool.check_invariants().unwrap();
            let counts = pool.counts();
            assert_eq!(counts.available(), counts.total, "{policy:?}: nothing is held");
            known_to_router(&pool, &events);
            pool.clear_cached();
            assert_eq!(pool.counts().free, BLOCKS as usize);
        }
    }
}

/// Asserts that a router that followed the events knows every key that is still present.
fn known_to_router(pool: &BlockPool, events: &EventQueue) {
    let (seen, lost) = events.drain();
    assert_eq!(lost, 0);
    let mut router: HashSet<BlockKey> = HashSet::new();
    for event in seen {
        match event {
            KvEvent::Stored { keys, .. } => router.extend(keys.iter()),
            KvEvent::Removed { key, .. } => {
                router.remove(&key);
            }
            KvEvent::Cleared => router.clear(),
        }
    }
    for key in (0..30).flat_map(chain) {
        assert!(pool.cached_prefix(&[key]) == 0 || router.contains(&key), "a key that no event told of");
    }
}
