//! `cargo xtask`: the tasks of CI and of developers. No task installs anything. If a tool is missing, the
//! task prints the command that installs it.
//!
//! Most modules are tasks. The others are `step` and `clock` (one command of a longer run, and its time),
//! `forward` (tasks that are programs of other crates) and `metadata` (the workspace's crates).

mod arm;
mod ascend_simulator;
mod bindgen;
mod check;
mod ci;
mod clock;
mod conform;
mod cuda_ptx;
mod deep;
mod features;
mod forward;
mod links;
mod loom;
mod metadata;
mod python;
mod rooms;
mod sanitize;
mod step;
mod storeys;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use forward::{ForwardedArgs, forward};
use xtask::cuda_double::{CudaDoubleArgs, cuda_double};
use xtask::run::exit_code;

/// Tasks of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct XtaskCli {
    #[command(subcommand)]
    task: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    /// Run all steps of CI, then print a table of their times, and the test counts.
    Ci(ci::CiArgs),
    /// Run the slice of the longer checks that has gone longest without a run (see docs/deep.md).
    Deep(deep::DeepArgs),
    /// Run all tests and print their counts in the last line.
    Test(test::TestArgs),
    /// Check formatting, lints, features, file sizes, imports, the documents' commands and links, and the
    /// tests that docs/features.md names.
    Check,
    /// Run the conformance suite on one backend and print a table. Fails if the machine has no device for it.
    Conform(conform::ConformArgs),
    /// Compile the CUDA backend's kernels to the committed PTX, and print their registers (needs wheels).
    CudaPtx(cuda_ptx::CudaPtxArgs),
    /// Build the CUDA driver's test double, which lets the CUDA backend run without a GPU.
    CudaDouble(CudaDoubleArgs),
    /// Generate the Rust bindings of the Ascend backend's C header (needs bindgen).
    Bindgen(bindgen::BindgenArgs),
    /// Build the simulator of CANN's libraries, which lets the Ascend backend run without an NPU.
    AscendSimulator,
    /// Compare the Ascend backend's C header with CANN's headers, from pinned `torch_npu` wheels.
    #[command(disable_help_flag = true)]
    AscendHeaders(ForwardedArgs),
    /// Run the benchmarks of the CPU kernels or of a GPU's kernels, and print one table of ratios.
    #[command(disable_help_flag = true)]
    Bench(ForwardedArgs),
    /// Check the CUDA backend on a real GPU, here or on another machine, and write one report.
    #[command(disable_help_flag = true)]
    GpuCheck(ForwardedArgs),
    /// Ask a published model questions with every reuse strategy, for docs/quality.md (needs its wheel).
    #[command(disable_help_flag = true)]
    Published(ForwardedArgs),
    /// Build the Python module's wheel and run its tests, or check the connector inside vLLM.
    Python(python::PythonArgs),
    /// Print the exactness tests' measurements as the table in docs/exactness.md.
    #[command(disable_help_flag = true)]
    Exactness(ForwardedArgs),
    /// Count the instructions of hot paths, against the baseline (needs valgrind and gungraun-runner).
    #[command(disable_help_flag = true)]
    Instructions(ForwardedArgs),
    /// Soak a server in mixed traffic, and check that nothing breaks, leaks or differs.
    #[command(disable_help_flag = true)]
    Soak(ForwardedArgs),
    /// Run the block pool's concurrent paths through the interleavings of two threads.
    Loom(loom::LoomArgs),
    /// Run the tests of crates with unsafe code under AddressSanitizer (needs a nightly toolchain) or
    /// valgrind.
    Sanitize(sanitize::SanitizeArgs),
    /// Run the fast kernels' tests for 64-bit ARM under an emulator (needs the target, gcc for it, and qemu).
    Arm,
    /// Lint each crate alone, in every combination of its features.
    Features,
}

fn main() -> ExitCode {
    exit_code(match XtaskCli::parse().task {
        XtaskCommand::Ci(args) => ci::ci(&args),
        XtaskCommand::Deep(args) => deep::deep(&args),
        XtaskCommand::Test(args) => test::test(&args),
        XtaskCommand::Check => check::check(),
        XtaskCommand::Conform(args) => conform::conform(&args),
        XtaskCommand::CudaPtx(args) => cuda_ptx::cuda_ptx(&args),
        XtaskCommand::CudaDouble(args) => cuda_double(&args),
        XtaskCommand::Bindgen(args) => bindgen::bindgen(&args),
        XtaskCommand::AscendSimulator => ascend_simulator::ascend_simulator(),
        XtaskCommand::AscendHeaders(args) => forward("ascend_headers", &args),
        XtaskCommand::Bench(args) => forward("bench", &args),
        XtaskCommand::GpuCheck(args) => forward("gpu_check", &args),
        XtaskCommand::Published(args) => forward("published", &args),
        XtaskCommand::Python(args) => python::python(&args),
        XtaskCommand::Exactness(args) => forward("exactness", &args),
        XtaskCommand::Instructions(args) => forward("instructions", &args),
        XtaskCommand::Soak(args) => forward("soak", &args),
        XtaskCommand::Loom(args) => loom::loom(&args),
        XtaskCommand::Sanitize(args) => sanitize::sanitize(&args),
        XtaskCommand::Arm => arm::arm(),
        XtaskCommand::Features => features::all(),
    })
}
