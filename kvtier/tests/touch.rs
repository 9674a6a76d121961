//! Records that are renewed without being loaded.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{load, record, scope};
use kvtier::{Slab, SlabConfig, Stored};

#[test]
fn records_that_are_touched_leave_last_in_the_order_of_the_call() {
    let folder = tempfile::tempdir().unwrap();
    let config = SlabConfig { limit: 4 << 20, cell_bytes: 128 << 10, ..SlabConfig::default() };
    let slab = Slab::open(folder.path(), scope(), config).unwrap();
    let store = |number| {
        assert_eq!(slab.store(record(number, 100_000)), Stored::Queued);
        assert!(slab.flush(Duration::from_secs(20)));
    };
    (0..8).for_each(store);
    let keys: Vec<_> = (0..8).map(|number| record(number, 0).id.key).collect();
    let absent = record(99, 0).id.key;
    let mut next = 100;
    // As long as the first records are touched, others leave.
    for _ in 0..30 {
        assert_eq!(slab.touch(keys.iter().rev().chain([&absent])), 8, "an absent record is skipped");
        store(next);
        next += 1;
    }
    assert!(slab.usage().evicted > 5 && slab.usage().hits == 0);
    assert!(keys.iter().all(|key| slab.contains(key)));
    // Then, the one that was touched last leaves last.
    while slab.contains(&keys[0]) {
        let left = keys.iter().filter(|key| slab.contains(key)).count();
        assert!(keys[..left].iter().all(|key| slab.contains(key)), "{left} records are left");
        store(next);
        next += 1;
    }
    assert!(load(&slab, &record(next - 1, 100_000).id).is_ok());
    slab.check_invariants().unwrap();
}
