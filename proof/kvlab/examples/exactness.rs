//! `cargo xtask exactness`: prints the exactness tests' measurements as the table in docs/exactness.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::{ExitCode, Stdio};

use clap::Parser;
use xtask::page;
use xtask::run::{Result, cargo_command, exit_code};

/// Print the exactness tests' measurements as the table in docs/exactness.md.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask exactness", bin_name = "cargo xtask exactness")]
struct ExactnessCli {
    /// Write the table to docs/exactness.md instead of printing it.
    #[arg(long)]
    write: bool,
}

/// The tests that print table rows.
const TESTS: &str = "exactness approximate rotated unrotated blending";
/// The page with the table.
const PAGE: &str = "docs/exactness.md";
/// The command in the table's marker line.
const COMMAND: &str = "cargo xtask exactness --write";

fn main() -> ExitCode {
    exit_code(exactness(&ExactnessCli::parse()))
}

fn exactness(args: &ExactnessCli) -> Result {
    // With the whole workspace, as `cargo xtask test` builds it, so nothing is compiled twice.
    let fixed = "test --release --workspace --all-features --test suite -- --nocapture";
    let mut command = cargo_command(&format!("{fixed} {TESTS}"));
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("`cargo test` cannot be run: {error}"))?;
    if !output.status.success() {
        return Err(
            "tests of exactness failed: run `cargo test -p kvmodel -p kvengine --test suite`".to_owned()
        );
    }
    let table = table(&gathered(&String::from_utf8_lossy(&output.stdout)));
    if !args.write {
        print!("{table}");
        return Ok(());
    }
    page::write(PAGE, COMMAND, &table)
}

/// Measurements of one kind.
#[derive(Debug, Default, PartialEq)]
struct Measured {
    differences: Vec<f64>,
    /// Differences as multiples of transformers' own error, in tests that measure that error.
    ratios: Vec<f64>,
}

/// Returns the differences, grouped by cache format and kind of measurement.
fn gathered(output: &str) -> BTreeMap<String, Measured> {
    let mut all: BTreeMap<String, Measured> = BTreeMap::new();
    // If tests run on several threads, a test's name may precede a row.
    let rows = output.lines().filter_map(|line| Some(line.get(line.find("| ")?..)?.trim()));
    for row in rows.filter_map(|row| row.strip_prefix('|')?.strip_suffix('|')) {
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, cell, format, what, difference, own @ ..] = &columns[..] else { continue };
        let (Ok(difference), true) = (difference.parse::<f64>(), own.len() <= 1) else { continue };
        let form = [", rotated copy", ", unrotated keys"].into_iter().find(|form| cell.ends_with(form));
        let blend = what.starts_with("blend").then_some("blends between their ends");
        let kind = match (*what, *cell) {
            ("", cell) => cell,
            (what, _) => blend.unwrap_or(what),
        };
        let measured = all.entry(format!("{format}{}: {kind}", form.unwrap_or_default())).or_default();
        measured.differences.push(difference);
        let own = own.first().and_then(|own| own.parse::<f64>().ok());
        measured.ratios.extend(own.map(|own| difference / own));
    }
    all
}

fn table(all: &BTreeMap<String, Measured>) -> String {
    let mut text =
        "| measured over all models and cells | measurements | largest logit difference | median | largest ratio to \
                    transformers' own error |\n|---|---|---|---|---|\n"
            .to_owned();
    for (what, Measured { differences, ratios }) in all {
        let mut sorted = differences.clone();
        sorted.sort_by(f64::total_cmp);
        let (largest, median) = (sorted.last().copied(), sorted.get(sorted.len() / 2).copied());
        let number = |x: Option<f64>| x.map_or("–".to_owned(), |x| format!("{x:.1e}"));
        let ratio = ratios.iter().copied().max_by(f64::total_cmp);
        let ratio = ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2} times"));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {what} | {} | {} | {} | {ratio} |",
            sorted.len(),
            number(largest),
            number(median)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_gathered_by_kind_wherever_they_are_in_a_line() {
        let output = "\
            running 3 tests\n\
            test a ... | llama | Overlapped, Alone | f32 | all chunks hit | 1.000e-6 |\n\
            | qwen2 | Overlapped, Alone | f32 | all chunks hit | 3.000e-6 |\n\
            | qwen2 | full attention | f32 |  | 2.000e-6 |\n\
            | qwen2 | Absolute, Alone | bf16 | all chunks hit | 2.000e-2 | 1.000e-2 |\n\
            | qwen2 | Absolute, Alone, rotated copy | bf16 | all chunks hit | 1.000e-2 | 1.000e-2 |\n\
            | no | row | at | all |\n";
        let all = gathered(output);
        let kinds: Vec<&str> = all.keys().map(String::as_str).collect();
        let expected = ["bf16, rotated copy: all chunks hit", "bf16: all chunks hit", "f32: all chunks hit"];
        assert_eq!(kinds, [&expected[..], &["f32: full attention"]].concat());
        assert_eq!(all["f32: all chunks hit"].differences, [1e-6, 3e-6]);
        assert_eq!(all["bf16: all chunks hit"].ratios, [2.0]);
        let text = table(&all);
        assert!(text.contains("| f32: all chunks hit | 2 | 3.0e-6 | 3.0e-6 | – |\n"), "{text}");
        assert!(text.contains("| bf16: all chunks hit | 1 | 2.0e-2 | 2.0e-2 | 2.00 times |\n"), "{text}");
    }
}
