//! A file of fixed size in which records survive the process.
//!
//! ```text
//!   store ──► queue ──► two threads: cells ─ payloads ─ headers ─ sync ──► found
//!   load  ──► cells ─ read, many requests at once ─ compare key, tokens, digest ──► buffers
//! ```
//!
//! - **Nothing wrong is served.** The digest of a record covers its payload, and a load compares the key, the
//!   tokens and the label. Whatever does not match is a miss.
//! - **The limit holds at every instant**, because the file has its full size from the start.
//! - **A crash loses only what was not synced.** A [checkpoint](table) lists the records and the cells that may
//!   be written after it. After a crash, only the headers of these cells are read.
//! - **Callers do not wait for the disk.** Stores are queued, and dropped if the queue is full. A load is started,
//!   and asked later whether it has ended.
//! - **A parent stays at least as long as its children**, so that what is left of a chain can be found.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvcore::BlockKey;
use parking_lot::{Condvar, Mutex, RwLock};

mod cells;
mod geometry;
mod inspect;
mod load;
mod open;
mod order;
mod rates;
mod state;
mod table;
mod touch;
mod usage;
mod write;

use geometry::Geometry;
pub use inspect::{InspectedScope, Inspection};
pub use load::{Found, Listing, Loading, Missed};
use rates::ReadRates;
use state::SlabState;
use usage::Counts;
pub use usage::SlabUsage;

use crate::error::{Error, Result};
use crate::io::{DiskIo, FileIo, IoChoice, IoWay};
use crate::record::{Header, Record};

/// The settings of a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabConfig {
    /// The largest size of the file in bytes.
    pub limit: u64,
    /// The number of bytes per cell, rounded up to whole pages. A record uses whole cells.
    pub cell_bytes: usize,
    /// The number of bytes that may wait to be written. Further records are dropped.
    pub queue_bytes: usize,
    /// The way of I/O, or `None` for the best one that works here.
    pub io: Option<IoWay>,
}

impl Default for SlabConfig {
    /// Returns the default settings: 10 GiB, cells of 64 KiB, and a queue of 256 MiB, and
    /// the best way of I/O.
    fn default() -> Self {
        Self { limit: 10 << 30, cell_bytes: 64 << 10, queue_bytes: 256 << 20, io: None }
    }
}

/// What became of a record that was given to [`Slab::store`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The record will be written.
    Queued,
    /// This record is stored already, or waits to be written.
    Known,
    /// The record was dropped, because the queue is full, the record is larger than the slab allows, or its
    /// parent is not here.
    Dropped,
}

/// A file of records. See the [module documentation](self).
///
/// # Drop behaviour
/// Writes the records that are waiting, and a last checkpoint.
pub struct Slab {
    shared: Arc<Shared>,
    writers: Vec<JoinHandle<()>>,
    /// Locks the folder for this process.
    _lock: Option<fs::File>,
}

/// The state that the slab shares with the threads that write.
struct Shared {
    io: Box<dyn DiskIo>,
    geometry: Geometry,
    config: SlabConfig,
    scope: BlockKey,
    state: Mutex<SlabState>,
    /// Held by the thread that takes a batch from the queue and places it.
    placing: Mutex<()>,
    /// Held for reading by a thread that has a batch, and for writing during a checkpoint.
    writing: RwLock<()>,
    queue: Mutex<Queue>,
    queue_changed: Condvar,
    counts: Mutex<Counts>,
    rates: Mutex<ReadRates>,
}

/// Records that wait to be written.
#[derive(Default)]
struct Queue {
    records: VecDeque<Record>,
    /// The records that wait or are being written, by their keys.
    waiting: HashMap<BlockKey, Waiting>,
    bytes: usize,
    closed: bool,
}

/// The records with one key that wait or are being written.
#[derive(Default)]
struct Waiting {
    /// The digest of the newest one's identity.
    identity: u64,
    records: usize,
}

/// The largest number of records, and of bytes after the first one, that are synced together.
const BATCH: (usize, usize) = (64, 32 << 20);

/// The number of threads that write.
const WRITERS: usize = 2;

impl Slab {
    /// The name of the file in the slab's folder.
    pub const FILE: &str = "records.kvslab";

    /// Opens or creates the slab in `folder`. `scope` is the key of the model, tokenizer and format of this
    /// process: records of other scopes count towards the limit, and leave first.
    ///
    /// If the file is of another version, larger than the limit, or so much smaller that it cannot grow to half
    /// of it, its records are given up, and the file is created anew.
    ///
    /// # Errors
    /// - Returns [`Error::NotAFolder`] if the path is a file.
    /// - Returns [`Error::InUse`] if another process has opened the folder.
    /// - Returns [`Error::LimitTooSmall`] if the limit is too small for a few records.
    /// - Returns [`Error::File`] if the file system refuses, as on a full disk or in a read-only folder, or if
    ///   [`SlabConfig::io`] is a way of I/O that cannot be used here.
    pub fn open(folder: &Path, scope: BlockKey, config: SlabConfig) -> Result<Self> {
        if folder.exists() && !folder.is_dir() {
            return Err(Error::NotAFolder { path: folder.to_owned() });
        }
        fs::create_dir_all(folder).map_err(Error::at("cannot create the folder", folder))?;
        let lock = lock(folder)?;
        let path = folder.join(Self::FILE);
        let io = FileIo::open(&path, config.io).map_err(Error::at("cannot open", &path))?;
        Self::over(Box::new(io), &path, scope, config, Some(lock))
    }

    /// Opens or creates a slab in an open file, as [`open`](Self::open) does. Errors contain `path`. `lock` is
    /// closed after the slab.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open) but [`Error::NotAFolder`] and [`Error::InUse`].
    pub fn over(
        io: Box<dyn DiskIo>,
        path: &Path,
        scope: BlockKey,
        config: SlabConfig,
        lock: Option<fs::File>,
    ) -> Result<Self> {
        let wanted = Geometry::within(config.limit, config.cell_bytes)?;
        let known = open::geometry(io.as_ref()).map_err(Error::at("cannot read", path))?;
        let size = io.size().map_err(Error::at("cannot read", path))?;
        // A file that was cut short has lost cells, so it is created anew.
        let known = known.filter(|known| known.file_bytes() <= size);
        // Tables have room for a few times the first size. A file that is still much smaller than its limit is
        // not worth keeping.
        let kept = known.and_then(|known| known.grown(config.limit));
        let kept = kept.filter(|kept| 2 * kept.file_bytes() >= wanted.file_bytes());
        let geometry = kept.unwrap_or(wanted);
        let emptied = if kept.is_some() { Ok(()) } else { io.resize(0) };
        let resized = emptied.and_then(|()| io.resize(geometry.file_bytes()));
        resized.map_err(Error::at("cannot reserve the disk tier's limit in", path))?;
        let prepare = if kept.is_none() { open::format } else { open::superblock };
        prepare(io.as_ref(), geometry).map_err(Error::at("cannot write", path))?;
        let mut state = open::restore(io.as_ref(), geometry).map_err(Error::at("cannot read", path))?;
        state.prefer(&scope);
        let shared = Arc::new(Shared {
            io,
            geometry,
            config,
            scope,
            state: Mutex::new(state),
            placing: Mutex::new(()),
            writing: RwLock::new(()),
            queue: Mutex::default(),
            queue_changed: Condvar::new(),
            counts: Mutex::default(),
            rates: Mutex::default(),
        });
        let mut this = Self { shared, writers: Vec::new(), _lock: lock };
        for _ in 0..WRITERS {
            let shared = Arc::clone(&this.shared);
            let writer = std::thread::Builder::new().name("kvtier-writer".to_owned());
            let writer = writer.spawn(move || shared.write_batches());
            this.writers.push(writer.map_err(Error::at("cannot start a thread that writes", path))?);
        }
        Ok(this)
    }

    /// Queues a record to be written, without waiting for the disk. It replaces a record with the same key and
    /// another identity.
    pub fn store(&self, record: Record) -> Stored {
        let shared = &*self.shared;
        let (key, bytes, identity) = (record.id.key, record.payload_len(), record.id.digest());
        // What waits is newer than what is stored.
        let waiting = shared.queue.lock().waiting.get(&key).map(|waiting| waiting.identity);
        let is_known = match waiting {
            Some(waiting) => waiting == identity,
            None => shared.state.lock().confirms(&key, identity),
        };
        if is_known {
            return Stored::Known;
        }
        let has_parent = shared.state.lock().has_parent(&record.note);
        let fits = shared.geometry.cells_for(bytes) <= shared.geometry.cells / 2
            && record.buffers.len() <= Header::MOST_LISTED / 2;
        let mut queue = shared.queue.lock();
        let has_parent = has_parent || record.note.parent.is_some_and(|key| queue.waiting.contains_key(&key));
        if !fits || !has_parent || queue.closed || queue.bytes + bytes > shared.config.queue_bytes {
            drop(queue);
            shared.count(|counts| counts.stores_dropped += 1);
            return Stored::Dropped;
        }
        let waiting = queue.waiting.entry(key).or_default();
        if waiting.records > 0 && waiting.identity == identity {
            return Stored::Known;
        }
        *waiting = Waiting { identity, records: waiting.records + 1 };
        queue.bytes += bytes;
        queue.records.push_back(record);
        drop(queue);
        shared.queue_changed.notify_all();
        Stored::Queued
    }

    /// Waits until everything that was stored before this call is on the disk or was dropped. Returns false if
    /// `limit` has passed first.
    pub fn flush(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut queue = self.shared.queue.lock();
        while !queue.waiting.is_empty() {
            if self.shared.queue_changed.wait_until(&mut queue, deadline).timed_out() {
                return queue.waiting.is_empty();
            }
        }
        true
    }

    /// Returns whether a record with this key can be loaded. Returns false if a load has asked for another
    /// identity under this key, so that the record is stored again.
    pub fn contains(&self, key: &BlockKey) -> bool {
        self.shared.state.lock().contains(key)
    }

    /// Returns the way of I/O and why better ones are not used, or `None` if the file is none of [`FileIo`].
    pub fn io_choice(&self) -> Option<&IoChoice> {
        self.shared.io.choice()
    }

    /// Returns the time in which the disk is expected to read `bytes`, by moving averages of the loads so far.
    /// Returns `None` if nothing was measured.
    pub fn expected(&self, bytes: usize) -> Option<Duration> {
        self.shared.rates.lock().expected(bytes)
    }

    /// Counts loads that a caller skips, because computing takes less time.
    pub fn count_skipped(&self, loads: usize) {
        self.shared.count(|counts| counts.loads_skipped_slower += loads as u64);
    }

    /// Checks that every cell has one owner. Returns a description of the first inconsistency as `Err`. Must
    /// not be called while records are being written.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.shared.state.lock().check()
    }
}

impl Shared {
    /// Waits for records, and returns a few of them. Returns `None` if the queue is closed and empty.
    fn next_batch(&self) -> Option<Vec<Record>> {
        let mut queue = self.queue.lock();
        while queue.records.is_empty() {
            if queue.closed {
                return None;
            }
            self.queue_changed.wait(&mut queue);
        }
        let (most, most_bytes) = BATCH;
        let mut bytes = 0;
        let fits = |record: &&Record| {
            bytes += record.payload_len();
            bytes <= most_bytes
        };
        let count = queue.records.iter().take(most).take_while(fits).count().max(1);
        Some(queue.records.drain(..count).collect())
    }

    /// Returns whether a record with this key waits to be written.
    fn waits(&self, key: Option<BlockKey>) -> bool {
        key.is_some_and(|key| self.queue.lock().waiting.contains_key(&key))
    }

    /// Forgets records that have been written or dropped.
    fn end_batch(&self, keys: &[BlockKey], bytes: usize) {
        let mut queue = self.queue.lock();
        for key in keys {
            if let Entry::Occupied(mut waiting) = queue.waiting.entry(*key) {
                waiting.get_mut().records -= 1;
                if waiting.get().records == 0 {
                    waiting.remove();
                }
            }
        }
        queue.bytes -= bytes;
        drop(queue);
        self.queue_changed.notify_all();
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock());
    }
}

/// Locks the folder for this process, by a file of its own.
fn lock(folder: &Path) -> Result<fs::File> {
    let path = folder.join("lock");
    let file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(Error::at("cannot open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(Error::InUse { path: folder.to_owned() }),
        Err(fs::TryLockError::Error(error)) => Err(Error::at("cannot lock", &path)(error)),
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.queue_changed.notify_all();
        for writer in self.writers.drain(..) {
            // If the thread panicked, the checkpoint before is still valid.
            let _ = writer.join();
        }
        self.shared.close();
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab").field("usage", &self.usage()).finish_non_exhaustive()
    }
}
