//! A process that is killed while it writes: this test starts itself as the process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::process::{Command, Stdio};
use std::time::Duration;

use common::{load, record, scope};
use kvtier::{Missed, Slab, SlabConfig};

/// The variable that makes this test the process that writes.
const FOLDER: &str = "KVTIER_TEST_FOLDER";

/// How often a process is killed, unless the variable `KVTIER_TEST_KILLS` says otherwise.
const KILLS: u64 = 12;

/// The sizes of the records, by their number.
fn bytes(number: u32) -> usize {
    1000 + (number as usize * 7919) % 60_000
}

fn open(folder: &str) -> Slab {
    let config = SlabConfig { limit: 4 << 20, cell_bytes: 8 << 10, ..SlabConfig::default() };
    Slab::open(folder.as_ref(), scope(), config).unwrap()
}

/// Stores records until the process is killed.
fn write_on(folder: &str) -> ! {
    let slab = open(folder);
    for number in (0..).map(|step: u32| step % 400) {
        slab.store(record(number, bytes(number)));
        if number % 5 == 0 {
            slab.flush(Duration::from_secs(20));
        }
    }
    unreachable!("the numbers do not end")
}

#[test]
fn a_killed_process_leaves_only_right_records() {
    if let Ok(folder) = std::env::var(FOLDER) {
        write_on(&folder);
    }
    let kills = std::env::var("KVTIER_TEST_KILLS").map_or(KILLS, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let mut found = 0;
    for kill in 0..kills {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .arg("a_killed_process_leaves_only_right_records")
            .env(FOLDER, path)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(60 + kill * 37 % 200));
        process.kill().unwrap();
        process.wait().unwrap();
        let slab = open(path);
        for number in 0..400 {
            let expected = record(number, bytes(number));
            match load(&slab, &expected.id) {
                Ok(buffers) => {
                    assert_eq!(buffers, expected.buffers, "record {number} after kill {kill}");
                    found += 1;
                }
                // A kill does not undo what the process has handed to the system.
                Err(Missed::Absent) => {}
                Err(missed) => panic!("record {number} after kill {kill}: {missed}"),
            }
        }
        slab.check_invariants().unwrap();
    }
    assert!(found > 20 * kills, "{found} in {kills} rounds");
}
