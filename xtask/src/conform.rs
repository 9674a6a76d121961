//! `cargo xtask conform`: the conformance suite on one backend.

use std::process::Command;

use clap::Args;

use crate::run::{Result, cargo, root, run};
use crate::{ascend_simulator, cuda_double};

/// Options of `cargo xtask conform`.
#[derive(Args)]
pub(crate) struct ConformArgs {
    /// Backend to check.
    #[arg(long, default_value = "cpu")]
    backend: String,
    /// Every element type in every variant, where some variants otherwise run in some.
    #[arg(long)]
    every: bool,
}

pub(crate) fn conform(args: &ConformArgs) -> Result {
    // Among the whole workspace and with all features, as the tests are built: nothing is built twice.
    cargo(&["build", "--release", "--quiet", "--workspace", "--all-features", "--example", "conform"])?;
    let folder = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
    let mut command = Command::new(folder.join("release/examples/conform"));
    command.args(["--backend", &args.backend]).args(args.every.then_some("--every")).current_dir(root());
    // The Vulkan loader's layers watch over wgpu: a release build of it asks for them only if told so.
    command.envs([("WGPU_VALIDATION", "1"), ("WGPU_DEBUG", "1")]);
    match args.backend.as_str() {
        "ascend" => ascend_simulator::provide(&mut command)?,
        "cuda" => cuda_double::provide(&mut command)?,
        _ => {}
    }
    run(&mut command, "conform")
}
