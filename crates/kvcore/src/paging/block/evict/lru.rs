//! Least recently released first.

use super::lists::Lists;
use super::{Entry, EvictionPolicy};

/// A policy that evicts the least recently used block. A block counts as used until its last holder lets
/// go.
#[derive(Debug)]
pub struct Lru(Lists);

impl Lru {
    /// Creates an empty order for `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        Self(Lists::new(blocks, 1))
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, block: u32, _: &Entry<'_>) {
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
            lru.insert(block, &Entry::default());
        }
        lru.remove(0);
        lru.remove(2);
        lru.insert(2, &Entry::default());
        assert_eq!(std::iter::from_fn(|| lru.evict(0)).collect::<Vec<_>>(), [3, 1, 2]);
        assert!(lru.is_empty());
    }
}
