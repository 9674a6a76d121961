//! `cargo xtask bench`: every benchmark, as one table of ratios to a limit of the same run.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};

mod aims;
mod plot;
mod rows;
mod table;

use rows::BenchRow;
pub(crate) use table::duration;

use crate::cuda_double;
use crate::run::{Result, cargo_command, root};

/// Whose benchmarks run.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchBackend {
    Cpu,
    /// Products with matrices of a model, on the CPU
    Products,
    Cuda,
    Wgpu,
}

/// Options of `cargo xtask bench`.
#[derive(Args)]
pub(crate) struct KernelBenchArgs {
    /// Kernels of the CPU and everything that depends on no device, the CPU's products with the matrices of a model, the
    /// kernels of CUDA on the first card (or, without a driver, through its test double, whose times say nothing), or the
    /// kernels of wgpu on its first adapter.
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BenchBackend,
    /// Small sizes: minutes become seconds, ratios become rough.
    #[arg(long)]
    quick: bool,
    /// Write the table to docs/benchmarks.md and the plots beside it.
    #[arg(long, conflicts_with = "quick")]
    write: bool,
    /// Draw the plots into this folder.
    #[arg(long, value_name = "DIR", conflicts_with = "write")]
    plots: Option<PathBuf>,
}

/// Small sizes for a card.
const QUICK_ON_A_CARD: &[&str] = &["--mib", "256", "--context", "1024", "--prompt", "1024"];

pub(crate) fn bench(args: &KernelBenchArgs) -> Result {
    let rows = match args.backend {
        BenchBackend::Cpu => cpu(args.quick)?,
        BenchBackend::Products => run_bench("products", if args.quick { &["--mib", "16"] } else { &[] })?,
        BenchBackend::Cuda if args.write && !cuda_double::driver_is_here() => {
            return Err("this machine has no CUDA driver: the table of docs/benchmarks.md is of a real card"
                .to_owned());
        }
        BenchBackend::Cuda => cuda(args.quick)?,
        BenchBackend::Wgpu => wgpu(args.quick)?,
    };
    if args.write && rows.iter().any(|row| row.double) {
        return Err("nothing is written: the driver that was loaded is its test double".to_owned());
    }
    let broken = aims::broken(&rows).join(", ");
    let sweeps = rows::sweeps(rows);
    let table = table::table(&sweeps);
    println!("{table}");
    if args.write {
        let path = root().join("docs/benchmarks.md");
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let text = table::replaced(&text, args.backend, &table)
            .ok_or("docs/benchmarks.md lacks its table markers")?;
        fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        println!("written to docs/benchmarks.md");
    }
    let beside_the_table = || args.write.then(|| root().join("docs/benchmarks"));
    if let Some(folder) = args.plots.clone().or_else(beside_the_table) {
        println!("plots in {}: {}", folder.display(), plot::write(&folder, &sweeps)?.join(", "));
    }
    if broken.is_empty() { Ok(()) } else { Err(format!("takes longer than it may: {broken}")) }
}

/// Returns the table of the rows that a benchmark printed, in Markdown; none if it printed none.
pub(crate) fn printed_table(output: &str) -> Option<String> {
    let rows = rows::parsed(output);
    (!rows.is_empty()).then(|| table::table(&rows::sweeps(rows)))
}

/// A row that a benchmark printed, at its largest size.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Printed {
    pub(crate) what: String,
    /// None for a row whose size is not in bytes.
    pub(crate) bytes: Option<f64>,
    pub(crate) seconds: f64,
}

/// Returns the rows that a benchmark printed, each at its largest size.
pub(crate) fn printed_rows(output: &str) -> Vec<Printed> {
    let largest = |sweep: rows::Sweep| {
        let BenchRow { what, size, unit, seconds, .. } = sweep.rows.into_iter().next_back()?;
        Some(Printed { what, bytes: (unit == "bytes").then_some(size), seconds })
    };
    rows::sweeps(rows::parsed(output)).into_iter().filter_map(largest).collect()
}

fn cuda(quick: bool) -> Result<Vec<BenchRow>> {
    let mut command = bench_command("kernels_on_cuda");
    cuda_double::provide(&mut command)?;
    if cuda_double::driver_is_here() {
        command.args(if quick { QUICK_ON_A_CARD } else { &[] });
    } else {
        eprintln!(
            "bench: no CUDA driver is here: through its test double, in small sizes, without ratios and aims"
        );
    }
    rows_of(command, "kernels_on_cuda")
}

fn wgpu(quick: bool) -> Result<Vec<BenchRow>> {
    let sizes: &[&str] = if quick { &["--mib", "4", "--context", "1024"] } else { &[] };
    run_bench("kernels_on_wgpu", sizes)
}

fn cpu(quick: bool) -> Result<Vec<BenchRow>> {
    // Reuse is measured on its chunk of 4096 tokens however small the rest: it must not take too long.
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

/// Returns the command that runs a benchmark of the workspace; arguments that are added go to the benchmark.
fn bench_command(name: &str) -> Command {
    // Among the whole workspace and with all features, as the tests are built: nothing is built twice.
    let mut command = cargo_command(&["bench", "--quiet", "--workspace", "--all-features", "--bench", name]);
    command.arg("--");
    command
}

/// The block pool against its peer, which has a workspace of its own.
fn block_pool(quick: bool) -> Result<Vec<BenchRow>> {
    let manifest = root().join("proof/kvbench/block-pool/Cargo.toml");
    let mut command = cargo_command(&["run", "--quiet", "--release", "--locked", "--manifest-path"]);
    command.arg(manifest).env("CARGO_TARGET_DIR", root().join("target/bench-peers")).arg("--");
    if quick {
        command.arg("--quick");
    }
    rows_of(command, "block-pool")
}

fn rows_of(mut command: Command, name: &str) -> Result<Vec<BenchRow>> {
    eprintln!("bench: {name}");
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|e| format!("`cargo bench` cannot be run: {e}"))?;
    let mut rows = Vec::new();
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
            if let Ok(row) = serde_json::from_str::<BenchRow>(&line) {
                let (what, aim) = (&row.what, aims::verdict(&row));
                let rate = row.rate().map(|rate| format!("{rate}, ")).unwrap_or_default();
                if row.double {
                    eprintln!("  {what}: runs");
                } else {
                    eprintln!("  {what}: {rate}{:.2} times as fast as {} (aim: {aim})", row.ratio, row.limit);
                }
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
