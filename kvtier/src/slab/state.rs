//! The records of a slab, the order in which they leave, and the cells.

use std::collections::HashMap;

use kvcore::{BlockKey, PolicyKind};

use super::accounts::{Accounts, Group};
use super::cells::{CellSet, count};
use super::flight::{InFlight, Taken};
use super::geometry::Geometry;
use super::order::Order;
use super::table::{Listed, Table};
use crate::known::KnownKeys;
use crate::record::{AccountId, CellRun, Header, RecordNote};

/// The fraction of a slab's cells that a checkpoint opens.
const OPENED: u32 = 8;

/// The distance that the numbers of writes jump when a slab is opened. The file may contain headers with numbers that the last
/// checkpoint does not know, in cells that are free again.
const JUMP: u64 = 1 << 32;

/// The largest number of cells that a checkpoint opens. After a crash, the first page of each is read.
const MOST_OPENED: u32 = 4096;

/// A stored record.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) scope: BlockKey,
    pub(super) sequence: u64,
    pub(super) payload: usize,
    pub(super) note: RecordNote,
    pub(super) created: u64,
    /// The digest of the record's identity.
    identity: u64,
    pub(super) runs: Vec<CellRun>,
    /// The number of loads under way. A record that is being read is not evicted.
    pub(super) readers: u32,
    /// True if a load has asked for another identity since the record was stored.
    doubted: bool,
}

/// The reason why a record gets no cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoCells {
    /// None are open. After a checkpoint, there may be some.
    Closed,
    /// The tenant's limit is used by records that are being written. After the batches under way, there may be some.
    InUse,
    /// Nothing that may leave makes enough room.
    NoRoom,
    /// The disk refuses the checkpoint that would open them.
    Refused,
}

/// A checkpoint that is being written, and the cells that it opens.
pub(super) struct Checkpoint {
    pub(super) table: Table,
    opened: Vec<CellRun>,
}

/// The records and the cells.
#[derive(Debug)]
pub(super) struct SlabState {
    geometry: Geometry,
    /// The key of the model, tokenizer and format of this process. Without one, all records are of others.
    scope: Option<BlockKey>,
    pub(super) accounts: Accounts,
    records: HashMap<BlockKey, Entry>,
    order: Order,
    pub(super) known: KnownKeys,
    /// Free cells that may be written now.
    open: CellSet,
    /// Free cells that the next checkpoint may open.
    closed: CellSet,
    flight: InFlight,
    /// Cells that were taken from a damaged record. They are not used again while this slab is open.
    pub(super) quarantined: u32,
    pub(super) sequence: u64,
    pub(super) generation: u64,
    pub(super) evicted: u64,
}

impl SlabState {
    /// Creates the state of a slab without records, for the records of `scope`.
    pub(super) fn new(geometry: Geometry, policy: PolicyKind, scope: Option<BlockKey>) -> Self {
        let mut closed = CellSet::default();
        closed.add(CellRun { start: 0, count: geometry.cells });
        Self {
            geometry,
            scope,
            accounts: Accounts::default(),
            records: HashMap::new(),
            order: Order::new(policy),
            known: KnownKeys::default(),
            open: CellSet::default(),
            closed,
            flight: InFlight::default(),
            quarantined: 0,
            sequence: 0,
            generation: 0,
            evicted: 0,
        }
    }

    /// Adds what a checkpoint lists, as far as it is consistent. Half of the uses of each record are forgotten, so that
    /// records that were popular long ago leave at last.
    pub(super) fn restore(&mut self, table: Table) {
        (self.sequence, self.generation) = (table.sequence, table.generation);
        for listed in table.records {
            let uses = listed.uses / 2;
            self.adopt(Listed { uses, ..listed });
        }
        for run in table.open {
            if self.geometry.has(run) && self.closed.remove(run) {
                self.open.add(run);
            }
        }
    }

    /// Returns the group of a record.
    fn group(&self, scope: &BlockKey, account: AccountId) -> Group {
        if self.scope.as_ref() == Some(scope) { Group::Own(account) } else { Group::Foreign }
    }

    /// Adds a record that is on the disk, unless its cells are not free or a newer record has its key.
    pub(super) fn adopt(&mut self, listed: Listed) {
        let Listed { key, scope, sequence, payload, note, ref runs, .. } = listed;
        let cells: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let sound = cells == u64::from(self.geometry.cells_for(payload))
            && runs.iter().all(|&run| self.geometry.has(run));
        if !sound || self.records.get(&key).is_some_and(|known| known.sequence >= sequence) {
            return;
        }
        let mut taken = Vec::new();
        for &run in runs {
            if self.closed.remove(run) || self.open.remove(run) {
                taken.push(run);
            }
        }
        if taken.len() < runs.len() {
            self.close(sequence, taken);
            return;
        }
        self.charge(self.group(&scope, note.account), runs);
        self.sequence = self.sequence.max(sequence);
        self.insert(listed);
    }

    /// Adds a record whose cells have been taken. An older record with the same key is replaced; if there is a
    /// newer one, the cells are free again.
    pub(super) fn insert(&mut self, listed: Listed) {
        let Listed { key, scope, sequence, payload, note, created, identity, uses, runs } = listed;
        let group = self.group(&scope, note.account);
        if self.records.get(&key).is_some_and(|known| known.sequence > sequence) {
            return self.give_back(group, Taken { sequence, runs, parent: note.parent });
        }
        self.remove(&key);
        self.order.insert(key, note.parent, group, uses);
        self.landed(sequence, note.parent);
        self.known.insert(note.text, key);
        let account = self.accounts.of(group);
        account.records += 1;
        account.written -= count(&runs);
        let (readers, doubted) = (0, false);
        let entry = Entry { scope, sequence, payload, note, created, identity, runs, readers, doubted };
        self.records.insert(key, entry);
        // The limit may have been lowered while the record was written.
        let _ = self.fit(group, 0);
    }

    /// Removes records whose parents are neither here nor among those that `waits` knows, because nobody can find
    /// them.
    pub(super) fn remove_orphans(&mut self, waits: impl Fn(Option<BlockKey>) -> bool) {
        let is_orphan = |entry: &Entry| !self.has_parent(&entry.note) && !waits(entry.note.parent);
        let orphans = self.records.iter().filter(|(_, entry)| is_orphan(entry));
        let mut leaving: Vec<BlockKey> = orphans.map(|(key, _)| *key).collect();
        if leaving.is_empty() {
            return;
        }
        let mut children = HashMap::<BlockKey, Vec<BlockKey>>::new();
        for (&key, entry) in &self.records {
            if let Some(parent) = entry.note.parent {
                children.entry(parent).or_default().push(key);
            }
        }
        while let Some(key) = leaving.pop() {
            self.remove(&key);
            if !waits(Some(key)) {
                leaving.extend(children.remove(&key).unwrap_or_default());
            }
        }
    }

    /// Ends the restoring of a slab: later writes have larger numbers than all headers in the file.
    pub(super) fn restored(&mut self) {
        self.sequence = self.sequence.saturating_add(JUMP);
    }

    /// Returns whether the record's parent is here, or it has none.
    pub(super) fn has_parent(&self, note: &RecordNote) -> bool {
        note.parent.is_none_or(|parent| self.records.contains_key(&parent))
    }

    /// Records a use of a record. Returns false if it is not here.
    pub(super) fn touch(&mut self, key: &BlockKey) -> bool {
        self.order.touch(key);
        self.records.contains_key(key)
    }

    /// Returns a record that is being read from now on, until it is [released](Self::release).
    pub(super) fn hold(&mut self, key: &BlockKey) -> Option<&Entry> {
        self.order.hold(key);
        let entry = self.records.get_mut(key)?;
        entry.readers += 1;
        Some(entry)
    }

    /// Ends one reading of a record, unless another one has replaced it. Returns its group if nobody reads the record
    /// any longer, to be [settled](Self::settle).
    pub(super) fn release(&mut self, key: &BlockKey, sequence: u64) -> Option<Group> {
        let entry = self.records.get_mut(key).filter(|entry| entry.sequence == sequence)?;
        entry.readers -= 1;
        if entry.readers > 0 {
            return None;
        }
        let (scope, account) = (entry.scope, entry.note.account);
        self.order.release(key);
        Some(self.group(&scope, account))
    }

    /// Evicts what a group has above its limit, because it was read when the limit was lowered.
    pub(super) fn settle(&mut self, group: Group) {
        // What is being read or written still is all that may be above it.
        let _ = self.fit(group, 0);
    }

    /// Returns a record.
    pub(super) fn get(&self, key: &BlockKey) -> Option<&Entry> {
        self.records.get(key)
    }

    /// Returns whether a record has this key, and nobody has asked for another identity under it.
    pub(super) fn contains(&self, key: &BlockKey) -> bool {
        self.records.get(key).is_some_and(|entry| !entry.doubted)
    }

    /// Returns whether the record with this key has this identity. If so, it is no longer in doubt.
    pub(super) fn confirms(&mut self, key: &BlockKey, identity: u64) -> bool {
        let entry = self.records.get_mut(key).filter(|entry| entry.identity == identity);
        entry.is_some_and(|entry| {
            entry.doubted = false;
            true
        })
    }

    /// Notes that a load has asked for another identity than a record's.
    pub(super) fn doubt(&mut self, key: &BlockKey, sequence: u64) {
        if let Some(entry) = self.records.get_mut(key).filter(|entry| entry.sequence == sequence) {
            entry.doubted = true;
        }
    }

    /// Removes a record. Its cells are free after the next checkpoint.
    pub(super) fn remove(&mut self, key: &BlockKey) {
        if let Some(entry) = self.take_out(key) {
            self.close(entry.sequence, entry.runs);
        }
    }

    /// Removes a record whose cells are damaged. They are not used again.
    pub(super) fn quarantine(&mut self, key: &BlockKey, sequence: u64) {
        if self.records.get(key).is_some_and(|entry| entry.sequence == sequence)
            && let Some(entry) = self.take_out(key)
        {
            self.known.damaged(key);
            self.quarantined += count(&entry.runs);
        }
    }

    fn take_out(&mut self, key: &BlockKey) -> Option<Entry> {
        let entry = self.records.remove(key)?;
        self.order.remove(key);
        self.known.remove(entry.note.text, key);
        let account = self.accounts.of(self.group(&entry.scope, entry.note.account));
        account.records -= 1;
        account.cells -= count(&entry.runs);
        Some(entry)
    }

    /// Removes a record that leaves to make room.
    fn evict(&mut self, key: &BlockKey) {
        if let Some(entry) = self.records.get(key) {
            let group = self.group(&entry.scope, entry.note.account);
            self.accounts.of(group).evicted += 1;
        }
        self.remove(key);
        self.known.evicted(key);
        self.evicted += 1;
    }

    /// Counts cells that are written for a group from now on.
    fn charge(&mut self, group: Group, runs: &[CellRun]) {
        let account = self.accounts.of(group);
        account.cells += count(runs);
        account.written += count(runs);
    }

    /// Returns cells of a group that were taken and are not used after all.
    pub(super) fn give_back(&mut self, group: Group, taken: Taken) {
        let Taken { sequence, runs, parent } = taken;
        let account = self.accounts.of(group);
        account.cells -= count(&runs);
        account.written -= count(&runs);
        self.landed(sequence, parent);
        self.close(sequence, runs);
    }

    /// Ends a write, if it is one.
    fn landed(&mut self, sequence: u64, parent: Option<BlockKey>) {
        if self.flight.is_written(sequence) {
            self.order.expect_no_longer(parent);
        }
        for run in self.flight.end(sequence) {
            self.closed.add(run);
        }
    }

    /// Adds cells whose last write has this number to those that a later checkpoint may open.
    fn close(&mut self, sequence: u64, runs: Vec<CellRun>) {
        for run in self.flight.keep(sequence, runs).err().into_iter().flatten() {
            self.closed.add(run);
        }
    }

    /// Returns whether a tenant may have a record of so many cells.
    pub(super) fn allows(&self, account: AccountId, cells: u32) -> bool {
        self.accounts.get(Group::Own(account)).limit.is_none_or(|limit| cells <= limit)
    }

    /// Limits the cells of a group. Evicts what is above the limit.
    pub(super) fn limit(&mut self, group: Group, limit: Option<u32>) {
        self.accounts.of(group).limit = limit;
        self.settle(group);
    }

    /// Evicts a group's own records until it may take `needed` cells more.
    fn fit(&mut self, group: Group, needed: u32) -> Result<(), NoCells> {
        let Some(limit) = self.accounts.get(group).limit else { return Ok(()) };
        if needed > limit {
            return Err(NoCells::NoRoom);
        }
        while self.accounts.get(group).cells > limit - needed {
            let Some(key) = self.order.evict(group) else {
                let is_written = self.accounts.get(group).written > 0;
                return Err(if is_written { NoCells::InUse } else { NoCells::NoRoom });
            };
            self.evict(&key);
        }
        Ok(())
    }

    /// Takes open cells for a record that is written next. If its tenant has a limit, the tenant's own records make room,
    /// but not the record's parent.
    pub(super) fn take(&mut self, note: &RecordNote, payload: usize) -> Result<Taken, NoCells> {
        let (group, needed) = (Group::Own(note.account), self.geometry.cells_for(payload));
        // The parent stays from here on, unless nothing is taken.
        self.order.expect(note.parent);
        // The header lists a few buffers, too.
        let most = Header::MOST_LISTED / 2;
        let taken =
            self.fit(group, needed).and_then(|()| self.open.take(needed, most).ok_or(NoCells::Closed));
        let runs = taken.inspect_err(|_| self.order.expect_no_longer(note.parent))?;
        self.charge(group, &runs);
        self.sequence += 1;
        self.flight.begin(self.sequence, &runs);
        Ok(Taken { sequence: self.sequence, runs, parent: note.parent })
    }

    /// Takes the record that leaves next out of the order, on behalf of a record that has a parent or not.
    fn next_to_leave(&mut self, has_parent: bool) -> Option<BlockKey> {
        let cells = self.geometry.cells;
        let first = self.accounts.most_pressed(cells).and_then(|group| self.order.evict(group));
        let next = first.or_else(|| {
            let mut groups = self.accounts.by_pressure(cells).into_iter();
            groups.find_map(|group| self.order.evict(group))
        });
        // While something is being written or is about to be, what waits may wait for it.
        let may_be_circle = next.is_none() && self.flight.first().is_none() && !has_parent;
        if may_be_circle { self.order.evict_circle() } else { next }
    }

    /// Evicts records, but no parent of the one that is coming, until the next checkpoint can open enough cells for it.
    /// Returns false if that is not possible, or only after the batches under way.
    pub(super) fn make_room(&mut self, note: &RecordNote, payload: usize) -> bool {
        let needed = self.geometry.cells_for(payload);
        let wanted = needed.max((self.geometry.cells / OPENED).min(MOST_OPENED));
        let free = |state: &Self| state.open.len() + state.closed.len();
        self.order.expect(note.parent);
        while free(self) + self.flight.freed_cells() < wanted {
            let Some(key) = self.next_to_leave(note.parent.is_some()) else { break };
            self.evict(&key);
        }
        self.order.expect_no_longer(note.parent);
        free(self) >= needed
    }

    /// Returns all records, the least recently used first.
    pub(super) fn listed(&self) -> impl Iterator<Item = Listed> {
        self.order.used().filter_map(|(key, uses)| {
            let Entry { scope, sequence, payload, note, created, identity, ref runs, .. } =
                *self.records.get(key)?;
            let (key, runs) = (*key, runs.clone());
            Some(Listed { key, scope, sequence, payload, note, created, identity, uses, runs })
        })
    }

    /// Starts the next checkpoint. Until it is on the disk, no cells may be taken. Cells that records are being written
    /// to stay open.
    pub(super) fn checkpoint(&self, needed: usize) -> Checkpoint {
        let mut closed = self.closed.clone();
        for run in self.open.runs() {
            closed.add(run);
        }
        let count = self.geometry.cells_for(needed).max(self.geometry.cells / OPENED).min(closed.len());
        let opened = closed.take(count.min(MOST_OPENED.max(self.geometry.cells_for(needed))), usize::MAX);
        let opened = opened.unwrap_or_default();
        let table = Table {
            generation: self.generation + 1,
            sequence: self.flight.first().map_or(self.sequence, |first| first - 1),
            open: opened.iter().copied().chain(self.flight.written()).collect(),
            records: self.listed().collect(),
        };
        Checkpoint { table, opened }
    }

    /// Ends a checkpoint that failed. It may be on the disk all the same, so that only cells that another one opens may be
    /// written.
    pub(super) fn not_opened(&mut self) {
        for run in std::mem::take(&mut self.open).runs() {
            self.closed.add(run);
        }
    }

    /// Ends a checkpoint that is on the disk: its open cells may be written.
    pub(super) fn opened(&mut self, checkpoint: &Checkpoint) {
        self.generation = checkpoint.table.generation;
        self.not_opened();
        for &run in &checkpoint.opened {
            if self.closed.remove(run) {
                self.open.add(run);
            }
        }
    }

    /// Returns the number of records, and of cells that contain records or are quarantined.
    pub(super) fn used(&self) -> (usize, u32) {
        let free = self.open.len() + self.closed.len() + self.flight.freed_cells();
        (self.records.len(), self.geometry.cells - free)
    }

    /// Checks that every cell is free, in one record, or set aside. Returns a description of the first
    /// inconsistency as `Err`.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut cells = vec![0u8; self.geometry.cells as usize];
        let of_records = self.records.values().flat_map(|entry| entry.runs.iter().copied());
        let freed = self.flight.freed();
        for run in self.open.runs().chain(self.closed.runs()).chain(freed).chain(of_records) {
            if !self.geometry.has(run) {
                return Err(format!("{run:?} is outside the file"));
            }
            for cell in run.start..run.start + run.count {
                cells[cell as usize] += 1;
            }
        }
        if let Some(cell) = cells.iter().position(|&owners| owners > 1) {
            return Err(format!("cell {cell} has {} owners", cells[cell]));
        }
        let owned = cells.iter().map(|&owners| u32::from(owners)).sum::<u32>();
        if owned + self.quarantined != self.geometry.cells {
            let (all, aside) = (self.geometry.cells, self.quarantined);
            return Err(format!("of {all} cells, {owned} have an owner and {aside} are set aside"));
        }
        self.check_accounts()?;
        self.order.check(self.records.len())
    }

    /// Checks that the accounts are the sums of their records, and within their limits. Nothing may be being written.
    fn check_accounts(&self) -> Result<(), String> {
        let mut sums: HashMap<Group, (u32, usize)> = HashMap::new();
        for entry in self.records.values() {
            let (cells, records) = sums.entry(self.group(&entry.scope, entry.note.account)).or_default();
            (*cells, *records) = (*cells + count(&entry.runs), *records + 1);
        }
        for (group, account) in self.accounts.iter() {
            let (cells, records) = sums.remove(&group).unwrap_or_default();
            let is_sound = (account.cells, account.written, account.records) == (cells, 0, records);
            if !is_sound || account.limit.is_some_and(|limit| cells > limit) {
                return Err(format!("{group:?} has {records} records in {cells} cells, not {account:?}"));
            }
        }
        if sums.is_empty() { Ok(()) } else { Err(format!("no account has {sums:?}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> BlockKey {
        BlockKey::from_bytes([0; 32]).child(&[number])
    }

    /// Stores `records` records of one cell for tenants in turn.
    fn filled(geometry: Geometry, policy: PolicyKind, records: u32, tenants: u64) -> SlabState {
        let mut state = SlabState::new(geometry, policy, Some(key(0)));
        state.open = std::mem::take(&mut state.closed);
        for number in 1..=records {
            let account = AccountId::from_bits(u64::from(number) % tenants);
            let note = RecordNote { account, ..RecordNote::default() };
            let Taken { sequence, runs, .. } = state.take(&note, 100).unwrap();
            let (payload, created, identity, uses) = (100, 0, 0, 0);
            let (key, scope) = (key(number), key(0));
            state.insert(Listed { key, scope, sequence, payload, note, created, identity, uses, runs });
        }
        state
    }

    /// Evicts everything in the order in which a slab does.
    fn leaving(mut state: SlabState) -> Vec<BlockKey> {
        let mut left = Vec::new();
        while let Some(key) = state.next_to_leave(false) {
            state.evict(&key);
            left.push(key);
        }
        state.check().unwrap();
        assert!(state.records.is_empty());
        left
    }

    #[test]
    fn the_least_recently_used_leave_in_the_same_order_after_a_restart() {
        let geometry = Geometry::within(1 << 20, 8 << 10).unwrap();
        for tenants in [1, 3] {
            let mut state = filled(geometry, PolicyKind::Lru, 80, tenants);
            for number in 0..200_u32 {
                state.touch(&key(number * number % 90));
            }
            let mut again = SlabState::new(geometry, PolicyKind::Lru, Some(key(0)));
            again.restore(state.checkpoint(0).table);
            again.check().unwrap();
            assert_eq!(leaving(again), leaving(state), "{tenants} tenants");
        }
    }

    #[test]
    fn what_was_used_often_stays_longest_after_a_restart_where_the_policy_counts() {
        let geometry = Geometry::within(1 << 20, 8 << 10).unwrap();
        for policy in [PolicyKind::S3Fifo, PolicyKind::TinyLfu] {
            let mut state = filled(geometry, policy, 80, 1);
            let used: Vec<BlockKey> = (1..=10).map(key).collect();
            for key in used.iter().cycle().take(80) {
                state.touch(key);
            }
            // The last ones to be used are others.
            (11..=80).for_each(|number| assert!(state.touch(&key(number))));
            let mut again = SlabState::new(geometry, policy, Some(key(0)));
            again.restore(state.checkpoint(0).table);
            let left = leaving(again);
            assert!(left[..60].iter().all(|key| !used.contains(key)), "{policy:?}");
        }
    }

    #[test]
    fn a_limit_evicts_at_once_and_only_its_own() {
        let geometry = Geometry::within(1 << 20, 8 << 10).unwrap();
        let mut state = filled(geometry, PolicyKind::Lru, 60, 3);
        let [limited, other] = [1, 2].map(|bits| Group::Own(AccountId::from_bits(bits)));
        state.limit(limited, Some(7));
        state.check().unwrap();
        let [account, untouched] = [limited, other].map(|group| state.accounts.get(group));
        assert_eq!((account.cells, account.records, account.evicted), (7, 7, 13));
        assert_eq!((untouched.cells, untouched.evicted), (20, 0));
        let note = RecordNote { account: AccountId::from_bits(1), ..RecordNote::default() };
        assert!(!state.allows(AccountId::from_bits(1), 8) && state.allows(AccountId::from_bits(1), 7));
        assert_eq!(state.take(&note, 7 * geometry.cell_bytes()), Err(NoCells::NoRoom));
        // Records that are being written use the limit, too, and cannot leave.
        let taken = state.take(&note, 6 * geometry.cell_bytes()).unwrap();
        assert_eq!(state.accounts.get(limited).records, 0);
        assert_eq!(state.take(&note, 100), Err(NoCells::InUse));
        state.give_back(limited, taken);
        state.check().unwrap();
        state.limit(limited, None);
        assert!(state.take(&note, 20 * geometry.cell_bytes()).is_ok());
    }
}
