//! Records whose contents follow from their number, and the ways of I/O, shared by the tests.
#![allow(dead_code, reason = "not every test uses everything")]

pub(crate) mod disk;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{BlockKey, KeyScope};
use kvtier::{FileIo, Found, IoWay, Missed, Record, RecordId, Slab};

/// The scope of most tests.
pub(crate) fn scope() -> BlockKey {
    KeyScope::new("test", b"weights").root()
}

/// A record of about `bytes` bytes that nothing but its number determines.
pub(crate) fn record(number: u32, bytes: usize) -> Record {
    let tokens: Arc<[u32]> = (0..17).map(|token| number.wrapping_mul(31) + token).collect();
    let key = scope().child(&tokens);
    let mut state = u64::from(number) + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    let buffers: Vec<Vec<u8>> =
        vec![(0..bytes / 2).map(|_| next()).collect(), (0..bytes - bytes / 2).map(|_| next()).collect()];
    Record::new(RecordId { key, tokens, stored_start: i64::from(number), label: "test".into() }, buffers)
}

/// Returns a record in memory of the slab, which the disk writes without a copy if the buffers fill whole pages.
pub(crate) fn in_slab_memory(slab: &Slab, record: &Record) -> Record {
    let lens: Vec<usize> = record.buffers.iter().map(|buffer| buffer.len()).collect();
    let mut buffers = slab.buffers(&lens);
    for (to, from) in buffers.iter_mut().zip(&record.buffers) {
        to.copy_from_slice(from);
    }
    Record { id: record.id.clone(), note: record.note, buffers }
}

/// Loads a record within a few seconds.
pub(crate) fn load(slab: &Slab, id: &RecordId) -> Result<Found, Missed> {
    slab.load(id, Instant::now() + Duration::from_secs(20))
}

/// Returns the ways of I/O that work here. Reports the others as skipped.
pub(crate) fn ways() -> Vec<IoWay> {
    let folder = tempfile::tempdir().unwrap();
    let works = |way: &IoWay| match FileIo::open(&folder.path().join("file"), Some(*way)) {
        Ok(_) => true,
        Err(reason) => {
            // No program that could be installed would change it, so this never counts as a failure.
            println!("SKIPPED {way}: {reason}");
            false
        }
    };
    IoWay::ALL.into_iter().filter(works).collect()
}
