//! `cargo xtask`: what CI and developers run. Nothing here installs anything; a tool that is missing
//! is named with the command that brings it.

mod arm;
mod bench;
mod check;
mod exactness;
mod instructions;
mod links;
mod loom;
mod run;
mod sanitize;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// All tests, and one line that counts them.
    Test,
    /// Formatting, lints, docs, every feature combination, licences, file sizes, the README's
    /// commands, the tests that docs/features.md names, the links of the documents.
    Check,
    /// The conformance suite on one backend, as a table; fails where the machine has no device of it.
    Conform {
        /// Which backend.
        #[arg(long, default_value = "cpu")]
        backend: String,
    },
    /// All benchmarks of the CPU (`--backend wgpu`: of a GPU's kernels), as one table of ratios.
    Bench(bench::BenchArgs),
    /// What the tests of exactness measure, as the table of docs/exactness.md.
    Exactness(exactness::ExactnessArgs),
    /// Instructions that hot paths take, against the committed baseline (needs valgrind and gungraun-runner).
    Instructions(instructions::InstructionsArgs),
    /// The block pool's concurrent paths under the interleavings of two threads.
    Loom(loom::LoomArgs),
    /// Tests of crates with unsafe code, under AddressSanitizer (needs a nightly toolchain).
    Sanitize,
    /// Tests of the fast kernels on 64-bit ARM, under an emulator (needs the target, a cross compiler and qemu).
    Arm,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Test => test::test(),
        Task::Check => check::check(),
        Task::Conform { backend } => conform(&backend),
        Task::Bench(args) => bench::bench(&args),
        Task::Exactness(args) => exactness::exactness(&args),
        Task::Instructions(args) => instructions::instructions(&args),
        Task::Loom(args) => loom::loom(&args),
        Task::Sanitize => sanitize::sanitize(),
        Task::Arm => arm::arm(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

fn conform(backend: &str) -> run::Result {
    let suite = ["run", "--quiet", "-p", "kvconform", "--example", "conform"];
    // The suite itself names the backends that it has.
    let features: &[&str] = if backend == "wgpu" { &["--features", "wgpu"] } else { &[] };
    run::cargo(&[&suite[..], features, &["--", "--backend", backend]].concat())
}
