//! From keys to blocks: hash tables over the digests' own bits, sharded by key.
//!
//! An entry holds 64 bits of its key; whoever follows it compares the whole key under the lock of the
//! block's shard. Locks here are leaves: no other lock is taken while one is held, except that batch
//! calls move from one table to the next by letting the first go.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Slot;

use crate::key::BlockKey;
use crate::sync::{Mutex, MutexGuard};

#[derive(Debug, Clone, Copy)]
struct Entry {
    word: u64,
    block: u32,
    /// Counts registrations: among equal keys the smallest is the oldest.
    stamp: u32,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    entries: HashTable<Entry>,
    stamp: u32,
}

impl Table {
    /// The block registered first under a key.
    fn find(&self, key: &BlockKey) -> Option<u32> {
        let word = key.word();
        self.entries.find(word, |e| e.word == word).map(|e| e.block)
    }

    /// As `find`, where a key may have several blocks.
    fn find_oldest(&self, key: &BlockKey) -> Option<u32> {
        let word = key.word();
        let newest_first = |e: &&Entry| self.stamp.wrapping_sub(e.stamp);
        self.entries.iter_hash(word).filter(|e| e.word == word).max_by_key(newest_first).map(|e| e.block)
    }

    fn insert(&mut self, word: u64, block: u32) {
        self.stamp = self.stamp.wrapping_add(1);
        let entry = Entry { word, block, stamp: self.stamp };
        self.entries.insert_unique(word, entry, |e| e.word);
    }
}

/// All tables of a pool.
#[derive(Debug)]
pub(super) struct Index {
    tables: Box<[Mutex<Table>]>,
    /// Whether a key may have several blocks.
    duplicates: bool,
}

impl Index {
    pub(super) fn new(tables: usize, blocks: usize, duplicates: bool) -> Self {
        let tables = tables.next_power_of_two();
        // A little above the mean, so that an uneven spread seldom grows a table.
        let room = if tables == 1 { blocks } else { blocks / tables * 9 / 8 + 64 };
        let table = || Mutex::new(Table { entries: HashTable::with_capacity(room), stamp: 0 });
        Self { tables: (0..tables).map(|_| table()).collect(), duplicates }
    }

    /// A cursor that keeps the table of the last key locked until another one is needed.
    pub(super) fn cursor(&self) -> Cursor<'_> {
        Cursor { index: self, at: usize::MAX, table: None }
    }

    pub(super) fn len(&self) -> usize {
        self.tables.iter().map(|table| table.lock().entries.len()).sum()
    }
}

/// Access to the index for a batch of keys.
pub(super) struct Cursor<'a> {
    index: &'a Index,
    at: usize,
    table: Option<MutexGuard<'a, Table>>,
}

impl Cursor<'_> {
    fn table(&mut self, key: &BlockKey) -> &mut Table {
        // Bits that hashbrown uses neither for places nor for tags of small tables.
        let at = (key.word() >> 40) as usize & (self.index.tables.len() - 1);
        if self.at != at {
            self.table = None;
            self.at = at;
        }
        self.table.get_or_insert_with(|| self.index.tables[at].lock())
    }

    /// Lets the table go that is held.
    pub(super) fn release(&mut self) {
        self.table = None;
        self.at = usize::MAX;
    }

    /// The block to which a key leads; its own key is still to be compared.
    pub(super) fn find(&mut self, key: &BlockKey) -> Option<u32> {
        let duplicates = self.index.duplicates;
        let table = self.table(key);
        if duplicates { table.find_oldest(key) } else { table.find(key) }
    }

    /// Enters a block under a key. If the key is known and may not have two blocks, nothing changes and
    /// the known block is returned.
    pub(super) fn enter(&mut self, key: &BlockKey, block: u32) -> Option<u32> {
        let duplicates = self.index.duplicates;
        let table = self.table(key);
        let word = key.word();
        if duplicates {
            table.insert(word, block);
            return None;
        }
        match table.entries.entry(word, |e| e.word == word, |e| e.word) {
            Slot::Occupied(slot) => Some(slot.get().block),
            Slot::Vacant(slot) => {
                slot.insert(Entry { word, block, stamp: 0 });
                None
            }
        }
    }

    /// Removes a block's entry.
    pub(super) fn remove(&mut self, key: &BlockKey, block: u32) {
        let word = key.word();
        if let Ok(slot) = self.table(key).entries.find_entry(word, |e| e.word == word && e.block == block) {
            slot.remove();
        }
    }

    /// Whether a block is entered under a key.
    pub(super) fn holds(&mut self, key: &BlockKey, block: u32) -> bool {
        let word = key.word();
        self.table(key).entries.find(word, |e| e.word == word && e.block == block).is_some()
    }
}
