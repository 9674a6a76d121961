//! The index from keys to blocks: hash tables, sharded by key, that use bits of the keys as hashes.
//!
//! An entry holds 64 bits of its key. The caller must compare the whole key under the lock of the block's
//! shard. The tables' locks are leaves: no other lock is acquired while the lock of a table is held. The keys
//! of a batch are grouped by table, so that each table is locked only once per group.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Slot;

use smallvec::SmallVec;

use crate::paging::key::BlockKey;
use crate::paging::sync::Mutex;

#[derive(Debug, Clone, Copy)]
struct IndexEntry {
    word: u64,
    block: u32,
    /// Sequence number of the registration. Among entries with equal keys, the smallest is the oldest.
    stamp: u32,
}

#[derive(Debug, Default)]
pub(super) struct IndexTable {
    entries: HashTable<IndexEntry>,
    stamp: u32,
}

impl IndexTable {
    /// Returns the block registered under a key.
    fn find(&self, key: &BlockKey) -> Option<u32> {
        let word = key.word();
        self.entries.find(word, |e| e.word == word).map(|e| e.block)
    }

    /// Returns the oldest block registered under a key, for an index in which a key may have several blocks.
    fn find_oldest(&self, key: &BlockKey) -> Option<u32> {
        let word = key.word();
        let newest_first = |e: &&IndexEntry| self.stamp.wrapping_sub(e.stamp);
        self.entries.iter_hash(word).filter(|e| e.word == word).max_by_key(newest_first).map(|e| e.block)
    }

    fn insert(&mut self, word: u64, block: u32) {
        self.stamp = self.stamp.wrapping_add(1);
        let entry = IndexEntry { word, block, stamp: self.stamp };
        self.entries.insert_unique(word, entry, |e| e.word);
    }
}

/// All tables of a pool.
#[derive(Debug)]
pub(super) struct Index {
    tables: Box<[Mutex<IndexTable>]>,
    /// True if a key may have several blocks.
    duplicates: bool,
}

/// Number of keys that are grouped by table at a time: the number of bits in a word.
const WINDOW: usize = 64;

/// Maximum number of tables. Each table needs a word while a window is grouped.
const MOST_TABLES: usize = 64;

impl Index {
    pub(super) fn new(tables: usize, blocks: usize, duplicates: bool) -> Self {
        let tables = tables.next_power_of_two().min(MOST_TABLES);
        // The capacity is a little above the average, so tables rarely grow even if keys are spread unevenly.
        let room = if tables == 1 { blocks } else { blocks / tables * 9 / 8 + 64 };
        let table = || Mutex::new(IndexTable { entries: HashTable::with_capacity(room), stamp: 0 });
        Self { tables: (0..tables).map(|_| table()).collect(), duplicates }
    }

    pub(super) fn len(&self) -> usize {
        self.tables.iter().map(|table| table.lock().entries.len()).sum()
    }

    /// Calls `each` for every key, with the key's index and its locked table. The keys of one table are
    /// visited in order, but the tables in any order.
    fn visit<'k>(
        &self,
        keys: impl ExactSizeIterator<Item = &'k BlockKey> + Clone,
        mut each: impl FnMut(usize, &BlockKey, &mut IndexTable),
    ) {
        if let [table] = &*self.tables {
            let mut table = table.lock();
            keys.enumerate().for_each(|(i, key)| each(i, key, &mut table));
            return;
        }
        let mut start = 0;
        let mut rest = keys;
        while rest.len() > 0 {
            let window: SmallVec<[&BlockKey; WINDOW]> = rest.by_ref().take(WINDOW).collect();
            let mut masks = [0u64; MOST_TABLES];
            for (i, key) in window.iter().enumerate() {
                // Bits that hashbrown uses neither for bucket indices nor for tags.
                masks[(key.word() >> 40) as usize & (self.tables.len() - 1)] |= 1 << i;
            }
            for (table, mask) in self.tables.iter().zip(&mut masks).filter(|(_, mask)| **mask != 0) {
                let mut table = table.lock();
                while *mask != 0 {
                    let i = mask.trailing_zeros() as usize;
                    each(start + i, window[i], &mut table);
                    *mask &= *mask - 1;
                }
            }
            start += window.len();
        }
    }

    /// Returns the blocks found for the longest known prefix of `keys`. The caller must still compare the
    /// whole keys.
    pub(super) fn find_prefix(&self, keys: &[BlockKey]) -> SmallVec<[u32; WINDOW]> {
        let mut found = SmallVec::new();
        // The search ends quickly at the first key of an unknown prompt, and takes large steps through a
        // known one.
        let mut step = 1;
        let mut rest = keys;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(step.min(rest.len()));
            let (start, mut known) = (found.len(), now.len());
            found.resize(start + now.len(), 0);
            self.visit(now.iter(), |i, key, table| {
                if i < known {
                    match if self.duplicates { table.find_oldest(key) } else { table.find(key) } {
                        Some(block) => found[start + i] = block,
                        None => known = i,
                    }
                }
            });
            if known < now.len() {
                found.truncate(start + known);
                break;
            }
            (rest, step) = (later, WINDOW);
            found.reserve_exact(rest.len());
        }
        found
    }

    /// Registers blocks under keys. If a key is known and duplicates are not allowed, its entry stays, and
    /// `known` is called with the index of the key and the known block.
    pub(super) fn enter(
        &self,
        keys: &[BlockKey],
        block: impl Fn(usize) -> u32,
        mut known: impl FnMut(usize, u32),
    ) {
        self.visit(keys.iter(), |i, key, table| {
            let word = key.word();
            if self.duplicates {
                return table.insert(word, block(i));
            }
            match table.entries.entry(word, |e| e.word == word, |e| e.word) {
                Slot::Occupied(slot) => known(i, slot.get().block),
                Slot::Vacant(slot) => {
                    slot.insert(IndexEntry { word, block: block(i), stamp: 0 });
                }
            }
        });
    }

    /// Removes entries.
    pub(super) fn remove(&self, entries: &[(BlockKey, u32)]) {
        self.visit(entries.iter().map(|(key, _)| key), |i, key, table| {
            let (word, block) = (key.word(), entries[i].1);
            if let Ok(slot) = table.entries.find_entry(word, |e| e.word == word && e.block == block) {
                slot.remove();
            }
        });
    }

    /// Returns whether the index has an entry for this key and block.
    pub(super) fn holds(&self, key: &BlockKey, block: u32) -> bool {
        let mut held = false;
        self.visit(std::iter::once(key), |_, key, table| {
            let word = key.word();
            held = table.entries.find(word, |e| e.word == word && e.block == block).is_some();
        });
        held
    }
}
