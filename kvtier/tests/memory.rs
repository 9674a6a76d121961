//! Records in host memory above the disk.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use common::disk::TestDisk;
use common::{in_slab_memory, load, record};
use kvtier::io::Direction;
use kvtier::{Missed, RecordId, Slab, SlabConfig, Stored};

const PATIENCE: Duration = Duration::from_secs(20);
const RECORD: usize = 64 << 10;

/// The memory of a record: its buffers, and the page behind them.
const HELD: usize = RECORD + 4096;

fn config(memory_bytes: usize) -> SlabConfig {
    SlabConfig { memory_bytes, ..SlabConfig::default() }
}

/// Stores records, and waits until they are on the disk.
fn store(slab: &Slab, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert_eq!(slab.store(in_slab_memory(slab, &record(number, RECORD))), Stored::Queued);
        assert!(slab.flush(PATIENCE));
    }
}

/// Loads a record while the disk answers nothing, and gives it back.
fn load_from_memory(slab: &Slab, number: u32) {
    let record = record(number, RECORD);
    let loading = slab.begin_load(&record.id);
    assert!(loading.is_over() && loading.has_arrived(), "record {number} is not in memory");
    let found = loading.end().unwrap();
    assert_eq!(found, record.buffers);
    slab.recycle(found);
}

#[test]
fn what_was_stored_or_used_last_is_found_while_the_disk_hangs() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_with(config(3 * HELD)).unwrap();
    store(&slab, 0..5);
    assert_eq!(
        (slab.usage().memory_bytes, slab.usage().memory_limit_bytes),
        (3 * HELD as u64, 3 * HELD as u64)
    );
    // A record that is read from the disk and given back pushes out the oldest of the others.
    let found = load(&slab, &record(0, RECORD).id).unwrap();
    slab.recycle(found);
    disk.hang();
    for _ in 0..2 {
        for number in [0, 3, 4] {
            assert!(slab.peek(&record(number, RECORD).id.key).unwrap().in_memory);
            load_from_memory(&slab, number);
        }
    }
    let late = slab.load(&record(2, RECORD).id, Instant::now() + Duration::from_millis(10));
    assert!(matches!(late, Err(Missed::Late)), "{late:?}");
    assert!(!slab.peek(&record(2, RECORD).id.key).unwrap().in_memory);
    let usage = slab.usage();
    assert_eq!((usage.memory_hits, usage.hits, usage.misses), (6, 7, 1));
    disk.go_on();
    slab.clear_memory();
    assert_eq!(slab.usage().memory_bytes, 0);
    for number in 0..5 {
        assert_eq!(load(&slab, &record(number, RECORD).id).unwrap(), record(number, RECORD).buffers);
    }
    assert_eq!(slab.usage().memory_hits, 6);
    slab.check_invariants().unwrap();
}

#[test]
fn a_record_that_was_not_given_back_is_read_from_the_disk() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_with(config(3 * HELD)).unwrap();
    store(&slab, 0..1);
    for memory_hits in [1, 1] {
        drop(load(&slab, &record(0, RECORD).id).unwrap());
        assert_eq!(slab.usage().memory_hits, memory_hits);
    }
    // Loads whose end nobody asks for, from the disk and from memory, give their record back.
    for memory_hits in [1, 2, 3] {
        assert!(slab.begin_load(&record(0, RECORD).id).wait_until(Instant::now() + PATIENCE));
        assert_eq!((slab.usage().memory_hits, slab.usage().memory_bytes), (memory_hits, HELD as u64));
    }
}

#[test]
fn what_could_not_be_written_or_is_too_large_does_not_stay() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_with(config(3 * HELD)).unwrap();
    disk.state().failing = Some(Direction::Write);
    slab.store(in_slab_memory(&slab, &record(0, RECORD)));
    assert!(slab.flush(PATIENCE));
    assert_eq!((slab.usage().records, slab.usage().memory_bytes), (0, 0));
    disk.state().failing = None;
    slab.store(record(1, 3 * HELD + 1));
    assert!(slab.flush(PATIENCE));
    assert_eq!((slab.usage().records, slab.usage().memory_bytes), (1, 0));
    store(&slab, 2..3);
    assert_eq!(slab.usage().memory_bytes, HELD as u64);
}

#[test]
fn memory_serves_although_the_disk_owes_many_answers() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_with(config(HELD)).unwrap();
    let large = record(0, 300_000);
    slab.store(large.clone());
    assert!(slab.flush(PATIENCE));
    store(&slab, 1..2);
    disk.hang();
    // The tests' slab may hold 4 MiB for loads that nobody waits for.
    for _ in 0..20 {
        assert!(matches!(slab.load(&large.id, Instant::now()), Err(Missed::Late)));
    }
    load_from_memory(&slab, 1);
    disk.go_on();
}

#[test]
fn what_has_left_the_disk_or_differs_is_not_served_from_memory() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_with(config(64 * HELD)).unwrap();
    store(&slab, 0..30);
    assert!(slab.usage().evicted > 0 && slab.usage().memory_bytes == 30 * HELD as u64);
    let gone = load(&slab, &record(0, RECORD).id);
    assert!(matches!(gone, Err(Missed::Absent)), "{gone:?}");
    let last = record(29, RECORD).id;
    let other = RecordId { label: "other".into(), ..last.clone() };
    let differs = load(&slab, &other);
    assert!(matches!(differs, Err(Missed::Differs)), "{differs:?}");
    load_from_memory(&slab, 29);
    // A record with the same key takes the place of the one before, in memory, too.
    let newer = kvtier::Record { id: other.clone(), ..record(7, RECORD) };
    assert_eq!(slab.store(newer), Stored::Queued);
    assert!(slab.flush(PATIENCE));
    let old = load(&slab, &last);
    assert!(matches!(old, Err(Missed::Differs)), "{old:?}");
    assert_eq!(load(&slab, &other).unwrap(), record(7, RECORD).buffers);
}

#[test]
fn the_memory_does_not_outlive_the_slab() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_with(config(64 * HELD)).unwrap();
    store(&slab, 0..3);
    drop(slab);
    let slab = disk.open_with(config(64 * HELD)).unwrap();
    assert_eq!((slab.usage().memory_bytes, slab.usage().records), (0, 3));
    for number in 0..3 {
        let found = load(&slab, &record(number, RECORD).id).unwrap();
        assert_eq!(found, record(number, RECORD).buffers);
        slab.recycle(found);
    }
    assert_eq!((slab.usage().memory_bytes, slab.usage().memory_hits), (3 * HELD as u64, 0));
}
