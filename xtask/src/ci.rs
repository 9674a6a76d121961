//! `cargo xtask ci`: runs the steps of CI in order, and prints a table of their times.

use std::fmt::Write as _;

use clap::Args;
use xtask::counts::Sums;
use xtask::run::Result;
use xtask::tools::{self, Tool};
use xtask::{cann_headers, cuda_double};

use crate::clock::{Seconds, timed};
use crate::step::{self, CommandOutcome, word};
use crate::{bindgen, cuda_ptx, deep, python, sanitize};

/// Options of `cargo xtask ci`.
#[derive(Args)]
pub(crate) struct CiArgs {
    /// Print the commands that install the missing tools; run nothing.
    #[arg(long)]
    missing: bool,
}

/// One step. To add one, add a line to [`STEPS`].
pub(crate) struct CiStep {
    /// The command, exactly as in the documents.
    pub(crate) command: &'static str,
    /// The time limit in seconds, on two fast cores and from a clean clone. Slow cores may take half as long
    /// again. The table marks a step that takes longer.
    budget: u32,
    /// Tools that the step needs besides Rust, git and a C compiler.
    needs: &'static [Tool],
}

/// The factor by which a step may exceed its budget on slow cores.
const SLOW: f64 = 1.5;

/// A wgpu device: a software GPU, and the layers that check how it is used.
const GPU: &[Tool] = &[
    Tool::Package("mesa-vulkan-drivers"),
    Tool::Package("libvulkan1"),
    Tool::Package("vulkan-validationlayers"),
];

/// Tools that the tests need: a wgpu device, and the compilers of the CUDA driver's double and of CUDA.
const DEVICES: &[Tool] = &[GPU[0], GPU[1], GPU[2], cuda_double::NEEDS[0], cuda_ptx::NEEDS[0]];

/// The step that prints the test counts in its last line.
const TEST: &str = "cargo xtask test";

const fn step(command: &'static str, budget: u32, needs: &'static [Tool]) -> CiStep {
    CiStep { command, budget, needs }
}

/// The steps of CI, in order. All of them use the release profile, so later steps reuse the first build.
pub(crate) const STEPS: &[CiStep] = &[
    step("cargo xtask check", 125, &[Tool::Component("rustfmt"), Tool::Component("clippy")]),
    step(TEST, 450, DEVICES),
    step("cargo run --release -p kvcli -- demo", 30, &[]),
    step(
        "cargo run --release -p kvcli -- run --json --prompt \"you answer questions ## alba is red . ## cedo is blue . bora is same . ## bora ?\" --warm \"you answer questions ## cedo is blue . bora is same . ## alba is red . ## alba ?\" --separator \"##\"",
        4,
        &[],
    ),
    step(
        "cargo run --release -p kvcli -- run --system \"you answer questions\" --document examples/documents/harbour.txt --document examples/documents/market.txt -p \"alba ?\"",
        4,
        &[],
    ),
    step("cargo run --release -p kvcli -- run --help", 2, &[]),
    step("cargo run --release -p kvcli -- eval --gate --questions 30", 5, &[]),
    step(
        "cargo run --release -p kvcli -- eval --seeds 2 --questions 4 --strategy link:2 --strategy blend:0.15@2",
        5,
        &[],
    ),
    step("cargo run --release -p kvcli -- tune --seeds 5 --questions 40 --out target/reuse.json", 5, &[]),
    step(
        "cargo run --release -p kvcli -- run --reuse target/reuse.json --system \"you answer questions\" --document examples/documents/harbour.txt -p \"alba ?\"",
        4,
        &[],
    ),
    step("cargo run --release -p kvcli -- bench rag --requests 20", 5, &[]),
    step("cargo run --release -p kvcli -- bench serve", 5, &[]),
    step("cargo run --release -p kvcli --features ascend,cuda,wgpu -- devices", 5, GPU),
    step("cargo run --release -p kvcli --features ascend,cuda,wgpu -- demo --backend wgpu", 5, GPU),
    step("cargo xtask cuda-double", 5, cuda_double::NEEDS),
    step(
        "LD_LIBRARY_PATH=target/cuda-double cargo run --release -p kvcli --features ascend,cuda,wgpu -- demo --backend cuda",
        5,
        cuda_double::NEEDS,
    ),
    step("cargo xtask ascend-simulator", 5, &[]),
    step(
        "KV_ASCEND_LIB_DIR=target/ascend-simulator cargo run --release -p kvcli --features ascend,cuda,wgpu -- demo --backend ascend",
        5,
        &[],
    ),
    step("cargo run --release --example paged_decode", 3, &[]),
    step("cargo run --release --example continuous_batching", 3, &[]),
    step("cargo run --release --example chunk_reuse", 5, &[]),
    step("cargo run --release --example own_backend", 5, &[]),
    step("cargo xtask soak --seconds 60", 75, &[]),
    step("cargo xtask python", 60, python::NEEDS),
    step("cargo xtask conform --backend ascend", 15, &[]),
    step("cargo xtask conform --backend cpu", 5, &[]),
    step("cargo xtask conform --backend cuda", 15, cuda_double::NEEDS),
    step("cargo xtask bindgen --check", 5, bindgen::NEEDS),
    step("cargo xtask ascend-headers", 5, cann_headers::NEEDS),
    step("cargo xtask cuda-ptx --check", 15, cuda_ptx::NEEDS),
    step("cargo xtask conform --backend wgpu", 45, GPU),
    step("cargo xtask sanitize", 115, &[sanitize::SANITIZER]),
    step("cargo xtask loom", 55, &[]),
    step("cargo xtask deep", 100, &[]),
];

/// Runs every step, even after a failure. Prints the table of times, then the test counts.
pub(crate) fn ci(args: &CiArgs) -> Result {
    if args.missing {
        let needs = STEPS.iter().flat_map(|step| step.needs).copied().chain(deep::next_needs()?);
        for command in tools::commands(needs) {
            println!("{command}");
        }
        return Ok(());
    }
    let (outcomes, total) = timed(|| STEPS.iter().map(|step| step::run(step.command)).collect::<Vec<_>>());
    print!("\n{}", table(STEPS, &outcomes, total));
    let failed: Vec<&str> = outcomes.iter().filter(|o| !o.passed).map(|o| o.name.as_str()).collect();
    if !failed.is_empty() {
        println!("failed, {} of {}: {}", failed.len(), STEPS.len(), failed.join("; "));
    }
    println!("{}", counts(&outcomes));
    // The counts must be the last line, so the failed steps were printed before them.
    if failed.is_empty() { Ok(()) } else { Err(String::new()) }
}

/// Returns the test counts. If the test step printed none, that counts as one failure.
fn counts(outcomes: &[CommandOutcome]) -> Sums {
    let counted = outcomes.iter().find(|outcome| outcome.name == TEST);
    let counts = counted.and_then(|outcome| outcome.last_line.parse().ok());
    counts.unwrap_or(Sums { passed: 0, failed: 1, skipped: 0 })
}

/// Returns the table of times, with a mark at each step that was over budget.
fn table(steps: &[CiStep], outcomes: &[CommandOutcome], total: Seconds) -> String {
    let mut text = format!("{:>8} {:>10} {:>7}  {:<6}  step\n", "seconds", "CPU time", "budget", "");
    let mut row = |seconds: Seconds, budget: u32, what: &str, name: &str| {
        let mark = if seconds.wall > SLOW * f64::from(budget) { "  over budget" } else { "" };
        let (wall, cpu) = (seconds.wall, seconds.cpu_text());
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{wall:>8.0} {cpu:>10} {budget:>7}  {what:<6}  {name}{mark}");
    };
    for (step, outcome) in steps.iter().zip(outcomes) {
        row(outcome.seconds, step.budget, word(outcome.passed), &shortened(&outcome.name));
    }
    let passed = word(outcomes.iter().all(|outcome| outcome.passed));
    row(total, steps.iter().map(|step| step.budget).sum(), passed, "all steps");
    text
}

/// Returns the command, shortened if it is long.
fn shortened(command: &str) -> String {
    const LENGTH: usize = 72;
    match command.char_indices().nth(LENGTH) {
        Some((end, _)) => format!("{}…", &command[..end]),
        None => command.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(name: &str, wall: f64, passed: bool, last_line: &str) -> CommandOutcome {
        let seconds = Seconds { wall, cpu: Some(2.0 * wall) };
        CommandOutcome { name: name.to_owned(), seconds, passed, last_line: last_line.to_owned() }
    }

    #[test]
    fn the_table_marks_what_failed_and_what_took_too_long() {
        let steps = [("a", 10), ("b", 10)].map(|(command, budget)| CiStep { command, budget, needs: &[] });
        let outcomes = [outcome("a", 3.0, true, ""), outcome("b", 16.0, false, "")];
        let text = table(&steps, &outcomes, Seconds { wall: 19.0, cpu: Some(38.0) });
        let lines: Vec<Vec<&str>> = text.lines().skip(1).map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["3", "6", "10", "passed", "a"]);
        assert_eq!(lines[1], ["16", "32", "10", "FAILED", "b", "over", "budget"]);
        assert_eq!(lines[2], ["19", "38", "20", "FAILED", "all", "steps"]);
    }

    #[test]
    fn counts_are_read_from_the_tests_and_a_failure_where_there_are_none() {
        let counted =
            [outcome("a", 1.0, true, "9 passed"), outcome(TEST, 1.0, true, "5 passed, 0 failed, 2 skipped")];
        assert_eq!(counts(&counted).to_string(), "5 passed, 0 failed, 2 skipped");
        let broken = [outcome(TEST, 1.0, false, "error: could not compile")];
        assert_eq!(counts(&broken).to_string(), "0 passed, 1 failed, 0 skipped");
        assert_eq!(counts(&[]).to_string(), "0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_long_command_is_shortened_in_the_table() {
        assert_eq!(shortened("cargo xtask test"), "cargo xtask test");
        assert!(shortened(STEPS[3].command).ends_with('…'));
    }

    #[test]
    fn all_steps_together_fit_into_twenty_minutes_of_fast_cores_and_thirty_of_slow_ones() {
        let seconds = STEPS.iter().map(|step| step.budget).sum::<u32>();
        assert!(seconds <= 20 * 60 && SLOW * f64::from(seconds) <= 30.0 * 60.0);
    }
}
