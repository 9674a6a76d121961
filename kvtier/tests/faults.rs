//! A disk that fails, hangs, or loses power: what is served is right or missing, never wrong.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{load, record, scope};
use kvtier::io::{Direction, IoEnd, IoRequest, OnEnd};
use kvtier::{DiskIo, Error, Missed, Record, Slab, SlabConfig, Stored};
use parking_lot::Mutex;

const LIMIT: u64 = 1 << 20;
/// The number of cuts after each event.
const CUTS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);

/// What happened to the disk.
#[derive(Clone)]
enum Event {
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    Sync,
    /// The records with smaller numbers are committed.
    Committed(u32),
}

#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    events: Vec<Event>,
    /// The kind of requests that fail.
    failing: Option<Direction>,
    /// The requests that the disk has not answered, if it hangs.
    hanging: Option<Vec<(usize, IoRequest, OnEnd)>>,
}

/// A disk in memory.
#[derive(Clone, Default)]
struct MemoryDisk(Arc<Mutex<Disk>>);

impl std::fmt::Debug for MemoryDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MemoryDisk")
    }
}

impl MemoryDisk {
    fn with(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Disk { bytes, ..Disk::default() })))
    }

    fn open(&self) -> kvtier::Result<Slab> {
        let config = SlabConfig { limit: LIMIT, cell_bytes: 8 << 10, queue_bytes: 4 << 20 };
        Slab::over(Box::new(self.clone()), Path::new("memory"), scope(), config, None)
    }

    /// Stops answering requests.
    fn hang(&self) {
        self.0.lock().hanging = Some(Vec::new());
    }

    /// Answers the requests that hang, and later ones.
    fn go_on(&self) {
        let hanging = self.0.lock().hanging.take().unwrap_or_default();
        for (index, request, on_end) in hanging {
            self.start(vec![request], Arc::new(move |end| on_end(IoEnd { index, ..end })));
        }
    }
}

impl DiskIo for MemoryDisk {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        for (index, mut request) in requests.into_iter().enumerate() {
            let mut disk = self.0.lock();
            if let Some(hanging) = &mut disk.hanging {
                hanging.push((index, request, Arc::clone(&on_end)));
                continue;
            }
            let start = request.offset as usize;
            let place = start..start + request.pages.bytes().len();
            let result = if disk.failing == Some(request.direction) {
                Err(io::Error::other("broken"))
            } else if place.end > disk.bytes.len() {
                Err(io::ErrorKind::UnexpectedEof.into())
            } else if request.direction == Direction::Read {
                request.pages.bytes_mut().copy_from_slice(&disk.bytes[place]);
                Ok(())
            } else {
                let bytes = request.pages.bytes().to_vec();
                disk.bytes[place].copy_from_slice(&bytes);
                disk.events.push(Event::Write { offset: request.offset, bytes });
                Ok(())
            };
            drop(disk);
            on_end(IoEnd { index, pages: request.pages, result });
        }
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.lock().bytes.len() as u64)
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.0.lock().bytes.resize(bytes as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.lock().events.push(Event::Sync);
        Ok(())
    }
}

/// Numbers that only depend on a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// Cuts the power after every event. Each sector that was written since the last sync may be old or new.
/// Returns the number of cuts.
fn cut_power(records: &[Record], cut: impl Fn(&MemoryDisk, u32)) -> usize {
    let disk = MemoryDisk::default();
    let slab = disk.open().unwrap();
    let size = disk.0.lock().bytes.len();
    for (number, record) in (0..).zip(records) {
        assert_eq!(slab.store(record.clone()), Stored::Queued);
        if number % 3 == 2 {
            assert!(slab.flush(PATIENCE));
            disk.0.lock().events.push(Event::Committed(number + 1));
        }
    }
    drop(slab);
    let events = disk.0.lock().events.clone();
    let (mut durable, mut pending, mut committed) = (vec![0; size], Vec::new(), 0);
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let mut cuts = 0;
    for event in events {
        match event {
            Event::Write { offset, bytes } => pending.push((offset as usize, bytes)),
            Event::Sync => {
                for (offset, bytes) in pending.drain(..) {
                    durable[offset..offset + bytes.len()].copy_from_slice(&bytes);
                }
            }
            Event::Committed(count) => committed = count,
        }
        for _ in 0..CUTS {
            let mut image = durable.clone();
            let kept = dice.roll(5);
            for (offset, bytes) in &pending {
                for (at, sector) in (*offset..).step_by(512).zip(bytes.chunks(512)) {
                    if dice.roll(4) < kept {
                        image[at..at + sector.len()].copy_from_slice(sector);
                    }
                }
            }
            cut(&MemoryDisk::with(image), committed);
            cuts += 1;
        }
    }
    cuts
}

#[test]
fn after_a_loss_of_power_committed_records_are_found_and_nothing_is_wrong() {
    let records: Vec<_> = (0..40).map(|number| record(number, 9_000)).collect();
    let cuts = cut_power(&records, |disk, committed| {
        let slab = disk.open().unwrap();
        for (number, expected) in (0..).zip(&records) {
            match load(&slab, &expected.id) {
                Ok(buffers) => assert_eq!(buffers, expected.buffers),
                Err(missed) => assert!(number >= committed, "{number} of {committed}: {missed}"),
            }
        }
        slab.check_invariants().unwrap();
        // The slab goes on.
        slab.store(record(1000, 9_000));
        assert!(slab.flush(PATIENCE) && load(&slab, &record(1000, 9_000).id).is_ok());
    });
    assert!(cuts > 500, "{cuts}");
}

#[test]
fn after_a_loss_of_power_during_eviction_nothing_is_wrong() {
    let records: Vec<_> = (0..200).map(|number| record(number, 30_000)).collect();
    let cuts = cut_power(&records, |disk, committed| {
        let slab = disk.open().unwrap();
        let mut found = HashSet::new();
        for (number, expected) in (0..).zip(&records) {
            if let Ok(buffers) = load(&slab, &expected.id) {
                assert_eq!(buffers, expected.buffers);
                found.insert(number);
            }
        }
        slab.check_invariants().unwrap();
        // The newest committed records are found.
        assert!(
            (committed.saturating_sub(15)..committed).all(|number| found.contains(&number)),
            "{committed}"
        );
    });
    assert!(cuts > 1000, "{cuts}");
}

#[test]
fn a_disk_that_fails_loses_records_and_says_so() {
    let disk = MemoryDisk::default();
    let slab = disk.open().unwrap();
    slab.store(record(1, 9_000));
    assert!(slab.flush(PATIENCE));
    disk.0.lock().failing = Some(Direction::Write);
    slab.store(record(2, 9_000));
    assert!(slab.flush(PATIENCE));
    assert!(!slab.contains(&record(2, 9_000).id.key));
    assert!(slab.usage().write_errors > 0);
    assert!(load(&slab, &record(1, 9_000).id).is_ok());
    disk.0.lock().failing = None;
    assert_eq!(slab.store(record(2, 9_000)), Stored::Queued);
    assert!(slab.flush(PATIENCE) && load(&slab, &record(2, 9_000).id).is_ok());
    disk.0.lock().failing = Some(Direction::Read);
    assert!(matches!(load(&slab, &record(1, 9_000).id), Err(Missed::Failed(_))));
    disk.0.lock().failing = None;
    assert!(matches!(load(&slab, &record(1, 9_000).id), Err(Missed::Absent)), "its cells are not trusted");
    assert!(load(&slab, &record(2, 9_000).id).is_ok());
    slab.check_invariants().unwrap();
    assert_eq!(slab.usage().read_errors, 1);
    disk.0.lock().failing = Some(Direction::Read);
    let refused = disk.open().unwrap_err();
    assert!(matches!(refused, Error::File { what: "cannot read", .. }), "{refused}");
}

#[test]
fn a_disk_that_hangs_stalls_nobody() {
    let disk = MemoryDisk::default();
    let slab = disk.open().unwrap();
    slab.store(record(1, 9_000));
    assert!(slab.flush(PATIENCE));
    disk.hang();
    let since = Instant::now();
    let late = slab.load(&record(1, 9_000).id, since + Duration::from_millis(50));
    assert!(matches!(late, Err(Missed::Late)), "{late:?}");
    // Stores are queued until the queue is full.
    let mut stored = Vec::new();
    for number in 2..1000 {
        stored.push(slab.store(record(number, 9_000)));
        if stored.last() == Some(&Stored::Dropped) {
            break;
        }
    }
    assert_eq!(stored.last(), Some(&Stored::Dropped));
    assert!(!slab.flush(Duration::from_millis(20)));
    disk.go_on();
    assert!(slab.flush(PATIENCE));
    assert_eq!(slab.usage().deadline_exceeded, 1);
    let newest = record(stored.len() as u32, 9_000);
    assert_eq!(load(&slab, &newest.id).unwrap(), newest.buffers);
    slab.check_invariants().unwrap();
}
