//! Checkpoints that are written while another record is: it is found after a crash, and nothing else takes its place.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use common::disk::TestDisk;
use common::{load, record, scope};
use kvtier::io::PAGE;
use kvtier::{AccountId, Record, RecordNote, Slab, Stored};

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
    wait_until(|| "no write hangs".to_owned(), || disk.held() == 1);
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

/// A limit evicts records that are newer than the one that hangs, just before a checkpoint. Their headers are in cells that
/// a checkpoint opens after a restart.
#[test]
fn records_that_have_left_do_not_come_back_after_two_restarts() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = with_a_write_that_hangs(&disk, 10);
    let tenant = AccountId::of(&scope().child(&[7]));
    slab.limit_account(tenant, Some(24 << 10));
    let others = 2000..2020;
    for number in others.clone() {
        let mut record = small(number);
        record.note.account = tenant;
        disk.state().holding = Some(PAYLOAD);
        slab.store(record.clone());
        wait_until(|| format!("{number} is not written: {:?}", slab.usage()), || disk.held() == 2);
        // What has left since the last checkpoint may be found after the crash, but not what is not found then.
        let again = TestDisk::in_memory(disk.image());
        let found = || {
            let slab = again.open().unwrap();
            slab.check_invariants().unwrap();
            others.clone().filter(|&number| slab.contains(&small(number).id.key)).collect::<Vec<_>>()
        };
        let first = found();
        assert_eq!(found(), first, "after {number}");
        disk.release();
        wait_until(|| format!("{number} is not found: {:?}", slab.usage()), || slab.contains(&record.id.key));
    }
    disk.release();
    assert!(slab.flush(PATIENCE));
    slab.check_invariants().unwrap();
}

/// The table of a checkpoint that failed may be on the disk. What is written afterwards is found all the same.
#[test]
fn records_after_a_checkpoint_that_failed_survive_a_crash() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let mut kept = Vec::new();
    for number in 0..60 {
        disk.state().failing_syncs = number % 7 == 3;
        slab.store(small(number));
        assert!(slab.flush(PATIENCE));
        disk.state().failing_syncs = false;
        // A smaller one fits into cells that are left.
        let little = record(5000 + number, 3_000);
        slab.store(little.clone());
        assert!(slab.flush(PATIENCE));
        kept.extend([small(number), little]);
        kept.retain(|record| slab.contains(&record.id.key));
        let again = TestDisk::in_memory(disk.image()).open().unwrap();
        for record in &kept {
            assert!(again.contains(&record.id.key), "{number}: {:?} is lost", record.id.stored_start);
            assert_eq!(load(&again, &record.id).unwrap(), record.buffers);
        }
    }
    assert!(slab.usage().write_errors > 3, "{:?}", slab.usage());
}

/// The parent is found, or waits to be found, at every moment after it was stored.
#[test]
fn a_child_is_stored_at_any_moment_after_its_parent() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    for number in 0..20_000 {
        let parent = record(2 * number, 100);
        let mut child = record(2 * number + 1, 100);
        child.note.parent = Some(parent.id.key);
        slab.store(parent);
        for _ in 0..number % 500 * 4 {
            std::hint::spin_loop();
        }
        assert_eq!(slab.store(child), Stored::Queued, "{number}: {:?}", slab.usage());
        if number % 5000 == 4999 {
            // The queue has room for about 30,000 of these records, should the threads that write get no processor.
            assert!(slab.flush(PATIENCE));
        }
    }
    assert!(slab.flush(PATIENCE));
    assert_eq!(slab.usage().stores_dropped, 0, "{:?}", slab.usage());
    slab.check_invariants().unwrap();
}

/// Room for a child is made by others, even where its parent would be the next one to leave.
#[test]
fn a_parent_stays_while_room_for_its_child_is_made() {
    let account = AccountId::DEFAULT;
    let own = |number, parent: Option<&Record>| {
        let mut record = record(number, 100);
        record.note =
            RecordNote { account, parent: parent.map(|parent| parent.id.key), ..RecordNote::default() };
        record
    };
    let mut others_left = false;
    for (limit, others) in (100..130).map(|others| (None, others)).chain([(Some(3 * (8 << 10)), 3)]) {
        let slab = TestDisk::in_memory(Vec::new()).open().unwrap();
        slab.limit_account(account, limit);
        let store = |record: &Record| {
            assert_eq!(slab.store(record.clone()), Stored::Queued);
            assert!(slab.flush(PATIENCE));
        };
        let grandparent = own(0, None);
        let parent = own(1, Some(&grandparent));
        [&grandparent, &parent].into_iter().for_each(store);
        (2..others).for_each(|number| store(&own(number, None)));
        if !slab.contains(&parent.id.key) {
            continue;
        }
        let (child, before) = (own(1000, Some(&parent)), slab.usage().evicted);
        store(&child);
        others_left |= slab.usage().evicted > before;
        let usage = slab.usage();
        for record in [&grandparent, &parent, &child] {
            assert!(
                slab.contains(&record.id.key),
                "{limit:?}, {others}: {:?}, {usage:?}",
                record.id.stored_start
            );
        }
        slab.check_invariants().unwrap();
    }
    assert!(others_left, "no room was needed");
}
