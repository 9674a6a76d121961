//! Accounts: how many cells and records each tenant has, and whose records leave first.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::record::AccountId;

/// Records that are counted together, and leave in one order. Those of other models come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Group {
    /// Records of other models, tokenizers and formats.
    Foreign,
    /// The records of a tenant.
    Own(AccountId),
}

/// The accounts of a slab.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    all: BTreeMap<Group, Account>,
}

/// The use of a disk by a tenant, in cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Account {
    /// The cells of its records, and of those that are being written.
    pub(super) cells: u32,
    /// The cells of those that are being written.
    pub(super) written: u32,
    pub(super) records: usize,
    /// The largest number of cells, or `None` for all.
    pub(super) limit: Option<u32>,
    /// The number of records that were evicted.
    pub(super) evicted: u64,
}

impl Accounts {
    /// Returns a group's account.
    pub(super) fn get(&self, group: Group) -> Account {
        self.all.get(&group).copied().unwrap_or_default()
    }

    /// Returns a group's account, to be changed.
    pub(super) fn of(&mut self, group: Group) -> &mut Account {
        self.all.entry(group).or_default()
    }

    /// Returns all accounts.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Group, &Account)> {
        self.all.iter().map(|(&group, account)| (group, account))
    }

    /// Returns the group that gives up records first.
    pub(super) fn most_pressed(&self, cells: u32) -> Option<Group> {
        self.pressed(cells).min_by(gives_first).map(|(group, _)| group)
    }

    /// Returns the groups in the order in which they give up records.
    pub(super) fn by_pressure(&self, cells: u32) -> Vec<Group> {
        let mut groups: Vec<_> = self.pressed(cells).collect();
        groups.sort_by(gives_first);
        groups.into_iter().map(|(group, _)| group).collect()
    }

    /// Returns the groups that have records, each with the share of its limit that it uses. A tenant without a limit
    /// may use `cells`.
    fn pressed(&self, cells: u32) -> impl Iterator<Item = (Group, f64)> {
        let pressure = move |account: &Account| {
            f64::from(account.cells) / f64::from(account.limit.unwrap_or(cells).clamp(1, cells.max(1)))
        };
        let used = self.all.iter().filter(|(_, account)| account.records > 0);
        used.map(move |(&group, account)| (group, pressure(account)))
    }
}

/// Orders groups: first those of other models, and then the tenants that use the largest shares of their limits.
fn gives_first(&(a, of_a): &(Group, f64), &(b, of_b): &(Group, f64)) -> Ordering {
    let is_own = |group: Group| group != Group::Foreign;
    is_own(a).cmp(&is_own(b)).then(of_b.total_cmp(&of_a)).then(a.cmp(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_models_give_first_and_then_those_that_use_most_of_what_they_may() {
        let mut accounts = Accounts::default();
        let own = |number| Group::Own(AccountId::from_bits(number));
        let each = [
            (own(1), 50, None),
            (own(2), 10, Some(20)),
            (own(3), 30, Some(200)),
            (Group::Foreign, 1, None),
            (own(4), 9, Some(0)),
        ];
        for (group, cells, limit) in each {
            *accounts.of(group) = Account { cells, records: 1, limit, ..Account::default() };
        }
        *accounts.of(own(5)) = Account { cells: 90, ..Account::default() };
        let order = accounts.by_pressure(100);
        assert_eq!(order, [Group::Foreign, own(4), own(1), own(2), own(3)]);
        assert_eq!(accounts.most_pressed(100), Some(Group::Foreign));
        accounts.of(Group::Foreign).records = 0;
        assert_eq!(accounts.most_pressed(100), Some(own(4)));
        assert_eq!(Accounts::default().most_pressed(100), None);
        assert_eq!(accounts.get(own(9)), Account::default());
    }
}
