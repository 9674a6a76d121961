//! The records that wait to be written, and the batches that are being written.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use kvcore::BlockKey;

use super::{Shared, Slab};
use crate::record::Record;

/// The largest number of records, and of bytes after the first one, that are synced together.
const BATCH: (usize, usize) = (64, 32 << 20);

/// Records that wait to be written.
#[derive(Default)]
pub(super) struct Queue {
    records: VecDeque<Record>,
    /// The records that wait or are being written, by their keys.
    waiting: HashMap<BlockKey, Waiting>,
    /// The batches that are being written, by their numbers: the records that are neither written nor dropped.
    batches: BTreeMap<u64, Vec<BatchRecord>>,
    /// The number of batches so far.
    taken: u64,
    /// The number of bytes of the records that wait or are being written.
    bytes: usize,
    pub(super) closed: bool,
}

/// The records with one key that wait or are being written.
#[derive(Default)]
struct Waiting {
    /// The digest of the newest one's identity.
    identity: u64,
    records: usize,
}

/// A record in a batch: its key and its length.
pub(super) type BatchRecord = (BlockKey, usize);

/// What a queue has given up.
struct GivenUp {
    /// The records that waited.
    records: VecDeque<Record>,
    /// The number of records that were being written.
    written: usize,
    batches: usize,
}

impl Queue {
    /// Returns the digest of the identity of the newest record with this key that waits or is being written.
    pub(super) fn identity_of(&self, key: &BlockKey) -> Option<u64> {
        self.waiting.get(key).map(|waiting| waiting.identity)
    }

    /// Returns whether a record with this key waits or is being written.
    pub(super) fn waits(&self, key: Option<BlockKey>) -> bool {
        key.is_some_and(|key| self.waiting.contains_key(&key))
    }

    /// Returns whether the queue has room for `bytes`, if it may contain `most`.
    pub(super) fn has_room(&self, bytes: usize, most: usize) -> bool {
        !self.closed && self.bytes + bytes <= most
    }

    /// Appends a record.
    pub(super) fn push(&mut self, record: Record, identity: u64) {
        let waiting = self.waiting.entry(record.id.key).or_default();
        *waiting = Waiting { identity, records: waiting.records + 1 };
        self.bytes += record.payload_len();
        self.records.push_back(record);
    }

    /// Takes a few records to be written, and a number for them.
    fn take_batch(&mut self) -> (u64, Vec<Record>) {
        let (most, most_bytes) = BATCH;
        let mut bytes = 0;
        let fits = |record: &&Record| {
            bytes += record.payload_len();
            bytes <= most_bytes
        };
        let count = self.records.iter().take(most).take_while(fits).count().max(1);
        let batch: Vec<Record> = self.records.drain(..count).collect();
        self.taken += 1;
        self.batches.insert(self.taken, batch.iter().map(batch_record).collect());
        (self.taken, batch)
    }

    /// Returns whether a batch has been given up.
    pub(super) fn is_given_up(&self, batch: u64) -> bool {
        !self.batches.contains_key(&batch)
    }

    /// Ends the writing of some records of a batch. Returns false if the batch has been given up.
    pub(super) fn settle(&mut self, batch: u64, records: &[BatchRecord]) -> bool {
        let Some(left) = self.batches.get_mut(&batch) else { return false };
        for record in records {
            if let Some(at) = left.iter().position(|other| other == record) {
                left.swap_remove(at);
            }
        }
        for record in records {
            self.forget(record);
        }
        true
    }

    /// Ends a batch, of which nothing is left.
    pub(super) fn end_batch(&mut self, batch: u64) {
        for record in self.batches.remove(&batch).unwrap_or_default() {
            self.forget(&record);
        }
    }

    fn forget(&mut self, &(key, bytes): &BatchRecord) {
        if let Entry::Occupied(mut waiting) = self.waiting.entry(key) {
            waiting.get_mut().records -= 1;
            if waiting.get().records == 0 {
                waiting.remove();
            }
        }
        self.bytes -= bytes;
    }

    /// Gives up everything that waits or is being written.
    fn give_up(&mut self) -> GivenUp {
        let (records, batches) = (std::mem::take(&mut self.records), std::mem::take(&mut self.batches));
        self.waiting.clear();
        self.bytes = 0;
        GivenUp { records, written: batches.values().map(Vec::len).sum(), batches: batches.len() }
    }
}

/// Returns a record as its batch lists it.
pub(super) fn batch_record(record: &Record) -> BatchRecord {
    (record.id.key, record.payload_len())
}

impl Slab {
    /// Waits until everything that was stored before this call is on the disk or was dropped. Returns false if
    /// `limit` has passed first.
    pub fn flush(&self, limit: Duration) -> bool {
        let deadline = Instant::now().checked_add(limit);
        loop {
            self.shared.give_up_late_writes();
            let mut queue = self.shared.queue.lock();
            if queue.waiting.is_empty() {
                return true;
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return false;
            }
            let until = [deadline, self.shared.next_look()].into_iter().flatten().min();
            match until {
                Some(until) => drop(self.shared.queue_changed.wait_until(&mut queue, until)),
                None => self.shared.queue_changed.wait(&mut queue),
            }
        }
    }
}

impl Shared {
    /// Waits for records, and returns a few of them with the number of their batch. Returns `None` if the queue is
    /// closed and empty.
    pub(super) fn next_batch(&self) -> Option<(u64, Vec<Record>)> {
        let mut queue = self.queue.lock();
        while queue.records.is_empty() {
            if queue.closed {
                return None;
            }
            self.queue_changed.wait(&mut queue);
        }
        Some(queue.take_batch())
    }

    /// Returns the time at which the oldest write is late.
    fn late_at(&self) -> Option<Instant> {
        self.io.oldest_write()?.checked_add(self.config.write_deadline)
    }

    /// Returns the earliest time at which a write can be late, of those that are under way or are started later.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.late_at().or_else(|| Instant::now().checked_add(self.config.write_deadline))
    }

    /// Returns whether the disk has not ended a write at its deadline. If so, drops everything that waits or is
    /// being written. The threads that write stay where they are until the disk has answered, with the memory and
    /// the cells that it may still use.
    pub(super) fn give_up_late_writes(&self) -> bool {
        if self.late_at().is_none_or(|at| at > Instant::now()) {
            return false;
        }
        let mut queue = self.queue.lock();
        let GivenUp { records, written, batches } = queue.give_up();
        if batches > 0 || !records.is_empty() {
            self.count(|counts| {
                counts.stores_dropped += (records.len() + written) as u64;
                counts.write_deadline_exceeded += batches as u64;
            });
            drop(queue);
            self.queue_changed.notify_all();
        }
        true
    }
}
