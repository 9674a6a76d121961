//! `cargo xtask instructions`: counts the instructions of hot paths and compares them with a committed
//! baseline.
//!
//! Times on a busy machine say little. The instruction count under valgrind is the same in every run, except
//! for a few instructions that depend on the random seed of a hash table. If a path grows by more than
//! [`TOLERANCE`], the task fails until the baseline is updated with a reason.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{ExitCode, Stdio};

use clap::Parser;
use serde::{Deserialize, Serialize};
use xtask::run::{Result, cargo_command, exit_code, read, root, skip, write};
use xtask::tools::{GUNGRAUN, Tool, first_line, require};

/// The growth that is tolerated, as a fraction.
const TOLERANCE: f64 = 0.05;

/// The change that random seeds may cause, as a fraction. Such a change does not update a count.
const NOISE: f64 = 0.001;

/// The committed baseline, relative to the workspace root.
const BASELINE: &str = "proof/kvbench/instructions/baseline.json";

/// Count the instructions of hot paths and compare them with the committed baseline (needs valgrind and
/// gungraun-runner).
#[derive(Parser)]
#[command(name = "cargo xtask instructions", bin_name = "cargo xtask instructions")]
struct InstructionsCli {
    /// Update the baseline with this run's counts.
    #[arg(long, requires = "reason")]
    write: bool,
    /// Reason that the counts changed.
    #[arg(long, requires = "write")]
    reason: Option<String>,
}

/// The committed counts.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Baseline {
    /// The tools that were used. Another compiler or C library gives different counts.
    counted_with: String,
    paths: BTreeMap<String, HotPath>,
}

/// One hot path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct HotPath {
    instructions: u64,
    /// The reason given when the count last changed.
    reason: String,
}

/// The count of each path, in the order of the run.
type Counts = Vec<(String, u64)>;

fn main() -> ExitCode {
    exit_code(instructions(&InstructionsCli::parse()))
}

fn instructions(args: &InstructionsCli) -> Result {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return skip("the instruction baseline is for Linux on x86-64");
    }
    let tools = tools()?;
    let counts = count()?;
    let path = root().join(BASELINE);
    let baseline: Baseline = serde_json::from_str(&read(&path)?).map_err(|e| format!("{BASELINE}: {e}"))?;
    print!("{}", table(&baseline, &counts));
    if let Some(reason) = &args.reason {
        let text = serde_json::to_string_pretty(&moved(&baseline, &counts, &tools, reason));
        write(&path, &(text.map_err(|e| e.to_string())? + "\n"))?;
        println!("written to {BASELINE}");
        return Ok(());
    }
    let complaints = complaints(&baseline, &counts);
    if complaints.is_empty() {
        println!("instructions: all {} paths within {:.0} %", counts.len(), 100.0 * TOLERANCE);
        return Ok(());
    }
    let mut message = format!(
        "{}; if that is intended: cargo xtask instructions --write --reason \"…\"",
        complaints.join("; ")
    );
    if tools != baseline.counted_with {
        let _ = write!(message, " (counted with {tools}, the baseline with {})", baseline.counted_with);
    }
    Err(message)
}

/// Returns the versions of the tools that affect the counts. The error names a missing tool.
fn tools() -> Result<String> {
    require("`cargo xtask instructions`", &[GUNGRAUN, Tool::Program("valgrind", "valgrind")])?;
    let compiler = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let [valgrind, compiler] = ["valgrind", &compiler].map(|tool| first_line(tool, &["--version"]));
    let compiler = compiler.ok_or("`rustc` cannot be run")?;
    let short: Vec<&str> = compiler.split(' ').take(2).collect();
    Ok(format!("{}, {}", valgrind.unwrap_or_default(), short.join(" ")))
}

/// Runs every path once.
fn count() -> Result<Counts> {
    let manifest = root().join("proof/kvbench/instructions/Cargo.toml");
    let mut command = cargo_command("bench --quiet --locked --bench hot_paths");
    command.arg("--manifest-path").arg(manifest).args(["--", "--output-format=json"]);
    command.env("CARGO_TARGET_DIR", root().join("target/instructions"));
    let output = command.stderr(Stdio::piped()).output().map_err(|e| format!("`cargo bench`: {e}"))?;
    if !output.status.success() {
        let _ = std::io::stderr().write_all(&output.stderr);
        return Err(format!("`cargo bench` failed ({})", output.status));
    }
    String::from_utf8_lossy(&output.stdout).lines().map(count_of).collect()
}

/// Parses a path and its count from one line of the harness's output.
fn count_of(line: &str) -> Result<(String, u64)> {
    let value: serde_json::Value = serde_json::from_str(line).map_err(|e| format!("{e}: {line}"))?;
    let word = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let metrics = &value["profiles"][0]["data"]["total"]["metrics"];
    let count = metrics["Ir"]["values"]["new"].as_u64();
    let count = count.ok_or_else(|| format!("this line has no instruction count: {line}"))?;
    Ok((format!("{}.{}", word("function_name"), word("id")), count))
}

/// Returns the growth from `before` to `now`, as a fraction.
fn growth(before: u64, now: u64) -> f64 {
    now as f64 / before.max(1) as f64 - 1.0
}

fn table(baseline: &Baseline, counts: &Counts) -> String {
    let mut text = format!("{:<36}{:>14}{:>14}{:>10}\n", "instructions of", "now", "baseline", "change");
    for (path, now) in counts {
        let (before, change) =
            baseline.paths.get(path).map_or(("–".to_owned(), "new".to_owned()), |entry| {
                let change = 100.0 * growth(entry.instructions, *now);
                (entry.instructions.to_string(), format!("{change:+.1} %"))
            });
        let _ = writeln!(text, "{path:<36}{now:>14}{before:>14}{change:>10}");
    }
    text
}

/// Returns the reasons to reject a run.
fn complaints(baseline: &Baseline, counts: &Counts) -> Vec<String> {
    let mut all = Vec::new();
    for (path, now) in counts {
        let Some(before) = baseline.paths.get(path).map(|entry| entry.instructions) else {
            all.push(format!("{path} is not in the baseline"));
            continue;
        };
        if *now as f64 > before as f64 * (1.0 + TOLERANCE) {
            all.push(format!("{path} takes {:.1} % more", 100.0 * growth(before, *now)));
        }
    }
    let gone = baseline.paths.keys().filter(|path| !counts.iter().any(|(counted, _)| counted == *path));
    all.extend(gone.map(|path| format!("{path} is in the baseline and was not counted")));
    all
}

/// Returns a baseline with this run's counts. Counts that changed get the reason; all other counts stay
/// unchanged.
fn moved(baseline: &Baseline, counts: &Counts, tools: &str, reason: &str) -> Baseline {
    let entry = |(path, now): &(String, u64)| {
        let same = baseline.paths.get(path).filter(|e| growth(e.instructions, *now).abs() <= NOISE);
        let entry =
            same.cloned().unwrap_or_else(|| HotPath { instructions: *now, reason: reason.to_owned() });
        (path.clone(), entry)
    };
    Baseline { counted_with: tools.to_owned(), paths: counts.iter().map(entry).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn baseline(paths: &[(&str, u64)]) -> Baseline {
        let entry = |&(path, instructions): &(&str, u64)| {
            (path.to_owned(), HotPath { instructions, reason: "before".to_owned() })
        };
        Baseline { counted_with: "a".to_owned(), paths: paths.iter().map(entry).collect() }
    }

    fn counts(paths: &[(&str, u64)]) -> Counts {
        paths.iter().map(|&(path, n)| (path.to_owned(), n)).collect()
    }

    #[test]
    fn growth_beyond_the_tolerance_is_refused_and_less_is_not() {
        let before = baseline(&[("a.b", 1000), ("c.d", 1000)]);
        assert!(complaints(&before, &counts(&[("a.b", 1050), ("c.d", 10)])).is_empty());
        let refused = complaints(&before, &counts(&[("a.b", 1051), ("c.d", 10)]));
        assert_eq!(refused, ["a.b takes 5.1 % more"]);
    }

    #[test]
    fn paths_that_come_and_go_are_refused() {
        let refused = complaints(&baseline(&[("a.b", 1)]), &counts(&[("c.d", 1)]));
        assert_eq!(refused, ["c.d is not in the baseline", "a.b is in the baseline and was not counted"]);
    }

    #[test]
    fn the_reason_goes_to_what_moved() {
        let before = baseline(&[("a.b", 10_000), ("c.d", 2)]);
        let now = moved(&before, &counts(&[("a.b", 10_001), ("c.d", 3)]), "b", "why");
        let all: Vec<_> = now.paths.values().map(|e| (e.instructions, e.reason.as_str())).collect();
        assert_eq!((now.counted_with.as_str(), all), ("b", vec![(10_000, "before"), (3, "why")]));
    }

    #[test]
    fn a_line_of_the_harness_has_its_path_and_count() {
        let line = r#"{"function_name":"f","id":"x","profiles":[{"data":{"total":{"metrics":
            {"Ir":{"values":{"new":7,"old":9}}}}}}]}"#;
        assert_eq!(count_of(line), Ok(("f.x".to_owned(), 7)));
        assert!(count_of("{}").is_err());
    }
}
