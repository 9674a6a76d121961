//! `cargo xtask ci`: the steps of CI, one after another, and a table of their seconds.

use std::fmt::Write as _;

use clap::Args;

use crate::clock::{Seconds, timed};
use crate::run::Result;
use crate::step::{self, Outcome, word};
use crate::test::Sums;
use crate::tools::{self, Tool};
use crate::{ascend_headers, bindgen, cuda_double, cuda_ptx, deep, python};

/// Options of `cargo xtask ci`.
#[derive(Args)]
pub(crate) struct CiArgs {
    /// Print the commands that bring the missing tools, and run nothing.
    #[arg(long)]
    missing: bool,
}

/// One step. To add one, add a line to [`STEPS`].
pub(crate) struct Step {
    /// The command, as the README writes it.
    pub(crate) command: &'static str,
    /// Seconds that it may take on two fast cores from a clean clone. Slow cores may take half as long again; more is
    /// marked in the table.
    budget: u32,
    /// Tools that the step needs beside Rust, git and a C compiler.
    needs: &'static [Tool],
}

/// Times as long that slow cores may take.
const SLOW: f64 = 1.5;

/// A device for wgpu: software that acts as a GPU, and the layers that watch over its use.
const GPU: &[Tool] = &[
    Tool::Package("mesa-vulkan-drivers"),
    Tool::Package("libvulkan1"),
    Tool::Package("vulkan-validationlayers"),
];

/// What tests need: a device for wgpu, the compiler of the CUDA driver's double, and that of CUDA.
const DEVICES: &[Tool] = &[GPU[0], GPU[1], GPU[2], cuda_double::NEEDS[0], cuda_ptx::NEEDS[0]];

/// The step whose last line counts the tests.
const TEST: &str = "cargo xtask test";

/// The steps of CI, in order. All are of the release profile, so the first build serves the others.
pub(crate) const STEPS: &[Step] = &[
    Step {
        command: "cargo xtask check",
        budget: 125,
        needs: &[Tool::Component("rustfmt"), Tool::Component("clippy")],
    },
    Step { command: TEST, budget: 450, needs: DEVICES },
    Step { command: "cargo run --release -p kvcli -- demo", budget: 15, needs: &[] },
    Step {
        command: "cargo run --release -p kvcli -- run --json --prompt \"you answer questions ## alba is red . ## cedo is blue . bora is same . ## bora ?\" --warm \"you answer questions ## cedo is blue . bora is same . ## alba is red . ## alba ?\" --separator \"##\"",
        budget: 4,
        needs: &[],
    },
    Step {
        command: "cargo run --release -p kvcli -- run --system \"you answer questions\" --document examples/documents/harbour.txt --document examples/documents/market.txt -p \"alba ?\"",
        budget: 4,
        needs: &[],
    },
    Step { command: "cargo run --release -p kvcli -- run --help", budget: 2, needs: &[] },
    Step { command: "cargo run --release -p kvcli -- eval --gate --questions 30", budget: 5, needs: &[] },
    Step {
        command: "cargo run --release -p kvcli -- eval --seeds 2 --questions 4 --strategy link:2 --strategy blend:0.15@2",
        budget: 5,
        needs: &[],
    },
    Step {
        command: "cargo run --release -p kvcli -- tune --seeds 5 --questions 40 --out target/reuse.json",
        budget: 5,
        needs: &[],
    },
    Step {
        command: "cargo run --release -p kvcli -- run --reuse target/reuse.json --system \"you answer questions\" --document examples/documents/harbour.txt -p \"alba ?\"",
        budget: 4,
        needs: &[],
    },
    Step { command: "cargo run --release -p kvcli -- bench rag --requests 20", budget: 10, needs: &[] },
    Step { command: "cargo run --release -p kvcli -- bench serve", budget: 5, needs: &[] },
    Step {
        command: "cargo run --release -p kvcli --features ascend,cuda,wgpu -- devices",
        budget: 5,
        needs: GPU,
    },
    Step {
        command: "cargo run --release -p kvcli --features ascend,cuda,wgpu -- demo --backend wgpu",
        budget: 5,
        needs: GPU,
    },
    Step { command: "cargo xtask cuda-double", budget: 5, needs: cuda_double::NEEDS },
    Step {
        command: "LD_LIBRARY_PATH=target/cuda-double cargo run --release -p kvcli --features ascend,cuda,wgpu -- demo --backend cuda",
        budget: 5,
        needs: cuda_double::NEEDS,
    },
    Step { command: "cargo xtask ascend-simulator", budget: 5, needs: &[] },
    Step {
        command: "KV_ASCEND_LIB_DIR=target/ascend-simulator cargo run --release -p kvcli --features ascend,cuda,wgpu -- demo --backend ascend",
        budget: 10,
        needs: &[],
    },
    Step { command: "cargo run --release --example paged_decode", budget: 3, needs: &[] },
    Step { command: "cargo run --release --example continuous_batching", budget: 3, needs: &[] },
    Step { command: "cargo run --release --example chunk_reuse", budget: 5, needs: &[] },
    Step { command: "cargo run --release --example own_backend", budget: 5, needs: &[] },
    Step { command: "cargo xtask python", budget: 60, needs: python::NEEDS },
    Step { command: "cargo xtask conform --backend ascend", budget: 10, needs: &[] },
    Step { command: "cargo xtask conform --backend cpu", budget: 5, needs: &[] },
    Step { command: "cargo xtask conform --backend cuda", budget: 10, needs: cuda_double::NEEDS },
    Step { command: "cargo xtask bindgen --check", budget: 5, needs: bindgen::NEEDS },
    Step { command: "cargo xtask ascend-headers", budget: 10, needs: ascend_headers::NEEDS },
    Step { command: "cargo xtask cuda-ptx --check", budget: 35, needs: cuda_ptx::NEEDS },
    Step { command: "cargo xtask conform --backend wgpu", budget: 45, needs: GPU },
    Step { command: "cargo xtask sanitize", budget: 140, needs: &[Tool::Sanitizer] },
    Step { command: "cargo xtask loom", budget: 55, needs: &[] },
    Step { command: "cargo xtask deep", budget: 140, needs: &[] },
];

/// Runs every step, also after one that failed, and prints the table and the counts of the tests last.
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
    // The counts are the last line: what failed is said before them.
    if failed.is_empty() { Ok(()) } else { Err(String::new()) }
}

/// Returns the counts of the tests; tests that did not come to be counted are one failure.
fn counts(outcomes: &[Outcome]) -> Sums {
    let counted = outcomes.iter().find(|outcome| outcome.name == TEST);
    let counts = counted.and_then(|outcome| outcome.last_line.parse().ok());
    counts.unwrap_or(Sums { passed: 0, failed: 1, skipped: 0 })
}

/// Returns the table of seconds, with those over their budget marked.
fn table(steps: &[Step], outcomes: &[Outcome], total: Seconds) -> String {
    let mut text = format!("{:>8} {:>10} {:>7}  {:<6}  step\n", "seconds", "processor", "budget", "");
    let mut row = |seconds: Seconds, budget: u32, what: &str, name: &str| {
        let mark = if seconds.wall > SLOW * f64::from(budget) { "  over its budget" } else { "" };
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

/// Returns a command without the end of a long one.
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

    fn outcome(name: &str, wall: f64, passed: bool, last_line: &str) -> Outcome {
        let seconds = Seconds { wall, cpu: Some(2.0 * wall) };
        Outcome { name: name.to_owned(), seconds, passed, last_line: last_line.to_owned() }
    }

    #[test]
    fn the_table_marks_what_failed_and_what_took_too_long() {
        let steps = [("a", 10), ("b", 10)].map(|(command, budget)| Step { command, budget, needs: &[] });
        let outcomes = [outcome("a", 3.0, true, ""), outcome("b", 16.0, false, "")];
        let text = table(&steps, &outcomes, Seconds { wall: 19.0, cpu: Some(38.0) });
        let lines: Vec<Vec<&str>> = text.lines().skip(1).map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["3", "6", "10", "passed", "a"]);
        assert_eq!(lines[1], ["16", "32", "10", "FAILED", "b", "over", "its", "budget"]);
        assert_eq!(lines[2], ["19", "38", "20", "FAILED", "all", "steps"]);
    }

    #[test]
    fn counts_are_those_of_the_tests_and_a_failure_where_there_are_none() {
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
