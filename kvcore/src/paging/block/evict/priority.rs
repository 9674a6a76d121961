//! The priority policy, which evicts the lowest priority first, and the least recently released block among
//! equals. Priorities may expire.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::lists::LinkedLists;
use super::{EvictionPolicy, PolicyEntry, Retention};

/// Number of priority levels, 0 to 100. Larger priorities count as 100.
const LEVELS: u8 = 101;

/// A policy that evicts blocks with the lowest [`Retention`] priority first, and among equals the least
/// recently released block.
///
/// An expired priority counts as [`Retention::DEFAULT_PRIORITY`]. The idea and the scale are taken from
/// `TensorRT-LLM` (priority-based eviction with durations).
#[derive(Debug)]
pub struct PriorityLru {
    lists: LinkedLists,
    /// `(end, block)` for each block whose priority ends, the earliest end first. An entry is valid only
    /// while it matches `until`.
    ends: BinaryHeap<Reverse<(u64, u32)>>,
    /// Time at which each block's priority ends, including held blocks.
    until: Vec<u64>,
    len: usize,
}

impl PriorityLru {
    /// Creates an empty policy for `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        Self {
            lists: LinkedLists::new(blocks, LEVELS),
            ends: BinaryHeap::new(),
            until: vec![u64::MAX; blocks],
            len: 0,
        }
    }

    /// Records the time at which a block's priority ends, unless that time is already recorded.
    fn expect(&mut self, until: u64, block: u32) {
        if std::mem::replace(&mut self.until[block as usize], until) == until || until == u64::MAX {
            return;
        }
        if self.ends.len() >= 2 * self.until.len() {
            let applies = |&Reverse((end, block)): &Reverse<(u64, u32)>| self.until[block as usize] == end;
            let mut ends = std::mem::take(&mut self.ends).into_vec();
            ends.retain(applies);
            ends.sort_unstable();
            ends.dedup();
            self.ends = ends.into();
        }
        self.ends.push(Reverse((until, block)));
    }

    /// Moves blocks whose priority has ended to the default level.
    fn expire(&mut self, now: u64) {
        while let Some(&Reverse((end, block))) = self.ends.peek()
            && end <= now
        {
            self.ends.pop();
            if self.until[block as usize] == end {
                self.until[block as usize] = u64::MAX;
                if self.lists.unlink(block) {
                    self.lists.push(Retention::DEFAULT_PRIORITY, block);
                }
            }
        }
    }
}

impl EvictionPolicy for PriorityLru {
    fn insert(&mut self, block: u32, entry: &PolicyEntry<'_>) {
        let over = entry.until <= entry.now;
        let level = if over { Retention::DEFAULT_PRIORITY } else { entry.priority.min(LEVELS - 1) };
        self.expect(if over { u64::MAX } else { entry.until }, block);
        self.lists.push(level, block);
        self.len += 1;
    }

    fn remove(&mut self, block: u32) {
        self.len -= usize::from(self.lists.unlink(block));
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        self.expire(now);
        let block = (0..LEVELS).find_map(|level| self.lists.pop(level))?;
        self.until[block as usize] = u64::MAX;
        self.len -= 1;
        Some(block)
    }

    fn wants_time(&self) -> bool {
        true
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_priorities_go_first_and_ended_ones_count_as_the_default() {
        let mut policy = PriorityLru::new(8);
        let at = |priority, until| PolicyEntry { priority, until, ..PolicyEntry::default() };
        policy.insert(0, &at(90, 1000));
        policy.insert(1, &at(35, u64::MAX));
        policy.insert(2, &at(10, u64::MAX));
        policy.insert(3, &at(90, u64::MAX));
        policy.insert(4, &at(0, 500));
        assert_eq!(policy.evict(0), Some(4));
        assert_eq!(policy.evict(0), Some(2));
        assert_eq!(policy.evict(2000), Some(1), "block 0 has joined the default after block 1");
        assert_eq!(policy.evict(2000), Some(0));
        assert_eq!((policy.evict(2000), policy.evict(2000), policy.len()), (Some(3), None, 0));
    }

    #[test]
    fn holding_a_block_again_and_again_notes_its_end_once() {
        let mut policy = PriorityLru::new(4);
        let entry = PolicyEntry { priority: 90, until: 1000, ..PolicyEntry::default() };
        for round in 0..10_000u64 {
            policy.insert(0, &entry);
            policy.insert(1, &PolicyEntry { until: 2000 + round, ..entry });
            policy.remove(0);
            policy.remove(1);
        }
        assert!(policy.ends.len() <= 9, "{}", policy.ends.len());
        policy.insert(0, &entry);
        policy.insert(2, &PolicyEntry::default());
        assert_eq!((policy.evict(1500), policy.evict(1500)), (Some(2), Some(0)));
    }

    #[test]
    fn an_old_expiry_does_not_touch_a_block_inserted_again() {
        let mut policy = PriorityLru::new(2);
        policy.insert(0, &PolicyEntry { priority: 90, until: 10, ..PolicyEntry::default() });
        policy.remove(0);
        policy.insert(0, &PolicyEntry { priority: 90, until: 50, ..PolicyEntry::default() });
        policy.insert(1, &PolicyEntry::default());
        assert_eq!(policy.evict(20), Some(1));
    }
}
