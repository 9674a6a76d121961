//! `cargo xtask`: what CI and developers run. Nothing here installs anything; a tool that is missing
//! is named with the command that brings it.

mod arm;
mod ascend_headers;
mod ascend_simulator;
mod bench;
mod bindgen;
mod check;
mod ci;
mod clock;
mod conform;
mod cuda_double;
mod cuda_ptx;
mod deep;
mod exactness;
mod features;
mod gpu_check;
mod instructions;
mod licences;
mod links;
mod loom;
mod page;
mod published;
mod python;
mod rooms;
mod run;
mod sanitize;
mod step;
mod storeys;
mod test;
mod tools;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    /// Run all steps of CI, then print a table of their seconds and the counts of the tests.
    Ci(ci::CiArgs),
    /// Run the slice of the deep checks that has gone longest without a run; docs/deep.md has the table.
    Deep(deep::DeepArgs),
    /// Run all tests and count them in the last line.
    Test(test::TestArgs),
    /// Check formatting, lints, docs, features, file sizes, the commands and links of the documents, and the tests that
    /// docs/features.md names.
    Check,
    /// Run the conformance suite on one backend and print a table; fails on a machine without a device for it.
    Conform(conform::ConformArgs),
    /// Compile the kernels of the CUDA backend to the PTX that is committed, and print their registers and spills (needs
    /// the compiler's wheels).
    CudaPtx(cuda_ptx::CudaPtxArgs),
    /// Build the test double of the CUDA driver, with which the CUDA backend runs on a machine without a GPU.
    CudaDouble(cuda_double::CudaDoubleArgs),
    /// Make the Rust of the Ascend backend's C header (needs bindgen).
    Bindgen(bindgen::BindgenArgs),
    /// Build the simulator of CANN's libraries, with which the Ascend backend runs on a machine without an NPU.
    AscendSimulator,
    /// Compare the Ascend backend's C header with headers of CANN, from pinned wheels of `torch_npu`.
    AscendHeaders,
    /// Run all benchmarks of the CPU (`--backend cuda`, `--backend wgpu`: of a GPU's kernels) and print one table of ratios.
    Bench(bench::KernelBenchArgs),
    /// Check the CUDA backend on a real card and write one report: conformance, sanitizers, speed, peers, answers. Runs
    /// elsewhere too, with the programs that `--collect` gathers.
    GpuCheck(gpu_check::GpuCheckArgs),
    /// Ask a published model in every way of reuse, and write the table of docs/quality.md (needs the model's wheel).
    Published(published::PublishedArgs),
    /// Build the wheel of the Python module and run its tests, or those of the connector inside vLLM.
    Python(python::PythonArgs),
    /// Print what the tests of exactness measure, as the table of docs/exactness.md.
    Exactness(exactness::ExactnessArgs),
    /// Count the instructions that hot paths take and compare them with the committed baseline (needs valgrind and
    /// gungraun-runner).
    Instructions(instructions::InstructionsArgs),
    /// Run the block pool's concurrent paths under the interleavings of two threads.
    Loom(loom::LoomArgs),
    /// Run the tests of crates with unsafe code under AddressSanitizer (needs a nightly toolchain) or valgrind.
    Sanitize(sanitize::SanitizeArgs),
    /// Run the tests of the fast kernels on 64-bit ARM, under an emulator (needs the target, a cross compiler and qemu).
    Arm,
    /// Lint each crate alone, in every combination of its features.
    Features,
    /// Check licences, bans and sources of all dependencies (needs cargo-deny).
    Licences,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        XtaskCommand::Ci(args) => ci::ci(&args),
        XtaskCommand::Deep(args) => deep::deep(&args),
        XtaskCommand::Test(args) => test::test(&args),
        XtaskCommand::Check => check::check(),
        XtaskCommand::Conform(args) => conform::conform(&args),
        XtaskCommand::CudaPtx(args) => cuda_ptx::cuda_ptx(&args),
        XtaskCommand::CudaDouble(args) => cuda_double::cuda_double(&args),
        XtaskCommand::Bindgen(args) => bindgen::bindgen(&args),
        XtaskCommand::AscendSimulator => ascend_simulator::ascend_simulator(),
        XtaskCommand::AscendHeaders => ascend_headers::ascend_headers(),
        XtaskCommand::Bench(args) => bench::bench(&args),
        XtaskCommand::GpuCheck(args) => gpu_check::gpu_check(&args),
        XtaskCommand::Published(args) => published::published(&args),
        XtaskCommand::Python(args) => python::python(&args),
        XtaskCommand::Exactness(args) => exactness::exactness(&args),
        XtaskCommand::Instructions(args) => instructions::instructions(&args),
        XtaskCommand::Loom(args) => loom::loom(&args),
        XtaskCommand::Sanitize(args) => sanitize::sanitize(&args),
        XtaskCommand::Arm => arm::arm(),
        XtaskCommand::Features => features::all(),
        XtaskCommand::Licences => licences::licences(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            // A task that has said what failed has no more to say.
            if !message.is_empty() {
                eprintln!("xtask: {message}");
            }
            ExitCode::FAILURE
        }
    }
}
