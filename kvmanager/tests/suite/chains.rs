//! Chains of blocks leave a pool from their ends, under every policy.

use std::collections::{BTreeSet, HashMap};

use kvcore::{BlockKey, BlockPool, BlockTable, KeyScope, PolicyKind, PoolConfig, SharedBlocks};
use kvmanager::ChainLinks;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

pub(crate) const BLOCKS: u32 = 24;
const BLOCK: usize = 4;
/// The length of the longest prompt, in blocks.
pub(crate) const LONGEST: usize = 12;

#[derive(Debug, Clone)]
pub(crate) enum Op {
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

pub(crate) fn op() -> impl Strategy<Value = Op> {
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

pub(crate) struct World {
    links: Option<ChainLinks>,
    pub(crate) pool: BlockPool,
    held: Vec<SharedBlocks>,
}

impl World {
    fn new(kind: PolicyKind, linked: bool) -> Self {
        let links = linked.then(ChainLinks::default);
        let config = PoolConfig::default();
        let config = match &links {
            Some(links) => config.custom_policy(links.policy(kind)),
            None => config.policy(kind),
        };
        Self::of(links, config)
    }

    pub(crate) fn of(links: Option<ChainLinks>, config: PoolConfig) -> Self {
        let pool = BlockPool::with_config(0..BLOCKS, config.shards(1)).unwrap();
        Self { links, pool, held: Vec::new() }
    }

    fn link(&self, parent: Option<BlockKey>, key: BlockKey) {
        if let Some(links) = &self.links {
            links.link(parent, &[key]);
        }
    }

    pub(crate) fn run(&mut self, op: &Op) {
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
                    let held = block.register(parent, &keys[i..=i]).unwrap();
                    self.link(parent, keys[i]);
                    drop(held);
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
                    self.link(parent, keys[i]);
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
pub(crate) const PROMPTS: u32 = 6;

/// Returns the keys of a prompt. Prompts share their beginnings: 0 to 2, and 3 to 5, each differ after a few
/// blocks.
pub(crate) fn keys(n: u32, len: usize) -> Vec<BlockKey> {
    let shared = 2 + n as usize;
    let token = |block: usize| if block < shared { 100 + n / 3 } else { n };
    let tokens: Vec<u32> = (0..len).flat_map(|block| [token(block); BLOCK]).collect();
    KeyScope::new("m", b"").root().chain(&tokens, BLOCK)
}

/// Runs random operations. Returns the number of cases in which a block was lost, for each policy.
fn losses(linked: bool) -> HashMap<String, usize> {
    let mut losses = HashMap::new();
    for kind in PolicyKind::ALL {
        let mut runner =
            TestRunner::new(Config { cases: 256, failure_persistence: None, ..Config::default() });
        let lost = losses.entry(format!("{kind:?}")).or_default();
        let count = std::cell::Cell::new(0);
        let ran = runner.run(&prop::collection::vec(op(), 1..60), |ops| {
            let mut world = World::new(kind, linked);
            for op in &ops {
                world.run(op);
                world.pool.check_invariants().unwrap();
                if world.lost() > 0 {
                    count.set(count.get() + 1);
                    prop_assert!(!linked, "{kind:?}: {op:?} left {} blocks that are not found", world.lost());
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
fn without_links_every_policy_loses_blocks() {
    let losses = losses(false);
    assert!(losses.values().all(|&lost| lost > 0), "the test above could not fail: {losses:?}");
}

#[test]
fn a_chain_that_was_registered_block_by_block_is_still_found_after_evictions() {
    for kind in PolicyKind::ALL {
        let mut world = World::new(kind, true);
        for n in 0..2 {
            world.run(&Op::OneByOne(n * 3, 12));
        }
        let before = [0, 3].map(|n| world.pool.cached_prefix(&keys(n, 12)));
        assert_eq!(before, [12, 12]);
        let two = world.pool.allocate(2).unwrap();
        let after = [0, 3].map(|n| world.pool.cached_prefix(&keys(n, 12)));
        assert_eq!(after.iter().sum::<usize>(), 22, "{kind:?}: {after:?}");
        drop(two);
    }
}
