//! The order in which the records of one group leave, by an eviction policy of the block pool.

use kvcore::{BlockKey, EvictionPolicy, PolicyEntry, PolicyKind};

/// The number of records for which a new ranking has room.
const FIRST: usize = 64;

/// The most uses of a record that are remembered. The policies distinguish no more.
pub(super) const MOST_USES: u8 = 15;

/// An eviction policy over records. The policy knows each record by a number.
///
/// The sizes of a policy's queues follow from the number of records for which it was created. The number of records
/// that a slab can contain depends on their sizes, so a policy that has become too small is replaced by a larger one,
/// which learns again how often each record was used.
#[derive(Debug)]
pub(super) struct Ranking {
    kind: PolicyKind,
    policy: Box<dyn EvictionPolicy>,
    wants_hits: bool,
    /// The key and the uses of each number's record. Numbers that are free contain the record before.
    records: Vec<(BlockKey, u8)>,
    free: Vec<u32>,
}

impl Ranking {
    /// Creates a ranking without records.
    pub(super) fn new(kind: PolicyKind) -> Self {
        let policy = kind.build(FIRST);
        let records = vec![(BlockKey::from_bytes([0; 32]), 0); FIRST];
        let free = (0..FIRST as u32).rev().collect();
        Self { kind, wants_hits: policy.wants_hits(), policy, records, free }
    }

    /// Adds a record that has been used `uses` times, and returns its number.
    pub(super) fn admit(&mut self, key: BlockKey, uses: u8) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| self.grow());
        self.records[number as usize] = (key, uses);
        self.queue(number);
        self.learn(number);
        number
    }

    /// Replaces the policy by one for more records, and returns a number that is free.
    fn grow(&mut self) -> u32 {
        let before = self.records.len();
        let capacity = before + before / 2;
        let order: Vec<u32> = std::iter::from_fn(|| self.policy.evict(0)).collect();
        self.policy = self.kind.build(capacity);
        for number in order {
            self.queue(number);
            self.learn(number);
        }
        self.records.resize(capacity, (BlockKey::from_bytes([0; 32]), 0));
        self.free.extend((before as u32..capacity as u32).rev());
        self.free.pop().unwrap_or_default()
    }

    /// Tells the policy how often a record was used.
    fn learn(&mut self, number: u32) {
        let (key, uses) = self.records[number as usize];
        for _ in 0..if self.wants_hits { uses } else { 0 } {
            self.policy.hit(number, &key);
        }
    }

    /// Records that a record is used. Returns the number of its uses.
    pub(super) fn hit(&mut self, number: u32) -> u8 {
        let (key, uses) = &mut self.records[number as usize];
        *uses = uses.saturating_add(1).min(MOST_USES);
        if self.wants_hits {
            self.policy.hit(number, key);
        }
        *uses
    }

    /// Lets a record leave that was [held](Self::hold) or [chosen](Self::choose).
    pub(super) fn queue(&mut self, number: u32) {
        let (key, _) = &self.records[number as usize];
        self.policy.insert(number, &PolicyEntry { key: Some(key), ..PolicyEntry::default() });
    }

    /// Keeps a record from leaving.
    pub(super) fn hold(&mut self, number: u32) {
        self.policy.remove(number);
    }

    /// Chooses the record that leaves next, and returns its key. The record keeps its number.
    pub(super) fn choose(&mut self) -> Option<BlockKey> {
        self.policy.evict(0).map(|number| self.records[number as usize].0)
    }

    /// Frees the number of a record that is held or chosen.
    pub(super) fn retire(&mut self, number: u32) {
        self.free.push(number);
    }

    /// Returns the number of records that may leave.
    pub(super) fn len(&self) -> usize {
        self.policy.len()
    }
}
