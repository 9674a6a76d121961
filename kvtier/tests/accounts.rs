//! Accounts of tenants: what they have adds up, limits hold at every instant, and a tenant that floods the disk pushes out
//! its own records.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::disk::{LIMIT, TestDisk};
use common::{load, record, scope};
use kvcore::{KeyScope, PolicyKind};
use kvtier::{AccountId, Record, Slab, SlabConfig, Stored};
use proptest::prelude::*;

const PATIENCE: Duration = Duration::from_secs(20);
const CELL: u64 = 8 << 10;
const TENANTS: u32 = 4;

/// The account of a tenant. The first one is the default tenant.
fn account(tenant: u32) -> AccountId {
    if tenant == 0 { AccountId::DEFAULT } else { AccountId::of(&scope().child(&[tenant])) }
}

/// A record of a tenant.
fn owned(tenant: u32, number: u32, bytes: usize) -> Record {
    let mut one = record(10_000 * tenant + number, bytes);
    one.note.account = account(tenant);
    one
}

fn here(slab: &Slab, tenant: u32, numbers: std::ops::Range<u32>) -> HashSet<u32> {
    numbers.filter(|&number| slab.contains(&owned(tenant, number, 0).id.key)).collect()
}

/// Checks that the accounts add up to the whole slab, and that none is above its limit.
fn adds_up(slab: &Slab) {
    let accounts: Vec<_> = (0..TENANTS).map(|tenant| slab.account(account(tenant))).collect();
    let usage = slab.usage();
    assert_eq!(accounts.iter().map(|of| of.bytes).sum::<u64>(), usage.bytes, "{accounts:?}");
    assert_eq!(accounts.iter().map(|of| of.records).sum::<usize>(), usage.records);
    assert_eq!(accounts.iter().map(|of| of.evicted).sum::<u64>(), usage.evicted);
    within_limits(slab);
    slab.check_invariants().unwrap();
}

/// Checks that no tenant is above its limit, which holds at every instant.
fn within_limits(slab: &Slab) {
    for tenant in 0..TENANTS {
        let of = slab.account(account(tenant));
        assert!(of.limit_bytes.is_none_or(|limit| of.bytes <= limit), "tenant {tenant}: {of:?}");
    }
}

/// Ends the thread that looks, also after a panic.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug, Clone)]
enum Step {
    Store(u32, u32),
    Load(u32, u32),
    Limit(u32, Option<u64>),
    Flush,
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        10 => (0..TENANTS, 0..40u32).prop_map(|(tenant, number)| Step::Store(tenant, number)),
        3 => (0..TENANTS, 0..40u32).prop_map(|(tenant, number)| Step::Load(tenant, number)),
        1 => (0..TENANTS, proptest::option::of(0..60u64)).prop_map(|(tenant, limit)| Step::Limit(tenant, limit)),
        2 => Just(Step::Flush),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..150)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn accounts_add_up_and_limits_hold_at_every_instant(steps in steps(), policy in 0..4usize) {
        let policy = PolicyKind::ALL[policy];
        let disk = TestDisk::in_memory(Vec::new());
        let open = || disk.open_with(SlabConfig { policy, ..SlabConfig::default() }).unwrap();
        let mut slab = open();
        let bytes = |number: u32| 1000 + 9000 * (number as usize % 3);
        let mut limits = [None; TENANTS as usize];
        for step in steps {
            // A thread looks at all times.
            let done = AtomicBool::new(false);
            std::thread::scope(|threads| {
                let _stop = Stop(&done);
                threads.spawn(|| while !done.load(Ordering::Relaxed) { within_limits(&slab) });
                match step {
                    Step::Store(tenant, number) => drop(slab.store(owned(tenant, number, bytes(number)))),
                    Step::Load(tenant, number) => {
                        let expected = owned(tenant, number, bytes(number));
                        let found = load(&slab, &expected.id);
                        assert!(found.is_err() || found.unwrap() == expected.buffers);
                    }
                    Step::Limit(tenant, cells) => {
                        // What is being written may be above a limit that is lowered.
                        assert!(slab.flush(PATIENCE));
                        limits[tenant as usize] = cells.map(|cells| cells * CELL + 1);
                        slab.limit_account(account(tenant), limits[tenant as usize]);
                        assert_eq!(slab.account(account(tenant)).limit_bytes, cells.map(|cells| cells * CELL));
                    }
                    Step::Flush | Step::Restart => assert!(slab.flush(PATIENCE)),
                }
            });
            match step {
                Step::Flush => adds_up(&slab),
                Step::Restart => {
                    let before: Vec<_> = (0..TENANTS).map(|tenant| slab.account(account(tenant))).collect();
                    drop(slab);
                    slab = open();
                    for (tenant, before) in (0..).zip(before) {
                        let after = slab.account(account(tenant));
                        assert_eq!((after.bytes, after.records), (before.bytes, before.records));
                        slab.limit_account(account(tenant), limits[tenant as usize]);
                    }
                    adds_up(&slab);
                }
                _ => {}
            }
        }
        assert!(slab.flush(PATIENCE));
        adds_up(&slab);
    }
}

/// Stores and flushes `numbers` of a tenant.
fn store(slab: &Slab, tenant: u32, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert_eq!(slab.store(owned(tenant, number, 3000)), Stored::Queued);
        assert!(slab.flush(PATIENCE));
    }
}

#[test]
fn a_tenant_that_floods_the_disk_pushes_out_its_own_records() {
    for policy in PolicyKind::ALL {
        for flooding in 0..3 {
            let disk = TestDisk::in_memory(Vec::new());
            let slab = disk.open_with(SlabConfig { policy, ..SlabConfig::default() }).unwrap();
            let [a, b] = [0, 1, 2].into_iter().filter(|&tenant| tenant != flooding).collect::<Vec<_>>()[..]
            else {
                panic!()
            };
            store(&slab, a, 0..10);
            store(&slab, b, 0..20);
            store(&slab, flooding, 100..500);
            adds_up(&slab);
            let evicted = [a, b, flooding].map(|tenant| slab.account(account(tenant)).evicted);
            assert_eq!((here(&slab, a, 0..10).len(), here(&slab, b, 0..20).len()), (10, 20), "{policy:?}");
            assert!(evicted[..2] == [0, 0] && evicted[2] > 300, "{policy:?}: {evicted:?}");
            // After a restart, too, whatever the order of the last uses is.
            drop(slab);
            let slab = disk.open_with(SlabConfig { policy, ..SlabConfig::default() }).unwrap();
            store(&slab, flooding, 500..700);
            assert_eq!((here(&slab, a, 0..10).len(), here(&slab, b, 0..20).len()), (10, 20), "{policy:?}");
        }
    }
}

#[test]
fn a_tenant_with_a_limit_keeps_its_newest_records_and_leaves_the_rest_to_others() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_with(SlabConfig::default()).unwrap();
    slab.limit_account(account(1), Some(8 * CELL));
    // In one batch, and one by one.
    for number in 0..64 {
        assert_eq!(slab.store(owned(1, number, 3000)), Stored::Queued);
    }
    assert!(slab.flush(PATIENCE));
    adds_up(&slab);
    assert_eq!(slab.account(account(1)).records, 8);
    assert_eq!(slab.usage().stores_dropped, 0, "older records make room, also in the same batch");
    store(&slab, 1, 100..120);
    assert_eq!(here(&slab, 1, 0..120), (112..120).collect());
    assert_eq!(slab.store(owned(1, 200, 9 * CELL as usize)), Stored::Dropped, "larger than the limit");
    // A tenant with a small limit that it does not exceed loses nothing to one without.
    store(&slab, 2, 0..300);
    let [small, large] = [1, 2].map(|tenant| slab.account(account(tenant)));
    assert!(small.bytes <= 8 * CELL && large.bytes > LIMIT / 2, "{small:?} {large:?}");
    adds_up(&slab);
}

/// The weights of limits: a tenant that may use more of the slab keeps more of it.
#[test]
fn records_leave_by_the_part_of_the_limit_that_is_used() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open_with(SlabConfig::default()).unwrap();
    for (tenant, cells) in [(1, 80), (2, 40)] {
        slab.limit_account(account(tenant), Some(cells * CELL));
    }
    for number in 0..400 {
        store(&slab, 1 + number % 2, number..number + 1);
    }
    let [large, small] = [1, 2].map(|tenant| slab.account(account(tenant)).bytes as f64);
    assert!((1.6..2.5).contains(&(large / small)), "{large} and {small}");
    adds_up(&slab);
}

#[test]
fn an_account_is_described_without_the_tenants_name() {
    let folder = tempfile::tempdir().unwrap();
    let name = "alice the tenant";
    let root = scope().child(&name.bytes().map(u32::from).collect::<Vec<_>>());
    let alice = AccountId::of(&root);
    assert!(alice != AccountId::DEFAULT && alice != AccountId::of(&scope()) && alice == AccountId::of(&root));
    let config = SlabConfig { limit: LIMIT, cell_bytes: CELL as usize, ..SlabConfig::default() };
    let slab = Slab::open(folder.path(), scope(), config).unwrap();
    for number in 0..7 {
        let mut one = record(number, 2000);
        one.note.account = if number < 5 { alice } else { AccountId::DEFAULT };
        slab.store(one);
    }
    assert!(slab.flush(PATIENCE));
    drop(slab);
    let found = Slab::inspect(folder.path(), true, &mut |_, _| ()).unwrap();
    let [of_scope] = &found.scopes[..] else { panic!("{found:?}") };
    let listed: Vec<_> = of_scope.accounts.iter().map(|of| (of.account.clone(), of.records)).collect();
    assert_eq!(listed, [(Some(alice.to_string()), 5), (None, 2)]);
    assert_eq!(of_scope.accounts.iter().map(|of| of.bytes).sum::<u64>(), of_scope.bytes);
    let bytes = std::fs::read(folder.path().join(Slab::FILE)).unwrap();
    assert!(!bytes.windows(5).any(|window| window == b"alice"));
    // Under another model, the tenant has another account, and none of these records is its own.
    let other = KeyScope::new("other", b"weights").root();
    let slab = Slab::open(folder.path(), other, config).unwrap();
    assert_eq!((slab.account(alice).records, slab.usage().records), (0, 7));
}

/// Files of the versions before have no accounts. Nothing of them is read as if it had.
#[test]
fn a_file_of_another_version_or_byte_order_is_given_up() {
    for version in [1u32, 2, 3, 5, 4u32.swap_bytes()] {
        let folder = tempfile::tempdir().unwrap();
        let config = SlabConfig { limit: LIMIT, cell_bytes: CELL as usize, ..SlabConfig::default() };
        let kept = record(1, 2000);
        let slab = Slab::open(folder.path(), scope(), config).unwrap();
        slab.store(kept.clone());
        drop(slab);
        let path = folder.path().join(Slab::FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[..4088]);
        bytes[4088..4096].copy_from_slice(&checksum.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        let slab = Slab::open(folder.path(), scope(), config).unwrap();
        assert_eq!((slab.usage().records, load(&slab, &kept.id).is_err()), (0, true), "version {version}");
        assert_eq!(slab.store(kept.clone()), Stored::Queued);
        assert!(slab.flush(PATIENCE) && load(&slab, &kept.id).is_ok());
    }
}

#[test]
fn a_limit_that_is_lowered_while_records_are_read_holds_as_soon_as_they_have_been_read() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let records: Vec<Record> = (0..5).map(|number| owned(1, number, 5_000)).collect();
    for one in &records {
        assert_eq!(slab.store(one.clone()), Stored::Queued);
    }
    assert!(slab.flush(PATIENCE));
    disk.hang();
    let loads: Vec<_> = records.iter().map(|one| slab.begin_load(&one.id)).collect();
    slab.limit_account(account(1), Some(2 * CELL));
    assert_eq!(slab.account(account(1)).records, 5, "what is read cannot leave");
    disk.go_on();
    for (load, one) in loads.into_iter().zip(&records) {
        load.wait_until(std::time::Instant::now() + PATIENCE);
        assert_eq!(load.end().unwrap(), one.buffers);
    }
    // The last reading ends after its result is there.
    let deadline = std::time::Instant::now() + PATIENCE;
    while slab.account(account(1)).records > 1 && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    adds_up(&slab);
    assert_eq!(slab.account(account(1)).records, 1);
}
