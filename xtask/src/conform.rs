//! `cargo xtask conform`: runs the conformance suite on one backend.

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
    /// Run every variant with every element type. By default, some variants run with some types only.
    #[arg(long)]
    every: bool,
}

pub(crate) fn conform(args: &ConformArgs) -> Result {
    // Built like the tests, with the whole workspace and all features, so nothing is compiled twice.
    cargo("build --release --quiet --workspace --all-features --example conform")?;
    let mut command = Command::new(target().join("release/examples/conform"));
    command.args(["--backend", &args.backend]).args(args.every.then_some("--every")).current_dir(root());
    // The Vulkan loader's validation layers check how wgpu is used. A release build of wgpu enables them only
    // on request.
    command.envs([("WGPU_VALIDATION", "1"), ("WGPU_DEBUG", "1")]);
    match args.backend.as_str() {
        "ascend" => ascend_simulator::provide(&mut command)?,
        "cuda" => cuda_double::provide(&mut command)?,
        _ => {}
    }
    run(&mut command, "conform")
}
