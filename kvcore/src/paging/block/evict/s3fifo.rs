//! S3-FIFO: FIFO queues that do not move blocks on a hit.

use super::lists::LinkedLists;
use super::{EvictionPolicy, NO_KEY, PolicyEntry, word};
use crate::paging::BlockKey;

const SMALL: u8 = 0;
const MAIN: u8 = 1;
const MOST: u8 = 3;

/// S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi 2023). New blocks enter a small queue. A block that was hit there
/// moves on to the main queue; other blocks are evicted, and their keys are remembered as ghosts. A block
/// whose key is a ghost enters the main queue directly.
///
/// A held block keeps its place in its queue, so a hit does not move the block. Eviction skips held blocks.
#[derive(Debug)]
pub struct S3Fifo {
    lists: LinkedLists,
    blocks: Vec<FifoState>,
    ghosts: Ghosts,
    small: usize,
    len: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct FifoState {
    /// First word of the key under which the block was last cached.
    key: u64,
    hits: u8,
    /// True if the block may be evicted. If false, the block is held and only keeps its place.
    present: bool,
}

/// Keys evicted from the small queue, stored as in the paper: fingerprints in buckets, each with the sequence
/// number of its eviction, which determines when the key is forgotten.
#[derive(Debug)]
struct Ghosts {
    buckets: Vec<[(u32, u32); WAYS]>,
    evictions: u32,
    most: u32,
}

const WAYS: usize = 4;

impl Ghosts {
    fn new(most: usize) -> Self {
        let buckets = (most / WAYS).max(1).next_power_of_two();
        Self { buckets: vec![[(0, 0); WAYS]; buckets], evictions: 0, most: most as u32 }
    }

    fn place(&self, key: u64) -> (usize, u32) {
        // Fingerprints are never 0, because 0 marks an empty entry.
        ((key as usize) & (self.buckets.len() - 1), (key >> 32) as u32 | 1)
    }

    fn age(&self, stamp: u32) -> u32 {
        self.evictions.wrapping_sub(stamp)
    }

    fn contains(&self, key: u64) -> bool {
        let (bucket, print) = self.place(key);
        self.buckets[bucket].iter().any(|&(other, stamp)| other == print && self.age(stamp) < self.most)
    }

    fn add(&mut self, key: u64) {
        self.evictions = self.evictions.wrapping_add(1);
        let (bucket, print) = self.place(key);
        let age = |&(other, stamp): &(u32, u32)| if other == 0 { u32::MAX } else { self.age(stamp) };
        let ages = self.buckets[bucket].each_ref().map(age);
        let oldest = (0..WAYS).max_by_key(|&way| ages[way]).unwrap_or(0);
        self.buckets[bucket][oldest] = (print, self.evictions);
    }
}

impl S3Fifo {
    /// Creates an empty policy for `blocks` blocks. The small queue gets a tenth of the blocks. A ghost is
    /// forgotten after at most as many further evictions from the small queue as the main queue has blocks.
    pub fn new(blocks: usize) -> Self {
        let small = (blocks / 10).max(1);
        let most = blocks - small.min(blocks);
        let ghosts = Ghosts::new(most);
        Self {
            lists: LinkedLists::new(blocks, 2),
            blocks: vec![FifoState::default(); blocks],
            ghosts,
            small,
            len: 0,
        }
    }

    /// Removes and returns the small queue's next evictable block. Blocks that were hit move to the main
    /// queue.
    fn pop_small(&mut self) -> Option<u32> {
        for _ in 0..self.lists.len(SMALL) {
            let block = self.lists.pop(SMALL)?;
            let state = &mut self.blocks[block as usize];
            if state.hits > 0 {
                state.hits = 0;
                self.lists.push(MAIN, block);
            } else if state.present {
                let key = std::mem::replace(&mut state.key, NO_KEY);
                if key != NO_KEY {
                    self.ghosts.add(key);
                }
                return Some(block);
            } else {
                self.lists.push(SMALL, block);
            }
        }
        None
    }

    /// Removes and returns the main queue's next evictable block. A block with hits loses one hit and returns
    /// to the end of the queue.
    fn pop_main(&mut self) -> Option<u32> {
        // Each round uses up one hit of every block that has hits, and skips each held block once.
        for _ in 0..=self.lists.len(MAIN) * usize::from(MOST + 1) {
            let block = self.lists.pop(MAIN)?;
            let state = &mut self.blocks[block as usize];
            if state.present && state.hits == 0 {
                state.key = NO_KEY;
                return Some(block);
            }
            state.hits = state.hits.saturating_sub(1);
            self.lists.push(MAIN, block);
        }
        None
    }
}

impl EvictionPolicy for S3Fifo {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        let state = &mut self.blocks[block as usize];
        self.len += 1;
        let key = entry.key.map_or(NO_KEY, word);
        let known = key != NO_KEY && state.key == key;
        *state = FifoState { key, hits: if known { state.hits } else { 0 }, present: true };
        if !known || self.lists.list_of(block).is_none() {
            self.lists.unlink(block);
            let ghost = self.ghosts.contains(key);
            self.lists.push(if ghost { MAIN } else { SMALL }, block);
        }
    }

    fn remove(&mut self, block: u32) {
        let state = &mut self.blocks[block as usize];
        self.len -= usize::from(state.present);
        state.present = false;
    }

    fn evict(&mut self, _: u64) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let small_first = self.lists.len(SMALL) > self.small;
        let block = if small_first {
            self.pop_small().or_else(|| self.pop_main())
        } else {
            self.pop_main().or_else(|| self.pop_small()).or_else(|| self.pop_main())
        }?;
        self.blocks[block as usize].present = false;
        self.len -= 1;
        Some(block)
    }

    fn hit(&mut self, block: u32, _: &BlockKey) {
        let state = &mut self.blocks[block as usize];
        state.hits = (state.hits + 1).min(MOST);
    }

    fn wants_hits(&self) -> bool {
        true
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paging::KeyScope;

    #[test]
    fn one_hit_wonders_leave_and_returning_ghosts_stay() {
        let root = KeyScope::new("m", b"").root();
        let key = |i| root.child(&[i]);
        let mut policy = S3Fifo::new(20);
        let keys: Vec<BlockKey> = (0..20).map(key).collect();
        for (block, key) in keys[..10].iter().enumerate() {
            policy.insert(block as u32, &PolicyEntry { key: Some(key), ..PolicyEntry::default() });
        }
        policy.hit(0, &keys[0]);
        assert_eq!(policy.evict(0), Some(1), "block 0 was hit and moved on");
        // key 1 returns in another block: the key is a ghost, so the block enters the main queue
        policy.insert(15, &PolicyEntry { key: Some(&keys[1]), ..PolicyEntry::default() });
        assert_eq!(policy.lists.list_of(15), Some(MAIN));
        let order: Vec<u32> = std::iter::from_fn(|| policy.evict(0)).collect();
        assert_eq!(order[..7], [2, 3, 4, 5, 6, 7, 0], "{order:?}");
    }

    #[test]
    fn a_held_block_keeps_its_place_and_is_not_evicted() {
        let root = KeyScope::new("m", b"").root();
        let keys: Vec<BlockKey> = (0..4).map(|i| root.child(&[i])).collect();
        let mut policy = S3Fifo::new(4);
        for (block, key) in keys.iter().enumerate() {
            policy.insert(block as u32, &PolicyEntry { key: Some(key), ..PolicyEntry::default() });
        }
        policy.remove(0);
        policy.remove(2);
        let mut gone: Vec<u32> = std::iter::from_fn(|| policy.evict(0)).collect();
        gone.sort_unstable();
        assert_eq!((gone, policy.len()), (vec![1, 3], 0));
        policy.insert(2, &PolicyEntry { key: Some(&keys[2]), ..PolicyEntry::default() });
        assert_eq!(policy.evict(0), Some(2));
    }
}
