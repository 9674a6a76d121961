//! A soak that is killed goes on when the same command is called again.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The longest time that a soak takes to get from one checkpoint to the next.
const PATIENCE: Duration = Duration::from_secs(60);

/// Builds the soak as `cargo xtask soak` does, and returns the program.
fn built() -> PathBuf {
    let mut build = Command::new(xtask::run::cargo_program());
    build
        .args(["build", "--release", "--quiet", "--all-features", "--example", "soak"])
        .current_dir(xtask::run::root());
    assert!(build.status().unwrap().success(), "the soak is not built");
    xtask::run::target().join("release/examples/soak")
}

/// Returns the command of a short soak with six segments.
fn soak(program: &Path, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["--seconds", "9", "--seed", "7", "--users", "16", "--idle", "20", "--folder"]).arg(folder);
    command
}

/// Reads the state of a soak, as soon as a condition holds for it.
fn state_when(file: &Path, holds: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + PATIENCE;
    loop {
        let state = std::fs::read_to_string(file).ok().and_then(|text| serde_json::from_str(&text).ok());
        if let Some(state) = state.filter(|state| holds(state)) {
            return state;
        }
        assert!(Instant::now() < until, "{} does not get there", file.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns what a soak has printed, and checks that it has found nothing wrong.
fn printed(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {text}{}", output.status, String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn a_soak_that_is_killed_goes_on() {
    let program = built();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.json");
    let mut first = soak(&program, folder.path()).stdout(Stdio::null()).spawn().unwrap();
    state_when(&file, |state| state["segments"] == 2);
    // A second one at the same time would change the files of the first one.
    let second = soak(&program, folder.path()).output().unwrap();
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && error.contains("another soak runs"), "{error}");
    first.kill().unwrap();
    first.wait().unwrap();
    let seconds = state_when(&file, |_| true)["seconds"].as_f64().unwrap();
    assert!((3.0..9.0).contains(&seconds), "{seconds}");
    let text = printed(&soak(&program, folder.path()).output().unwrap());
    assert!(text.contains(&format!("going on after {seconds:.0} seconds")), "{text}");
    // The soak itself has looked for the documents that were registered before the kill.
    assert!(!file.exists(), "it has ended");
}
