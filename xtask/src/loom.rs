//! `cargo xtask loom`: the concurrent paths of the block pool under the interleavings of two threads.

use clap::Args;

use xtask::run::{Result, cargo_command, root, run};

/// Options of `cargo xtask loom`.
#[derive(Args)]
pub(crate) struct LoomArgs {
    /// Allow any number of preemptions instead of three, for half a minute a model.
    #[arg(long)]
    exhaustive: bool,
}

/// Seconds of each model with `--exhaustive`. Some models would take hours to finish.
const SECONDS: &str = "30";

pub(crate) fn loom(args: &LoomArgs) -> Result {
    let mut command = cargo_command("test --release -p kvcore --test loom");
    // A folder of its own, since the flag would rebuild everything else. The pool and loom are compiled for
    // speed, the other dependencies of kvcore's tests are not.
    command.args(["--config", "profile.release.package.'*'.opt-level=0"]);
    command.args(["--config", "profile.release.package.loom.opt-level=3"]);
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", root().join("target/loom"));
    if args.exhaustive {
        command.env("LOOM_MAX_DURATION", SECONDS);
    } else {
        command.env("LOOM_MAX_PREEMPTIONS", "3");
    }
    run(&mut command, "cargo test (loom)")
}
