//! The `TinyLFU` policy, which keeps the most frequently used blocks, as estimated by a sketch.

use super::lists::LinkedLists;
use super::sketch::Sketch;
use super::{EvictionPolicy, NO_KEY, PolicyEntry, word};
use crate::paging::BlockKey;

const WINDOW: u8 = 0;
const PROBATION: u8 = 1;
const PROTECTED: u8 = 2;

/// Window-TinyLFU (Einziger, Friedman, Manes 2017).
///
/// A new block enters a small window, and moves from the window to a probation queue. When room is needed,
/// the newest block on probation is compared with the oldest one: the block whose key was seen less often is
/// evicted. A block that is hit on probation becomes protected.
#[derive(Debug)]
pub struct TinyLfu {
    lists: LinkedLists,
    sketch: Sketch,
    /// First word of the key under which each block was last cached. A block with another key counts as new.
    keys: Vec<u64>,
    /// The list that each block was in when it was last held.
    left: Vec<u8>,
    window: usize,
    protected: usize,
}

impl TinyLfu {
    /// Creates an empty policy for `blocks` blocks: 1 % for the window, and 80 % of the remaining blocks for
    /// protected blocks.
    pub fn new(blocks: usize) -> Self {
        let window = (blocks / 100).max(1);
        Self {
            lists: LinkedLists::new(blocks, 3),
            sketch: Sketch::new(blocks),
            keys: vec![NO_KEY; blocks],
            left: vec![WINDOW; blocks],
            window,
            protected: (blocks - window.min(blocks)) * 4 / 5,
        }
    }

    fn seen(&self, block: u32) -> u8 {
        match self.keys[block as usize] {
            NO_KEY => 0,
            key => self.sketch.estimate(key),
        }
    }

    /// Moves a list's oldest blocks to the probation queue while the list exceeds its share.
    fn overflow(&mut self, list: u8, share: usize) {
        while self.lists.len(list) > share
            && let Some(block) = self.lists.pop(list)
        {
            self.lists.push(PROBATION, block);
        }
    }
}

impl EvictionPolicy for TinyLfu {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        let i = block as usize;
        let key = entry.key.map_or(NO_KEY, word);
        let known = key != NO_KEY && self.keys[i] == key;
        if known && self.left[i] != WINDOW {
            // The block has been hit since it was cached, so it moves up from probation.
            self.lists.push(PROTECTED, block);
            self.overflow(PROTECTED, self.protected);
            return;
        }
        if !known {
            self.keys[i] = key;
            if key != NO_KEY {
                self.sketch.observe(key);
            }
        }
        self.lists.push(WINDOW, block);
        self.overflow(WINDOW, self.window);
    }

    fn remove(&mut self, block: u32) {
        if let Some(list) = self.lists.list_of(block) {
            self.left[block as usize] = list;
            self.lists.unlink(block);
        }
    }

    fn evict(&mut self, _: u64) -> Option<u32> {
        let next = match (self.lists.oldest(PROBATION), self.lists.newest(PROBATION)) {
            (Some(victim), Some(candidate)) if self.seen(candidate) <= self.seen(victim) => candidate,
            (Some(victim), _) => victim,
            _ => self.lists.oldest(PROTECTED).or_else(|| self.lists.oldest(WINDOW))?,
        };
        self.lists.unlink(next);
        self.keys[next as usize] = NO_KEY;
        Some(next)
    }

    fn hit(&mut self, _: u32, key: &BlockKey) {
        self.sketch.observe(word(key));
    }

    fn wants_hits(&self) -> bool {
        true
    }

    fn len(&self) -> usize {
        [WINDOW, PROBATION, PROTECTED].into_iter().map(|list| self.lists.len(list)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paging::KeyScope;

    #[test]
    fn a_scan_does_not_push_out_frequent_blocks() {
        let root = KeyScope::new("m", b"").root();
        let mut policy = TinyLfu::new(100);
        let popular: Vec<BlockKey> = (0..50).map(|i| root.child(&[i])).collect();
        for _ in 0..4 {
            for (block, key) in popular.iter().enumerate() {
                policy.hit(block as u32, key);
            }
        }
        for (block, key) in popular.iter().enumerate() {
            policy.insert(block as u32, &PolicyEntry { key: Some(key), ..PolicyEntry::default() });
        }
        // 1,000 keys that occur once each, in the other fifty blocks
        let mut free: Vec<u32> = (50..100).collect();
        for i in 0..1000 {
            let block = free.pop().unwrap_or_else(|| policy.evict(0).unwrap());
            let key = root.child(&[1000 + i]);
            policy.insert(block, &PolicyEntry { key: Some(&key), ..PolicyEntry::default() });
        }
        let left = (0..50).filter(|&b| policy.keys[b] == word(&popular[b])).count();
        assert!(left >= 45, "{left} of 50 popular blocks left");
    }
}
