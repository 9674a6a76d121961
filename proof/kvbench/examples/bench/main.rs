//! `cargo xtask bench`: runs the benchmarks and prints one table of ratios to limits measured in the same
//! run.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::{Parser, ValueEnum};
use kvbench::rows::{self, BenchRow};
use kvbench::{aims, table};
use xtask::run::{Result, cargo_command, exit_code, lines, root};
use xtask::{cuda_double, page};

mod plot;

/// Groups of benchmarks.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchBackend {
    /// CPU kernels, and benchmarks that do not need a device
    Cpu,
    /// Products with a model's matrices, on the CPU
    Products,
    /// Records on a disk, in each way of I/O that works here
    Disk,
    /// CUDA kernels on the first card, or on the test double if there is no driver; its times say nothing
    /// about a card
    Cuda,
    /// wgpu kernels on the first adapter
    Wgpu,
}

impl BenchBackend {
    /// Returns the command that writes this group's table.
    fn command(self) -> &'static str {
        match self {
            Self::Cpu => "cargo xtask bench --write",
            Self::Products => "cargo xtask bench --backend products --write",
            Self::Disk => "cargo xtask bench --backend disk --write",
            Self::Cuda => "cargo xtask bench --backend cuda --write",
            Self::Wgpu => "cargo xtask bench --backend wgpu --write",
        }
    }
}

/// Run the benchmarks of the CPU kernels or of a GPU's kernels, and print one table of ratios.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct BenchCli {
    /// Benchmarks to run.
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BenchBackend,
    /// Use small sizes: seconds instead of minutes, but only rough ratios.
    #[arg(long)]
    quick: bool,
    /// Write the table to docs/benchmarks.md and the plots to docs/benchmarks.
    #[arg(long, conflicts_with = "quick")]
    write: bool,
    /// Draw the plots in this folder.
    #[arg(long, value_name = "DIR", conflicts_with = "write")]
    plots: Option<PathBuf>,
}

/// Small sizes for runs on a card.
const QUICK_ON_A_CARD: &[&str] = &["--mib", "256", "--context", "1024", "--prompt", "1024"];

fn main() -> ExitCode {
    exit_code(bench(&BenchCli::parse()))
}

fn bench(args: &BenchCli) -> Result {
    let rows = match args.backend {
        BenchBackend::Cpu => cpu(args.quick)?,
        BenchBackend::Products => run_bench("products", if args.quick { &["--mib", "16"] } else { &[] })?,
        BenchBackend::Disk => {
            let size: &[&str] = if args.quick { &["--mib", "64"] } else { &[] };
            let mut rows = run_bench("disk_tier", size)?;
            rows.extend(run_bench("disk_engine", size)?);
            rows
        }
        BenchBackend::Cuda if args.write && !cuda_double::driver_is_here() => {
            return Err(
                "this machine has no CUDA driver; the table in docs/benchmarks.md must come from a real card"
                    .to_owned(),
            );
        }
        BenchBackend::Cuda => cuda(args.quick)?,
        BenchBackend::Wgpu => wgpu(args.quick)?,
    };
    if args.write && rows.iter().any(|row| row.double) {
        return Err("nothing is written, because the loaded driver is the test double".to_owned());
    }
    let broken = aims::broken(&rows).join(", ");
    let sweeps = rows::sweeps(rows);
    let table = table::table(&sweeps);
    println!("{table}");
    if args.write {
        page::write("docs/benchmarks.md", args.backend.command(), &table)?;
        println!("written to docs/benchmarks.md");
    }
    let in_docs = || args.write.then(|| root().join("docs/benchmarks"));
    if let Some(folder) = args.plots.clone().or_else(in_docs) {
        println!("plots in {}: {}", folder.display(), plot::write(&folder, &sweeps)?.join(", "));
    }
    if broken.is_empty() { Ok(()) } else { Err(format!("slower than required: {broken}")) }
}

fn cuda(quick: bool) -> Result<Vec<BenchRow>> {
    let mut command = bench_command("kernels_on_cuda");
    cuda_double::provide(&mut command)?;
    if cuda_double::driver_is_here() {
        command.args(if quick { QUICK_ON_A_CARD } else { &[] });
    } else {
        eprintln!(
            "bench: this machine has no CUDA driver; the benchmark runs with the driver's test double, in small \
             sizes, without ratios and targets"
        );
    }
    rows_of(command, "kernels_on_cuda")
}

fn wgpu(quick: bool) -> Result<Vec<BenchRow>> {
    let sizes: &[&str] = if quick { &["--mib", "4", "--context", "1024"] } else { &[] };
    run_bench("kernels_on_wgpu", sizes)
}

fn cpu(quick: bool) -> Result<Vec<BenchRow>> {
    // Reuse has a required target for a chunk of 4096 tokens, so that size is always measured.
    let [kernels, formats, ttft, steps]: [&[&str]; 4] = if quick {
        [
            &["--mib", "16", "--context", "1024"],
            &["--tokens", "512"],
            &["--layers", "2", "--hidden", "128", "--tokens", "64"],
            &["--layers", "2", "--hidden", "128", "--answers", "32"],
        ]
    } else {
        [
            &["--mib", "1024", "--context", "32768"],
            &["--tokens", "32768"],
            &["--layers", "8", "--hidden", "1024", "--tokens", "512"],
            &["--layers", "8", "--hidden", "1024", "--answers", "256"],
        ]
    };
    let mut rows = run_bench("kernels_against_memcpy", kernels)?;
    rows.extend(run_bench("quantized_caches", formats)?);
    rows.extend(run_bench("chunk_reuse", &["--tokens", "4096"])?);
    rows.extend(run_bench("ttft", ttft)?);
    rows.extend(run_bench("batch_slots", &[])?);
    rows.extend(run_bench("engine_step", steps)?);
    rows.extend(block_pool(quick)?);
    Ok(rows)
}

fn run_bench(name: &str, args: &[&str]) -> Result<Vec<BenchRow>> {
    let mut command = bench_command(name);
    command.args(args);
    rows_of(command, name)
}

/// Returns the command that runs one of the workspace's benchmarks. Arguments added to it go to the
/// benchmark.
fn bench_command(name: &str) -> Command {
    // Built like the tests, with the whole workspace and all features, so nothing is compiled twice.
    cargo_command(&format!("bench --quiet --workspace --all-features --bench {name} --"))
}

/// Measures the block pool against its peer, which is in a separate workspace.
fn block_pool(quick: bool) -> Result<Vec<BenchRow>> {
    let manifest = root().join("proof/kvbench/block-pool/Cargo.toml");
    let mut command = cargo_command("run --quiet --release --locked --manifest-path");
    command.arg(manifest).env("CARGO_TARGET_DIR", root().join("target/bench-peers")).arg("--");
    if quick {
        command.arg("--quick");
    }
    rows_of(command, "block-pool")
}

/// Runs a benchmark, prints its rows as they arrive, and returns them.
fn rows_of(mut command: Command, name: &str) -> Result<Vec<BenchRow>> {
    eprintln!("bench: {name}");
    let mut rows = Vec::new();
    let succeeded = lines(&mut command, "cargo bench", |line| {
        let Ok(row) = serde_json::from_str::<BenchRow>(line) else { return };
        let (what, aim) = (&row.what, aims::verdict(&row));
        let rate = row.rate().map(|rate| format!("{rate}, ")).unwrap_or_default();
        if row.double {
            eprintln!("  {what}: runs");
        } else {
            eprintln!("  {what}: {rate}{:.2} times as fast as {} (target: {aim})", row.ratio, row.limit);
        }
        rows.push(row);
    })?;
    if succeeded && !rows.is_empty() { Ok(rows) } else { Err(format!("benchmark {name} failed")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_backend_has_its_table() {
        let text = include_str!("../../../../docs/benchmarks.md");
        for backend in BenchBackend::value_variants() {
            let replaced = page::replaced(text, backend.command(), "new");
            assert!(replaced.is_some_and(|page| page.contains("\n\nnew\n")));
        }
    }
}
