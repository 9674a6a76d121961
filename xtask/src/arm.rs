//! `cargo xtask arm`: the fast kernels of the CPU backend on 64-bit ARM, where the compiler makes NEON of them.

use std::process::{Command, Stdio};

use crate::run::{Result, cargo_command, root, run};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const COMPILER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

/// Builds and runs the property tests under an emulator; says what is missing otherwise.
pub(crate) fn arm() -> Result {
    if let Some(missing) = missing() {
        println!("SKIPPED: {missing}");
        return Ok(());
    }
    // Built for this alone: compiling dependencies for speed would take longer than the tests.
    let light = ["--config", "profile.dev.package.'*'.opt-level=1"];
    let mut command = cargo_command(&["test", "--target", TARGET, "-p", "kvbackend-cpu", "--test", "fast"]);
    command
        .args(light)
        .env("CARGO_TARGET_DIR", root().join("target/arm"))
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", COMPILER)
        .env("CC_aarch64_unknown_linux_gnu", COMPILER)
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("{EMULATOR} -L /usr/aarch64-linux-gnu"),
        );
    run(&mut command, "cargo test (64-bit ARM)")
}

/// What to install, if anything.
fn missing() -> Option<String> {
    let runs = |program: &str| {
        let mut command = Command::new(program);
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    if cfg!(target_arch = "aarch64") {
        return Some("this is 64-bit ARM: `cargo xtask test` runs them".to_owned());
    }
    let targets = Command::new("rustup").args(["target", "list", "--installed"]).output();
    if !targets.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(TARGET)) {
        return Some(format!("64-bit ARM needs `rustup target add {TARGET}`"));
    }
    let needed = [(COMPILER, "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"), (EMULATOR, "qemu-user")];
    needed.into_iter().find(|(program, _)| !runs(program)).map(|(program, packages)| {
        format!("64-bit ARM needs {program}: on Debian, apt-get install {packages}")
    })
}
