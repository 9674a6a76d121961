//! The limit in bytes, sampled while a slab is at work.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(unix)]

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::disk::Dice;
use common::{load, record, scope, ways};
use kvcore::KeyScope;
use kvtier::{IoWay, Slab, SlabConfig};

const CELL: usize = 8 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// The number of bytes that a folder takes on the disk, and the sum of its files' sizes.
fn taken(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap());
    files.map(|file| file.len().max(file.blocks() * 512)).sum()
}

/// Stores and loads records of random sizes.
fn work(slab: &Slab, dice: &mut Dice, steps: usize) {
    for _ in 0..steps {
        let number = dice.roll(300) as u32;
        let bytes = 100 + (number as usize * 7919) % 90_000;
        match dice.roll(8) {
            0 => assert!(slab.flush(PATIENCE)),
            1..3 => drop(load(slab, &record(number, bytes).id)),
            _ => drop(slab.store(record(number, bytes))),
        }
        let usage = slab.usage();
        assert!(usage.bytes <= usage.limit_bytes, "{usage:?}");
    }
}

#[test]
fn a_folder_never_takes_more_than_its_limit() {
    for way in ways() {
        samples_stay_within_the_limit(way);
    }
}

fn samples_stay_within_the_limit(way: IoWay) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (limit, done, samples) = (AtomicU64::new(6 << 20), AtomicBool::new(false), AtomicU64::new(0));
    let most = std::thread::scope(|threads| {
        let sampling = threads.spawn(|| {
            let mut most = 0.0f64;
            while !done.load(Ordering::Relaxed) {
                // The limit only grows while this runs.
                let taken = taken(folder).saturating_sub(CELL as u64);
                most = most.max(taken as f64 / limit.load(Ordering::SeqCst) as f64);
                samples.fetch_add(1, Ordering::Relaxed);
            }
            most
        });
        let mut dice = Dice(0x2545_f491_4f6c_dd1d);
        // Other models' records are there first, the limit grows, and slabs are opened again and again.
        for turn in 0..12u64 {
            let scope = if turn % 3 == 0 { KeyScope::new("other", &[turn as u8]).root() } else { scope() };
            if turn % 5 == 4 {
                limit.fetch_add(2 << 20, Ordering::SeqCst);
            }
            let limit = limit.load(Ordering::SeqCst);
            let config = SlabConfig {
                limit,
                cell_bytes: CELL,
                queue_bytes: 1 << 20,
                io: Some(way),
                ..SlabConfig::default()
            };
            let slab = Slab::open(folder, scope, config).unwrap();
            work(&slab, &mut dice, 150);
            assert!(slab.usage().records > 0);
        }
        done.store(true, Ordering::Relaxed);
        sampling.join().unwrap()
    });
    let samples = samples.into_inner();
    assert!(samples > 100, "{samples} samples");
    // Most of the limit is used, and never more than one cell above it.
    assert!((0.5..=1.0).contains(&most), "{most} of the limit, {way}");
}
