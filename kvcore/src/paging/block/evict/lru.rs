//! The LRU policy, which evicts the least recently released block first.

use super::lists::LinkedLists;
use super::{EvictionPolicy, PolicyEntry};

/// A policy that evicts the least recently used block. A block is in use until its last holder drops it.
#[derive(Debug)]
pub struct Lru(LinkedLists);

impl Lru {
    /// Creates an empty policy for `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        Self(LinkedLists::new(blocks, 1))
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, block: u32, _: &PolicyEntry<'_>) {
        self.0.push(0, block);
    }

    fn remove(&mut self, block: u32) {
        self.0.unlink(block);
    }

    fn evict(&mut self, _: u64) -> Option<u32> {
        self.0.pop(0)
    }

    fn len(&self) -> usize {
        self.0.len(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first_and_removed_ones_never() {
        let mut lru = Lru::new(4);
        for block in [2, 0, 3, 1] {
            lru.insert(block, &PolicyEntry::default());
        }
        lru.remove(0);
        lru.remove(2);
        lru.insert(2, &PolicyEntry::default());
        assert_eq!(std::iter::from_fn(|| lru.evict(0)).collect::<Vec<_>>(), [3, 1, 2]);
        assert!(lru.is_empty());
    }
}
