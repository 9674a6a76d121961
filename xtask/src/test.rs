//! `cargo xtask test`: every test, counted.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::run::{Result, cargo_command};

/// Sums of all test binaries.
#[derive(Default)]
struct Sums {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Sums {
    /// Adds a line like `test result: ok. 12 passed; 0 failed; 1 ignored; …`, or a test's own
    /// `SKIPPED: reason`.
    fn add(&mut self, line: &str) {
        if line.trim_start().starts_with("SKIPPED") {
            self.skipped += 1;
        }
        let Some(counts) = line.strip_prefix("test result: ") else { return };
        let counts = counts.split_once(". ").map_or(counts, |(_, rest)| rest);
        for part in counts.split(';') {
            if let Some((number, what)) = part.trim().split_once(' ') {
                let number = number.parse().unwrap_or(0);
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.skipped += number,
                    _ => {}
                }
            }
        }
    }
}

/// Runs all tests and prints `N passed, N failed, N skipped` last.
pub(crate) fn test() -> Result {
    let mut sums = Sums::default();
    // Not `--all-targets`: that would run the benchmarks too, unoptimised.
    let targets: [&[&str]; 2] = [&["--lib", "--bins", "--tests", "--examples"], &["--doc"]];
    let mut ok = true;
    for targets in targets {
        ok &= pass(
            &[&["test", "--workspace", "--all-features", "--no-fail-fast"], targets].concat(),
            &mut sums,
        )?;
    }
    println!("\n{} passed, {} failed, {} skipped", sums.passed, sums.failed, sums.skipped);
    if ok && sums.failed == 0 && sums.passed > 0 { Ok(()) } else { Err("tests failed".to_owned()) }
}

fn pass(args: &[&str], sums: &mut Sums) -> Result<bool> {
    let name = format!("cargo {}", args.join(" "));
    // A skipped test prints why; without this the harness would swallow it.
    let mut command = cargo_command(args);
    command.args(["--", "--show-output"]).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("`{name}` cannot be run: {e}"))?;
    let mut output = String::new();
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
            sums.add(&line);
            if line.starts_with("test result: ") || line.trim_start().starts_with("SKIPPED") {
                println!("{line}");
            }
            output += &line;
            output.push('\n');
        }
    }
    let passed = child.wait().map_err(|e| format!("`{name}`: {e}"))?.success();
    if !passed {
        println!("{output}");
    }
    Ok(passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_several_binaries_add_up() {
        let mut sums = Sums::default();
        for line in [
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
            "SKIPPED: no Vulkan adapter",
            "test a ... ok",
        ] {
            sums.add(line);
        }
        assert_eq!((sums.passed, sums.failed, sums.skipped), (15, 2, 2));
    }
}
