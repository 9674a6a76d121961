//! Chains of blocks leave a pool in the order of its policy, except that a block waits for the ones that follow it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvcore::{BlockKey, BlockPool, EvictionPolicy, KeyScope, PolicyEntry, PolicyKind, PoolConfig};
use kvmanager::ChainLinks;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::chains::{LONGEST, PROMPTS, World, keys, op};

/// A plain model of an order: lists, and searches through them.
#[derive(Debug)]
struct Model {
    parents: HashMap<BlockKey, BlockKey>,
    /// The blocks that were released and not evicted since.
    known: Vec<(u32, BlockKey)>,
    order: Order,
}

#[derive(Debug)]
enum Order {
    /// The idle blocks, in the order in which they were released.
    Released(Vec<u32>),
    /// A policy without chains, and the blocks that it selected while others followed them.
    Policy(Box<dyn EvictionPolicy>, Vec<u32>),
}

impl Model {
    fn new(kind: PolicyKind, blocks: usize) -> Self {
        let all = (0..PROMPTS).flat_map(|n| {
            let keys = keys(n, LONGEST);
            (1..LONGEST).map(move |i| (keys[i], keys[i - 1]))
        });
        let order = match kind {
            // Without priorities, the policy for priorities is LRU.
            PolicyKind::Lru | PolicyKind::Priority => Order::Released(Vec::new()),
            _ => Order::Policy(kind.build(blocks), Vec::new()),
        };
        Self { parents: all.collect(), known: Vec::new(), order }
    }

    fn is_followed(&self, block: u32) -> bool {
        let key = self.known.iter().find(|(known, _)| *known == block).map(|(_, key)| *key);
        self.known.iter().any(|(_, other)| key.is_some() && self.parents.get(other).copied() == key)
    }

    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        self.known.retain(|(known, _)| *known != block);
        self.known.extend(entry.key.map(|key| (block, *key)));
        match &mut self.order {
            Order::Released(idle) => idle.push(block),
            Order::Policy(policy, _) => policy.insert(block, entry),
        }
    }

    fn remove(&mut self, block: u32) {
        match &mut self.order {
            Order::Released(idle) => idle.retain(|other| *other != block),
            Order::Policy(policy, passed) => {
                let before = passed.len();
                passed.retain(|other| *other != block);
                if passed.len() == before {
                    policy.remove(block);
                }
            }
        }
    }

    fn hit(&mut self, block: u32, key: &BlockKey) {
        if let Order::Policy(policy, _) = &mut self.order {
            policy.hit(block, key);
        }
    }

    /// Returns the block that may leave first.
    fn evict(&mut self, now: u64) -> Option<u32> {
        let mut list = match &self.order {
            Order::Released(list) | Order::Policy(_, list) => list.clone(),
        };
        let mut last = list.iter().position(|&block| !self.is_followed(block));
        while last.is_none()
            && let Order::Policy(policy, _) = &mut self.order
            && let Some(block) = policy.evict(now)
        {
            list.push(block);
            last = (!self.is_followed(block)).then(|| list.len() - 1);
        }
        let block = last.map(|last| list.remove(last));
        self.known.retain(|(known, _)| Some(*known) != block);
        match &mut self.order {
            Order::Released(own) | Order::Policy(_, own) => *own = list,
        }
        block
    }
}

/// A policy, and the model that must evict the same blocks.
#[derive(Debug)]
struct Compared {
    policy: Box<dyn EvictionPolicy>,
    model: Model,
}

impl EvictionPolicy for Compared {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        self.policy.insert(block, entry);
        self.model.insert(block, entry);
    }

    fn remove(&mut self, block: u32) {
        self.policy.remove(block);
        self.model.remove(block);
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        let (evicted, expected) = (self.policy.evict(now), self.model.evict(now));
        assert_eq!(evicted, expected, "the order is not the policy's: {:?}", self.model);
        evicted
    }

    fn hit(&mut self, block: u32, key: &BlockKey) {
        self.policy.hit(block, key);
        self.model.hit(block, key);
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

#[test]
fn blocks_leave_in_the_order_of_the_policy_except_that_they_wait_for_their_followers() {
    for kind in PolicyKind::ALL {
        let mut runner =
            TestRunner::new(Config { cases: 256, failure_persistence: None, ..Config::default() });
        let ran = runner.run(&prop::collection::vec(op(), 1..80), |ops| {
            let links = ChainLinks::default();
            let policy = links.policy(kind);
            let config = PoolConfig::default().custom_policy(move |blocks| {
                Box::new(Compared { policy: policy(blocks), model: Model::new(kind, blocks) })
            });
            let mut world = World::of(Some(links), config);
            for op in &ops {
                world.run(op);
                world.pool.check_invariants().unwrap();
            }
            Ok(())
        });
        ran.unwrap();
    }
}

/// Creates a pool of this many blocks, and fills it with chains of these lengths, block by block.
fn filled(kind: PolicyKind, lengths: &[usize]) -> (BlockPool, Vec<Vec<BlockKey>>) {
    let blocks = lengths.iter().sum::<usize>() as u32;
    let links = ChainLinks::default();
    let config = PoolConfig::default().shards(1).custom_policy(links.policy(kind));
    let pool = BlockPool::with_config(0..blocks, config).unwrap();
    let chain = |(n, length): (usize, &usize)| {
        let keys = KeyScope::new("m", &[n as u8]).root().chain(&vec![n as u32; *length], 1);
        for (i, key) in keys.iter().enumerate() {
            let parent = i.checked_sub(1).map(|i| keys[i]);
            let held = pool.allocate(1).unwrap().register(parent, &[*key]).unwrap();
            links.link(parent, &[*key]);
            drop(held);
        }
        keys
    };
    let keys = lengths.iter().enumerate().map(chain).collect();
    (pool, keys)
}

#[test]
fn the_oldest_of_several_chains_leaves_as_a_whole_before_the_next_one() {
    for kind in [PolicyKind::Lru, PolicyKind::Priority, PolicyKind::S3Fifo] {
        let (pool, keys) = filled(kind, &[5, 4, 3]);
        let mut held = Vec::new();
        let mut left = Vec::new();
        for _ in 0..12 {
            held.push(pool.allocate(1).unwrap());
            left.push(keys.iter().map(|keys| pool.cached_prefix(keys)).collect::<Vec<_>>());
        }
        let expected = [
            [4, 4, 3],
            [3, 4, 3],
            [2, 4, 3],
            [1, 4, 3],
            [0, 4, 3],
            [0, 3, 3],
            [0, 2, 3],
            [0, 1, 3],
            [0, 0, 3],
            [0, 0, 2],
            [0, 0, 1],
            [0, 0, 0],
        ];
        assert_eq!(left, expected, "{kind:?}");
    }
}

#[test]
fn a_long_chain_is_evicted_without_walking_along_it_each_time() {
    for kind in PolicyKind::ALL {
        let (pool, keys) = filled(kind, &[60_000]);
        let began = Instant::now();
        let mut taken = Vec::new();
        for left in (0..60_000).rev() {
            taken.push(pool.allocate(1).unwrap());
            assert!(left % 6_000 != 0 || pool.cached_prefix(&keys[0]) == left);
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(5), "{kind:?}: 60,000 evictions take {took:?}");
    }
}
