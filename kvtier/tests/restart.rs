//! Many records on a disk are found after a restart, in every way of I/O, also after a kill.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;

use common::{load, record, scope, ways};
use kvtier::{FileIo, IoWay, Slab, SlabConfig, Stored};

/// More than the cells that a checkpoint opens.
const RECORDS: u32 = 20_000;

fn open(folder: &Path, io: Option<IoWay>) -> Slab {
    // Two pages: a header and one page of payload.
    let config = SlabConfig { limit: 256 << 20, cell_bytes: 8 << 10, io, ..SlabConfig::default() };
    let path = folder.join(Slab::FILE);
    let file = FileIo::open(&path, io).unwrap();
    Slab::over(Box::new(file), &path, scope(), config, None).unwrap()
}

/// Opens the slab, and loads the first, the last and some other records. Leaves the slab open, so that nothing is
/// written when it closes.
fn finds_all(folder: &Path, io: Option<IoWay>) {
    let slab = open(folder, io);
    assert_eq!(slab.usage().records, RECORDS as usize);
    for number in (0..RECORDS).step_by(997).chain([RECORDS - 1]) {
        let expected = record(number, 1000);
        assert_eq!(load(&slab, &expected.id).unwrap(), expected.buffers, "{number}");
    }
    std::mem::forget(slab);
}

#[test]
fn many_records_are_found_after_a_restart_and_after_a_kill() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let slab = open(folder, None);
    for number in 0..RECORDS {
        while slab.store(record(number, 1000)) == Stored::Dropped {
            assert!(slab.flush(std::time::Duration::from_secs(100)));
        }
    }
    assert!(slab.flush(std::time::Duration::from_secs(100)));
    // As after a kill: the last records are in no checkpoint.
    finds_all(folder, None);
    drop(slab);
    for way in ways() {
        finds_all(folder, Some(way));
    }
}
