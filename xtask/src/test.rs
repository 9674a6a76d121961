//! `cargo xtask test`: every test, counted.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::str::FromStr;

use clap::Args;

use crate::run::{Result, cargo_command};
use crate::{ascend_simulator, cuda_double};

/// Options of `cargo xtask test`.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Build this workspace's crates with debug assertions and overflow checks; examples in documentation are left out.
    #[arg(long)]
    assertions: bool,
}

/// Counts of tests.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Sums {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl fmt::Display for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl FromStr for Sums {
    type Err = ();

    /// Reads what [`Display`](fmt::Display) writes, and nothing else.
    fn from_str(line: &str) -> std::result::Result<Self, ()> {
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [passed, failed, skipped] = numbers[..] else { return Err(()) };
        let sums = Self { passed, failed, skipped };
        if sums.to_string() == line { Ok(sums) } else { Err(()) }
    }
}

/// Reads the output of test binaries that show what passed tests printed.
#[derive(Default)]
struct Reader {
    sums: Sums,
    /// Tests of the current binary that said so themselves.
    skipped: u64,
    /// The section of the output that a line belongs to.
    section: Section,
    /// Output of failed tests, and their names after that.
    failures: Vec<String>,
}

#[derive(Default, PartialEq)]
enum Section {
    /// Of no test.
    #[default]
    Other,
    /// Of tests that failed.
    Failed,
    /// Of a test that passed and has not said that it was skipped.
    Passed,
    /// Of a test that was counted as skipped.
    Skipped,
}

impl Reader {
    /// Takes a line. A test that prints `SKIPPED …` is skipped however often it does, and did not pass, although its
    /// harness says so.
    fn add(&mut self, line: &str) {
        let of_success = matches!(self.section, Section::Passed | Section::Skipped);
        if line == "successes:" || (is_heading(line) && of_success) {
            self.section = Section::Passed;
        } else if line == "failures:" {
            self.section = Section::Failed;
        } else if line.trim_start().starts_with("SKIPPED") && self.section == Section::Passed {
            self.section = Section::Skipped;
            self.skipped += 1;
        }
        if self.section == Section::Failed && !line.is_empty() {
            self.failures.push(line.to_owned());
        }
        let Some(counts) = line.strip_prefix("test result: ") else { return };
        let counts = counts.split_once(". ").map_or(counts, |(_, rest)| rest);
        for part in counts.split(';') {
            if let Some((number, what)) = part.trim().split_once(' ') {
                let number: u64 = number.parse().unwrap_or(0);
                match what {
                    "passed" => self.sums.passed += number.saturating_sub(self.skipped),
                    "failed" => self.sums.failed += number,
                    "ignored" => self.sums.skipped += number,
                    _ => {}
                }
            }
        }
        self.sums.skipped += std::mem::take(&mut self.skipped);
        self.section = Section::Other;
    }

    /// Counts a pass that failed. If no test of the pass failed, something did not compile or a test program
    /// crashed before its counts: that is one failure, and the end of the output is what is known of it.
    fn broke_off(&mut self, failed_before: u64, output: &str) {
        if self.sums.failed == failed_before {
            self.sums.failed += 1;
            let lines: Vec<&str> = output.lines().collect();
            let end = lines.len().saturating_sub(LINES_OF_A_CRASH);
            self.failures.extend(lines[end..].iter().map(|&line| line.to_owned()));
        }
    }
}

/// Returns the counts of a test program that shows what passed tests printed.
pub(crate) fn counted(output: &str) -> Sums {
    let mut reader = Reader::default();
    output.lines().for_each(|line| reader.add(line));
    reader.sums
}

/// Returns true for the line that the harness writes before the output of a test.
fn is_heading(line: &str) -> bool {
    line.starts_with("---- ") && line.ends_with(" stdout ----")
}

/// Last lines of a pass that failed without a failed test.
const LINES_OF_A_CRASH: usize = 40;

/// Settings of the release profile under which this workspace's crates have assertions, and their dependencies are
/// built as they are without.
const ASSERTIONS: [&str; 8] = [
    "--config",
    "profile.release.debug-assertions=true",
    "--config",
    "profile.release.overflow-checks=true",
    "--config",
    "profile.release.package.'*'.debug-assertions=false",
    "--config",
    "profile.release.package.'*'.overflow-checks=false",
];

/// All that has tests but documentation. `--all-targets` would run the benchmarks too.
const PROGRAMS: &[&str] = &["--lib", "--bins", "--tests", "--examples"];

/// Runs the tests and prints what failed, and `N passed, N failed, N skipped` last.
pub(crate) fn test(args: &TestArgs) -> Result {
    let mut reader = Reader::default();
    let passes: &[&[&str]] = if args.assertions { &[PROGRAMS] } else { &[PROGRAMS, &["--doc"]] };
    let everything = ["test", "--release", "--workspace", "--all-features", "--no-fail-fast"];
    let assertions: &[&str] = if args.assertions { &ASSERTIONS } else { &[] };
    let mut ok = true;
    for targets in passes {
        ok &= pass(&[&everything[..], assertions, targets].concat(), &mut reader)?;
    }
    let sums = reader.sums;
    if !reader.failures.is_empty() {
        println!("\n{}", reader.failures.join("\n"));
    }
    println!("\n{sums}");
    if ok && sums.failed == 0 && sums.passed > 0 { Ok(()) } else { Err("tests failed".to_owned()) }
}

fn pass(args: &[&str], reader: &mut Reader) -> Result<bool> {
    let name = format!("cargo {}", args.join(" "));
    // A skipped test prints why; without this the harness would swallow it.
    let mut command = cargo_command(args);
    command.args(["--", "--show-output"]).stdout(Stdio::piped());
    cuda_double::provide(&mut command)?;
    ascend_simulator::provide(&mut command)?;
    let mut child = command.spawn().map_err(|e| format!("`{name}` cannot be run: {e}"))?;
    let mut output = String::new();
    let failed_before = reader.sums.failed;
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
            reader.add(&line);
            if line.starts_with("test result: ") || line.trim_start().starts_with("SKIPPED") {
                println!("{line}");
            }
            output += &line;
            output.push('\n');
        }
    }
    let passed = child.wait().map_err(|e| format!("`{name}`: {e}"))?.success();
    if !passed {
        reader.broke_off(failed_before, &output);
    }
    Ok(passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(lines: &[&str]) -> String {
        let mut reader = Reader::default();
        for line in lines {
            reader.add(line);
        }
        reader.sums.to_string()
    }

    #[test]
    fn results_of_several_binaries_add_up() {
        let lines = [
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
            "test a ... ok",
        ];
        assert_eq!(sums(&lines), "15 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn a_pass_that_fails_without_a_failed_test_counts_as_one() {
        let mut reader = Reader::default();
        reader.add("test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        reader.broke_off(0, "running 12 tests\ntest a ... ");
        assert_eq!(reader.sums.to_string(), "12 passed, 1 failed, 0 skipped");
        assert_eq!(reader.failures, ["running 12 tests", "test a ... "]);
        reader.broke_off(0, "");
        assert_eq!(reader.sums.failed, 1, "a failure that was counted is not counted again");
    }

    #[test]
    fn a_test_that_says_so_is_skipped_once_and_has_not_passed() {
        let lines = [
            "test a ... ok",
            "successes:",
            "",
            "---- a stdout ----",
            "SKIPPED: no Vulkan adapter",
            "---- a line of the test's own",
            "SKIPPED: no Vulkan adapter",
            "---- b stdout ----",
            "a line",
            "---- c stdout ----",
            "SKIPPED cpu (amx): no such instructions",
            "",
            "successes:",
            "    a",
            "test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        ];
        assert_eq!(sums(&lines), "2 passed, 0 failed, 2 skipped");
        let another = ["test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out"];
        assert_eq!(sums(&[&lines[..], &another].concat()), "6 passed, 0 failed, 2 skipped");
    }

    #[test]
    fn a_test_that_says_so_and_fails_has_failed() {
        let lines = [
            "failures:",
            "---- a stdout ----",
            "SKIPPED: a part",
            "failures:",
            "    a",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
        ];
        assert_eq!(sums(&lines), "1 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn what_failed_tests_print_and_their_names_are_kept() {
        let lines = [
            "successes:",
            "---- a stdout ----",
            "fine",
            "successes:",
            "    a",
            "",
            "failures:",
            "---- b stdout ----",
            "SKIPPED: a part",
            "",
            "thread 'b' panicked at b.rs:1",
            "failures:",
            "    b",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
            "running 3 tests",
        ];
        let mut reader = Reader::default();
        for line in lines {
            reader.add(line);
        }
        assert_eq!(reader.sums.to_string(), "1 passed, 1 failed, 0 skipped");
        let kept = [6, 7, 8, 10, 11, 12, 13].map(|i| lines[i]);
        assert_eq!(reader.failures, kept);
    }

    #[test]
    fn counts_are_read_as_they_are_written() {
        let counts = Sums { passed: 5, failed: 1, skipped: 2 };
        assert_eq!(counts.to_string().parse(), Ok(counts));
        for other in ["5 passed, 0 failed", "5 passed, 1 failed, 2 skipped!", ""] {
            assert_eq!(other.parse::<Sums>(), Err(()));
        }
    }
}
