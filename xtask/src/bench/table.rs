//! The table of `docs/benchmarks.md`.

use std::fmt::Write as _;

use super::Backend;
use super::aims::verdict;
use super::rows::Sweep;

/// The table, in Markdown.
pub(super) fn table(sweeps: &[Sweep]) -> String {
    let mut text = String::from(
        "| what | size | time | bytes/s | limit or peer | its time | ratio | aim | exponent |\n\
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
                ratio(r.ratio),
                verdict(r),
            );
        }
    }
    text
}

fn size(size: f64, unit: &str) -> String {
    let mib = size / f64::from(1 << 20);
    match unit {
        "bytes" if mib < 1.0 => format!("{:.0} KiB", size / 1024.0),
        "bytes" => format!("{mib:.0} MiB"),
        unit => format!("{size:.0} {unit}"),
    }
}

/// Two digits at least, however small.
fn ratio(ratio: f64) -> String {
    let zeros = (-ratio.log10()).ceil().clamp(1.0, 9.0) as usize;
    format!("{ratio:.*}", zeros + 1)
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-6 => format!("{:.1} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.1} µs", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// Where the table of a backend begins; the CPU's is the one without a name.
fn begin(backend: Backend) -> String {
    let option = match backend {
        Backend::Cpu => "",
        Backend::Wgpu => "--backend wgpu ",
    };
    format!("<!-- table: written by `cargo xtask bench {option}--write` -->")
}

const END: &str = "<!-- end of table -->";

/// `text` with another table between the markers of a backend.
pub(super) fn replaced(text: &str, backend: Backend, table: &str) -> Option<String> {
    let begin = begin(backend);
    let (before, rest) = text.split_once(&begin)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{begin}\n\n{table}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::{sweeps, tests::row};

    #[test]
    fn a_row_of_the_table_ends_in_its_exponent() {
        let text = table(&sweeps(vec![row(1024.0, 1.0), row(2048.0, 2.0)]));
        assert_eq!(
            text.lines().last(),
            Some("| a | 2 KiB | 2.00 s | 1.0 KB/s | memcpy | 1.00 s | 0.50 | – | 1.00 |")
        );
    }

    #[test]
    fn small_ratios_keep_two_digits() {
        let all = [23.224, 1.0, 0.5, 0.1, 0.0999, 0.012, 0.00034].map(ratio);
        assert_eq!(all, ["23.22", "1.00", "0.50", "0.10", "0.100", "0.012", "0.00034"]);
    }

    #[test]
    fn only_the_table_is_replaced() {
        let (cpu, wgpu) = (begin(Backend::Cpu), begin(Backend::Wgpu));
        let text = format!("a\n{cpu}\nold\n{END}\nb\n{wgpu}\n{END}");
        let new = format!("a\n{cpu}\n\nnew\n\n{END}\nb\n{wgpu}\n{END}");
        assert_eq!(replaced(&text, Backend::Cpu, "new\n"), Some(new));
        let new = format!("a\n{cpu}\nold\n{END}\nb\n{wgpu}\n\nnew\n\n{END}");
        assert_eq!(replaced(&text, Backend::Wgpu, "new\n"), Some(new));
        assert_eq!(replaced("no markers", Backend::Cpu, "new"), None);
    }
}
