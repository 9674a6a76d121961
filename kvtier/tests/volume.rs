//! Large records that a killed process had committed: this test starts itself as the process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{load, record, scope};
use kvtier::{Slab, SlabConfig, Stored};

/// The variable that makes this test the process that writes.
const FOLDER: &str = "KVTIER_TEST_VOLUME_FOLDER";

/// The number of MiB that are committed before the kill, unless the variable `KVTIER_TEST_VOLUME` says otherwise.
const MIB: u32 = 128;

/// The size of a record: a piece of a few hundred tokens.
const BYTES: usize = 2 << 20;

/// The line that the process writes for each batch begins with this, and ends with the number of committed records.
const COMMITTED: &str = "committed: ";

/// Returns how much to commit, in MiB.
fn volume() -> u32 {
    std::env::var("KVTIER_TEST_VOLUME").map_or(MIB, |mib| mib.parse().unwrap())
}

fn open(folder: &Path) -> Slab {
    // Room for all that is written, with the headers of the records: nothing is evicted, whenever the kill comes.
    let limit = (u64::from(volume()) * 5 / 4 + 64) << 20;
    Slab::open(folder, scope(), SlabConfig { limit, ..SlabConfig::default() }).unwrap()
}

/// Stores records until the process is killed.
fn write_on(folder: &Path) -> ! {
    let slab = open(folder);
    for number in 0.. {
        while slab.store(record(number, BYTES)) == Stored::Dropped {
            assert!(slab.flush(Duration::from_secs(100)));
        }
        if number % 8 == 7 {
            assert!(slab.flush(Duration::from_secs(100)));
            println!("\n{COMMITTED}{}", number + 1);
        }
        // More would evict what the test expects, if the kill comes late.
        while number >= volume() / 2 + 16 {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    unreachable!("the numbers do not end")
}

#[test]
fn everything_that_was_committed_is_found_after_a_kill() {
    if let Ok(folder) = std::env::var(FOLDER) {
        write_on(folder.as_ref());
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["everything_that_was_committed_is_found_after_a_kill", "--nocapture"])
        .env(FOLDER, folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    // The pipe stays open until the kill, so that nothing else ends the process.
    let mut counts =
        lines.map_while(Result::ok).filter_map(|line| line.strip_prefix(COMMITTED)?.parse::<u32>().ok());
    let committed = counts.find(|&count| count >= volume() / 2).unwrap();
    process.kill().unwrap();
    process.wait().unwrap();

    let began = Instant::now();
    let slab = open(folder.path());
    for number in 0..committed {
        let expected = record(number, BYTES);
        let found =
            load(&slab, &expected.id).unwrap_or_else(|missed| panic!("{number} of {committed}: {missed}"));
        assert!(found == expected.buffers, "record {number} of {committed} differs");
        if number == 0 {
            println!("{} MiB: {:.0} ms to the first hit", 2 * committed, began.elapsed().as_secs_f64() * 1e3);
        }
    }
    slab.check_invariants().unwrap();
}
