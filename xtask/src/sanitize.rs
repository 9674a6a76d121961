//! `cargo xtask sanitize`: unsafe code under AddressSanitizer.

use std::process::{Command, Stdio};

use crate::run::{Result, root, run};

/// Crates whose `unsafe` touches memory, the suite that runs them, and the cache whose threads put reserved memory
/// to sleep. (`kvc` has one line that sets a variable of its environment.)
const CRATES: [&str; 3] = ["kvbackend-cpu", "kvconform", "kvchunk"];

pub(crate) fn sanitize() -> Result {
    let host = host()?;
    let nightly = Command::new("cargo")
        .args(["+nightly", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !nightly.is_ok_and(|s| s.success()) {
        println!("SKIPPED: AddressSanitizer needs a nightly toolchain: rustup toolchain install nightly");
        return Ok(());
    }
    let mut command = Command::new("cargo");
    command.args(["+nightly", "test", "--target", &host, "--tests"]);
    // Dependencies are built for this alone: compiling them for speed would take longer than the tests.
    command.args(["--config", "profile.dev.package.'*'.opt-level=1"]);
    for name in CRATES {
        command.args(["-p", name]);
    }
    command
        .current_dir(root())
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .env("CARGO_TARGET_DIR", root().join("target/sanitize"));
    run(&mut command, "cargo +nightly test")
}

/// The machine's own target, which sanitizers need to be named.
fn host() -> Result<String> {
    let output =
        Command::new("rustc").arg("-vV").output().map_err(|e| format!("`rustc -vV` cannot be run: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix("host: "));
    line.map(str::to_owned).ok_or_else(|| "rustc names no host".to_owned())
}
