//! `cargo xtask arm`: compiles the CPU backend's fast kernels for 64-bit ARM (NEON) and tests them.

use xtask::run::{Result, cargo_command, root, run, skip};
use xtask::tools::{Tool, require};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const COMPILER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

/// The Rust target, its C compiler and C library, and the emulator.
pub(crate) const NEEDS: &[Tool] = &[
    Tool::Target(TARGET),
    Tool::Program(COMPILER, "gcc-aarch64-linux-gnu"),
    Tool::Package("libc6-dev-arm64-cross"),
    Tool::Program(EMULATOR, "qemu-user"),
];

/// Builds the property tests and runs them under an emulator. On a machine without an emulator, reports
/// the missing tools.
pub(crate) fn arm() -> Result {
    if cfg!(target_arch = "aarch64") {
        println!("arm: this is 64-bit ARM, where `cargo xtask test` runs them");
        return Ok(());
    }
    if let Err(missing) = require("`cargo xtask arm`", NEEDS) {
        return skip(&missing);
    }
    // No other task uses this build, and optimising its dependencies would take longer than the tests.
    let light = ["--config", "profile.dev.package.'*'.opt-level=1"];
    let mut command = cargo_command(&format!("test --target {TARGET} -p kvbackend-cpu --test fast"));
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
