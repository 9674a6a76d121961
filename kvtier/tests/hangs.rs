//! A disk whose writes hang: they are given up at their deadline, nobody waits for them any longer, and the slab goes
//! on when the disk does.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use common::disk::{Dice, LIMIT, TestDisk, on_each_disk};
use common::{in_slab_memory, load, record, scope};
use kvtier::{Missed, Record, Slab, SlabConfig, Stored};

const PATIENCE: Duration = Duration::from_secs(20);

/// Longer than a disk in memory takes on a machine that is busy.
const DEADLINE: Duration = Duration::from_millis(250);

/// Stores a record as soon as the slab accepts it, and waits until it is found.
fn store_again(slab: &Slab, record: &Record) {
    let until = Instant::now() + PATIENCE;
    while !slab.contains(&record.id.key) {
        assert!(Instant::now() < until, "the slab does not recover: {:?}", slab.usage());
        slab.store(record.clone());
        assert!(slab.flush(PATIENCE));
    }
    assert_eq!(load(slab, &record.id).unwrap(), record.buffers);
}

/// Checks the invariants as soon as the threads that write have ended what was given up.
fn check(slab: &Slab) {
    let until = Instant::now() + PATIENCE;
    while let Err(fault) = slab.check_invariants() {
        assert!(Instant::now() < until, "{fault}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Stores two records on a disk that hangs after some writes and syncs, and follows what becomes of them.
fn gives_up(disk: &TestDisk, after: usize, deadline: Duration) {
    let slab = disk.open_within(deadline);
    let [kept, lost, waiting, refused] = [1, 2, 3, 4].map(|number| record(number, 9_000));
    store_again(&slab, &kept);
    disk.state().hanging_after = Some(after);
    let since = Instant::now();
    assert_eq!(slab.store(lost.clone()), Stored::Queued);
    // The first record is taken before the second one is stored, or both are taken together.
    assert_eq!(slab.store(waiting.clone()), Stored::Queued);
    assert!(slab.flush(PATIENCE), "a flush ends at the deadline of the writes");
    assert!((deadline..PATIENCE / 2).contains(&since.elapsed()), "{:?}", since.elapsed());
    let usage = slab.usage();
    let found = [&lost, &waiting].into_iter().filter(|one| slab.contains(&one.id.key)).count() as u64;
    assert_eq!(usage.stores_dropped + found, 2, "{usage:?}");
    assert!(usage.stores_dropped > 0 && (1..=2).contains(&usage.write_deadline_exceeded), "{usage:?}");
    assert_eq!(usage.write_errors, 0);
    // While the disk hangs, nothing is queued, and what is stored is still read.
    let since = Instant::now();
    for count in 1..=50 {
        assert_eq!(slab.store(refused.clone()), Stored::Dropped);
        assert_eq!(slab.usage().stores_dropped, usage.stores_dropped + count);
    }
    assert!(slab.flush(PATIENCE) && since.elapsed() < PATIENCE / 10);
    assert_eq!(load(&slab, &kept.id).unwrap(), kept.buffers);
    assert_eq!(slab.usage().write_deadline_exceeded, usage.write_deadline_exceeded);
    disk.go_on();
    for again in [&refused, &lost, &waiting] {
        store_again(&slab, again);
    }
    check(&slab);
    drop(slab);
    let slab = disk.open().unwrap();
    for expected in [&kept, &lost, &waiting, &refused] {
        assert_eq!(load(&slab, &expected.id).unwrap(), expected.buffers);
    }
}

/// A record of 9,000 bytes is one write, its header another one, and the batch ends with a sync.
#[test]
fn writes_that_hang_are_given_up_whatever_they_write() {
    for after in 0..5 {
        gives_up(&TestDisk::in_memory(Vec::new()), after, DEADLINE);
    }
}

#[test]
fn writes_that_hang_are_given_up_in_each_way_of_io() {
    on_each_disk(|disk| gives_up(&disk, 0, Duration::from_secs(1)));
}

/// Writes are timed one by one, so a slow disk may take much longer than the deadline for all of them.
#[test]
fn a_slow_disk_is_not_given_up() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_within(4 * DEADLINE);
    let since = Instant::now();
    let mut number = 0;
    while since.elapsed() < 8 * DEADLINE {
        disk.be_late();
        assert_eq!(slab.store(record(number, 9_000)), Stored::Queued);
        while disk.kept() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(DEADLINE);
        disk.go_on();
        number += 1;
    }
    assert!(slab.flush(PATIENCE));
    let usage = slab.usage();
    assert_eq!((usage.write_deadline_exceeded, usage.stores_dropped), (0, 0));
    assert_eq!(usage.records, number as usize);
}

#[test]
fn dropping_a_slab_waits_no_longer_than_the_deadline_of_a_write() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = (folder.path().join("lock"), TestDisk::in_memory(Vec::new()));
    let open = || {
        let lock = File::create(&path).unwrap();
        lock.try_lock().ok().map(|()| {
            let config = SlabConfig { limit: LIMIT, write_deadline: DEADLINE, ..SlabConfig::default() };
            let io = Box::new(disk.clone());
            let config = SlabConfig { cell_bytes: 8 << 10, ..config };
            Slab::over(io, Path::new("test"), scope(), config, Some(lock)).unwrap()
        })
    };
    // In a payload, in a header, in the sync behind them, and in the last checkpoint.
    for after in 0..4 {
        let slab = open().unwrap();
        let [kept, lost] = [1, 2].map(|number| record(100 * after + number, 9_000));
        store_again(&slab, &kept);
        disk.state().hanging_after = Some(after as usize);
        assert_eq!(slab.store(lost.clone()), Stored::Queued);
        let since = Instant::now();
        drop(slab);
        assert!(since.elapsed() < PATIENCE / 2, "{:?}", since.elapsed());
        // The disk still has the memory of its writes, and nobody else may write to the file.
        assert!(after == 2 || disk.unanswered() > 0);
        assert!(open().is_none());
        disk.go_on();
        let until = Instant::now() + PATIENCE;
        let slab = loop {
            assert!(Instant::now() < until, "the folder stays locked");
            match open() {
                Some(slab) => break slab,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(load(&slab, &kept.id).unwrap(), kept.buffers);
        match load(&slab, &lost.id) {
            Ok(buffers) => assert_eq!(buffers, lost.buffers),
            Err(missed) => assert!(matches!(missed, Missed::Absent), "{missed}"),
        }
        check(&slab);
    }
}

#[test]
fn a_slab_on_a_disk_that_hangs_is_not_opened_and_is_opened_later() {
    let disk = TestDisk::in_memory(Vec::new());
    let kept = record(1, 9_000);
    store_again(&disk.open().unwrap(), &kept);
    let config = SlabConfig { write_deadline: DEADLINE, ..SlabConfig::default() };
    let refused = |hang: &dyn Fn()| {
        while disk.holders() > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        hang();
        let since = Instant::now();
        let refused = disk.open_with(config).unwrap_err().to_string();
        assert!(refused.contains("cannot read test: the disk does not answer"), "{refused}");
        assert!((DEADLINE..PATIENCE / 2).contains(&since.elapsed()), "{:?}", since.elapsed());
        // The thread that opens it still waits for the disk.
        assert!(disk.holders() > 1);
        disk.go_on();
    };
    // The first read; a change of the size; the superblock, and the sync behind it.
    refused(&|| disk.hang());
    refused(&|| disk.state().hanging_resize = true);
    for after in 0..2 {
        refused(&|| disk.state().hanging_after = Some(after));
    }
    let slab = disk.open_with(config).unwrap();
    assert_eq!(load(&slab, &kept.id).unwrap(), kept.buffers);
}

/// Hangs after a random number of writes and syncs, in payloads, headers, syncs and checkpoints, while chains of
/// records push each other out.
#[test]
fn after_hangs_at_any_write_nothing_is_wrong() {
    let dice = &mut Dice(0x6a09_e667_f3bc_c909);
    let disk = TestDisk::in_memory(Vec::new());
    let deadline = DEADLINE;
    let mut slab = disk.open_within(deadline);
    let link = |number: u32| {
        let mut record = record(number, if number.is_multiple_of(4) { 64 << 10 } else { 12_000 });
        record.note.parent = (!number.is_multiple_of(3)).then(|| common::record(number - 1, 0).id.key);
        record
    };
    let mut given_up = 0;
    for round in 0..25 {
        disk.state().hanging_after = Some(dice.roll(25) as usize);
        for _ in 0..15 {
            let chain = 3 * dice.roll(60) as u32;
            for number in chain..chain + 1 + dice.roll(3) as u32 {
                slab.store(in_slab_memory(&slab, &link(number)));
            }
        }
        assert!(slab.flush(PATIENCE));
        given_up += slab.usage().write_deadline_exceeded;
        let is_dropped = dice.roll(3) == 0;
        if is_dropped {
            drop(slab);
        } else {
            disk.go_on();
            store_again(&slab, &record(1000 + round, 9_000));
            check(&slab);
            drop(slab);
        }
        disk.go_on();
        // Whoever still writes has ended after a while; in a folder, a lock tells.
        while disk.holders() > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        slab = disk.open_within(deadline);
        check(&slab);
        for number in 0..180 {
            let expected = link(number);
            match load(&slab, &expected.id) {
                Ok(buffers) => assert_eq!(buffers, expected.buffers, "{number}"),
                Err(missed) => assert!(matches!(missed, Missed::Absent), "{number}: {missed}"),
            }
            let has_parent = expected.note.parent.is_none_or(|parent| slab.contains(&parent));
            assert!(has_parent || !slab.contains(&expected.id.key), "{number} has outlived its parent");
        }
    }
    assert!(given_up > 6, "{given_up} batches");
}
