//! The order in which records leave: by the policy of their group, but no record before one that needs it.
//!
//! ```text
//!   insert ──► ranked ◄── release / touch
//!                │  └──── hold ──► held                          a load reads it
//!                └─ chosen ─┬─► leaves
//!                           └─► waiting ──► due ──► leaves       others need it; they have left
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kvcore::{BlockKey, PolicyKind};

use super::accounts::Group;
use super::ranking::Ranking;

/// The order in which records leave, and the order in which they were used.
///
/// A record that others name as their parent stays until they have left: if its policy chooses it before, it waits
/// for them, and is the next one to leave after the last one of them.
#[derive(Debug)]
pub(super) struct Order {
    policy: PolicyKind,
    tick: u64,
    places: HashMap<BlockKey, Place>,
    /// All records, by the times of their last uses.
    used: BTreeMap<u64, BlockKey>,
    groups: BTreeMap<Group, Leaving>,
    /// The number of records that name a key as their parent, whether or not the parent is here.
    children: HashMap<BlockKey, u32>,
    held: usize,
}

/// A record's place in the order.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// The time of the last use.
    tick: u64,
    group: Group,
    /// The number in the group's ranking.
    number: u32,
    parent: Option<BlockKey>,
    uses: u8,
    standing: Standing,
}

/// Whether a record may leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// The policy decides.
    Ranked,
    /// It is being read, and stays.
    Held,
    /// The policy has chosen it. It leaves after the records that need it.
    Waiting,
}

/// The records of one group.
#[derive(Debug)]
struct Leaving {
    ranking: Ranking,
    /// The ticks of the records that wait for others to leave.
    waiting: BTreeSet<u64>,
    /// The ticks of the records that have waited, and that no other record needs any more.
    due: BTreeSet<u64>,
}

impl Leaving {
    /// Takes a record out of its standing, so that it neither leaves nor waits.
    fn withdraw(&mut self, place: &Place) {
        match place.standing {
            Standing::Ranked => self.ranking.hold(place.number),
            Standing::Held => {}
            Standing::Waiting => {
                self.waiting.remove(&place.tick);
                self.due.remove(&place.tick);
            }
        }
    }
}

impl Order {
    /// Creates an order without records.
    pub(super) fn new(policy: PolicyKind) -> Self {
        Self {
            policy,
            tick: 0,
            places: HashMap::new(),
            used: BTreeMap::new(),
            groups: BTreeMap::new(),
            children: HashMap::new(),
            held: 0,
        }
    }

    /// Adds a record that has been used `uses` times, as the last one that was used. It must not be here.
    pub(super) fn insert(&mut self, key: BlockKey, parent: Option<BlockKey>, group: Group, uses: u8) {
        self.tick += 1;
        let parent = parent.filter(|parent| *parent != key);
        self.expect(parent);
        // Records of other models are never used, so the order of their last uses is all that is known of them.
        let policy = if group == Group::Foreign { PolicyKind::Lru } else { self.policy };
        let leaving = self.groups.entry(group).or_insert_with(|| Leaving {
            ranking: Ranking::new(policy),
            waiting: BTreeSet::new(),
            due: BTreeSet::new(),
        });
        let number = leaving.ranking.admit(key, uses);
        let place = Place { tick: self.tick, group, number, parent, uses, standing: Standing::Ranked };
        self.places.insert(key, place);
        self.used.insert(self.tick, key);
    }

    /// Keeps a record for a child that is being written, until [`expect_no_longer`](Self::expect_no_longer).
    pub(super) fn expect(&mut self, parent: Option<BlockKey>) {
        let Some(parent) = parent else { return };
        *self.children.entry(parent).or_default() += 1;
        if let Some(place) = self.places.get(&parent)
            && let Some(leaving) = self.groups.get_mut(&place.group)
        {
            leaving.due.remove(&place.tick);
        }
    }

    /// Lets a record leave that was kept for a child, unless it has others.
    pub(super) fn expect_no_longer(&mut self, parent: Option<BlockKey>) {
        let Some(parent) = parent else { return };
        if let Some(count) = self.children.get_mut(&parent) {
            *count -= 1;
            if *count > 0 {
                return;
            }
            self.children.remove(&parent);
        }
        if let Some(place) = self.places.get(&parent).filter(|place| place.standing == Standing::Waiting)
            && let Some(leaving) = self.groups.get_mut(&place.group)
        {
            leaving.due.insert(place.tick);
        }
    }

    /// Removes a record, if it is here.
    pub(super) fn remove(&mut self, key: &BlockKey) {
        let Some(place) = self.places.remove(key) else { return };
        self.used.remove(&place.tick);
        self.held -= usize::from(place.standing == Standing::Held);
        if let Some(leaving) = self.groups.get_mut(&place.group) {
            leaving.withdraw(&place);
            leaving.ranking.retire(place.number);
        }
        self.expect_no_longer(place.parent);
    }

    /// Records a use of a record that nobody reads.
    pub(super) fn touch(&mut self, key: &BlockKey) {
        if self.places.get(key).is_some_and(|place| place.standing != Standing::Held) {
            self.hold(key);
            self.release(key);
        }
    }

    /// Records a use of a record, and keeps it until it is [released](Self::release).
    pub(super) fn hold(&mut self, key: &BlockKey) {
        let Some(place) = self.places.get_mut(key) else { return };
        let Some(leaving) = self.groups.get_mut(&place.group) else { return };
        place.uses = leaving.ranking.hit(place.number);
        leaving.withdraw(place);
        self.held += usize::from(place.standing != Standing::Held);
        place.standing = Standing::Held;
    }

    /// Makes a record that was held the most recently used one.
    pub(super) fn release(&mut self, key: &BlockKey) {
        let held = |place: &&mut Place| place.standing == Standing::Held;
        let Some(place) = self.places.get_mut(key).filter(held) else { return };
        let Some(leaving) = self.groups.get_mut(&place.group) else { return };
        self.held -= 1;
        self.tick += 1;
        self.used.remove(&place.tick);
        self.used.insert(self.tick, *key);
        place.tick = self.tick;
        place.standing = Standing::Ranked;
        leaving.ranking.queue(place.number);
    }

    /// Removes the record of a group that leaves next, and returns its key. Returns `None` if all are being read,
    /// or are needed by others.
    pub(super) fn evict(&mut self, group: Group) -> Option<BlockKey> {
        let leaving = self.groups.get_mut(&group)?;
        if let Some(key) = leaving.due.first().and_then(|tick| self.used.get(tick)).copied() {
            self.remove(&key);
            return Some(key);
        }
        while let Some(key) = leaving.ranking.choose() {
            let Some(place) = self.places.get_mut(&key) else { continue };
            place.standing = Standing::Waiting;
            leaving.waiting.insert(place.tick);
            if !self.children.contains_key(&key) {
                self.remove(&key);
                return Some(key);
            }
        }
        None
    }

    /// Removes a record that waits for others although none of them can leave, because they wait for one another.
    /// Only a damaged file contains such records. Must be called if no group has a record to evict.
    pub(super) fn evict_circle(&mut self) -> Option<BlockKey> {
        // Otherwise, a record that is being read may be what others wait for.
        let tick =
            self.groups.values().filter(|_| self.held == 0).find_map(|leaving| leaving.waiting.first());
        let key = tick.and_then(|tick| self.used.get(tick)).copied()?;
        self.remove(&key);
        Some(key)
    }

    /// Returns all records with the numbers of their uses, the least recently used first.
    pub(super) fn used(&self) -> impl Iterator<Item = (&BlockKey, u8)> {
        self.used.values().filter_map(|key| Some((key, self.places.get(key)?.uses)))
    }

    /// Checks the lists against each other, and against the number of records. Returns a description of the
    /// first inconsistency as `Err`.
    pub(super) fn check(&self, records: usize) -> Result<(), String> {
        let mut children: HashMap<BlockKey, u32> = HashMap::new();
        for parent in self.places.values().filter_map(|place| place.parent) {
            *children.entry(parent).or_default() += 1;
        }
        let is_listed = |(key, place): (&BlockKey, &Place)| {
            let waits = place.standing == Standing::Waiting;
            let is_due = waits && !children.contains_key(key);
            self.used.get(&place.tick) == Some(key)
                && self.groups.get(&place.group).is_some_and(|leaving| {
                    leaving.waiting.contains(&place.tick) == waits
                        && leaving.due.contains(&place.tick) == is_due
                })
        };
        let count = |standing| self.places.values().filter(|place| place.standing == standing).count();
        let ranked: usize = self.groups.values().map(|leaving| leaving.ranking.len()).sum();
        let waiting: usize = self.groups.values().map(|leaving| leaving.waiting.len()).sum();
        let sound = self.places.len() == records
            && self.used.len() == records
            && children == self.children
            && self.places.iter().all(is_listed)
            && [ranked, self.held, waiting]
                == [Standing::Ranked, Standing::Held, Standing::Waiting].map(count);
        if sound { Ok(()) } else { Err("the order of eviction does not list every record once".to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::AccountId;

    const OWN: Group = Group::Own(AccountId::DEFAULT);

    fn key(number: u8) -> BlockKey {
        BlockKey::from_bytes([number; 32])
    }

    #[derive(Debug, Clone)]
    enum Change {
        Insert(u8, Option<u8>),
        Remove(u8),
        Touch(u8),
        Hold(u8),
        Release(u8),
        Evict,
    }

    fn changes(records: u8, holds: bool) -> impl Strategy<Value = Vec<Change>> {
        let number = 1..records;
        let change = prop_oneof![
            // A parent has a smaller number, so there are no circles.
            3 => (number.clone(), any::<Option<u8>>())
                .prop_map(|(of, by)| Change::Insert(of, by.map(|by| by % of).filter(|&by| by > 0))),
            1 => number.clone().prop_map(Change::Remove),
            2 => number.clone().prop_map(Change::Touch),
            u32::from(holds) => number.clone().prop_map(Change::Hold),
            u32::from(holds) => number.prop_map(Change::Release),
            2 => Just(Change::Evict),
        ];
        proptest::collection::vec(change, 0..150)
    }

    proptest! {
        #[test]
        fn the_least_recently_used_leave_as_from_a_plain_list(changes in changes(12, false)) {
            let mut order = Order::new(PolicyKind::Lru);
            let mut plain: Vec<(u8, Option<u8>)> = Vec::new();
            for change in changes {
                match change {
                    Change::Insert(number, parent) => {
                        order.remove(&key(number));
                        order.insert(key(number), parent.map(key), OWN, 0);
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
                    Change::Hold(_) | Change::Release(_) => {}
                    Change::Evict => {
                        let needed = |number| plain.iter().any(|&(_, parent)| parent == Some(number));
                        let leaving = plain.iter().map(|&(number, _)| number).find(|&number| !needed(number));
                        prop_assert_eq!(order.evict(OWN), leaving.map(key));
                        plain.retain(|&(number, _)| Some(number) != leaving);
                    }
                }
                order.check(plain.len()).unwrap();
                let keys: Vec<_> = order.used().map(|(key, _)| *key).collect();
                prop_assert_eq!(keys, plain.iter().map(|&(number, _)| key(number)).collect::<Vec<_>>());
            }
        }

        #[test]
        fn under_every_policy_nothing_leaves_that_is_needed_or_read(changes in changes(200, true)) {
            for policy in PolicyKind::ALL {
                let mut order = Order::new(policy);
                // The parent of each record, and whether the record is held.
                let mut here: BTreeMap<u8, (Option<u8>, bool)> = BTreeMap::new();
                let needed = |here: &BTreeMap<u8, (Option<u8>, bool)>, number| {
                    here.values().any(|&(parent, _)| parent == Some(number))
                };
                for change in &changes {
                    match *change {
                        Change::Insert(number, parent) => {
                            order.remove(&key(number));
                            order.insert(key(number), parent.map(key), OWN, number % 5);
                            here.insert(number, (parent, false));
                        }
                        Change::Remove(number) => {
                            order.remove(&key(number));
                            here.remove(&number);
                        }
                        Change::Touch(number) => order.touch(&key(number)),
                        Change::Hold(number) => {
                            order.hold(&key(number));
                            here.entry(number).and_modify(|(_, held)| *held = true);
                        }
                        Change::Release(number) => {
                            order.release(&key(number));
                            here.entry(number).and_modify(|(_, held)| *held = false);
                        }
                        Change::Evict => {
                            let left = order.evict(OWN).map(|key| key.as_bytes()[0]);
                            let may_leave = |number: &u8| !needed(&here, *number) && !here[number].1;
                            let possible: Vec<u8> = here.keys().copied().filter(may_leave).collect();
                            prop_assert_eq!(left.is_some(), !possible.is_empty(), "{:?}", policy);
                            prop_assert!(left.is_none_or(|left| possible.contains(&left)), "{:?}", policy);
                            left.map(|left| here.remove(&left));
                        }
                    }
                    order.check(here.len()).unwrap();
                }
                // Everything leaves once, the children first.
                for &number in here.keys() {
                    order.release(&key(number));
                }
                while let Some(left) = order.evict(OWN) {
                    let left = left.as_bytes()[0];
                    prop_assert!(here.remove(&left).is_some() && !needed(&here, left), "{:?}", policy);
                }
                prop_assert!(here.is_empty(), "{:?}: {:?}", policy, here);
            }
        }
    }

    #[test]
    fn records_that_need_each_other_leave_all_the_same() {
        for policy in PolicyKind::ALL {
            let mut order = Order::new(policy);
            order.insert(key(1), Some(key(2)), OWN, 0);
            order.insert(key(2), Some(key(1)), OWN, 0);
            order.insert(key(3), Some(key(3)), OWN, 0);
            let mut left = Vec::new();
            while let Some(key) = order.evict(OWN).or_else(|| order.evict_circle()) {
                left.push(key.as_bytes()[0]);
                order.check(3 - left.len()).unwrap();
            }
            assert_eq!(left[0], 3, "{policy:?}");
            left.sort_unstable();
            assert_eq!(left, [1, 2, 3], "{policy:?}");
        }
    }

    #[test]
    fn a_record_that_is_read_keeps_those_that_it_needs() {
        let mut order = Order::new(PolicyKind::Lru);
        order.insert(key(1), None, OWN, 0);
        order.insert(key(2), Some(key(1)), OWN, 0);
        order.hold(&key(2));
        assert_eq!((order.evict(OWN), order.evict_circle()), (None, None));
        order.release(&key(2));
        assert_eq!(
            [order.evict(OWN), order.evict(OWN), order.evict(OWN)],
            [Some(key(2)), Some(key(1)), None]
        );
    }
}
