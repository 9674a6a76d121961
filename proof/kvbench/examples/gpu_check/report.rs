//! The report: the machine, a table of the steps, and each step's findings.

use std::fmt::Write as _;
use std::path::Path;

use xtask::run::{Result, write};

/// The report's file name.
pub(super) const FILE: &str = "report.md";

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum CardOutcome {
    /// The step passed, with a summary.
    Passed(String),
    /// The step failed, with the reason.
    Failed(String),
    /// The step cannot run here, with the reason. This is not a failure.
    Skipped(String),
}

impl CardOutcome {
    fn word(&self) -> &'static str {
        match self {
            Self::Passed(_) => "passed",
            Self::Failed(_) => "FAILED",
            Self::Skipped(_) => "SKIPPED",
        }
    }

    fn text(&self) -> &str {
        let (Self::Passed(text) | Self::Failed(text) | Self::Skipped(text)) = self;
        text
    }
}

/// The results of a step.
#[derive(Debug, Clone)]
pub(super) struct EndedStep {
    pub(super) outcome: CardOutcome,
    pub(super) seconds: f64,
    /// Details for the report, in Markdown.
    pub(super) section: String,
}

/// The report so far.
pub(super) struct Report {
    head: String,
    steps: Vec<(&'static str, &'static str, EndedStep)>,
}

impl Report {
    pub(super) fn new(version: &str, facts: &[(String, String)]) -> Self {
        let mut head = "# A check of the CUDA backend\n\n| | |\n|---|---|\n".to_owned();
        let built = [("built of".to_owned(), version.to_owned())];
        for (name, value) in built.iter().chain(facts) {
            println!("gpu-check: {name}: {value}");
            // Writing to a string cannot fail.
            let _ = writeln!(head, "| {name} | {} |", cell(value));
        }
        Self { head, steps: Vec::new() }
    }

    /// Adds a step and prints its line.
    pub(super) fn add(&mut self, name: &'static str, about: &'static str, ended: EndedStep) {
        let (word, text) = (ended.outcome.word(), ended.outcome.text());
        println!("gpu-check: {name}: {word}, {:.0} s: {text}", ended.seconds);
        self.steps.push((name, about, ended));
    }

    /// Returns the names of the steps that failed.
    pub(super) fn failed(&self) -> Vec<&'static str> {
        let failed = |(name, _, ended): &(&'static str, _, EndedStep)| {
            matches!(ended.outcome, CardOutcome::Failed(_)).then_some(*name)
        };
        self.steps.iter().filter_map(failed).collect()
    }

    /// Returns the report in Markdown.
    fn text(&self) -> String {
        let mut text = format!("{}\n| step | outcome | seconds | |\n|---|---|---|---|\n", self.head);
        for (name, _, EndedStep { outcome, seconds, .. }) in &self.steps {
            let (word, why) = (outcome.word(), cell(outcome.text()));
            let _ = writeln!(text, "| {name} | {word} | {seconds:.0} | {why} |");
        }
        for (name, about, EndedStep { section, .. }) in &self.steps {
            if !section.is_empty() {
                let _ = writeln!(text, "\n## {name}\n\n{about}.\n\n{}", section.trim_end());
            }
        }
        text
    }

    /// Writes the report so far.
    pub(super) fn write(&self, folder: &Path) -> Result {
        write(&folder.join(FILE), &self.text())
    }

    /// Prints the numbers of passed, failed and skipped steps, and the report's path.
    pub(super) fn print_end(&self, path: &Path) {
        let count = |word| self.steps.iter().filter(|(_, _, ended)| ended.outcome.word() == word).count();
        let seconds: f64 = self.steps.iter().map(|(_, _, ended)| ended.seconds).sum();
        let [passed, failed, skipped] = ["passed", "FAILED", "SKIPPED"].map(count);
        println!(
            "gpu-check: {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0} s: {}",
            path.display()
        );
    }
}

/// Escapes a string for one table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(outcome: CardOutcome, section: &str) -> EndedStep {
        EndedStep { outcome, seconds: 1.6, section: section.to_owned() }
    }

    #[test]
    fn a_report_has_the_machine_every_step_and_its_details() {
        let mut report = Report::new("commit a", &[("card".to_owned(), "X|Y".to_owned())]);
        report.add("one", "The first", ended(CardOutcome::Passed("3 passed".to_owned()), "| t |\n"));
        report.add("two", "The second", ended(CardOutcome::Skipped("no tool".to_owned()), ""));
        report.add("three", "The third", ended(CardOutcome::Failed("line\nline".to_owned()), ""));
        let text = report.text();
        for line in [
            "| built of | commit a |",
            "| card | X\\|Y |",
            "| one | passed | 2 | 3 passed |",
            "| two | SKIPPED | 2 | no tool |",
            "| three | FAILED | 2 | line line |",
            "## one",
            "The first.",
            "| t |",
        ] {
            assert!(text.lines().any(|known| known == line), "{line:?} is not in\n{text}");
        }
        assert!(!text.contains("## two"));
        assert_eq!(report.failed(), ["three"]);
    }
}
