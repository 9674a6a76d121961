//! Records in host memory above the disk: the ones that were stored or used last. A load finds them without a read.

use std::collections::{BTreeMap, HashMap};

use kvcore::BlockKey;
use parking_lot::Mutex;

use crate::buffer::RecordBuffer;
use crate::record::RecordId;

/// Records in host memory, up to a number of bytes. Of the records that no other one needs, the least recently used one
/// leaves first. A record that has just come stays, unless it needs all others.
pub(super) struct MemoryTier {
    limit: usize,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    /// The records, each with the number of its last use.
    records: HashMap<BlockKey, (Kept, u64)>,
    /// The keys by their last use.
    order: BTreeMap<u64, BlockKey>,
    /// The keys of the records that no other one needs, by their last use.
    ends: BTreeMap<u64, BlockKey>,
    /// The number of records that need the one with a key, which may not be here. It is never zero.
    children: HashMap<BlockKey, usize>,
    /// A use of the least recently used record, and the record that the search for a circle has reached from there.
    search: Option<(u64, BlockKey)>,
    /// The number of uses.
    uses: u64,
    bytes: usize,
    hits: u64,
}

/// A record in host memory.
pub(super) struct Kept {
    pub(super) id: RecordId,
    /// The record without which nobody can use this one.
    pub(super) parent: Option<BlockKey>,
    pub(super) buffers: Vec<RecordBuffer>,
}

/// The contents of the memory, and the loads that it has served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryUsage {
    pub(super) bytes: usize,
    pub(super) hits: u64,
}

impl MemoryTier {
    /// Creates an empty tier that keeps at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, held: Mutex::default() }
    }

    /// Returns whether the tier can keep a record with so many bytes.
    pub(super) fn has_room_for(&self, bytes: usize) -> bool {
        (1..=self.limit).contains(&bytes)
    }

    /// Keeps a record, in place of one with the same key. Returns the buffers that are not kept: those of the records that
    /// leave, or of this one if it is too large.
    pub(super) fn keep(&self, record: Kept) -> Vec<RecordBuffer> {
        let bytes = record.bytes();
        if !self.has_room_for(bytes) {
            return record.buffers;
        }
        let (mut held, key) = (self.held.lock(), record.id.key);
        let mut left = held.remove(&key).map_or_else(Vec::new, |before| before.buffers);
        held.add(record);
        while held.bytes > self.limit
            && let Some(leaves) = held.next_to_leave(&key)
        {
            left.extend(held.remove(&leaves).map_or_else(Vec::new, |gone| gone.buffers));
        }
        left
    }

    /// Removes and returns a record with this identity.
    pub(super) fn take(&self, id: &RecordId) -> Option<Vec<RecordBuffer>> {
        let mut held = self.held.lock();
        held.records.get(&id.key).filter(|(kept, _)| kept.id == *id)?;
        held.hits += 1;
        held.remove(&id.key).map(|taken| taken.buffers)
    }

    /// Returns whether a record with this key is here.
    pub(super) fn contains(&self, key: &BlockKey) -> bool {
        self.held.lock().records.contains_key(key)
    }

    /// Removes everything.
    pub(super) fn clear(&self) {
        let mut held = self.held.lock();
        let hits = held.hits;
        *held = Held { hits, ..Held::default() };
    }

    pub(super) fn usage(&self) -> MemoryUsage {
        let held = self.held.lock();
        MemoryUsage { bytes: held.bytes, hits: held.hits }
    }
}

impl Kept {
    fn bytes(&self) -> usize {
        self.buffers.iter().map(RecordBuffer::memory_bytes).sum()
    }
}

impl Held {
    fn add(&mut self, mut record: Kept) {
        let key = record.id.key;
        // Nobody else needs a record because it needs itself.
        record.parent = record.parent.filter(|parent| *parent != key);
        self.uses += 1;
        self.bytes += record.bytes();
        self.order.insert(self.uses, key);
        if !self.children.contains_key(&key) {
            self.ends.insert(self.uses, key);
        }
        if let Some(parent) = record.parent {
            *self.children.entry(parent).or_default() += 1;
            if let Some((_, used)) = self.records.get(&parent) {
                self.ends.remove(used);
            }
        }
        self.records.insert(key, (record, self.uses));
    }

    fn remove(&mut self, key: &BlockKey) -> Option<Kept> {
        let (record, used) = self.records.remove(key)?;
        self.order.remove(&used);
        self.ends.remove(&used);
        self.bytes -= record.bytes();
        if let Some(parent) = record.parent
            && let Some(children) = self.children.get_mut(&parent)
        {
            *children -= 1;
            if *children == 0 {
                self.children.remove(&parent);
                if let Some((_, used)) = self.records.get(&parent) {
                    self.ends.insert(*used, parent);
                }
            }
        }
        Some(record)
    }

    /// Returns the key of the record that leaves next: the least recently used one of those that nobody needs. The newest one
    /// leaves if it needs all others.
    fn next_to_leave(&mut self, newest: &BlockKey) -> Option<BlockKey> {
        if let Some(key) = self.oldest_in_circle() {
            return Some(key);
        }
        self.ends.values().find(|key| *key != newest).or(Some(newest)).copied()
    }

    /// Returns the key of the least recently used record if it needs itself by way of others. Somebody needs each record of
    /// such a circle, so that none would leave. Each call looks at one more record, so that none takes long.
    fn oldest_in_circle(&mut self) -> Option<BlockKey> {
        let (&used, &oldest) = self.order.first_key_value()?;
        let reached = self.search.filter(|(start, _)| *start == used).map_or(oldest, |(_, reached)| reached);
        let parent = self.records.get(&reached).and_then(|(record, _)| record.parent);
        self.search = parent.map(|parent| (used, parent));
        parent.filter(|parent| *parent == oldest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(number: u8, token: u32) -> RecordId {
        let key = BlockKey::from_bytes([number; 32]);
        RecordId { key, tokens: [token].into(), stored_start: 0, label: "test".into() }
    }

    fn buffers(len: usize, byte: u8) -> Vec<RecordBuffer> {
        vec![vec![byte; len].into()]
    }

    fn kept(id: RecordId, len: usize, byte: u8) -> Kept {
        Kept { id, parent: None, buffers: buffers(len, byte) }
    }

    /// A record of 20 bytes that needs another one, or none.
    fn link(number: u8, parent: u8) -> Kept {
        let parent = (parent > 0).then(|| id(parent, 0).key);
        Kept { parent, ..kept(id(number, 0), 20, number) }
    }

    #[test]
    fn a_record_with_another_identity_is_not_taken() {
        let memory = MemoryTier::new(100);
        assert!(memory.keep(kept(id(1, 7), 40, 7)).is_empty());
        assert!(memory.take(&id(1, 8)).is_none());
        assert_eq!(
            memory.keep(kept(id(1, 8), 50, 8)),
            buffers(40, 7),
            "the one before gives its memory back"
        );
        assert_eq!(memory.usage(), MemoryUsage { bytes: 50, hits: 0 });
        assert_eq!(memory.take(&id(1, 8)), Some(buffers(50, 8)));
        assert_eq!(memory.usage(), MemoryUsage { bytes: 0, hits: 1 });
    }

    #[test]
    fn what_is_too_large_pushes_out_nothing() {
        let memory = MemoryTier::new(100);
        memory.keep(kept(id(1, 1), 100, 1));
        assert_eq!(memory.keep(kept(id(2, 2), 101, 2)), buffers(101, 2));
        assert!(memory.contains(&id(1, 1).key));
        memory.clear();
        assert_eq!((memory.usage().bytes, memory.contains(&id(1, 1).key)), (0, false));
    }

    #[test]
    fn a_chain_leaves_from_its_end() {
        let memory = MemoryTier::new(100);
        // A chain of three, and two that need nobody.
        for (number, parent) in [(1, 0), (2, 1), (3, 2), (4, 0), (5, 0)] {
            memory.keep(link(number, parent));
        }
        let left: Vec<RecordBuffer> = (6..10).flat_map(|number| memory.keep(link(number, 0))).collect();
        assert_eq!(left, [[3; 20], [2; 20], [1; 20], [4; 20]].map(|one| one.to_vec()));
        // A child whose parent has been taken leaves when it is its turn.
        let chain = MemoryTier::new(60);
        for (number, parent) in [(1, 0), (2, 1), (3, 2)] {
            chain.keep(link(number, parent));
        }
        assert!(chain.take(&id(1, 0)).is_some());
        assert!(chain.keep(link(4, 0)).is_empty());
        assert_eq!(chain.keep(link(5, 0)), [[3; 20].to_vec()]);
    }

    #[test]
    fn a_parent_stays_where_its_child_comes() {
        let memory = MemoryTier::new(60);
        let key = |number: u8| id(number, 0).key;
        for (number, parent) in [(9, 0), (2, 0), (3, 0)] {
            memory.keep(link(number, parent));
        }
        // The parent is the one that was used least recently.
        assert_eq!(memory.keep(link(4, 9)), [[2; 20].to_vec()]);
        assert_eq!(memory.keep(link(1, 4)), [[3; 20].to_vec()]);
        assert_eq!(memory.keep(link(5, 1)), [[5; 20].to_vec()], "it needs everything else");
        assert!([9, 4, 1].map(key).iter().all(|key| memory.contains(key)));
    }

    #[test]
    fn records_that_need_each_other_leave_all_the_same() {
        let memory = MemoryTier::new(60);
        let key = |number: u8| id(number, 0).key;
        for (number, parent) in [(1, 2), (2, 1), (3, 3)] {
            memory.keep(Kept { parent: Some(key(parent)), ..kept(id(number, 0), 20, number) });
        }
        for number in 4..8 {
            assert_eq!(memory.keep(kept(id(number, 0), 20, number)).len(), 1);
        }
        assert_eq!(memory.usage().bytes, 60);
        assert!([5, 6, 7].map(key).iter().all(|key| memory.contains(key)), "the circle has left");
        // A circle that fills the memory.
        let full = MemoryTier::new(60);
        for (number, parent) in [(1, 3), (2, 1), (3, 2)] {
            full.keep(Kept { parent: Some(key(parent)), ..kept(id(number, 0), 20, number) });
        }
        let left: Vec<RecordBuffer> =
            (4..8).flat_map(|number| full.keep(kept(id(number, 0), 20, number))).collect();
        assert_eq!(left, [[4; 20], [5; 20], [1; 20], [3; 20]].map(|one| one.to_vec()));
    }

    impl MemoryTier {
        /// Checks what is counted against the records.
        fn check(&self) {
            let held = self.held.lock();
            let used = |(key, (_, used)): (&BlockKey, &(Kept, u64))| (*used, *key);
            let needed = |key: &BlockKey| held.records.values().any(|(kept, _)| kept.parent == Some(*key));
            assert_eq!(held.order, held.records.iter().map(used).collect());
            assert_eq!(held.ends, held.records.iter().filter(|(key, _)| !needed(key)).map(used).collect());
            assert_eq!(
                held.children.values().sum::<usize>(),
                held.records.values().filter(|(kept, _)| kept.parent.is_some()).count()
            );
            assert_eq!(held.bytes, held.records.values().map(|(kept, _)| kept.bytes()).sum::<usize>());
            assert!(held.bytes <= self.limit && held.children.values().all(|count| *count > 0));
        }
    }

    proptest! {
        #[test]
        fn the_least_recently_used_end_leaves_first(
            uses in prop::collection::vec((0u8..12, 1usize..40, 0u8..18, any::<bool>()), 1..120),
        ) {
            let memory = MemoryTier::new(100);
            let key = |number: u8| id(number, 0).key;
            // The plain model: records with their sizes and parents, the last one used at the end.
            let mut model: Vec<(u8, usize, Option<u8>)> = Vec::new();
            for (number, len, parent, is_kept) in uses {
                let before = model.iter().position(|(other, ..)| *other == number).map(|at| model.remove(at));
                let mut expected: Vec<_> = before.iter().flat_map(|(_, len, _)| buffers(*len, number)).collect();
                if is_kept {
                    // Without circles.
                    let parent = Some(parent).filter(|parent| *parent < number);
                    model.push((number, len, parent));
                    while model.iter().map(|(_, len, _)| len).sum::<usize>() > 100 {
                        let is_end = |(one, ..): &(u8, usize, Option<u8>)| {
                            *one != number && model.iter().all(|(.., parent)| *parent != Some(*one))
                        };
                        let (gone, len, _) = model.remove(model.iter().position(is_end).unwrap_or(model.len() - 1));
                        expected.extend(buffers(len, gone));
                    }
                    let record = Kept { parent: parent.map(key), ..kept(id(number, 0), len, number) };
                    prop_assert_eq!(memory.keep(record), expected);
                } else {
                    prop_assert_eq!(memory.take(&id(number, 0)), before.map(|_| expected));
                }
                memory.check();
                for number in 0..12 {
                    let is_here = model.iter().any(|(other, ..)| *other == number);
                    prop_assert_eq!(memory.contains(&key(number)), is_here);
                }
            }
        }

        #[test]
        fn records_with_any_parents_leave(
            uses in prop::collection::vec((0u8..12, 1usize..40, 0u8..12, any::<bool>()), 1..120),
        ) {
            let memory = MemoryTier::new(100);
            let key = |number: u8| id(number, 0).key;
            for (number, len, parent, is_kept) in uses {
                if is_kept {
                    memory.keep(Kept { parent: Some(key(parent)), ..kept(id(number, 0), len, number) });
                } else {
                    memory.take(&id(number, 0));
                }
                memory.check();
            }
            for number in 100..150 {
                memory.keep(kept(id(number, 0), 40, number));
                memory.check();
            }
            prop_assert!((0..12).all(|number| !memory.contains(&key(number))), "others came later");
            prop_assert!([148, 149].map(key).iter().all(|key| memory.contains(key)));
        }

        #[test]
        fn the_least_recently_kept_leave_first(uses in prop::collection::vec((0u8..12, 1usize..60, any::<bool>()), 1..80)) {
            let memory = MemoryTier::new(100);
            // The plain model: records with their sizes, the last one used at the end.
            let mut model: Vec<(u8, usize)> = Vec::new();
            for (number, len, is_kept) in uses {
                let before = model.iter().position(|(other, _)| *other == number).map(|at| model.remove(at));
                if is_kept {
                    memory.keep(kept(id(number, 0), len, number));
                    model.push((number, len));
                    while model.iter().map(|(_, len)| len).sum::<usize>() > 100 {
                        model.remove(0);
                    }
                } else {
                    let expected = before.map(|(_, len)| buffers(len, number));
                    prop_assert_eq!(memory.take(&id(number, 0)), expected);
                }
                prop_assert_eq!(memory.usage().bytes, model.iter().map(|(_, len)| len).sum::<usize>());
                for number in 0..12 {
                    let is_here = model.iter().any(|(other, _)| *other == number);
                    prop_assert_eq!(memory.contains(&id(number, 0).key), is_here);
                }
            }
        }
    }
}
