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

use crate::run::{Result, cargo_command, root};

/// Whose benchmarks run.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchBackend {
    Cpu,
    Wgpu,
}

/// Options of `cargo xtask bench`.
#[derive(Args)]
pub(crate) struct KernelBenchArgs {
    /// Kernels of the CPU and everything that depends on no device, or the kernels of wgpu on its first adapter.
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

pub(crate) fn bench(args: &KernelBenchArgs) -> Result {
    let rows = match args.backend {
        BenchBackend::Cpu => cpu(args.quick)?,
        BenchBackend::Wgpu => wgpu(args.quick)?,
    };
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

fn wgpu(quick: bool) -> Result<Vec<BenchRow>> {
    let sizes: &[&str] = if quick { &["--mib", "4", "--context", "1024"] } else { &[] };
    run_bench("kernels_on_wgpu", sizes)
}

fn cpu(quick: bool) -> Result<Vec<BenchRow>> {
    // Reuse is measured on its chunk of 4096 tokens however small the rest: it must not take too long.
    let [kernels, formats, ttft]: [&[&str]; 3] = if quick {
        [
            &["--mib", "16", "--context", "1024"],
            &["--tokens", "512"],
            &["--layers", "2", "--hidden", "128", "--tokens", "64"],
        ]
    } else {
        [
            &["--mib", "1024", "--context", "32768"],
            &["--tokens", "4096"],
            &["--layers", "8", "--hidden", "1024", "--tokens", "512"],
        ]
    };
    let mut rows = run_bench("kernels_against_memcpy", kernels)?;
    rows.extend(run_bench("quantized_caches", formats)?);
    rows.extend(run_bench("chunk_reuse", &["--tokens", "4096"])?);
    rows.extend(run_bench("ttft", ttft)?);
    rows.extend(block_pool(quick)?);
    Ok(rows)
}

fn run_bench(name: &str, args: &[&str]) -> Result<Vec<BenchRow>> {
    // Among the whole workspace and with all features, as the tests are built: nothing is built twice.
    let mut command = cargo_command(&["bench", "--quiet", "--workspace", "--all-features", "--bench", name]);
    command.arg("--").args(args);
    // As `kvc` does: see its `threads`.
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        command.env("RAYON_NUM_THREADS", num_cpus::get_physical().clamp(1, allowed).to_string());
    }
    rows_of(command, name)
}

/// The block pool against its peer, which has a workspace of its own.
fn block_pool(quick: bool) -> Result<Vec<BenchRow>> {
    let manifest = root().join("benches/block-pool/Cargo.toml");
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
                eprintln!("  {what}: {rate}{:.2} times as fast as {} (aim: {aim})", row.ratio, row.limit);
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
