//! The table in `docs/benchmarks.md`, as Markdown.

use std::fmt::Write as _;

use crate::aims::verdict;
use crate::rows::{Sweep, parsed, sweeps};

/// Formats sweeps as a table.
pub fn table(sweeps: &[Sweep]) -> String {
    let mut text = String::from(
        "| what | size | time | bytes/s | limit or peer | its time | ratio | target | exponent |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for sweep in sweeps {
        let exponent = sweep.exponent().map_or_else(|| "–".to_owned(), |e| format!("{e:.2}"));
        for r in sweep.shown() {
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {exponent} |",
                r.what,
                size(r.size, &r.unit),
                duration(r.seconds),
                r.rate().unwrap_or_else(|| "–".to_owned()),
                r.limit,
                duration(r.limit_seconds),
                if r.double { "–".to_owned() } else { ratio(r.ratio) },
                verdict(r),
            );
        }
    }
    if sweeps.iter().flat_map(|sweep| &sweep.rows).any(|row| row.double) {
        text += "\nMeasured with the driver's test double: these times say nothing about a real card.\n";
    }
    text
}

/// Formats the rows in a benchmark's output as a table. Returns `None` if there are no rows.
pub fn printed(output: &str) -> Option<String> {
    let rows = parsed(output);
    (!rows.is_empty()).then(|| table(&sweeps(rows)))
}

fn size(size: f64, unit: &str) -> String {
    let mib = size / f64::from(1 << 20);
    match unit {
        "bytes" if mib < 1.0 => format!("{:.0} KiB", size / 1024.0),
        "bytes" => format!("{mib:.0} MiB"),
        unit => format!("{size:.0} {unit}"),
    }
}

/// Formats a ratio with at least two digits.
fn ratio(ratio: f64) -> String {
    let zeros = (-ratio.log10()).ceil().clamp(1.0, 9.0) as usize;
    format!("{ratio:.*}", zeros + 1)
}

/// Formats a time in a suitable unit.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-6 => format!("{:.1} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.1} µs", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{BenchRow, tests::row};

    #[test]
    fn a_row_of_the_table_ends_in_its_exponent() {
        let text = table(&sweeps(vec![row(1024.0, 1.0), row(2048.0, 2.0)]));
        assert_eq!(
            text.lines().last(),
            Some("| a | 2 KiB | 2.00 s | 1.0 KB/s | memcpy | 1.00 s | 0.50 | – | 1.00 |")
        );
    }

    #[test]
    fn rows_of_a_test_double_have_no_ratio() {
        let text = table(&sweeps(vec![BenchRow { double: true, ..row(1024.0, 1.0) }]));
        assert!(text.contains("| memcpy | 1.00 s | – | – | – |") && text.contains("test double"));
    }

    #[test]
    fn small_ratios_keep_two_digits() {
        let all = [23.224, 1.0, 0.5, 0.1, 0.0999, 0.012, 0.00034].map(ratio);
        assert_eq!(all, ["23.22", "1.00", "0.50", "0.10", "0.100", "0.012", "0.00034"]);
    }
}
