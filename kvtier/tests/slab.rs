//! A slab on a real file: restarts, limits, eviction, damage, and bad input.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::time::{Duration, Instant};

use common::{load, record, scope};
use kvcore::KeyScope;
use kvtier::{Error, Missed, Record, RecordId, Slab, SlabConfig, Stored};

const PATIENCE: Duration = Duration::from_secs(20);
const LIMIT: u64 = 8 << 20;

fn config() -> SlabConfig {
    SlabConfig { limit: LIMIT, cell_bytes: 16 << 10, ..SlabConfig::default() }
}

fn open(folder: &std::path::Path) -> Slab {
    Slab::open(folder, scope(), config()).unwrap()
}

/// Stores records of 100,000 bytes.
fn store(slab: &Slab, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert_eq!(slab.store(record(number, 100_000)), Stored::Queued);
    }
}

#[test]
fn records_survive_a_restart_bit_by_bit() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = [0, 1, 4000, 16 << 10, 100_000, (1 << 20) + 3];
    let records: Vec<_> = (0..).zip(sizes).map(|(n, bytes)| record(n, bytes)).collect();
    let slab = open(folder.path());
    for record in &records {
        assert_eq!(slab.store(record.clone()), Stored::Queued);
    }
    assert!(slab.flush(PATIENCE));
    for restart in 0..3 {
        let slab = if restart == 0 { &slab } else { &{ open(folder.path()) } };
        for record in &records {
            assert_eq!(load(slab, &record.id).unwrap(), record.buffers, "restart {restart}");
            assert_eq!(slab.store(record.clone()), Stored::Known);
        }
        let usage = slab.usage();
        assert_eq!((usage.records, usage.hits, usage.misses), (6, 6, 0));
        slab.check_invariants().unwrap();
        if restart == 0 {
            // The first slab is still open.
            let second = Slab::open(folder.path(), scope(), config());
            assert!(matches!(second, Err(Error::InUse { .. })), "{second:?}");
            break;
        }
    }
    drop(slab);
    let slab = open(folder.path());
    for record in &records {
        assert_eq!(load(&slab, &record.id).unwrap(), record.buffers, "after a restart");
    }
}

#[test]
fn the_file_keeps_its_size_and_the_least_recently_used_leave_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(Slab::FILE);
    let slab = open(folder.path());
    let size = fs::metadata(&path).unwrap().len();
    assert!(size <= LIMIT && size == slab.usage().limit_bytes);
    for number in 0..300 {
        slab.store(record(number, 100_000));
        assert!(slab.flush(PATIENCE));
        // The first record is used again and again.
        assert!(load(&slab, &record(0, 100_000).id).is_ok(), "{number}");
        assert_eq!(fs::metadata(&path).unwrap().len(), size);
    }
    slab.check_invariants().unwrap();
    let usage = slab.usage();
    assert!(usage.evicted > 200 && usage.records > 40 && usage.bytes <= LIMIT, "{usage:?}");
    let kept: Vec<u32> = (0..300).filter(|&number| slab.contains(&record(number, 100_000).id.key)).collect();
    let newest = 300 - (kept.len() as u32 - 1)..300;
    assert_eq!(kept, std::iter::once(0).chain(newest).collect::<Vec<_>>());
}

#[test]
fn records_of_other_scopes_count_and_leave_first() {
    let folder = tempfile::tempdir().unwrap();
    let other = KeyScope::new("other", b"weights").root();
    {
        let slab = Slab::open(folder.path(), other, config()).unwrap();
        store(&slab, 0..20);
    }
    {
        let slab = open(folder.path());
        assert_eq!(slab.usage().records, 20);
        store(&slab, 100..120);
    }
    // The records of the other scope are used last, and leave first all the same.
    let slab = open(folder.path());
    assert!(load(&slab, &record(0, 100_000).id).is_ok());
    drop(slab);
    let slab = open(folder.path());
    store(&slab, 200..240);
    assert!(slab.flush(PATIENCE));
    let has = |numbers: std::ops::Range<u32>| {
        numbers.filter(|&n| slab.contains(&record(n, 100_000).id.key)).count()
    };
    assert_eq!((has(100..120), has(200..240)), (20, 40));
    assert!(has(0..20) < 20);
}

#[test]
fn another_identity_is_a_miss_and_stays() {
    let folder = tempfile::tempdir().unwrap();
    let slab = open(folder.path());
    let stored = record(1, 5000);
    slab.store(stored.clone());
    assert!(slab.flush(PATIENCE));
    let mut tokens = stored.id.tokens.to_vec();
    tokens[3] += 1;
    let others = [
        RecordId { tokens: tokens.into(), ..stored.id.clone() },
        RecordId { tokens: stored.id.tokens[1..].into(), ..stored.id.clone() },
        RecordId { stored_start: 7, ..stored.id.clone() },
        RecordId { label: "tesT".into(), ..stored.id.clone() },
    ];
    for other in &others {
        assert!(matches!(load(&slab, other), Err(Missed::Differs)), "{other:?}");
    }
    assert!(matches!(load(&slab, &record(2, 10).id), Err(Missed::Absent)));
    assert_eq!(load(&slab, &stored.id).unwrap(), stored.buffers);
    let usage = slab.usage();
    assert_eq!((usage.hits, usage.misses, usage.differs, usage.damaged), (1, 5, 4, 0));
}

/// Records that have the key of another one, and differ from it in one part of the identity.
fn others_with_the_key_of(stored: &Record) -> Vec<Record> {
    let mut tokens = stored.id.tokens.to_vec();
    tokens[3] += 1;
    let ids = [
        RecordId { label: "another model".into(), ..stored.id.clone() },
        RecordId { label: "tesT".into(), ..stored.id.clone() },
        RecordId { tokens: tokens.into(), ..stored.id.clone() },
        RecordId { tokens: stored.id.tokens[1..].into(), ..stored.id.clone() },
        RecordId { stored_start: -1, ..stored.id.clone() },
    ];
    ids.into_iter().zip(1u8..).map(|(id, byte)| Record::new(id, vec![vec![byte; 9000]])).collect()
}

#[test]
fn a_newer_identity_replaces_an_older_one_with_the_same_key() {
    let first = record(1, 5000);
    for other in others_with_the_key_of(&first) {
        let folder = tempfile::tempdir().unwrap();
        let slab = open(folder.path());
        slab.store(first.clone());
        assert!(slab.flush(PATIENCE));
        assert_eq!(slab.store(other.clone()), Stored::Queued, "{:?}", other.id);
        assert!(slab.flush(PATIENCE));
        assert_eq!(slab.store(other.clone()), Stored::Known);
        let is_replaced = |slab: &Slab| {
            assert_eq!(load(slab, &other.id).unwrap(), other.buffers);
            assert!(matches!(load(slab, &first.id), Err(Missed::Differs)));
            assert_eq!(slab.usage().records, 1);
            slab.check_invariants().unwrap();
        };
        is_replaced(&slab);
        drop(slab);
        let slab = open(folder.path());
        is_replaced(&slab);
        // And back again, also after a restart.
        assert_eq!(slab.store(first.clone()), Stored::Queued);
        assert!(slab.flush(PATIENCE));
        assert_eq!(load(&slab, &first.id).unwrap(), first.buffers);
    }
}

#[test]
fn the_newest_of_the_identities_that_wait_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let slab = open(folder.path());
    let first = record(1, 200_000);
    let others = others_with_the_key_of(&first);
    for _ in 0..20 {
        slab.store(first.clone());
        for other in &others {
            slab.store(other.clone());
            slab.store(other.clone());
        }
    }
    assert!(slab.flush(PATIENCE));
    let newest = others.last().unwrap();
    assert_eq!(load(&slab, &newest.id).unwrap(), newest.buffers);
    assert_eq!((slab.usage().records, slab.usage().write_errors), (1, 0));
    slab.check_invariants().unwrap();
}

/// The engine asks whether a key is there before it copies a piece out of the cache.
#[test]
fn a_key_that_was_asked_for_with_another_identity_can_be_stored_again() {
    let folder = tempfile::tempdir().unwrap();
    let slab = open(folder.path());
    let first = record(1, 5000);
    slab.store(first.clone());
    assert!(slab.flush(PATIENCE) && slab.contains(&first.id.key));
    for other in others_with_the_key_of(&first) {
        assert!(matches!(load(&slab, &other.id), Err(Missed::Differs)));
        assert!(!slab.contains(&first.id.key), "{:?}", other.id);
        // The owner of the record that is there confirms it.
        assert_eq!(slab.store(first.clone()), Stored::Known);
        assert!(slab.contains(&first.id.key));
    }
    let other = &others_with_the_key_of(&first)[0];
    assert!(load(&slab, &other.id).is_err());
    assert_eq!(slab.store(other.clone()), Stored::Queued);
    assert!(slab.flush(PATIENCE) && slab.contains(&first.id.key));
    assert_eq!(load(&slab, &other.id).unwrap(), other.buffers);
}

#[test]
fn a_changed_byte_anywhere_is_a_miss_or_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let records: Vec<_> = (0..8).map(|number| record(number, 30_000)).collect();
    {
        let slab = open(folder.path());
        for record in &records {
            slab.store(record.clone());
        }
    }
    let path = folder.path().join(Slab::FILE);
    let intact = fs::read(&path).unwrap();
    let mut found = [0, 0];
    for at in (0..intact.len()).step_by(41_113) {
        let mut bytes = intact.clone();
        bytes[at] ^= 0x10;
        fs::write(&path, &bytes).unwrap();
        let slab = open(folder.path());
        for record in &records {
            match load(&slab, &record.id) {
                Ok(buffers) => {
                    assert_eq!(buffers, record.buffers, "byte {at}");
                    found[0] += 1;
                }
                Err(Missed::Absent | Missed::Damaged) => found[1] += 1,
                Err(other) => panic!("byte {at}: {other}"),
            }
        }
        slab.check_invariants().unwrap();
    }
    assert!(found[0] > 100 && found[1] > 0, "{found:?}");
    for cut in [0, 1, 5000, intact.len() / 2, intact.len() - 1] {
        fs::write(&path, &intact[..cut]).unwrap();
        let slab = open(folder.path());
        assert!(records.iter().all(|record| load(&slab, &record.id).is_err()), "{cut} bytes");
        slab.store(records[0].clone());
        assert!(slab.flush(PATIENCE) && load(&slab, &records[0].id).is_ok());
    }
}

#[test]
fn a_larger_limit_keeps_the_records_and_a_smaller_one_starts_anew() {
    let folder = tempfile::tempdir().unwrap();
    let kept = record(1, 50_000);
    drop({
        let slab = open(folder.path());
        slab.store(kept.clone());
        slab
    });
    let larger = SlabConfig { limit: 2 * LIMIT, ..config() };
    let slab = Slab::open(folder.path(), scope(), larger).unwrap();
    assert_eq!(load(&slab, &kept.id).unwrap(), kept.buffers);
    assert!(slab.usage().limit_bytes > LIMIT && slab.usage().limit_bytes <= 2 * LIMIT);
    drop(slab);
    let slab = open(folder.path());
    assert!(matches!(load(&slab, &kept.id), Err(Missed::Absent)));
    assert!(fs::metadata(folder.path().join(Slab::FILE)).unwrap().len() <= LIMIT);
}

#[test]
fn bad_folders_and_limits_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let refused = |result: kvtier::Result<Slab>| result.unwrap_err().to_string();
    let not_a_folder = refused(Slab::open(&file, scope(), config()));
    assert!(not_a_folder.contains("is not a folder"), "{not_a_folder}");
    let below = refused(Slab::open(&file.join("below"), scope(), config()));
    assert!(below.contains("cannot create the folder"), "{below}");
    let small = SlabConfig { limit: 4096, ..config() };
    let small = refused(Slab::open(folder.path(), scope(), small));
    assert!(small.contains("too small") && small.contains("use at least"), "{small}");
    let endless = SlabConfig { limit: u64::MAX / 4, ..config() };
    let endless = refused(Slab::open(folder.path(), scope(), endless));
    assert!(endless.contains("cannot reserve the disk tier's limit"), "{endless}");
}

#[test]
fn the_size_of_a_slab_is_known_before_it_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(Slab::FILE);
    assert_eq!(Slab::size_in(folder.path()), None, "nothing is there");
    fs::write(&file, [7; 9000]).unwrap();
    assert_eq!(Slab::size_in(folder.path()), None, "it is no slab");
    fs::remove_file(&file).unwrap();
    drop(open(folder.path()));
    let size = fs::metadata(&file).unwrap().len();
    assert_eq!(Slab::size_in(folder.path()), Some(size));
    fs::File::options().write(true).open(&file).unwrap().set_len(size - 1).unwrap();
    assert_eq!(Slab::size_in(folder.path()), None, "it was cut short");
}

#[test]
#[cfg(unix)]
fn a_pipe_in_place_of_the_lock_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let lock = folder.path().join("lock");
    assert!(std::process::Command::new("mkfifo").arg(&lock).status().unwrap().success());
    let refused = Slab::open(folder.path(), scope(), config());
    assert!(matches!(refused, Err(Error::NotAFile { path }) if path == lock));
}

#[test]
fn what_does_not_fit_is_dropped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let slab = open(folder.path());
    assert_eq!(slab.store(record(1, 5 << 20)), Stored::Dropped, "more than half of the slab");
    let tight = SlabConfig { queue_bytes: 1000, ..config() };
    drop(slab);
    let slab = Slab::open(folder.path(), scope(), tight).unwrap();
    assert_eq!(slab.store(record(2, 2000)), Stored::Dropped, "the queue is too short");
    assert_eq!(slab.store(record(3, 500)), Stored::Queued);
    assert_eq!(slab.usage().stores_dropped, 1);
    let late = slab.load(&record(4, 10).id, Instant::now());
    assert!(matches!(late, Err(Missed::Absent)), "{late:?}");
}

#[test]
fn a_slab_is_described_while_it_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let nothing = Slab::inspect(folder.path(), true, &mut |_, _| ());
    assert!(matches!(nothing, Err(Error::NoSlab { .. })), "{nothing:?}");
    let other = KeyScope::new("other", b"weights").root();
    let slab = Slab::open(folder.path(), other, config()).unwrap();
    store(&slab, 0..2);
    drop(slab);
    let slab = open(folder.path());
    let mut chained = record(10, 5000);
    chained.note.parent = Some(record(20, 0).id.key);
    chained.note.cost = Duration::from_millis(1500);
    assert_eq!(slab.store(chained.clone()), Stored::Dropped, "without its parent");
    store(&slab, 20..25);
    assert_eq!(slab.store(chained), Stored::Queued);
    assert!(slab.flush(Duration::from_secs(20)));
    let mut last = (0, 0);
    let found = Slab::inspect(folder.path(), true, &mut |done, total| last = (done, total)).unwrap();
    assert_eq!((found.records, found.damaged, last), (8, Some(0), (8, 8)));
    assert_eq!((found.bytes, found.limit_bytes), (slab.usage().bytes, slab.usage().limit_bytes));
    let [own, others] = &found.scopes[..] else { panic!("{found:?}") };
    assert_eq!((own.records, own.chained, own.cost_ms, own.label.as_deref()), (6, 1, 1500, Some("test")));
    assert_eq!((others.records, others.chained), (2, 0));
    assert!(own.created[0] <= own.created[1] && own.created[0] > 1_700_000_000);
    drop(slab);
    let path = folder.path().join(Slab::FILE);
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end / 2 - end / 3..end / 2].fill(7);
    fs::write(&path, bytes).unwrap();
    let damaged = Slab::inspect(folder.path(), true, &mut |_, _| ()).unwrap();
    assert!(damaged.damaged > Some(0) || damaged.records < 8, "{damaged:?}");
    let unchecked = Slab::inspect(folder.path(), false, &mut |_, _| ()).unwrap();
    assert_eq!((unchecked.damaged, unchecked.records), (None, damaged.records));
}

#[test]
fn a_child_never_outlives_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let key = |chain: u32, place: u32| record(1000 * chain + place, 0).id.key;
    let chain = |chain: u32, places: std::ops::Range<u32>| {
        places.map(move |place| {
            let mut one = record(1000 * chain + place, 30_000);
            one.note.parent = place.checked_sub(1).map(|before| key(chain, before));
            one
        })
    };
    let intact = |slab: &Slab| {
        for chain in 0..40 {
            let here: Vec<bool> = (0..8).map(|place| slab.contains(&key(chain, place))).collect();
            assert!(here.is_sorted_by(|before, after| before >= after), "chain {chain}: {here:?}");
        }
    };
    let mut slab = open(folder.path());
    for number in 0..40 {
        for record in chain(number, 0..5) {
            slab.store(record);
        }
        assert!(slab.flush(Duration::from_secs(20)));
        // An old chain grows, and the end of another one is used.
        for record in chain(number / 2, 5..8) {
            slab.store(record);
        }
        assert!(slab.flush(Duration::from_secs(20)));
        let _ = load(&slab, &record(1000 * (number / 3) + 4, 30_000).id);
        intact(&slab);
        if number % 7 == 6 {
            drop(slab);
            slab = open(folder.path());
            intact(&slab);
        }
    }
    assert!(slab.usage().records > 80 && slab.usage().bytes <= LIMIT);
    slab.check_invariants().unwrap();
}

/// Several threads write, but the last record that was stored under a key is the one that is found.
#[test]
fn the_last_store_of_a_key_wins_in_every_round() {
    let folder = tempfile::tempdir().unwrap();
    let slab = open(folder.path());
    let first = record(1, 40_000);
    let others = others_with_the_key_of(&first);
    for round in 0..200 {
        let others = others.iter().cycle().skip(round).take(3);
        let last = others.clone().last().unwrap();
        for (number, other) in (10..).zip(others) {
            assert_ne!(slab.store(other.clone()), Stored::Dropped);
            slab.store(record(number + round as u32 % 7, 30_000));
        }
        assert!(slab.flush(PATIENCE));
        assert_eq!(load(&slab, &last.id).unwrap(), last.buffers, "round {round}");
    }
    slab.check_invariants().unwrap();
}

#[test]
fn a_folder_is_unlocked_although_a_child_process_still_holds_the_descriptor() {
    let folder = tempfile::tempdir().unwrap();
    let lock = std::fs::File::create(folder.path().join("lock")).unwrap();
    lock.try_lock().unwrap();
    // A child has such a copy between its fork and the start of its program.
    let copy = lock.try_clone().unwrap();
    let disk = Box::new(common::disk::TestDisk::in_memory(Vec::new()));
    let config = SlabConfig { limit: common::disk::LIMIT, ..SlabConfig::default() };
    let slab = Slab::over(disk, folder.path(), scope(), config, Some(lock)).unwrap();
    let open = || Slab::open(folder.path(), scope(), config).map(drop);
    assert!(matches!(open(), Err(Error::InUse { .. })));
    drop(slab);
    open().unwrap();
    drop(copy);
}

#[test]
#[cfg(target_os = "linux")]
fn a_read_only_folder_is_an_error_that_names_it() {
    // Nobody may create files in this folder of the kernel, not even root.
    for folder in ["/proc/self", "/proc/self/none"] {
        let refused = Slab::open(std::path::Path::new(folder), scope(), config());
        let Err(Error::File { path, .. }) = &refused else { panic!("{refused:?}") };
        assert!(path.starts_with(folder), "{}", path.display());
    }
}
