//! The records of a slab, the order in which they leave, and the cells.

use std::collections::HashMap;

use kvcore::BlockKey;

use super::cells::CellSet;
use super::geometry::Geometry;
use super::known::Known;
use super::order::Order;
use super::table::{Listed, Table};
use crate::record::{CellRun, Header, RecordNote};

/// The fraction of a slab's cells that a checkpoint opens.
const OPENED: u32 = 8;

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

/// The records and the cells.
#[derive(Debug)]
pub(super) struct SlabState {
    geometry: Geometry,
    records: HashMap<BlockKey, Entry>,
    order: Order,
    pub(super) known: Known,
    /// Free cells that may be written now.
    open: CellSet,
    /// Free cells that the next checkpoint may open.
    closed: CellSet,
    /// Cells that were taken from a damaged record. They are not used again while this slab is open.
    pub(super) quarantined: u32,
    pub(super) sequence: u64,
    pub(super) generation: u64,
    pub(super) evicted: u64,
}

impl SlabState {
    /// Creates the state of a slab without records.
    pub(super) fn new(geometry: Geometry) -> Self {
        let mut closed = CellSet::default();
        closed.add(CellRun { start: 0, count: geometry.cells });
        Self {
            geometry,
            records: HashMap::new(),
            order: Order::default(),
            known: Known::default(),
            open: CellSet::default(),
            closed,
            quarantined: 0,
            sequence: 0,
            generation: 0,
            evicted: 0,
        }
    }

    /// Creates the state that a checkpoint lists, as far as it is consistent.
    pub(super) fn restored(geometry: Geometry, table: Table) -> Self {
        let mut state = Self::new(geometry);
        (state.sequence, state.generation) = (table.sequence, table.generation);
        for listed in table.records {
            state.adopt(listed);
        }
        for run in table.open {
            if geometry.has(run) && state.closed.remove(run) {
                state.open.add(run);
            }
        }
        state
    }

    /// Adds a record that is on the disk, unless its cells are not free or a newer record has its key.
    pub(super) fn adopt(&mut self, listed: Listed) {
        let Listed { key, sequence, payload, ref runs, .. } = listed;
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
            self.give_back(taken);
            return;
        }
        self.sequence = self.sequence.max(sequence);
        self.insert(listed);
    }

    /// Adds a record whose cells have been taken. An older record with the same key is replaced; if there is a
    /// newer one, the cells are free again.
    pub(super) fn insert(&mut self, listed: Listed) {
        let Listed { key, scope, sequence, payload, note, created, identity, runs } = listed;
        if self.records.get(&key).is_some_and(|known| known.sequence > sequence) {
            return self.give_back(runs);
        }
        self.remove(&key);
        self.order.insert(key, note.parent);
        self.known.insert(note.text, key);
        let (readers, doubted) = (0, false);
        let entry = Entry { scope, sequence, payload, note, created, identity, runs, readers, doubted };
        self.records.insert(key, entry);
    }

    /// Removes records whose parents are neither here nor among those that `waits` knows, because nobody can find
    /// them.
    pub(super) fn remove_orphans(&mut self, waits: impl Fn(Option<BlockKey>) -> bool) {
        loop {
            let is_orphan = |entry: &Entry| !self.has_parent(&entry.note) && !waits(entry.note.parent);
            let orphans = self.records.iter().filter(|(_, entry)| is_orphan(entry));
            let keys: Vec<BlockKey> = orphans.map(|(key, _)| *key).collect();
            if keys.is_empty() {
                return;
            }
            for key in &keys {
                self.remove(key);
            }
        }
    }

    /// Returns whether the record's parent is here, or it has none.
    pub(super) fn has_parent(&self, note: &RecordNote) -> bool {
        note.parent.is_none_or(|parent| self.records.contains_key(&parent))
    }

    /// Moves the records of other scopes to the front of the order of eviction.
    pub(super) fn prefer(&mut self, scope: &BlockKey) {
        let records = &self.records;
        self.order.prefer(|key| records.get(key).is_some_and(|entry| entry.scope == *scope));
    }

    /// Returns a record, and makes it the last one to leave.
    pub(super) fn touch(&mut self, key: &BlockKey) -> Option<&mut Entry> {
        self.order.touch(key);
        self.records.get_mut(key)
    }

    /// Returns a record.
    pub(super) fn get(&self, key: &BlockKey) -> Option<&Entry> {
        self.records.get(key)
    }

    /// Returns a record, to be changed.
    pub(super) fn get_mut(&mut self, key: &BlockKey) -> Option<&mut Entry> {
        self.records.get_mut(key)
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
            self.give_back(entry.runs);
        }
    }

    /// Removes a record whose cells are damaged. They are not used again.
    pub(super) fn quarantine(&mut self, key: &BlockKey, sequence: u64) {
        if self.records.get(key).is_some_and(|entry| entry.sequence == sequence)
            && let Some(entry) = self.take_out(key)
        {
            self.quarantined += entry.runs.iter().map(|run| run.count).sum::<u32>();
        }
    }

    fn take_out(&mut self, key: &BlockKey) -> Option<Entry> {
        let entry = self.records.remove(key)?;
        self.order.remove(key);
        self.known.remove(entry.note.text, key);
        Some(entry)
    }

    /// Returns cells that were taken and are not used after all.
    pub(super) fn give_back(&mut self, runs: Vec<CellRun>) {
        for run in runs {
            self.closed.add(run);
        }
    }

    /// Takes open cells for a record, or returns `None` if a checkpoint must open some first.
    pub(super) fn take(&mut self, payload: usize) -> Option<Vec<CellRun>> {
        // The header lists a few buffers, too.
        self.open.take(self.geometry.cells_for(payload), Header::MOST_LISTED / 2)
    }

    /// Evicts records until the next checkpoint can open enough cells for a payload. Returns false if that is
    /// not possible.
    pub(super) fn make_room(&mut self, payload: usize) -> bool {
        let needed = self.geometry.cells_for(payload);
        let wanted = needed.max((self.geometry.cells / OPENED).min(MOST_OPENED));
        let free = |state: &Self| state.open.len() + state.closed.len();
        while free(self) < wanted {
            let is_read = |key: &BlockKey| self.records.get(key).is_some_and(|entry| entry.readers > 0);
            let Some(key) = self.order.first(|key| !is_read(key)) else { break };
            self.remove(&key);
            self.known.evicted(&key);
            self.evicted += 1;
        }
        free(self) >= needed
    }

    /// Returns all records, the least recently used first.
    pub(super) fn listed(&self) -> impl Iterator<Item = Listed> {
        self.order.keys().filter_map(|key| {
            let Entry { scope, sequence, payload, note, created, identity, ref runs, .. } =
                *self.records.get(key)?;
            Some(Listed { key: *key, scope, sequence, payload, note, created, identity, runs: runs.clone() })
        })
    }

    /// Starts the next checkpoint. Until it is on the disk, only cells that were open before are written.
    pub(super) fn checkpoint(&self, needed: usize) -> Table {
        let mut closed = self.closed.clone();
        for run in self.open.runs() {
            closed.add(run);
        }
        let count = self.geometry.cells_for(needed).max(self.geometry.cells / OPENED).min(closed.len());
        let open = closed.take(count.min(MOST_OPENED.max(self.geometry.cells_for(needed))), usize::MAX);
        Table {
            generation: self.generation + 1,
            sequence: self.sequence,
            open: open.unwrap_or_default(),
            records: self.listed().collect(),
        }
    }

    /// Ends a checkpoint that is on the disk: its open cells may be written.
    pub(super) fn opened(&mut self, table: &Table) {
        self.generation = table.generation;
        let before: Vec<CellRun> = self.open.runs().collect();
        for run in before {
            self.open.remove(run);
            self.closed.add(run);
        }
        for &run in &table.open {
            if self.closed.remove(run) {
                self.open.add(run);
            }
        }
    }

    /// Returns the number of records, and of cells that contain records or are quarantined.
    pub(super) fn used(&self) -> (usize, u32) {
        (self.records.len(), self.geometry.cells - self.open.len() - self.closed.len())
    }

    /// Checks that every cell is free, in one record, or set aside. Returns a description of the first
    /// inconsistency as `Err`.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut cells = vec![0u8; self.geometry.cells as usize];
        let of_records = self.records.values().flat_map(|entry| entry.runs.iter().copied());
        for run in self.open.runs().chain(self.closed.runs()).chain(of_records) {
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
        self.order.check(self.records.len())
    }
}
