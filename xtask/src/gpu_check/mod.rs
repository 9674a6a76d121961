//! `cargo xtask gpu-check`: everything that a real card can say about the CUDA backend, in one command and one report.
//!
//! The steps are a list ([`steps::STEPS`]). They need programs that are built here or were built elsewhere
//! ([`programs`]), and the driver; nothing of Rust, and no repository.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::cuda_double;
use crate::run::{Result, root, skip};

mod machine;
mod peers;
mod process;
mod programs;
mod report;
mod steps;

use programs::Programs;
use report::Report;
use steps::{CardStep, STEPS, Site};

/// The folder of results, below the root of the workspace or, with `--bin`, below the current one.
const OUT: &str = "target/gpu-check";

/// Times as long that steps may take through the double, on slow processors.
const SLOW: u64 = 5;

/// Options of `cargo xtask gpu-check`.
#[derive(Args)]
pub(crate) struct GpuCheckArgs {
    /// Folder for the report and what each step printed [default: target/gpu-check].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Take the programs from this folder, which `--collect` has filled, and build nothing.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["collect", "double"])]
    bin: Option<PathBuf>,
    /// Build the programs and copy them into this folder, to be carried to a machine without Rust; check nothing.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "double"])]
    collect: Option<PathBuf>,
    /// Run the steps that do not need a card through the test double of the driver.
    #[arg(long)]
    double: bool,
}

pub(crate) fn gpu_check(args: &GpuCheckArgs) -> Result {
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
    std::fs::create_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
    let mut report = Report::new(&programs.version, &found.facts);
    let mut site = Site::new(programs, found, &out, args.double);
    for step in STEPS {
        report.add(step.name, step.about, site.run(step));
        // After each step, so that what was found is kept whatever happens to the next.
        report.write(site.out())?;
    }
    report.print_end(&site.out().join(report::FILE));
    let failed = report.failed();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// Says that there is no card, and what would run on one.
fn nothing_to_check(reason: &str) -> Result {
    println!("gpu-check: {reason}. On a card it runs:");
    for CardStep { name, about, .. } in STEPS {
        skip(&format!("{name}: {about}"))?;
    }
    println!(
        "`cargo xtask gpu-check --collect DIR` gathers what a machine with a card needs, where `DIR/xtask gpu-check --bin \
         DIR` then runs; `--double` tries the command itself."
    );
    Ok(())
}

/// Returns a path from which any current folder reaches the file.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}
