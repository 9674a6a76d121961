//! A file of fixed size in which records survive the process.
//!
//! ```text
//!   store ──► queue ──► four threads: cells ─ payloads ─ headers ─ sync ──► found
//!   load  ──► cells ─ read, many requests at once ─ compare key, tokens, digest ──► buffers
//!     └─ the ones stored or used last ─ host memory ─ compare key, tokens ───────────► buffers
//! ```
//!
//! - **Nothing wrong is served.** The digest of a record covers its payload, and a load compares the key, the
//!   tokens and the label. Whatever does not match is a miss.
//! - **The limit holds at every instant**, because the file has its full size from the start.
//! - **A crash loses only what was not synced.** A [checkpoint](table) lists the records and the cells that may
//!   be written after it. After a crash, only the headers of these cells are read.
//! - **Callers do not wait for the disk.** Stores are queued, and dropped if the queue is full. A load is started,
//!   and asked later whether it has ended. If a write has not ended at its
//!   [deadline](SlabConfig::write_deadline), stores are dropped until it has.
//! - **A parent stays at least as long as its children**, so that what is left of a chain can be found.
//! - **Records of other models leave first**, and then those of the tenant that uses the largest share of its limit.
//!   A tenant that floods the disk therefore pushes out its own records.

use std::fmt;
use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvcore::{BlockKey, PolicyKind};
use parking_lot::{Condvar, Mutex, RwLock};

mod accounts;
mod cells;
mod flight;
mod geometry;
mod inspect;
mod load;
mod memory;
mod open;
mod order;
mod queue;
mod ranking;
mod rates;
mod spares;
mod state;
mod table;
mod times;
mod touch;
mod turns;
mod usage;
mod write;

use accounts::Group;
use geometry::Geometry;
pub use inspect::{InspectedAccount, InspectedScope, Inspection};
pub use load::{Found, Listing, Loading, Missed};
use memory::{Kept, MemoryTier};
use queue::Queue;
use rates::ReadRates;
use spares::Spares;
use state::SlabState;
use times::Times;
pub use times::{OnTime, SlabStep};
use turns::ReadTurns;
use usage::Counts;
pub use usage::{AccountUsage, SlabUsage};

use crate::buffer::RecordBuffer;
use crate::error::{Error, Result};
use crate::io::{DiskIo, IoChoice, IoWay, PAGE, Watched};
use crate::record::{Header, Record};

/// The settings of a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabConfig {
    /// The largest size of the file in bytes.
    pub limit: u64,
    /// The number of bytes per cell, rounded up to whole pages. A record uses whole cells.
    pub cell_bytes: usize,
    /// The number of bytes that may wait to be written; further records are dropped. As many bytes may be read for
    /// loads that were given up; further loads are late at once, until the disk has answered.
    pub queue_bytes: usize,
    /// The number of bytes of records that also stay in host memory, where loads find them without a read: the ones that
    /// were stored or [recycled](Slab::recycle) last. A page behind each record counts, too. They do not outlive the process.
    pub memory_bytes: usize,
    /// The way of I/O, or `None` for the best one that works here.
    pub io: Option<IoWay>,
    /// The longest time for one write or sync. After it, everything that waits or is being written is dropped, and
    /// further records are dropped until the disk has answered. A slab is not opened if one request takes longer.
    pub write_deadline: Duration,
    /// The policy that decides which records of a tenant leave first, apart from those that others need. Records have
    /// no priorities, so that [`PolicyKind::Priority`] is the same as [`PolicyKind::Lru`].
    pub policy: PolicyKind,
}

impl Default for SlabConfig {
    /// Returns the default settings: 10 GiB, cells of 64 KiB, a queue of 256 MiB, no records in host memory, the best
    /// way of I/O, 30 seconds for a write, and LRU.
    fn default() -> Self {
        Self {
            limit: 10 << 30,
            cell_bytes: 64 << 10,
            queue_bytes: 256 << 20,
            memory_bytes: 0,
            io: None,
            write_deadline: Duration::from_secs(30),
            policy: PolicyKind::Lru,
        }
    }
}

/// What became of a record that was given to [`Slab::store`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The record will be written.
    Queued,
    /// This record is stored already, or waits to be written.
    Known,
    /// The record was dropped, because the queue is full, the disk has not ended a write at its deadline, the
    /// record is larger than the slab or its tenant's limit allows, or its parent is not here.
    Dropped,
}

/// A file of records. See the [module documentation](self).
///
/// # Drop behaviour
/// Writes the records that are waiting, and a last checkpoint. If the disk does not end a write at its
/// [deadline](SlabConfig::write_deadline), nobody waits any longer. In that case, threads hold the file, its lock and
/// the memory of the writes until the disk has answered.
pub struct Slab {
    shared: Arc<Shared>,
    writers: Vec<JoinHandle<()>>,
    /// Locks the folder for this process until nothing writes to it any more.
    lock: Arc<Lock>,
}

/// A lock on a file, if there is one, until it is dropped.
struct Lock(Option<fs::File>);

impl Drop for Lock {
    /// Unlocks the file, also if another process has a copy of the descriptor. Closing it is not enough: a process that
    /// is starting has such a copy, and with it the lock, until it runs its program.
    fn drop(&mut self) {
        // A file that cannot be unlocked is unlocked when it is closed.
        let _ = self.0.as_ref().map(fs::File::unlock);
    }
}

/// The state that the slab shares with the threads that write.
struct Shared {
    io: Arc<Watched>,
    geometry: Geometry,
    config: SlabConfig,
    scope: BlockKey,
    state: Mutex<SlabState>,
    /// Held by the thread that takes a batch from the queue and places it.
    placing: Mutex<()>,
    /// Held for reading by a thread that has a batch, and for writing by one that waits for all other batches.
    writing: RwLock<()>,
    queue: Mutex<Queue>,
    queue_changed: Condvar,
    counts: Mutex<Counts>,
    rates: Mutex<ReadRates>,
    turns: ReadTurns,
    spares: Spares,
    memory: MemoryTier,
    times: Times,
    /// The number of bytes in loads that were given up and that the disk has not answered.
    given_up: AtomicUsize,
}

// Decision: docs/decisions/tiers.md#four-threads-write
/// The number of threads that write.
const WRITERS: usize = 4;

// Decision: docs/decisions/tiers.md#whoever-stores-lets-the-disks-threads-run
/// The number of bytes of a record whose caller lets other threads run.
const YIELDS: usize = 256 << 10;

// Decision: docs/decisions/tiers.md#a-thread-provides-the-memory-of-the-first-loads
/// The largest number of bytes that are provided for the first loads.
const FIRST_LOADS: usize = 32 << 20;

impl Slab {
    /// The name of the file in the slab's folder.
    pub const FILE: &str = "records.kvslab";

    /// Returns the size in bytes of the slab in `folder`, if there is one of this version. As a limit, it keeps the
    /// records.
    pub fn size_in(folder: &Path) -> Option<u64> {
        let path = folder.join(Self::FILE);
        // Opening a pipe would wait for its writer.
        let size = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?.len();
        let mut page = [0; PAGE];
        fs::File::open(&path).ok()?.read_exact(&mut page).ok()?;
        Geometry::read(&page).map(Geometry::file_bytes).filter(|bytes| *bytes <= size)
    }

    /// Opens or creates the slab in `folder`. `scope` is the key of the model, tokenizer and format of this
    /// process: records of other scopes count towards the limit, and leave first.
    ///
    /// If the file is of another version, larger than the limit, or so much smaller that it cannot grow to half
    /// of it, its records are given up, and the file is created anew.
    ///
    /// # Errors
    /// - Returns [`Error::NotAFolder`] if the path is a file, and [`Error::NotAFile`] if its lock is a pipe or a device.
    /// - Returns [`Error::InUse`] if another process has opened the folder.
    /// - Returns [`Error::LimitTooSmall`] if the limit is too small for a few records.
    /// - Returns [`Error::File`] if the file system refuses, as on a full disk or in a read-only folder, if the disk
    ///   does not answer within [`SlabConfig::write_deadline`], or if [`SlabConfig::io`] is a way of I/O that cannot be used here.
    pub fn open(folder: &Path, scope: BlockKey, config: SlabConfig) -> Result<Self> {
        let (io, lock) = open::files_within(folder, config)?;
        Self::over_locked(Box::new(io), &folder.join(Self::FILE), scope, config, lock)
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
        Self::over_locked(io, path, scope, config, Lock(lock))
    }

    fn over_locked(
        io: Box<dyn DiskIo>,
        path: &Path,
        scope: BlockKey,
        config: SlabConfig,
        lock: Lock,
    ) -> Result<Self> {
        let lock = Arc::new(lock);
        let io = Arc::new(Watched::new(io));
        let (geometry, state) = open::open_within(&io, path, scope, config, &lock)?;
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
            turns: ReadTurns::default(),
            // Half of what may wait to be written.
            spares: Spares::new(config.queue_bytes / 2),
            memory: MemoryTier::new(config.memory_bytes),
            times: Times::default(),
            given_up: AtomicUsize::new(0),
        });
        let mut this = Self { shared, writers: Vec::new(), lock };
        for number in 0..WRITERS {
            let (shared, lock) = (Arc::clone(&this.shared), Arc::clone(&this.lock));
            let writer = std::thread::Builder::new().name("kvtier-writer".to_owned());
            let writer = writer.spawn(move || {
                if number == 0 {
                    shared.spares.provide(FIRST_LOADS.min(shared.geometry.file_bytes() as usize / 16));
                }
                shared.write_batches();
                drop(lock);
            });
            this.writers.push(writer.map_err(Error::at("cannot start a thread that writes", path))?);
        }
        Ok(this)
    }

    /// Queues a record to be written, without waiting for the disk. It replaces a record with the same key and
    /// another identity.
    pub fn store(&self, record: Record) -> Stored {
        let (stored, refused) = self.queue(record);
        if let Some(Record { buffers, .. }) = refused {
            self.shared.recycle(buffers);
        }
        stored
    }

    /// Queues a record, or returns it.
    fn queue(&self, record: Record) -> (Stored, Option<Record>) {
        let shared = &*self.shared;
        let (key, bytes, identity) = (record.id.key, record.payload_len(), record.id.digest());
        // What waits is newer than what is stored.
        let waiting = shared.queue.lock().identity_of(&key);
        let is_known = match waiting {
            Some(waiting) => waiting == identity,
            None => shared.state.lock().confirms(&key, identity),
        };
        if is_known {
            return (Stored::Known, Some(record));
        }
        // In this order, because the parent may have been written in between.
        let parent_waits = shared.queue.lock().waits(record.note.parent);
        let has_parent = parent_waits || shared.state.lock().has_parent(&record.note);
        let cells = shared.geometry.cells_for(bytes);
        let fits = cells <= shared.geometry.cells / 2
            && shared.state.lock().allows(record.note.account, cells)
            && record.buffers.len() <= Header::MOST_LISTED / 2;
        let is_late = shared.give_up_late_writes();
        let mut queue = shared.queue.lock();
        if is_late || !fits || !has_parent || !queue.has_room(bytes, shared.config.queue_bytes) {
            drop(queue);
            shared.count(|counts| counts.stores_dropped += 1);
            return (Stored::Dropped, Some(record));
        }
        if queue.identity_of(&key) == Some(identity) {
            return (Stored::Known, Some(record));
        }
        queue.push(record, identity);
        drop(queue);
        shared.queue_changed.notify_all();
        if bytes >= YIELDS {
            std::thread::yield_now();
        }
        (Stored::Queued, None)
    }

    /// Returns buffers of these lengths with undefined contents, for a record to be stored. If they fill whole pages, and
    /// unless they are small, the disk writes them without a copy. The memory is that of earlier records, if there is some.
    pub fn buffers(&self, lens: &[usize]) -> Vec<RecordBuffer> {
        self.shared.spares.buffers(lens)
    }

    /// Gives a record that was loaded and used back to the slab, which keeps it in [host memory](SlabConfig::memory_bytes) or
    /// uses its memory again.
    pub fn recycle(&self, found: Found) {
        self.shared.keep(found.0);
    }

    /// Forgets the records in host memory. Those on the disk stay.
    pub fn clear_memory(&self) {
        self.shared.memory.clear();
    }

    /// Returns whether a record with this key can be loaded. Returns false if a load has asked for another
    /// identity under this key, so that the record is stored again.
    pub fn contains(&self, key: &BlockKey) -> bool {
        self.shared.state.lock().contains(key)
    }

    /// Returns the way of I/O and why better ones are not used, or `None` if the file is none of [`FileIo`](crate::FileIo).
    pub fn io_choice(&self) -> Option<&IoChoice> {
        self.shared.io.choice()
    }

    /// Returns the key of the model, tokenizer and format of this process.
    pub fn scope(&self) -> &BlockKey {
        &self.shared.scope
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
    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock());
    }

    /// Keeps a record in host memory, or uses its memory for the next records.
    fn keep(&self, record: Kept) {
        self.recycle(self.memory.keep(record));
    }

    /// Uses the memory of buffers for the next records.
    fn recycle(&self, buffers: Vec<RecordBuffer>) {
        self.spares.give(buffers.into_iter().filter_map(RecordBuffer::into_piece));
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.queue_changed.notify_all();
        let (writers, lock) = (std::mem::take(&mut self.writers), Arc::clone(&self.lock));
        let shared = Arc::clone(&self.shared);
        let (ends, ended) = mpsc::channel();
        let close = move || {
            for writer in writers {
                // If the thread panicked, the checkpoint before is still valid.
                let _ = writer.join();
            }
            shared.close();
            drop((shared, lock));
            // Nobody listens if the disk was late.
            let _ = ends.send(());
        };
        // If no thread starts, the closure is dropped, and the threads that write end by themselves.
        if std::thread::Builder::new().name("kvtier-close".to_owned()).spawn(close).is_err() {
            return;
        }
        loop {
            let limit = self.shared.next_look().map(|at| at.saturating_duration_since(Instant::now()));
            match ended.recv_timeout(limit.unwrap_or(Duration::MAX)) {
                Err(mpsc::RecvTimeoutError::Timeout) if !self.shared.give_up_late_writes() => {}
                _ => return,
            }
        }
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab").field("usage", &self.usage()).finish_non_exhaustive()
    }
}
