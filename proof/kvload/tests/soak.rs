//! The example `soak` when it is killed and called again, and when it is called twice at the same time.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Returns the example, which Cargo builds beside the tests of the crate.
fn example() -> Option<PathBuf> {
    let test = std::env::current_exe().unwrap();
    let path = test.parent()?.parent()?.join("examples").join("soak");
    path.exists().then_some(path)
}

/// Returns a short soak in a folder of its own.
fn soak(example: &Path, folder: &Path) -> Command {
    let mut command = Command::new(example);
    command.env("CARGO_TARGET_DIR", folder).stdin(Stdio::null());
    command.args(["--seconds", "6", "--seed", "7", "--users", "8", "--idle", "20"]);
    command
}

/// Returns the number of times of traffic that a soak has saved, if it has begun.
fn segments(folder: &Path) -> u64 {
    let text = fs::read_to_string(folder.join("soak/state.json")).unwrap_or_default();
    serde_json::from_str::<Value>(&text).map_or(0, |state| state["segments"].as_u64().unwrap())
}

#[test]
fn a_soak_that_was_killed_goes_on_and_another_one_at_the_same_time_is_refused() {
    let Some(example) = example() else {
        println!("SKIPPED: the example soak has not been built");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut killed = soak(&example, folder).stdout(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(120);
    while segments(folder) < 2 {
        assert!(Instant::now() < until && killed.try_wait().unwrap().is_none(), "it does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    let documents = || fs::read_to_string(folder.join("soak/documents.jsonl")).unwrap();
    assert!(documents().contains("kept-1"));
    let second = soak(&example, folder).output().unwrap();
    let refusal = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && refusal.contains("another soak runs"), "{refusal}");
    assert!(documents().contains("kept-1"), "the documents of the running soak are gone");
    killed.kill().unwrap();
    killed.wait().unwrap();
    let saved = segments(folder);
    let resumed = soak(&example, folder).output().unwrap();
    let said = String::from_utf8_lossy(&resumed.stdout);
    assert!(resumed.status.success(), "{said}{}", String::from_utf8_lossy(&resumed.stderr));
    assert!(saved >= 2 && said.contains("going on after") && said.contains("nothing was wrong"), "{said}");
    assert_eq!(segments(folder), 0, "the state of a soak that has ended is gone");
}
