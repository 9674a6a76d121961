//! Tasks that run example programs of other crates. Each program parses its own options and prints its own
//! help.

use std::ffi::OsString;
use std::process::Command;

use clap::Args;
use xtask::run::{Result, cargo_program, root};

/// Arguments that are passed on to the program.
#[derive(Args)]
pub(crate) struct ForwardedArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

// Decision: docs/decisions/tools.md#tasks-that-measure-a-crate-are-its-examples
/// Runs an example program in the current folder, built with all the workspace's features.
pub(crate) fn forward(example: &str, args: &ForwardedArgs) -> Result {
    let mut command = Command::new(cargo_program());
    command.arg("run").arg("--manifest-path").arg(root().join("Cargo.toml"));
    // Decision: docs/decisions/tools.md#one-build-of-the-dependencies
    command.args(["--release", "--quiet", "--all-features", "--example", example, "--"]).args(&args.args);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        // The program or Cargo has already printed the error.
        Ok(_) => Err(String::new()),
        Err(error) => Err(format!("`cargo run --example {example}` cannot be run: {error}")),
    }
}
