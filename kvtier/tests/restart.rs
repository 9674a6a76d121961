//! The time from a start to the first record, with many records on the disk.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{load, record, scope, ways};
use kvtier::{FileIo, IoWay, Slab, SlabConfig, Stored};

const RECORDS: u32 = 100_000;
/// The time to the first record.
const MOST: Duration = Duration::from_secs(1);

fn open(folder: &Path, io: Option<IoWay>) -> Slab {
    // Two pages: a header and one page of payload.
    let config = SlabConfig { limit: 1 << 30, cell_bytes: 8 << 10, io, ..SlabConfig::default() };
    let path = folder.join(Slab::FILE);
    let file = FileIo::open(&path, io).unwrap();
    Slab::over(Box::new(file), &path, scope(), config, None).unwrap()
}

/// Returns the shortest of three times from opening a slab to the first record. Leaves the slabs open, so that
/// nothing is written when they close.
fn first_hit(folder: &Path, io: Option<IoWay>, number: u32) -> Duration {
    let time = |_| {
        let start = Instant::now();
        let slab = open(folder, io);
        let found = load(&slab, &record(number, 1000).id).unwrap();
        let time = start.elapsed();
        assert_eq!(found, record(number, 1000).buffers);
        std::mem::forget(slab);
        time
    };
    (0..3).map(time).min().unwrap()
}

#[test]
fn a_hundred_thousand_records_are_found_within_a_second() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let slab = open(folder, None);
    for number in 0..RECORDS {
        while slab.store(record(number, 1000)) == Stored::Dropped {
            assert!(slab.flush(Duration::from_secs(100)));
        }
    }
    assert!(slab.flush(Duration::from_secs(100)));
    assert_eq!(slab.usage().records, RECORDS as usize);
    // As after a kill: the last records are in no checkpoint.
    let killed = first_hit(folder, None, RECORDS - 1);
    drop(slab);
    for way in ways() {
        let (newest, oldest) = (first_hit(folder, Some(way), RECORDS - 1), first_hit(folder, Some(way), 0));
        println!("{way}: {newest:?} and {oldest:?}; after a kill {killed:?}");
        assert!(newest < MOST && oldest < MOST, "{way}: {newest:?}, {oldest:?}");
    }
    assert!(killed < MOST, "{killed:?}");
}
