//! A process that is killed while it writes: this test starts itself as the process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::process::{Command, Stdio};
use std::time::Duration;

use common::{in_slab_memory, load, record, scope, ways};
use kvtier::{IoWay, Missed, Slab, SlabConfig};

/// The variable that makes this test the process that writes.
const FOLDER: &str = "KVTIER_TEST_FOLDER";

/// The variable with the number of the way of I/O.
const WAY: &str = "KVTIER_TEST_WAY";

/// How often a process is killed, unless the variable `KVTIER_TEST_KILLS` says otherwise.
const KILLS: u64 = 12;

/// The sizes of the records, by their number. Some of them fill whole pages.
fn bytes(number: u32) -> usize {
    if number.is_multiple_of(3) {
        return (64 << 10) + (8 << 10) * (number as usize % 4);
    }
    1000 + (number as usize * 7919) % 60_000
}

fn open(folder: &str, way: IoWay) -> Slab {
    let io = Some(way);
    let config = SlabConfig { limit: 4 << 20, cell_bytes: 8 << 10, io, ..SlabConfig::default() };
    Slab::open(folder.as_ref(), scope(), config).unwrap()
}

/// Stores records until the process is killed.
fn write_on(folder: &str, way: IoWay) -> ! {
    let slab = open(folder, way);
    for number in (0..).map(|step: u32| step % 400) {
        slab.store(in_slab_memory(&slab, &record(number, bytes(number))));
        if number % 5 == 0 {
            slab.flush(Duration::from_secs(20));
        }
    }
    unreachable!("the numbers do not end")
}

#[test]
fn a_killed_process_leaves_only_right_records() {
    if let Ok(folder) = std::env::var(FOLDER) {
        let way: usize = std::env::var(WAY).unwrap().parse().unwrap();
        write_on(&folder, IoWay::ALL[way]);
    }
    let ways = ways();
    let kills = std::env::var("KVTIER_TEST_KILLS").map_or(KILLS, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let mut found = 0;
    for kill in 0..kills {
        let way = ways[kill as usize % ways.len()];
        let mut process = Command::new(std::env::current_exe().unwrap())
            .arg("a_killed_process_leaves_only_right_records")
            .env(FOLDER, path)
            .env(WAY, IoWay::ALL.iter().position(|&each| each == way).unwrap().to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(60 + kill * 37 % 200));
        process.kill().unwrap();
        process.wait().unwrap();
        let slab = open(path, way);
        for number in 0..400 {
            let expected = record(number, bytes(number));
            match load(&slab, &expected.id) {
                Ok(buffers) => {
                    assert_eq!(buffers, expected.buffers, "record {number} after kill {kill}, {way}");
                    found += 1;
                }
                // A kill does not undo what the process has handed to the system.
                Err(Missed::Absent) => {}
                Err(missed) => panic!("record {number} after kill {kill}, {way}: {missed}"),
            }
        }
        slab.check_invariants().unwrap();
    }
    assert!(found > 20 * kills, "{found} in {kills} rounds");
}
