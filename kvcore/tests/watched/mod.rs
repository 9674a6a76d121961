//! A policy that checks another one.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use kvcore::{BlockKey, EvictionPolicy, PolicyEntry};

/// What a policy did against its contract.
pub(crate) type Faults = Arc<Mutex<Vec<String>>>;

/// A policy that reports what another does against its contract. The pool would replace that policy in silence.
#[derive(Debug)]
pub(crate) struct Watched {
    policy: Box<dyn EvictionPolicy>,
    blocks: HashSet<u32>,
    faults: Faults,
}

impl Watched {
    /// Watches a policy that is still empty.
    pub(crate) fn boxed(policy: Box<dyn EvictionPolicy>, faults: &Faults) -> Box<dyn EvictionPolicy> {
        Box::new(Self { policy, blocks: HashSet::new(), faults: Arc::clone(faults) })
    }

    fn expect(&self, right: bool, fault: &str) {
        if !right || self.policy.len() != self.blocks.len() {
            self.faults.lock().unwrap().push(format!("{fault}: {:?} for {:?}", self.policy, self.blocks));
        }
    }
}

impl EvictionPolicy for Watched {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        self.policy.insert(block, entry);
        let new = self.blocks.insert(block);
        self.expect(new, "insert");
    }

    fn remove(&mut self, block: u32) {
        self.policy.remove(block);
        let known = self.blocks.remove(&block);
        self.expect(known, "remove");
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        let evicted = self.policy.evict(now);
        let known = evicted.map_or(self.blocks.is_empty(), |block| self.blocks.remove(&block));
        self.expect(known, "evict");
        evicted
    }

    fn hit(&mut self, block: u32, key: &BlockKey) {
        self.policy.hit(block, key);
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
