//! `cargo xtask loom`: runs the block pool's concurrent paths through the interleavings of two threads.

use clap::Args;

use xtask::run::{Result, cargo_command, root, run};

/// Options of `cargo xtask loom`.
#[derive(Args)]
pub(crate) struct LoomArgs {
    /// Allow any number of preemptions, instead of three, and run each model for half a minute.
    #[arg(long)]
    exhaustive: bool,
}

/// Seconds per model with `--exhaustive`. Some models would take hours to finish.
const SECONDS: &str = "30";

pub(crate) fn loom(args: &LoomArgs) -> Result {
    let mut command = cargo_command("test --release -p kvcore --test loom");
    // A separate target folder, because the flag would rebuild everything in the usual one. The pool and loom
    // are optimised. The other dependencies of kvcore's tests, for example the CPU backend, are not.
    for package in ["'*'", "kvbackend-cpu"] {
        command.args(["--config", &format!("profile.release.package.{package}.opt-level=0")]);
    }
    command.args(["--config", "profile.release.package.loom.opt-level=3"]);
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", root().join("target/loom"));
    if args.exhaustive {
        command.env("LOOM_MAX_DURATION", SECONDS);
    } else {
        command.env("LOOM_MAX_PREEMPTIONS", "3");
    }
    run(&mut command, "cargo test (loom)")
}
