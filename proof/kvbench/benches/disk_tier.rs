//! Compares a slab's writes and reads of records of 2 MiB with plain direct writes and reads of the same bytes
//! on the same disk, in each way of I/O that works here.
//!
//! `--mib N` sets the number of MiB per turn (default 512), and `--turns N` the number of turns (default 5).
//! `--quick 1` measures one turn.
//!
//! The plain program has one thread for each request under way, and as much memory as it reads and writes. Both sides
//! overwrite files that were written before, and both end their writes with a sync. The times of a slab include its
//! digests and its checkpoints.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvbench::{option, row};
use kvcore::KeyScope;
use kvtier::{FileIo, IoWay, Record, RecordId, Slab, SlabConfig, Stored};

mod direct;

use direct::Plain;

/// The number of bytes in the buffers of a record.
const RECORD: usize = 2 << 20;
/// The number of records that are loaded at the same time.
const LOADS: usize = 4;
/// The longest time that a turn waits for the disk.
const PATIENCE: Duration = Duration::from_secs(60);

/// A slab, with the records of one turn.
struct Ours {
    slab: Slab,
    records: u32,
    ids: Vec<RecordId>,
}

impl Ours {
    fn new(folder: &Path, way: IoWay, records: u32) -> Self {
        let bytes = u64::from(records) * RECORD as u64;
        let config = SlabConfig {
            limit: bytes + bytes / 4 + (32 << 20),
            queue_bytes: 2 * bytes as usize,
            io: Some(way),
            ..SlabConfig::default()
        };
        let slab = Slab::open(folder, KeyScope::new("bench", b"").root(), config).expect("a slab");
        Self { slab, records, ids: Vec::new() }
    }

    /// Stores new records, which replace those of the turn before, and returns the time in seconds.
    fn write(&mut self, turn: u32) -> f64 {
        let record = |number: u32| {
            let tokens: Vec<u32> = (0..512).map(|token| turn * self.records + number + token).collect();
            let key = KeyScope::new("bench", b"").root().child(&[turn, number]);
            let id = RecordId { key, tokens: tokens.into(), stored_start: 0, label: "bench".into() };
            let mut buffers = self.slab.buffers(&[RECORD / 2; 2]);
            for (buffer, byte) in buffers.iter_mut().zip([turn, turn + 7]) {
                buffer.fill((byte + number) as u8);
            }
            Record::new(id, buffers)
        };
        let records: Vec<Record> = (0..self.records).map(record).collect();
        self.ids = records.iter().map(|record| record.id.clone()).collect();
        let start = Instant::now();
        for record in records {
            assert_eq!(self.slab.store(record), Stored::Queued);
        }
        assert!(self.slab.flush(PATIENCE), "the records were not written in time");
        start.elapsed().as_secs_f64()
    }

    /// Loads all records of the last turn, several at a time, and returns the time in seconds.
    fn read(&self, loads: usize) -> f64 {
        let next = AtomicU64::new(0);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..loads {
                scope.spawn(|| {
                    while let Some(id) = self.ids.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                        let found = self.slab.load(id, Instant::now() + PATIENCE);
                        self.slab.recycle(found.expect("a record that was stored"));
                    }
                });
            }
        });
        start.elapsed().as_secs_f64()
    }
}

/// The number of records on the disk when a slab is opened.
const MANY: u32 = 100_000;

/// Stores [`MANY`] small records, and returns the shortest of three times from opening the slab to the first
/// record, in seconds.
fn restart(folder: &Path, way: IoWay) -> f64 {
    let scope = KeyScope::new("bench", b"").root();
    let config = SlabConfig { limit: 1 << 30, cell_bytes: 8 << 10, io: Some(way), ..SlabConfig::default() };
    let open = || Slab::open(folder, scope, config).expect("a slab");
    let id = |number: u32| RecordId {
        key: scope.child(&[number]),
        tokens: [number].into(),
        stored_start: 0,
        label: "bench".into(),
    };
    let slab = open();
    for number in 0..MANY {
        while slab.store(Record::new(id(number), vec![vec![number as u8; 1000]])) == Stored::Dropped {
            assert!(slab.flush(PATIENCE), "the records were not written in time");
        }
    }
    drop(slab);
    let time = |_| {
        let start = Instant::now();
        let slab = open();
        slab.load(&id(MANY / 2), Instant::now() + PATIENCE).expect("a record that was stored");
        start.elapsed().as_secs_f64()
    };
    (0..3).map(time).fold(f64::INFINITY, f64::min)
}

fn main() {
    let mib = option("--mib", 512);
    let turns = if option("--quick", 0) > 0 { 1 } else { option("--turns", 5) };
    let records = (mib * (1 << 20) / RECORD).max(1) as u32;
    let bytes = records as usize * RECORD;
    for way in IoWay::ALL {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        if let Err(reason) = FileIo::open(&folder.path().join("try"), Some(way)) {
            eprintln!("SKIPPED {way}: {reason}");
            continue;
        }
        let plain = Plain::new(&folder.path().join("plain"), bytes as u64, 1);
        let mut ours = Ours::new(folder.path(), way, records);
        let mut memory = ours.slab.buffers(&[bytes]).remove(0);
        // The first turns write to places that were never written.
        plain.write();
        ours.write(0);
        ours.write(1);
        let mut best = [f64::INFINITY; 5];
        for turn in 2..turns as u32 + 2 {
            let (write, plain_write) = (ours.write(turn), plain.write_from(&mut memory));
            let (read, plain_read) = (ours.read(LOADS), plain.read_to(&mut memory));
            let times = [write, plain_write, read, plain_read, ours.read(1)];
            for (best, time) in best.iter_mut().zip(times) {
                *best = best.min(time);
            }
        }
        let [write, plain_write, read, plain_read, one_read] = best;
        let what = |does: &str| format!("disk tier: {does} records of 2 MiB, {way}");
        row(&what("write"), bytes, write, "direct writes", plain_write);
        row(&what(&format!("read, {LOADS} at a time,")), bytes, read, "direct reads", plain_read);
        row(&what("read, one at a time,"), bytes, one_read, "direct reads", plain_read);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        let first = restart(folder.path(), way);
        row(
            &format!("disk tier: restart to the first of {MANY} records, {way}"),
            RECORD,
            first,
            "one second",
            1.0,
        );
    }
}
