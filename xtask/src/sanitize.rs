//! `cargo xtask sanitize`: unsafe code under AddressSanitizer, or under valgrind where there is no nightly toolchain.

use std::process::Command;

use clap::Args;

use crate::ascend_simulator;
use crate::run::{Result, cargo_command, root, run, skip};
use crate::tools::{Tool, nightly};

/// Options of `cargo xtask sanitize`.
#[derive(Args)]
pub(crate) struct SanitizeArgs {
    /// Every test of the crates, instead of those that reach the unsafe code soonest.
    #[arg(long)]
    all: bool,
    /// The tests of the Ascend backend instead, on the simulator of CANN.
    #[arg(long, conflicts_with = "all")]
    ascend: bool,
}

/// Crates whose `unsafe` touches memory, the suite that runs them, and the cache whose threads put reserved memory
/// to sleep. (`kvc` has one line that sets a variable of its environment.)
const ALL: [&str; 7] = ["-p", "kvbackend-cpu", "-p", "kvconform", "-p", "kvchunk", "--tests"];

/// Tests that run without `--all`: units, every kernel in every instruction set on one thread and several, and the
/// conformance suite.
const SOONEST: [&str; 8] = [
    "-p",
    "kvbackend-cpu",
    "-p",
    "kvconform",
    "--lib",
    "--test=fast",
    "--test=tensors",
    "--test=conformance",
];

/// Tests of a backend whose device is a library that is loaded at run time.
const ASCEND: [&str; 3] = ["-p", "kvbackend-ascend", "--tests"];

/// Dependencies are built for this alone, and lightly. This workspace's crates are compiled for speed: at level 1 the
/// whole took a third more processor time, since the property tests ran several times as long.
const LIGHT: [&str; 2] = ["--config", "profile.release.package.'*'.opt-level=1"];

pub(crate) fn sanitize(args: &SanitizeArgs) -> Result {
    if nightly() {
        address_sanitizer(args)
    } else if Tool::Sanitizer.is_here() {
        valgrind(args)
    } else {
        skip(&format!("no nightly toolchain and no valgrind: {}", Tool::Sanitizer.bring()))
    }
}

/// Cases of each property test without `--all`: as many as find a read out of bounds, which most cases of a wrong kernel
/// have.
const CASES: &str = "32";

/// Adds what follows `cargo test`.
fn add_tests(command: &mut Command, args: &SanitizeArgs) -> Result {
    let chosen: &[&str] = match args {
        SanitizeArgs { ascend: true, .. } => &ASCEND,
        SanitizeArgs { all: true, .. } => &ALL,
        _ => &SOONEST,
    };
    command.arg("--release").args(LIGHT).args(chosen);
    if !args.all {
        command.env("PROPTEST_CASES", CASES);
    }
    if args.ascend { ascend_simulator::provide(command) } else { Ok(()) }
}

fn address_sanitizer(args: &SanitizeArgs) -> Result {
    let host = host()?;
    let mut command = Command::new("cargo");
    command.args(["+nightly", "test", "--target", &host]);
    add_tests(&mut command, args)?;
    command
        .current_dir(root())
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .env("CARGO_TARGET_DIR", root().join("target/sanitize"));
    run(&mut command, "cargo +nightly test")
}

/// Reads and writes beyond memory of the heap and of freed memory are found; the stack is not looked at, and
/// instructions that valgrind does not know are not run.
fn valgrind(args: &SanitizeArgs) -> Result {
    let runner = format!("CARGO_TARGET_{}_RUNNER", host()?.to_uppercase().replace('-', "_"));
    let mut command = cargo_command(&["test"]);
    add_tests(&mut command, args)?;
    command.env(runner, "valgrind --quiet --error-exitcode=99 --fair-sched=yes");
    run(&mut command, "cargo test (valgrind)")
}

/// Returns the machine's own target, which must be named to a sanitizer.
fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output();
    let output = output.map_err(|e| format!("`rustc -vV` cannot be run: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix("host: "));
    line.map(str::to_owned).ok_or_else(|| "rustc names no host".to_owned())
}
