//! `cargo xtask conform`: the conformance suite on one backend.

use std::process::Command;

use clap::Args;

use xtask::cuda_double;
use xtask::run::{Result, cargo, root, run, target};

use crate::ascend_simulator;

/// Options of `cargo xtask conform`.
#[derive(Args)]
pub(crate) struct ConformArgs {
    /// Backend to check.
    #[arg(long, default_value = "cpu")]
    backend: String,
    /// Run every variant in every element type; otherwise some variants run in some types only.
    #[arg(long)]
    every: bool,
}

pub(crate) fn conform(args: &ConformArgs) -> Result {
    // Among the whole workspace and with all features, as the tests are built: nothing is built twice.
    cargo("build --release --quiet --workspace --all-features --example conform")?;
    let mut command = Command::new(target().join("release/examples/conform"));
    command.args(["--backend", &args.backend]).args(args.every.then_some("--every")).current_dir(root());
    // The layers of the Vulkan loader check the use of wgpu. A release build of wgpu asks for them only if
    // told to.
    command.envs([("WGPU_VALIDATION", "1"), ("WGPU_DEBUG", "1")]);
    match args.backend.as_str() {
        "ascend" => ascend_simulator::provide(&mut command)?,
        "cuda" => cuda_double::provide(&mut command)?,
        _ => {}
    }
    run(&mut command, "conform")
}
