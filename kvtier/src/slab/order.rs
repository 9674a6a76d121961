//! The order in which records leave: the least recently used first, but no record before one that needs it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kvcore::BlockKey;

/// The order in which records leave.
///
/// A record that others name as their parent is no leaf, and stays until they have left. Every change costs a
/// logarithm of the number of records.
#[derive(Debug, Default)]
pub(super) struct Order {
    tick: u64,
    ranks: HashMap<BlockKey, Rank>,
    /// All records, by their ticks.
    used: BTreeMap<u64, BlockKey>,
    /// The ticks of the records that no other record needs.
    leaves: BTreeSet<u64>,
    /// The number of records that name a key as their parent, whether or not the parent is here.
    children: HashMap<BlockKey, u32>,
}

/// A record's place in the order.
#[derive(Debug, Clone, Copy)]
struct Rank {
    /// The time of the last use.
    tick: u64,
    parent: Option<BlockKey>,
}

impl Order {
    /// Adds a record, or moves it to the end.
    pub(super) fn insert(&mut self, key: BlockKey, parent: Option<BlockKey>) {
        self.remove(&key);
        self.tick += 1;
        let parent = parent.filter(|parent| *parent != key);
        if let Some(parent) = parent {
            *self.children.entry(parent).or_default() += 1;
            if let Some(rank) = self.ranks.get(&parent) {
                self.leaves.remove(&rank.tick);
            }
        }
        self.ranks.insert(key, Rank { tick: self.tick, parent });
        self.used.insert(self.tick, key);
        if !self.children.contains_key(&key) {
            self.leaves.insert(self.tick);
        }
    }

    /// Removes a record, if it is here.
    pub(super) fn remove(&mut self, key: &BlockKey) {
        let Some(Rank { tick, parent }) = self.ranks.remove(key) else { return };
        self.used.remove(&tick);
        self.leaves.remove(&tick);
        let Some(parent) = parent else { return };
        if let Some(count) = self.children.get_mut(&parent) {
            *count -= 1;
            if *count > 0 {
                return;
            }
            self.children.remove(&parent);
        }
        if let Some(rank) = self.ranks.get(&parent) {
            self.leaves.insert(rank.tick);
        }
    }

    /// Makes a record the most recently used one.
    pub(super) fn touch(&mut self, key: &BlockKey) {
        let Some(rank) = self.ranks.get_mut(key) else { return };
        self.tick += 1;
        self.used.remove(&rank.tick);
        self.used.insert(self.tick, *key);
        if self.leaves.remove(&rank.tick) {
            self.leaves.insert(self.tick);
        }
        rank.tick = self.tick;
    }

    /// Moves the records for which `later` is true behind all others, in their order.
    pub(super) fn prefer(&mut self, later: impl Fn(&BlockKey) -> bool) {
        let keys: Vec<BlockKey> = self.keys().filter(|key| later(key)).copied().collect();
        for key in &keys {
            self.touch(key);
        }
    }

    /// Returns the first record that may leave.
    pub(super) fn first(&self, mut may_leave: impl FnMut(&BlockKey) -> bool) -> Option<BlockKey> {
        let leaf = self.leaves.iter().filter_map(|tick| self.used.get(tick)).find(|key| may_leave(key));
        // Records of a damaged file may be one another's parents.
        leaf.or_else(|| self.keys().find(|key| may_leave(key))).copied()
    }

    /// Returns all records, the least recently used first.
    pub(super) fn keys(&self) -> impl Iterator<Item = &BlockKey> {
        self.used.values()
    }

    /// Checks the lists against each other, and against the number of records. Returns a description of the
    /// first inconsistency as `Err`.
    pub(super) fn check(&self, records: usize) -> Result<(), String> {
        let mut children: HashMap<BlockKey, u32> = HashMap::new();
        for parent in self.ranks.values().filter_map(|rank| rank.parent) {
            *children.entry(parent).or_default() += 1;
        }
        let is_leaf = |key: &BlockKey, rank: &Rank| {
            self.leaves.contains(&rank.tick) != children.contains_key(key)
                && self.used.get(&rank.tick) == Some(key)
        };
        let sound = self.ranks.len() == records
            && self.used.len() == records
            && children == self.children
            && self.ranks.iter().all(|(key, rank)| is_leaf(key, rank));
        if sound { Ok(()) } else { Err("the order of eviction does not list every record once".to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(number: u8) -> BlockKey {
        BlockKey::from_bytes([number; 32])
    }

    #[derive(Debug, Clone)]
    enum Change {
        Insert(u8, Option<u8>),
        Remove(u8),
        Touch(u8),
        Evict,
    }

    fn changes() -> impl Strategy<Value = Vec<Change>> {
        let number = 1..12u8;
        let change = prop_oneof![
            // A parent has a smaller number, so there are no circles.
            (number.clone(), any::<Option<u8>>())
                .prop_map(|(of, by)| Change::Insert(of, by.map(|by| by % of).filter(|&by| by > 0))),
            number.clone().prop_map(Change::Remove),
            number.prop_map(Change::Touch),
            Just(Change::Evict),
        ];
        proptest::collection::vec(change, 0..60)
    }

    proptest! {
        #[test]
        fn records_leave_as_from_a_plain_list(changes in changes()) {
            let mut order = Order::default();
            let mut plain: Vec<(u8, Option<u8>)> = Vec::new();
            for change in changes {
                match change {
                    Change::Insert(number, parent) => {
                        order.insert(key(number), parent.map(key));
                        plain.retain(|(other, _)| *other != number);
                        plain.push((number, parent));
                    }
                    Change::Remove(number) => {
                        order.remove(&key(number));
                        plain.retain(|(other, _)| *other != number);
                    }
                    Change::Touch(number) => {
                        order.touch(&key(number));
                        if let Some(at) = plain.iter().position(|(other, _)| *other == number) {
                            let touched = plain.remove(at);
                            plain.push(touched);
                        }
                    }
                    Change::Evict => {
                        let needed = |number| plain.iter().any(|&(_, parent)| parent == Some(number));
                        let leaving = plain.iter().map(|&(number, _)| number).find(|&number| !needed(number));
                        prop_assert_eq!(order.first(|_| true), leaving.map(key));
                        if let Some(leaving) = leaving {
                            order.remove(&key(leaving));
                            plain.retain(|&(number, _)| number != leaving);
                        }
                    }
                }
                order.check(plain.len()).unwrap();
                let keys: Vec<_> = order.keys().copied().collect();
                prop_assert_eq!(keys, plain.iter().map(|&(number, _)| key(number)).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn records_that_need_each_other_leave_all_the_same() {
        let mut order = Order::default();
        order.insert(key(1), Some(key(2)));
        order.insert(key(2), Some(key(1)));
        order.insert(key(3), Some(key(3)));
        for number in [3, 1, 2] {
            assert_eq!(order.first(|_| true), Some(key(number)));
            order.remove(&key(number));
            order.check(usize::from(if number == 3 { 2 } else { number % 2 })).unwrap();
        }
    }
}
