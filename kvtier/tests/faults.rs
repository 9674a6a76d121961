//! A disk that fails, hangs, or loses power: what is served is right or missing, never wrong.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::disk::{Dice, Event, TestDisk, on_each_disk};
use common::{in_slab_memory, load, record, ways};
use kvtier::io::Direction;
use kvtier::{DiskIo, Error, Missed, Record, SlabStep, Stored};
use parking_lot::Mutex;

const PATIENCE: Duration = Duration::from_secs(20);

/// Cuts the power of a disk several times after every write and every sync. Each sector that was written since
/// the last sync, or whose write had not ended before it, may be old or new. Returns the number of cuts.
fn cut_power(disk: &TestDisk, times: usize, records: &[Record], cut: impl Fn(&TestDisk, u32)) -> usize {
    let slab = disk.open().unwrap();
    let size = disk.size().unwrap() as usize;
    for (number, record) in (0..).zip(records) {
        assert_eq!(slab.store(in_slab_memory(&slab, record)), Stored::Queued);
        if number % 3 == 2 {
            assert!(slab.flush(PATIENCE));
            disk.state().events.push(Event::Committed(number + 1));
        }
    }
    drop(slab);
    let events = disk.state().events.clone();
    let (mut durable, mut pending, mut committed) = (vec![0; size], Vec::new(), 0);
    let mut ended = HashSet::new();
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let mut cuts = 0;
    for event in events {
        match event {
            Event::Write { number, offset, bytes } => pending.push((number, offset as usize, bytes)),
            Event::Sync => pending.retain(|(number, offset, bytes)| {
                let is_covered = ended.contains(number);
                if is_covered {
                    durable[*offset..offset + bytes.len()].copy_from_slice(bytes);
                }
                !is_covered
            }),
            Event::Committed(count) => committed = count,
            Event::Ended(number) => {
                ended.insert(number);
                continue;
            }
        }
        for _ in 0..times {
            let mut image = durable.clone();
            let kept = dice.roll(5);
            for (_, offset, bytes) in &pending {
                for (at, sector) in (*offset..).step_by(512).zip(bytes.chunks(512)) {
                    if dice.roll(4) < kept {
                        image[at..at + sector.len()].copy_from_slice(sector);
                    }
                }
            }
            cut(&TestDisk::in_memory(image), committed);
            cuts += 1;
        }
    }
    cuts
}

/// Cuts the power of a disk in memory four times after every event, and of a file in each way of I/O once.
fn cut_power_of_each(records: &[Record], cut: impl Fn(&TestDisk, u32)) -> usize {
    let mut cuts = cut_power(&TestDisk::in_memory(Vec::new()), 4, records, &cut);
    for way in ways() {
        let folder = tempfile::tempdir().unwrap();
        cuts += cut_power(&TestDisk::of_file(&folder.path().join("file"), way), 1, records, &cut);
    }
    cuts
}

#[test]
fn after_a_loss_of_power_committed_records_are_found_and_nothing_is_wrong() {
    // Some of them fill whole pages.
    let bytes = |number: u32| if number.is_multiple_of(20) { 64 << 10 } else { 9_000 };
    let records: Vec<_> = (0..40).map(|number| record(number, bytes(number))).collect();
    let cuts = cut_power_of_each(&records, |disk, committed| {
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
    assert!(cuts > 600, "{cuts}");
}

#[test]
fn after_a_loss_of_power_during_eviction_nothing_is_wrong() {
    let bytes = |number: u32| if number.is_multiple_of(20) { 64 << 10 } else { 30_000 };
    let records: Vec<_> = (0..200).map(|number| record(number, bytes(number))).collect();
    let cuts = cut_power_of_each(&records, |disk, committed| {
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
    assert!(cuts > 1500, "{cuts}");
}

/// A record of another model or format under the same key replaces the one before it; after a loss of power,
/// one of them is found.
#[test]
fn after_a_loss_of_power_during_replacement_one_of_the_two_is_found() {
    let label = |number: u32| format!("format {number}").into();
    let versions: Vec<Record> = (0..30)
        .map(|number: u32| {
            let bytes = if number.is_multiple_of(4) { 64 << 10 } else { 9_000 + 100 * number as usize };
            let mut version = record(7, bytes);
            version.id.label = label(number);
            version
        })
        .collect();
    let cuts = cut_power_of_each(&versions, |disk, committed| {
        let slab = disk.open().unwrap();
        let mut found = Vec::new();
        for (number, expected) in (0..).zip(&versions) {
            match load(&slab, &expected.id) {
                Ok(buffers) => {
                    assert_eq!(buffers, expected.buffers);
                    found.push(number);
                }
                Err(Missed::Differs | Missed::Absent | Missed::Damaged) => {}
                Err(missed) => panic!("{number}: {missed}"),
            }
        }
        let is_newest = found.iter().any(|&number| number + 1 >= committed);
        // A newer version may be damaged, which is a miss.
        assert!(found.len() <= 1 && (is_newest || found.is_empty()), "{found:?} of {committed}");
        slab.check_invariants().unwrap();
    });
    assert!(cuts > 400, "{cuts}");
}

#[test]
fn a_disk_that_fails_loses_records_and_says_so() {
    on_each_disk(|disk| loses_records_and_says_so(&disk));
}

fn loses_records_and_says_so(disk: &TestDisk) {
    let slab = disk.open().unwrap();
    slab.store(record(1, 9_000));
    assert!(slab.flush(PATIENCE));
    disk.state().failing = Some(Direction::Write);
    slab.store(record(2, 9_000));
    assert!(slab.flush(PATIENCE));
    assert!(!slab.contains(&record(2, 9_000).id.key));
    assert!(slab.usage().write_errors > 0);
    assert!(load(&slab, &record(1, 9_000).id).is_ok());
    disk.state().failing = None;
    assert_eq!(slab.store(record(2, 9_000)), Stored::Queued);
    assert!(slab.flush(PATIENCE) && load(&slab, &record(2, 9_000).id).is_ok());
    disk.state().failing = Some(Direction::Read);
    assert!(matches!(load(&slab, &record(1, 9_000).id), Err(Missed::Failed(_))));
    disk.state().failing = None;
    assert!(matches!(load(&slab, &record(1, 9_000).id), Err(Missed::Absent)), "its cells are not trusted");
    assert!(load(&slab, &record(2, 9_000).id).is_ok());
    slab.check_invariants().unwrap();
    assert_eq!(slab.usage().read_errors, 1);
    disk.state().failing = Some(Direction::Read);
    let refused = disk.open().unwrap_err();
    assert!(matches!(refused, Error::File { what: "cannot read", .. }), "{refused}");
}

#[test]
fn a_disk_that_hangs_stalls_nobody() {
    on_each_disk(|disk| stalls_nobody(&disk));
}

fn stalls_nobody(disk: &TestDisk) {
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
    // The threads that write may end in any order, so the very newest record may have left again.
    let newest = (0..20).map(|before| record(stored.len() as u32 - before, 9_000));
    let found = newest.filter(|one| load(&slab, &one.id).is_ok_and(|buffers| buffers == one.buffers));
    assert!(found.count() > 5);
    slab.check_invariants().unwrap();
}

#[test]
fn loads_that_are_given_up_take_bounded_memory() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let one = record(1, 300_000);
    slab.store(one.clone());
    assert!(slab.flush(PATIENCE));
    disk.hang();
    // The tests' slab may hold 4 MiB for loads that nobody waits for.
    for _ in 0..100 {
        assert!(matches!(slab.load(&one.id, Instant::now()), Err(Missed::Late)));
    }
    let unanswered = disk.unanswered();
    assert_eq!(slab.usage().deadline_exceeded, 100);
    disk.go_on();
    assert_eq!(load(&slab, &one.id).unwrap(), one.buffers);
    disk.hang();
    assert!(matches!(slab.load(&one.id, Instant::now()), Err(Missed::Late)));
    let of_one = disk.unanswered();
    assert!(of_one > 0 && unanswered <= 15 * of_one, "{unanswered} requests, {of_one} for one load");
    disk.go_on();
    slab.check_invariants().unwrap();
}

#[test]
fn requests_that_end_short_are_errors() {
    on_each_disk(|disk| {
        let slab = disk.open().unwrap();
        let kept = record(1, 9_000);
        slab.store(kept.clone());
        assert!(slab.flush(PATIENCE));
        disk.state().short = Some(Direction::Write);
        slab.store(record(2, 9_000));
        assert!(slab.flush(PATIENCE) && !slab.contains(&record(2, 9_000).id.key));
        disk.state().short = None;
        assert_eq!(load(&slab, &kept.id).unwrap(), kept.buffers);
        disk.state().short = Some(Direction::Read);
        assert!(matches!(load(&slab, &kept.id), Err(Missed::Failed(_))));
        let usage = slab.usage();
        assert!(usage.write_errors > 0 && usage.read_errors == 1, "{usage:?}");
        slab.check_invariants().unwrap();
    });
}

#[test]
fn memory_of_late_requests_is_kept_until_they_end() {
    on_each_disk(|disk| {
        let slab = disk.open().unwrap();
        let records: Vec<Record> = (0..10).map(|number| record(number, 20_000)).collect();
        for record in &records {
            slab.store(record.clone());
        }
        assert!(slab.flush(PATIENCE));
        disk.be_late();
        // As many loads as the disk is asked for at once.
        for record in &records {
            let late = slab.load(&record.id, Instant::now() + Duration::from_millis(5));
            assert!(matches!(late, Err(Missed::Late)), "{late:?}");
        }
        // A header and a payload for each record.
        let deadline = Instant::now() + PATIENCE;
        while disk.kept() < 2 * records.len() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(disk.kept(), 2 * records.len());
        disk.go_on();
        // Memory that comes back late does not disturb other loads.
        for record in &records {
            assert_eq!(load(&slab, &record.id).unwrap(), record.buffers);
        }
        let usage = slab.usage();
        assert_eq!((usage.deadline_exceeded, usage.hits, usage.damaged), (10, 10, 0));
        slab.check_invariants().unwrap();
    });
}

/// A load that finds nothing takes the disk no time, and is not observed.
#[test]
fn the_times_of_loads_and_writes_are_observed() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let times: Arc<Mutex<Vec<(SlabStep, Duration)>>> = Arc::default();
    let observer = Arc::clone(&times);
    slab.observe(Arc::new(move |step, time| observer.lock().push((step, time))));
    let seen = |step| times.lock().iter().filter(|(seen, _)| *seen == step).count();
    let stored = record(1, 9_000);
    slab.store(stored.clone());
    assert!(slab.flush(PATIENCE));
    assert_eq!((seen(SlabStep::Load), seen(SlabStep::Write)), (0, 1));
    load(&slab, &record(2, 9_000).id).unwrap_err();
    assert_eq!(seen(SlabStep::Load), 0);
    load(&slab, &stored.id).unwrap();
    // Records that cannot be read take the disk some time, too.
    disk.hang();
    let loading = slab.begin_load(&stored.id);
    std::thread::sleep(Duration::from_millis(30));
    disk.state().failing = Some(Direction::Read);
    disk.go_on();
    assert!(loading.wait_until(Instant::now() + PATIENCE));
    loading.end().unwrap_err();
    assert_eq!((seen(SlabStep::Load), seen(SlabStep::Write)), (2, 1));
    assert!(times.lock().last().unwrap().1 >= Duration::from_millis(30), "{:?}", times.lock());
}

#[test]
fn loads_are_read_in_their_order_and_a_few_at_a_time() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let records: Vec<Record> = (0..40).map(|number| record(number, 9_000)).collect();
    for record in &records {
        slab.store(record.clone());
    }
    assert!(slab.flush(PATIENCE));
    disk.hang();
    let mut loads: Vec<_> = records.iter().map(|record| slab.begin_load(&record.id)).collect();
    // A header and a payload for each record.
    let at_once = disk.unanswered() / 2;
    assert!((8..20).contains(&at_once), "{at_once} loads at once");
    assert!(loads.iter().all(|loading| !loading.has_arrived() && loading.progress() == 0.0));
    // A load that nobody waits for any more is not read if its turn comes, and holds no memory.
    drop(loads.pop());
    let last = loads.pop().unwrap();
    assert!(matches!(last.end(), Err(Missed::Late)));
    disk.hang_next();
    let arrived = loads.iter().take_while(|loading| loading.has_arrived()).count();
    assert_eq!(arrived, at_once);
    assert!(loads[arrived..].iter().all(|loading| !loading.is_over()), "the others wait for their turns");
    assert_eq!(disk.unanswered() / 2, at_once, "as many loads were started as have ended");
    disk.go_on();
    for (loading, record) in loads.into_iter().zip(&records) {
        assert!(loading.has_arrived() && loading.is_over());
        assert_eq!(loading.end().unwrap(), record.buffers);
    }
    let usage = slab.usage();
    assert_eq!((usage.hits, usage.deadline_exceeded), (38, 1), "{usage:?}");
    slab.check_invariants().unwrap();
}

/// The disk answers while requests are started, so a recursion would be as deep as there are loads.
#[test]
fn thousands_of_loads_end_on_a_small_stack() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let one = record(1, 9_000);
    slab.store(one.clone());
    assert!(slab.flush(PATIENCE));
    disk.hang();
    let loads: Vec<_> = (0..50_000).map(|_| slab.begin_load(&one.id)).collect();
    let small = std::thread::Builder::new().stack_size(256 << 10);
    let ends = move || {
        disk.go_on();
        loads.into_iter().filter(kvtier::Loading::has_arrived).count()
    };
    assert_eq!(small.spawn(ends).unwrap().join().unwrap(), 50_000);
    slab.check_invariants().unwrap();
}
