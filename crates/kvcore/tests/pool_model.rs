//! Random operations on a pool against a plain model of what it should do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;

use kvcore::{
    BlockKey, BlockPool, CompleteBlock, KeyScope, MutableBlock, RetainedRun, SharedBlock, SharedRun,
};
use proptest::prelude::*;

const BLOCKS: usize = 6;

#[derive(Debug, Clone)]
enum Op {
    Allocate(usize),
    Complete(usize),
    Register(usize, u32),
    Share(usize),
    Lookup(u32),
    CloneShared(usize),
    DropMutable(usize),
    DropComplete(usize),
    DropShared(usize),
    MakeRun(usize),
    Retain(usize),
    ShareRetained(usize),
    DropRun(usize),
    DropRetained(usize),
    ClearCached,
}

fn op() -> impl Strategy<Value = Op> {
    let i = 0..4usize;
    prop_oneof![
        (0..4usize).prop_map(Op::Allocate),
        i.clone().prop_map(Op::Complete),
        (i.clone(), 0..5u32).prop_map(|(a, b)| Op::Register(a, b)),
        i.clone().prop_map(Op::Share),
        (0..5u32).prop_map(Op::Lookup),
        i.clone().prop_map(Op::CloneShared),
        i.clone().prop_map(Op::DropMutable),
        i.clone().prop_map(Op::DropComplete),
        i.clone().prop_map(Op::DropShared),
        (1..4usize).prop_map(Op::MakeRun),
        i.clone().prop_map(Op::Retain),
        i.clone().prop_map(Op::ShareRetained),
        i.clone().prop_map(Op::DropRun),
        i.prop_map(Op::DropRetained),
        Just(Op::ClearCached),
    ]
}

/// What is held, and for each block id how many holders and claims there should be.
#[derive(Default)]
struct World {
    mutable: Vec<MutableBlock>,
    complete: Vec<CompleteBlock>,
    shared: Vec<SharedBlock>,
    runs: Vec<SharedRun>,
    retained: Vec<RetainedRun>,
    /// Under which key a block was registered, until it is seen to be gone.
    keys: HashMap<u32, u32>,
}

fn key(n: u32) -> BlockKey {
    KeyScope::new("m", b"").root().child(&[n])
}

fn take<T>(list: &mut Vec<T>, i: usize) -> Option<T> {
    (i < list.len()).then(|| list.remove(i))
}

impl World {
    fn apply(&mut self, pool: &BlockPool, op: &Op) {
        match *op {
            Op::Allocate(n) => {
                let before = pool.counts();
                if let Ok(blocks) = pool.allocate(n) {
                    assert_eq!(blocks.len(), n);
                    // whatever was evicted has lost its key
                    for block in &blocks {
                        self.keys.remove(&block.id().0);
                    }
                    self.mutable.extend(blocks);
                } else {
                    assert!(before.free + before.evictable < n);
                    assert_eq!(pool.counts(), before, "a failed allocation changes nothing");
                }
            }
            Op::Complete(i) => self.complete.extend(take(&mut self.mutable, i).map(MutableBlock::complete)),
            Op::Register(i, k) => {
                if let Some(block) = take(&mut self.complete, i) {
                    let (id, known) =
                        (block.id().0, self.keys.iter().find(|(_, v)| **v == k).map(|(id, _)| *id));
                    let shared = block.register(key(k));
                    assert_eq!(shared.id().0, known.unwrap_or(id), "a known key gives the known block");
                    self.keys.insert(shared.id().0, k);
                    self.shared.push(shared);
                }
            }
            Op::Share(i) => self.shared.extend(take(&mut self.complete, i).map(CompleteBlock::share)),
            Op::Lookup(k) => {
                let known = self.keys.iter().find(|(_, v)| **v == k).map(|(id, _)| *id);
                let found = pool.lookup(&key(k));
                assert_eq!(found.as_ref().map(|b| b.id().0), known);
                self.shared.extend(found);
            }
            Op::CloneShared(i) => {
                let clone = self.shared.get(i).cloned();
                self.shared.extend(clone);
            }
            Op::DropMutable(i) => drop(take(&mut self.mutable, i)),
            Op::DropComplete(i) => drop(take(&mut self.complete, i)),
            Op::DropShared(i) => drop(take(&mut self.shared, i)),
            Op::MakeRun(n) => {
                let n = n.min(self.mutable.len());
                if n > 0 {
                    let blocks = self.mutable.drain(..n).collect();
                    self.runs.push(SharedRun::from_filled(pool, blocks).unwrap());
                }
            }
            Op::Retain(i) => self.retained.extend(self.runs.get(i).map(SharedRun::retain)),
            Op::ShareRetained(i) => self.runs.extend(self.retained.get(i).map(RetainedRun::share)),
            Op::DropRun(i) => drop(take(&mut self.runs, i)),
            Op::DropRetained(i) => drop(take(&mut self.retained, i)),
            Op::ClearCached => {
                let held: Vec<u32> = self.shared.iter().map(|b| b.id().0).collect();
                self.keys.retain(|id, _| held.contains(id));
                pool.clear_cached();
            }
        }
    }

    fn check(&self, pool: &BlockPool) {
        pool.check_invariants().unwrap();
        let mut holders: HashMap<u32, usize> = HashMap::new();
        for id in self
            .shared
            .iter()
            .map(|b| b.id().0)
            .chain(self.runs.iter().flat_map(|r| r.ids().iter().map(|b| b.0)))
        {
            *holders.entry(id).or_default() += 1;
        }
        let claimed =
            self.retained.iter().flat_map(|r| r.ids().iter().map(|b| b.0)).chain(self.keys.keys().copied());
        let mut cached: Vec<u32> = claimed.filter(|id| !holders.contains_key(id)).collect();
        cached.sort_unstable();
        cached.dedup();
        let counts = pool.counts();
        assert_eq!(counts.mutable, self.mutable.len());
        assert_eq!(counts.complete, self.complete.len());
        assert_eq!(counts.shared, holders.len());
        assert_eq!(counts.cached, cached.len());
        assert_eq!(
            counts.free + counts.mutable + counts.complete + counts.shared + counts.cached,
            counts.total
        );
        for block in &self.shared {
            assert_eq!(block.holders(), holders[&block.id().0]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_pool_does_what_its_model_does(ops in prop::collection::vec(op(), 1..120)) {
        let pool = BlockPool::new(10..10 + BLOCKS as u32).unwrap();
        let mut world = World::default();
        for op in &ops {
            world.apply(&pool, op);
            world.check(&pool);
        }
        drop(world);
        pool.check_invariants().unwrap();
        pool.clear_cached();
        prop_assert_eq!(pool.counts().free, BLOCKS);
    }
}
