//! `cargo xtask bench`: every benchmark, as one table of ratios to a limit of the same run.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use clap::Args;
use serde::Deserialize;

use crate::run::{Result, cargo_command, root};

/// Options of `cargo xtask bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Small sizes: minutes become seconds, ratios become rough.
    #[arg(long)]
    quick: bool,
    /// Write the table to docs/benchmarks.md.
    #[arg(long)]
    write: bool,
}

/// One row, as a benchmark prints it.
#[derive(Deserialize)]
struct Row {
    what: String,
    size: f64,
    unit: String,
    seconds: f64,
    limit: String,
    limit_seconds: f64,
    ratio: f64,
}

/// Rows that differ in size only.
struct Sweep {
    largest: Row,
    /// Time grows with size to this power.
    exponent: Option<f64>,
}

pub(crate) fn bench(args: &BenchArgs) -> Result {
    let (mib, context, ttft): (&str, &str, &[&str]) = if args.quick {
        ("16", "512", &["--layers", "2", "--hidden", "128", "--tokens", "64"])
    } else {
        ("1024", "4096", &["--layers", "8", "--hidden", "1024", "--tokens", "512"])
    };
    let mut rows = run_bench("kvbackend-cpu", "kernels_against_memcpy", &["--mib", mib])?;
    rows.extend(run_bench("kvbackend-cpu", "quantized_caches", &["--tokens", context])?);
    rows.extend(run_bench("kvchunk", "chunk_reuse", &[])?);
    rows.extend(run_bench("kvmodel", "ttft", ttft)?);
    rows.extend(block_pool(args.quick)?);
    let table = table(sweeps(rows));
    println!("{table}");
    if args.write {
        let path = root().join("docs/benchmarks.md");
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let text = replaced(&text, &table).ok_or("docs/benchmarks.md lacks its table markers")?;
        fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        println!("written to docs/benchmarks.md");
    }
    Ok(())
}

fn run_bench(package: &str, name: &str, args: &[&str]) -> Result<Vec<Row>> {
    let mut command = cargo_command(&["bench", "--quiet", "-p", package, "--bench", name, "--"]);
    command.args(args);
    rows_of(command, name)
}

/// The block pool against its peer, which has a workspace of its own.
fn block_pool(quick: bool) -> Result<Vec<Row>> {
    let manifest = root().join("benches/block-pool/Cargo.toml");
    let mut command = cargo_command(&["run", "--quiet", "--release", "--locked", "--manifest-path"]);
    command.arg(manifest).env("CARGO_TARGET_DIR", root().join("target/bench-peers")).arg("--");
    if quick {
        command.arg("--quick");
    }
    rows_of(command, "block-pool")
}

fn rows_of(mut command: Command, name: &str) -> Result<Vec<Row>> {
    eprintln!("bench: {name}");
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|e| format!("`cargo bench` cannot be run: {e}"))?;
    let mut rows = Vec::new();
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
            if let Ok(row) = serde_json::from_str::<Row>(&line) {
                eprintln!("  {}: {:.2} times as fast as {}", row.what, row.ratio, row.limit);
                rows.push(row);
            }
        }
    }
    let status = child.wait().map_err(|e| e.to_string())?;
    if status.success() && !rows.is_empty() {
        Ok(rows)
    } else {
        Err(format!("benchmark {name} failed ({status})"))
    }
}

/// Groups rows by what they measure; each keeps its largest size and the exponent of its growth.
fn sweeps(rows: Vec<Row>) -> Vec<Sweep> {
    let mut groups: Vec<Vec<Row>> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|g| g[0].what == row.what && g[0].limit == row.limit) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups
        .into_iter()
        .filter_map(|mut group| {
            group.sort_by(|a, b| a.size.total_cmp(&b.size));
            let (first_size, first_seconds) = (group[0].size, group[0].seconds);
            let largest = group.pop()?;
            let grown = largest.size / first_size;
            let exponent = (grown > 1.0).then(|| (largest.seconds / first_seconds).ln() / grown.ln());
            Some(Sweep { largest, exponent })
        })
        .collect()
}

/// The table, in Markdown.
fn table(sweeps: Vec<Sweep>) -> String {
    let mut text = String::from(
        "| what | size | time | limit or peer | its time | ratio | exponent |\n|---|---|---|---|---|---|---|\n",
    );
    for Sweep { largest: r, exponent } in sweeps {
        let exponent = exponent.map_or_else(|| "–".to_owned(), |e| format!("{e:.2}"));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {:.2} | {exponent} |",
            r.what,
            size(r.size, &r.unit),
            duration(r.seconds),
            r.limit,
            duration(r.limit_seconds),
            r.ratio,
        );
    }
    text
}

fn size(size: f64, unit: &str) -> String {
    match unit {
        "bytes" => format!("{:.0} MiB", size / f64::from(1 << 20)),
        unit => format!("{size:.0} {unit}"),
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-6 => format!("{:.1} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.1} µs", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

const BEGIN: &str = "<!-- table: written by `cargo xtask bench --write` -->";
const END: &str = "<!-- end of table -->";

/// `text` with another table between the markers.
fn replaced(text: &str, table: &str) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(size: f64, seconds: f64) -> Row {
        let (what, unit, limit) = ("a".to_owned(), "bytes".to_owned(), "memcpy".to_owned());
        Row { what, size, unit, seconds, limit, limit_seconds: 1.0, ratio: 1.0 / seconds }
    }

    #[test]
    fn a_sweep_shows_its_largest_size_and_its_exponent() {
        let all = sweeps(vec![row(4.0, 16.0), row(1.0, 1.0), row(2.0, 4.0)]);
        assert_eq!((all.len(), all[0].largest.size), (1, 4.0));
        assert!(all[0].exponent.is_some_and(|e| (e - 2.0).abs() < 1e-9));
        assert!(sweeps(vec![row(1.0, 1.0)])[0].exponent.is_none());
    }

    #[test]
    fn only_the_table_is_replaced() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb");
        assert_eq!(replaced(&text, "new\n"), Some(format!("a\n{BEGIN}\n\nnew\n\n{END}\nb")));
        assert_eq!(replaced("no markers", "new"), None);
    }
}
