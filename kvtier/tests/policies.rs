//! Eviction policies of a slab: whatever the policy, the invariants hold, and policies that resist scans keep what is
//! used again and again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashSet;
use std::time::Duration;

use common::disk::{Dice, TestDisk};
use common::{load, record};
use kvcore::{BlockKey, KeyScope, PolicyKind};
use kvtier::{Missed, Record, Slab, SlabConfig, Stored};
use proptest::prelude::*;

const PATIENCE: Duration = Duration::from_secs(20);
const MOST: u32 = 60;

/// Opens a slab for the records of a model, in cells of 8 KiB.
fn open(disk: &TestDisk, policy: PolicyKind, model: u32) -> Slab {
    let scope = KeyScope::new("test", &model.to_le_bytes()).root();
    disk.open_for(scope, SlabConfig { policy, ..SlabConfig::default() }).unwrap()
}

/// A record of one of several models. Three follow one another, as the blocks of a prompt do.
fn link(model: u32, number: u32) -> Record {
    let mut one = record(1000 * model + number, 3000 + 7000 * (number as usize % 4));
    one.note.parent = (!number.is_multiple_of(3)).then(|| key(model, number - 1));
    one
}

/// The key of such a record.
fn key(model: u32, number: u32) -> BlockKey {
    record(1000 * model + number, 0).id.key
}

#[derive(Debug, Clone)]
enum Step {
    Store(u32),
    Load(u32),
    Touch(u32),
    Flush,
    Restart(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..MOST).prop_map(Step::Store),
        3 => (0..MOST).prop_map(Step::Load),
        2 => (0..MOST).prop_map(Step::Touch),
        3 => Just(Step::Flush),
        1 => (0..2u32).prop_map(Step::Restart),
    ];
    proptest::collection::vec(step, 1..120)
}

/// Checks the invariants after a flush: no child without its parent, and no record of the process's own model has left
/// before the last one of another model.
fn check(slab: &Slab, model: u32) {
    assert!(slab.flush(PATIENCE));
    slab.check_invariants().unwrap();
    let usage = slab.usage();
    assert!(usage.bytes <= usage.limit_bytes, "{usage:?}");
    for model in 0..2 {
        for number in (0..MOST).filter(|number| number % 3 > 0) {
            let [child, parent] = [number, number - 1].map(|number| key(model, number));
            assert!(!slab.contains(&child) || slab.contains(&parent), "{number} has outlived its parent");
        }
    }
    let foreign = (0..MOST).filter(|&number| slab.contains(&key(1 - model, number))).count();
    let own = slab.account(kvtier::AccountId::DEFAULT);
    assert_eq!(own.records + foreign, usage.records);
    assert!(
        own.evicted == 0 || foreign == 0,
        "{} have left, and {foreign} of another model stay",
        own.evicted
    );
}

fn runs_right(policy: PolicyKind, steps: &[Step]) {
    let disk = TestDisk::in_memory(Vec::new());
    let mut model = 0;
    let mut slab = open(&disk, policy, model);
    for step in steps {
        match *step {
            Step::Store(number) => {
                for number in number - number % 3..=number {
                    slab.store(link(model, number));
                }
            }
            Step::Load(number) => match load(&slab, &link(model, number).id) {
                Ok(buffers) => assert_eq!(buffers, link(model, number).buffers),
                Err(missed) => assert!(matches!(missed, Missed::Absent), "{missed}"),
            },
            Step::Touch(number) => drop(slab.touch([&key(model, number)])),
            Step::Flush => check(&slab, model),
            Step::Restart(next) => {
                check(&slab, model);
                let before: HashSet<u32> =
                    (0..2 * MOST).filter(|&at| slab.contains(&key(at / MOST, at % MOST))).collect();
                drop(slab);
                model = next;
                slab = open(&disk, policy, model);
                let after = (0..2 * MOST).filter(|&at| slab.contains(&key(at / MOST, at % MOST)));
                assert_eq!(after.collect::<HashSet<_>>(), before, "a restart loses nothing");
            }
        }
    }
    check(&slab, model);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn under_every_policy_parents_and_own_records_stay(steps in steps()) {
        for policy in PolicyKind::ALL {
            runs_right(policy, &steps);
        }
    }
}

/// Stores and uses 20 records again and again, and then stores ten times as many as the slab has room for, each
/// once. From time to time, one of the first ones is used. Returns how many of them are still there.
fn left_after_scan(policy: PolicyKind, restarts: bool) -> usize {
    let disk = TestDisk::in_memory(Vec::new());
    let mut slab = open(&disk, policy, 0);
    let mut dice = Dice(0x243f_6a88_85a3_08d3);
    let hot: Vec<Record> = (0..20).map(|number| record(number, 3000)).collect();
    let store = |slab: &Slab, record: &Record| {
        assert_eq!(slab.store(record.clone()), Stored::Queued);
        assert!(slab.flush(PATIENCE));
    };
    for record in &hot {
        store(&slab, record);
    }
    for number in 100..160 {
        store(&slab, &record(number, 3000));
        for _ in 0..3 {
            let one = &hot[dice.roll(20) as usize];
            assert_eq!(load(&slab, &one.id).unwrap(), one.buffers, "the slab is not full");
        }
    }
    assert_eq!(slab.usage().evicted, 0);
    for number in 1000..2200 {
        if restarts && number % 400 == 0 {
            drop(slab);
            slab = open(&disk, policy, 0);
        }
        store(&slab, &record(number, 3000));
        if number % 10 == 0 {
            // A miss is computed and stored again, as an engine does.
            let one = &hot[dice.roll(20) as usize];
            if load(&slab, &one.id).is_err() {
                store(&slab, one);
            }
        }
    }
    slab.check_invariants().unwrap();
    hot.iter().filter(|record| slab.contains(&record.id.key)).count()
}

#[test]
fn policies_that_resist_scans_keep_what_is_used_where_lru_loses_it() {
    for restarts in [false, true] {
        let left = |policy| left_after_scan(policy, restarts);
        let (lru, fifo, lfu) = (left(PolicyKind::Lru), left(PolicyKind::S3Fifo), left(PolicyKind::TinyLfu));
        println!("restarts {restarts}: of 20 records, lru keeps {lru}, s3-fifo {fifo}, tiny-lfu {lfu}");
        assert!(lru < 12 && fifo >= 17 && lfu >= 17, "restarts {restarts}: {lru}, {fifo}, {lfu}");
        assert_eq!(left(PolicyKind::Priority), lru, "no record has a priority");
    }
}
