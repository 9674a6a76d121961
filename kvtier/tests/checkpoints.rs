//! Checkpoints that are written while another record is: it is found after a crash, and nothing else takes its place.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use common::disk::TestDisk;
use common::{load, record};
use kvtier::io::PAGE;
use kvtier::{Record, Slab};

const PATIENCE: Duration = Duration::from_secs(20);

/// The number of bytes that the payload of such a record takes on the disk.
const PAYLOAD: usize = 5 * PAGE;

/// A record of three cells.
fn small(number: u32) -> Record {
    record(number, 20_000)
}

fn wait_until(what: impl Fn() -> String, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{}", what());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Stores records one after another, each as soon as the one before is found.
fn store_each(slab: &Slab, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let record = small(number);
        wait_until(
            || format!("{number} is not written: {:?}", slab.usage()),
            || {
                slab.store(record.clone());
                slab.contains(&record.id.key)
            },
        );
    }
}

/// Checks that every record that `kept` knows is found after a crash, and that nothing is damaged. What has left since
/// the last checkpoint may be found again.
fn check_after_a_crash(disk: &TestDisk, numbers: std::ops::Range<u32>, kept: impl Fn(u32) -> bool) {
    let slab = TestDisk::in_memory(disk.image()).open().unwrap();
    for number in numbers {
        let found = load(&slab, &small(number).id);
        assert!(found.is_ok() || !kept(number), "{number} is lost");
        assert!(found.is_err() || found.unwrap() == small(number).buffers);
    }
    assert_eq!(slab.usage().damaged, 0);
    slab.check_invariants().unwrap();
}

/// The record whose write hangs.
const HANGING: u32 = 1000;

/// Returns a slab with a few records, and another one whose write hangs.
fn with_a_write_that_hangs(disk: &TestDisk, before: u32) -> Slab {
    let slab = disk.open().unwrap();
    store_each(&slab, 0..before);
    disk.state().holding = Some(PAYLOAD);
    slab.store(small(HANGING));
    wait_until(|| "no write hangs".to_owned(), || disk.holds());
    slab
}

/// The slab has room for about forty such records, and a checkpoint opens room for five.
fn survives(disk: &TestDisk, before: u32, beside: u32) {
    let slab = with_a_write_that_hangs(disk, before);
    store_each(&slab, before..before + beside);
    let found = |number: u32| slab.contains(&small(number).id.key);
    assert!(!found(HANGING));
    check_after_a_crash(disk, 0..before + beside, found);
    disk.release();
    assert!(slab.flush(PATIENCE) && found(HANGING));
    slab.check_invariants().unwrap();
    check_after_a_crash(disk, HANGING..HANGING + 1, found);
    check_after_a_crash(disk, 0..before + beside, found);
    // Later records use all cells again, and that of the record that hung.
    store_each(&slab, 2000..2100);
    assert!(slab.flush(PATIENCE) && !found(HANGING));
    slab.check_invariants().unwrap();
    check_after_a_crash(disk, 2000..2100, found);
    assert!(slab.usage().records > 30, "{:?}", slab.usage());
}

#[test]
fn a_record_that_is_being_written_survives_the_checkpoints_beside_it() {
    // The others fill a part of the slab, or push out some that are older than the one that hangs.
    for (before, beside) in [(1, 20), (30, 20), (60, 30)] {
        survives(&TestDisk::in_memory(Vec::new()), before, beside);
    }
}

/// Cells of newer records are not written again while an older one is being written, so that the rest waits for it.
#[test]
fn records_that_push_out_newer_ones_wait_for_the_older_one() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = with_a_write_that_hangs(&disk, 10);
    let all = 10..100;
    let stored = |number: &u32| slab.contains(&small(*number).id.key);
    for number in all.clone() {
        slab.store(small(number));
    }
    wait_until(|| format!("{:?}", slab.usage()), || all.clone().filter(stored).count() > 20);
    assert!(!slab.flush(Duration::from_millis(200)));
    check_after_a_crash(&disk, all.clone(), |number| stored(&number));
    disk.release();
    assert!(slab.flush(PATIENCE) && stored(&99));
    slab.check_invariants().unwrap();
    check_after_a_crash(&disk, 0..HANGING + 1, |number| stored(&number));
}
