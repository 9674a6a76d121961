//! Counts of tests, parsed from the output of test programs run with `--show-output`.

use std::fmt;
use std::str::FromStr;

/// Counts of passed, failed and skipped tests.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sums {
    /// The number of tests that passed.
    pub passed: u64,
    /// The number of tests that failed.
    pub failed: u64,
    /// The number of tests that are ignored, or that reported that they were skipped.
    pub skipped: u64,
}

impl fmt::Display for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl FromStr for Sums {
    type Err = ();

    /// Parses a string that [`Display`](fmt::Display) wrote; fails for anything else.
    fn from_str(line: &str) -> std::result::Result<Self, ()> {
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [passed, failed, skipped] = numbers[..] else { return Err(()) };
        let sums = Self { passed, failed, skipped };
        if sums.to_string() == line { Ok(sums) } else { Err(()) }
    }
}

/// Reads the output of test programs line by line.
#[derive(Debug, Default)]
pub struct OutputReader {
    /// Counts of all programs so far.
    pub sums: Sums,
    /// Output of failed tests, followed by their names.
    pub failures: Vec<String>,
    /// The number of tests of the current program that reported that they were skipped.
    skipped: u64,
    /// The section of the output that the next line belongs to.
    section: Section,
}

/// A section of a test program's output.
#[derive(Debug, Default, PartialEq)]
enum Section {
    /// Lines that do not belong to any test.
    #[default]
    Other,
    /// Output of failed tests.
    Failed,
    /// Output of a passed test that has not reported being skipped so far.
    Passed,
    /// Output of a test that was already counted as skipped.
    Skipped,
}

impl OutputReader {
    /// Reads a line. A test that prints `SKIPPED …` counts as skipped, once, although the test harness
    /// reports that it passed.
    pub fn add(&mut self, line: &str) {
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

    /// Counts a failed run of `cargo test`. If no test failed, a program did not compile, or it crashed
    /// before printing its counts. That counts as one failure, described by the end of the output.
    pub fn broke_off(&mut self, failed_before: u64, output: &str) {
        if self.sums.failed == failed_before {
            self.sums.failed += 1;
            let lines: Vec<&str> = output.lines().collect();
            let end = lines.len().saturating_sub(LINES_OF_A_CRASH);
            self.failures.extend(lines[end..].iter().map(|&line| line.to_owned()));
        }
    }
}

/// Returns the counts in a test program's output.
pub fn counted(output: &str) -> Sums {
    let mut reader = OutputReader::default();
    output.lines().for_each(|line| reader.add(line));
    reader.sums
}

/// Returns true for the line that the test harness prints before a test's output.
fn is_heading(line: &str) -> bool {
    line.starts_with("---- ") && line.ends_with(" stdout ----")
}

/// The number of output lines to keep from a run that failed without a failed test.
const LINES_OF_A_CRASH: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(lines: &[&str]) -> String {
        let mut reader = OutputReader::default();
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
        let mut reader = OutputReader::default();
        reader.add("test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        reader.broke_off(0, "running 12 tests\ntest a ... ");
        assert_eq!(reader.sums.to_string(), "12 passed, 1 failed, 0 skipped");
        assert_eq!(reader.failures, ["running 12 tests", "test a ... "]);
        reader.broke_off(0, "");
        assert_eq!(reader.sums.failed, 1, "a failure that was counted is not counted again");
    }

    #[test]
    fn a_test_that_prints_skipped_is_skipped_once_and_has_not_passed() {
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
    fn a_test_that_prints_skipped_and_fails_has_failed_and_its_output_is_kept() {
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
        let mut reader = OutputReader::default();
        for line in lines {
            reader.add(line);
        }
        assert_eq!(reader.sums.to_string(), "1 passed, 1 failed, 0 skipped");
        let kept = [6, 7, 8, 10, 11, 12, 13].map(|i| lines[i]);
        assert_eq!(reader.failures, kept);
    }

    #[test]
    fn counts_are_parsed_as_they_are_written() {
        let counts = Sums { passed: 5, failed: 1, skipped: 2 };
        assert_eq!(counts.to_string().parse(), Ok(counts));
        for other in ["5 passed, 0 failed", "5 passed, 1 failed, 2 skipped!", ""] {
            assert_eq!(other.parse::<Sums>(), Err(()));
        }
    }
}
