//! Chains of blocks leave a pool from their ends, under every policy and from pools with several shards.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvcore::{
    BlockKey, BlockPool, BlockTable, EvictionPolicy, KeyScope, PolicyEntry, PolicyKind, PoolConfig,
    SharedBlocks,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const BLOCKS: u32 = 24;
const BLOCK: usize = 4;
/// The length of the longest prompt, in blocks.
const LONGEST: usize = 12;

#[derive(Debug, Clone)]
enum Op {
    /// Registers the missing blocks of a prompt one by one, each released before the next one.
    OneByOne(u32, usize),
    /// Fills a sequence's table block by block, and releases it as a whole.
    Table(u32, usize),
    /// Finds a prompt and releases it.
    Hit(u32, usize),
    /// Finds a prompt and holds it.
    Hold(u32, usize),
    Release(usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let prompt = (0..PROMPTS, 1..=LONGEST);
    prop_oneof![
        6 => prompt.clone().prop_map(|(n, len)| Op::OneByOne(n, len)),
        2 => prompt.clone().prop_map(|(n, len)| Op::Table(n, len)),
        3 => prompt.clone().prop_map(|(n, len)| Op::Hit(n, len)),
        2 => prompt.prop_map(|(n, len)| Op::Hold(n, len)),
        3 => (0..4usize).prop_map(Op::Release),
        1 => Just(Op::Clear),
    ]
}

struct World {
    pool: BlockPool,
    held: Vec<SharedBlocks>,
}

impl World {
    fn new(kind: PolicyKind, shards: usize, chains: bool) -> Self {
        let config = PoolConfig::default().policy(kind).shards(shards).chains(chains);
        Self { pool: BlockPool::with_config(0..BLOCKS, config).unwrap(), held: Vec::new() }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::OneByOne(n, len) => {
                let keys = keys(n, len);
                for i in self.pool.cached_prefix(&keys)..len {
                    let Ok(block) = self.pool.allocate(1) else { return };
                    // Making room may have taken the end of this very chain.
                    if self.pool.cached_prefix(&keys[..i]) < i {
                        return;
                    }
                    let parent = i.checked_sub(1).map(|i| keys[i]);
                    drop(block.register(parent, &keys[i..=i]).unwrap());
                }
            }
            Op::Table(n, len) => {
                let keys = keys(n, len);
                let found = self.pool.lookup_chain(&keys);
                let known = found.len();
                let mut table = BlockTable::with_prefix(found, BLOCK).unwrap();
                for i in known..len {
                    if table.grow(BLOCK).is_err() {
                        return;
                    }
                    let parent = i.checked_sub(1).map(|i| keys[i]);
                    table.share_full(parent, &keys[i..=i]).unwrap();
                }
            }
            Op::Hit(n, len) => drop(self.pool.lookup_chain(&keys(n, len))),
            Op::Hold(n, len) => self.held.push(self.pool.lookup_chain(&keys(n, len))),
            Op::Release(i) if i < self.held.len() => drop(self.held.remove(i)),
            Op::Release(_) => {}
            Op::Clear => drop(self.pool.clear_cached()),
        }
    }

    /// Returns the number of blocks with a key that no lookup finds.
    fn lost(&self) -> usize {
        let mut found: BTreeSet<u32> = BTreeSet::new();
        for n in 0..PROMPTS {
            found.extend(self.pool.lookup_chain(&keys(n, LONGEST)).ids().iter().map(|id| id.0));
        }
        let counts = self.pool.counts();
        counts.cached + counts.shared - found.len()
    }
}

/// The number of prompts.
const PROMPTS: u32 = 6;

/// Returns the keys of a prompt. Prompts share their beginnings: 0 to 2, and 3 to 5, each differ after a few
/// blocks.
fn keys(n: u32, len: usize) -> Vec<BlockKey> {
    let shared = 2 + n as usize;
    let token = |block: usize| if block < shared { 100 + n / 3 } else { n };
    let tokens: Vec<u32> = (0..len).flat_map(|block| [token(block); BLOCK]).collect();
    KeyScope::new("m", b"").root().chain(&tokens, BLOCK)
}

/// Runs random operations. Returns the number of cases in which a block was lost, for each pool.
fn losses(chains: bool) -> HashMap<String, usize> {
    let mut losses = HashMap::new();
    for (kind, shards) in PolicyKind::ALL.into_iter().flat_map(|kind| [(kind, 1), (kind, 3)]) {
        let mut runner =
            TestRunner::new(Config { cases: 256, failure_persistence: None, ..Config::default() });
        let lost = losses.entry(format!("{kind:?}, {shards} shards")).or_default();
        let count = std::cell::Cell::new(0);
        let ran = runner.run(&prop::collection::vec(op(), 1..60), |ops| {
            let mut world = World::new(kind, shards, chains);
            for op in &ops {
                world.run(op);
                world.pool.check_invariants().unwrap();
                if world.lost() > 0 {
                    count.set(count.get() + 1);
                    prop_assert!(!chains, "{kind:?}: {op:?} left {} blocks that are not found", world.lost());
                    return Ok(());
                }
            }
            world.held.clear();
            world.pool.clear_cached();
            prop_assert_eq!(world.pool.counts().free, BLOCKS as usize);
            Ok(())
        });
        ran.unwrap();
        *lost = count.get();
    }
    losses
}

#[test]
fn no_block_outlives_the_blocks_before_it_under_any_policy() {
    assert!(losses(true).values().all(|&lost| lost == 0));
}

#[test]
fn without_chains_every_policy_loses_blocks() {
    let losses = losses(false);
    assert!(losses.values().all(|&lost| lost > 0), "the test above could not fail: {losses:?}");
}

/// Fills a pool with chains of these lengths, block by block.
fn fill(pool: &BlockPool, lengths: &[usize]) -> Vec<Vec<BlockKey>> {
    let chain = |(n, length): (usize, &usize)| {
        let keys = KeyScope::new("m", &[n as u8]).root().chain(&vec![n as u32; *length], 1);
        for (i, key) in keys.iter().enumerate() {
            let parent = i.checked_sub(1).map(|i| keys[i]);
            drop(pool.allocate(1).unwrap().register(parent, &[*key]).unwrap());
        }
        keys
    };
    lengths.iter().enumerate().map(chain).collect()
}

#[test]
fn the_oldest_of_several_chains_leaves_as_a_whole_before_the_next_one() {
    for kind in [PolicyKind::Lru, PolicyKind::Priority, PolicyKind::S3Fifo] {
        let pool = BlockPool::with_config(0..12, PoolConfig::default().policy(kind)).unwrap();
        let keys = fill(&pool, &[5, 4, 3]);
        let mut held = Vec::new();
        for left in (0..12).rev() {
            held.push(pool.allocate(1).unwrap());
            let expected = [left.clamp(7, 12) - 7, left.clamp(3, 7) - 3, left.min(3)];
            let found = keys.iter().map(|keys| pool.cached_prefix(keys)).collect::<Vec<_>>();
            assert_eq!(found, expected, "{kind:?}");
        }
    }
}

#[test]
fn a_chain_over_several_shards_leaves_from_its_end() {
    for kind in PolicyKind::ALL {
        let config = PoolConfig::default().policy(kind).shards(4);
        let pool = BlockPool::with_config(0..64, config).unwrap();
        let keys = fill(&pool, &[64]).remove(0);
        let mut left = 64;
        for n in [1, 2, 5, 16, 3, 20, 17] {
            left -= n;
            let taken = pool.allocate(n).unwrap();
            assert_eq!(pool.cached_prefix(&keys), left, "{kind:?}");
            pool.check_invariants().unwrap();
            std::mem::forget(taken);
        }
    }
}

/// A policy that counts how often it is asked for a block.
#[derive(Debug)]
struct Asked(Box<dyn EvictionPolicy>, Arc<AtomicUsize>);

impl EvictionPolicy for Asked {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        self.0.insert(block, entry);
    }

    fn remove(&mut self, block: u32) {
        self.0.remove(block);
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.evict(now)
    }

    fn hit(&mut self, block: u32, key: &BlockKey) {
        self.0.hit(block, key);
    }

    fn wants_hits(&self) -> bool {
        self.0.wants_hits()
    }

    fn wants_time(&self) -> bool {
        self.0.wants_time()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn a_long_chain_is_evicted_without_walking_along_it_each_time() {
    for kind in PolicyKind::ALL {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let policy = move |blocks| Box::new(Asked(kind.build(blocks), Arc::clone(&count))) as Box<_>;
        let config = PoolConfig::default().custom_policy(policy).shards(1);
        let pool = BlockPool::with_config(0..60_000, config).unwrap();
        let keys = fill(&pool, &[60_000]).remove(0);
        let mut taken = Vec::new();
        for left in (0..60_000).rev() {
            taken.push(pool.allocate(1).unwrap());
            assert!(left % 6_000 != 0 || pool.cached_prefix(&keys) == left);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 60_000, "{kind:?}: one question a block");
    }
}

#[test]
fn a_block_that_waits_is_found_and_held_again() {
    for kind in PolicyKind::ALL {
        let pool = BlockPool::with_config(0..6, PoolConfig::default().policy(kind)).unwrap();
        let keys = fill(&pool, &[6]).remove(0);
        drop(pool.allocate(2).unwrap());
        let hit = pool.lookup_chain(&keys);
        assert_eq!(hit.len(), 4, "{kind:?}");
        assert_eq!(pool.counts().evictable, 0);
        pool.check_invariants().unwrap();
        drop(hit);
        let all = pool.allocate(6).unwrap();
        assert_eq!((all.len(), pool.cached_prefix(&keys)), (6, 0));
    }
}

#[test]
fn an_allocation_does_not_fail_because_held_blocks_follow_all_others() {
    for (shards, taken) in [(1, 1), (1, 5), (3, 1), (3, 2), (3, 5)] {
        let pool = BlockPool::with_config(0..6, PoolConfig::default().shards(shards)).unwrap();
        let keys = KeyScope::new("m", b"").root().chain(&[7; 6], 1);
        let mut whole = pool.allocate(6).unwrap().register(None, &keys).unwrap();
        let end = whole.split_off(5).unwrap();
        drop(whole);
        let taken = pool.allocate(taken).unwrap();
        // The chain is still found from its first block on.
        assert_eq!(pool.cached_prefix(&keys), 5 - taken.len(), "{shards} shards");
        pool.check_invariants().unwrap();
        drop((end, taken));
        pool.clear_cached();
        assert_eq!(pool.counts().free, 6);
        pool.check_invariants().unwrap();
    }
}

#[test]
fn a_block_that_comes_back_is_followed_by_the_blocks_that_stayed() {
    for shards in [1, 3] {
        let pool = BlockPool::with_config(0..6, PoolConfig::default().shards(shards)).unwrap();
        let keys = KeyScope::new("m", b"").root().chain(&[7, 8, 9], 1);
        let mut whole = pool.allocate(3).unwrap().register(None, &keys).unwrap();
        let end = whole.split_off(1).unwrap();
        drop(whole);
        // Everything else is taken, too: the first block must leave.
        let all = pool.allocate(4).unwrap();
        assert_eq!(pool.cached_prefix(&keys), 0);
        drop((all, end));
        drop(pool.allocate(3).unwrap().register(None, &keys).unwrap());
        pool.check_invariants().unwrap();
        let mut taken = Vec::new();
        for left in [3, 3, 3, 2, 1, 0] {
            taken.push(pool.allocate(1).unwrap());
            assert_eq!(pool.cached_prefix(&keys), left, "{shards} shards");
        }
    }
}

#[test]
fn blocks_that_stop_waiting_together_leave_before_the_next_one_of_the_policy() {
    let config = PoolConfig::default().policy(PolicyKind::Lru).shards(1);
    let pool = BlockPool::with_config(0..8, config).unwrap();
    let key = |n: u32| KeyScope::new("m", b"").root().child(&[n]);
    let cached = |parent, n| pool.allocate(1).unwrap().register(parent, &[key(n)]).unwrap();
    let waiting = [cached(None, 0), cached(None, 1)];
    let ids = waiting.each_ref().map(|blocks| blocks.ids()[0]);
    let _held = [cached(Some(key(0)), 2), cached(Some(key(1)), 3)];
    let next = cached(None, 4);
    let id = next.ids()[0];
    drop((waiting, next));
    let all = pool.allocate(pool.counts().free + 1).unwrap();
    assert!(all.ids().contains(&id) && ids.iter().all(|id| !all.ids().contains(id)));
    drop(all);
    let newest = cached(None, 5).ids()[0];
    // The held blocks follow another one from now on.
    let _moved = pool.allocate(3).unwrap().register(None, &[key(6), key(2), key(3)]).unwrap();
    let some = pool.allocate(pool.counts().free + 2).unwrap();
    assert!(!some.ids().contains(&newest) && ids.iter().all(|id| some.ids().contains(id)));
    pool.check_invariants().unwrap();
}

#[test]
fn contents_do_not_wait_for_the_blocks_that_followed_others_before() {
    let pool = BlockPool::with_config(0..2, PoolConfig::default()).unwrap();
    let old = KeyScope::new("m", b"").root().chain(&[7, 8], 1);
    let mut whole = pool.allocate(2).unwrap().register(None, &old).unwrap();
    let end = whole.split_off(1).unwrap();
    let first = whole.ids()[0];
    drop(whole);
    let block = pool.allocate(1).unwrap();
    assert_eq!(block.ids(), [first]);
    // The block now follows the one that followed its old contents.
    drop(block.register(Some(old[1]), &[old[1].child(&[9])]).unwrap());
    drop(end);
    pool.check_invariants().unwrap();
    let evicted = pool.allocate(1).unwrap();
    assert_eq!(evicted.ids(), [first], "the end of the new chain");
    assert!(pool.lookup(&old[1]).is_some());
}
