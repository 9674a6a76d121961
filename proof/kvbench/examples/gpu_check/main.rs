//! `cargo xtask gpu-check`: runs all checks of the CUDA backend that need a real card, and writes one report.
//!
//! The steps are in a list ([`steps::STEPS`]). They need the driver, and programs that are built here or
//! elsewhere ([`programs`]), but neither Rust nor the repository.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use xtask::cuda_double;
use xtask::run::{Result, create_folder, exit_code, root, skip};

mod machine;
mod peers;
mod process;
mod programs;
mod report;
mod steps;

use programs::Programs;
use report::Report;
use steps::{CardStep, STEPS, Site};

/// The folder of the results, relative to the workspace root or, with `--bin`, to the current folder.
const OUT: &str = "target/gpu-check";

/// The factor by which steps may exceed their time limits on the double and on slow processors.
const SLOW: u64 = 5;

/// Check the CUDA backend on a real card, here or elsewhere, and write one report: conformance, sanitizers,
/// speed, peers, answers.
#[derive(Parser)]
#[command(name = "cargo xtask gpu-check", bin_name = "cargo xtask gpu-check")]
struct GpuCheckCli {
    /// The folder for the report and for each step's output [default: target/gpu-check].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Use the programs in a folder that `--collect` has filled, and build nothing.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["collect", "double"])]
    bin: Option<PathBuf>,
    /// Build the programs and copy them into this folder, for a machine without Rust. Check nothing.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "double"])]
    collect: Option<PathBuf>,
    /// Run the steps that do not need a card, on the driver's test double.
    #[arg(long)]
    double: bool,
}

fn main() -> ExitCode {
    exit_code(gpu_check(&GpuCheckCli::parse()))
}

fn gpu_check(args: &GpuCheckCli) -> Result {
    if let Some(folder) = &args.collect {
        return programs::collect(folder);
    }
    if args.bin.is_none() && !args.double && !cuda_double::driver_is_here() {
        return nothing_to_check("this machine has no CUDA driver");
    }
    let programs = match &args.bin {
        Some(folder) => Programs::of_folder(folder)?,
        None => Programs::built()?,
    };
    let found = machine::found(&programs, args.double)?;
    if found.card.is_none() {
        return nothing_to_check(&found.missing);
    }
    let out = args.out.clone().unwrap_or_else(|| match &args.bin {
        Some(_) => PathBuf::from(OUT),
        None => root().join(OUT),
    });
    create_folder(&out)?;
    let mut report = Report::new(&programs.version, &found.facts);
    let mut site = Site::new(programs, found, &out, args.double);
    for step in STEPS {
        report.add(step.name, step.about, site.run(step));
        // Written after each step, so the step's results are kept even if the next step fails.
        report.write(site.out())?;
    }
    report.print_end(&site.out().join(report::FILE));
    let failed = report.failed();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// Prints that there is no card, and lists the steps that would run on one.
fn nothing_to_check(reason: &str) -> Result {
    println!("gpu-check: {reason}. On a card it runs:");
    for CardStep { name, about, .. } in STEPS {
        skip(&format!("{name}: {about}"))?;
    }
    println!(
        "`cargo xtask gpu-check --collect DIR` gathers the programs for a machine with a card, where `DIR/gpu-check --bin \
         DIR` then runs; `--double` tries the command itself."
    );
    Ok(())
}

/// Returns a path that is valid in any current folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}
