//! `cargo xtask deep`: runs checks that are too long for every change, in slices of a few minutes.
//!
//! The table in docs/deep.md shows when each slice last ran. Each run of CI picks the slice that has gone
//! longest without a run. Once the changed table is committed, the next run picks another slice.

use std::process::Command;

use clap::Args;

use xtask::run::{Result, none_of, root};
use xtask::tools::{self, GUNGRAUN, Tool, first_line};
use xtask::{cuda_double, published};

use crate::{arm, python, sanitize, step};

mod table;

use table::{Row, Table};

/// Options of `cargo xtask deep`.
#[derive(Args)]
pub(crate) struct DeepArgs {
    /// The slice to run; by default the one that has gone longest without a run.
    #[arg(value_name = "SLICE", conflicts_with_all = ["all", "list"])]
    slice: Option<String>,
    /// Run every slice that has not passed on the current code. After an interruption, the next run continues
    /// where this one stopped.
    #[arg(long, conflicts_with = "list")]
    all: bool,
    /// Print the table; run nothing.
    #[arg(long)]
    list: bool,
    /// Print the commands that install the tools missing for any slice; run nothing.
    #[arg(long, conflicts_with_all = ["all", "list", "slice"])]
    missing: bool,
}

/// A part of the deep checks. To add a slice, add an entry to [`SLICES`].
pub(crate) struct Slice {
    pub(crate) name: &'static str,
    /// A description of what the slice covers, for the table.
    pub(crate) covers: &'static str,
    /// The command. It may take at most five minutes on two slow cores.
    pub(crate) command: &'static str,
    /// Tools that the slice needs in addition to CI's.
    needs: &'static [Tool],
}

/// Creates a slice that needs no tools but CI's.
const fn plain(name: &'static str, covers: &'static str, command: &'static str) -> Slice {
    Slice { name, covers, command, needs: &[] }
}

/// All slices.
pub(crate) const SLICES: &[Slice] = &[
    plain(
        "assertions",
        "the tests of each run but examples, with debug assertions and overflow checks; 200 killed processes, 1 GiB on a disk",
        "KVTIER_TEST_KILLS=200 KVTIER_TEST_VOLUME=1024 cargo xtask test --assertions",
    ),
    Slice {
        name: "features",
        covers: "each crate alone, in every combination of its features",
        command: "cargo xtask features",
        needs: &[Tool::Component("clippy")],
    },
    Slice {
        name: "licences",
        covers: "licences, bans and sources of all dependencies",
        command: "cargo deny --log-level error check bans licenses sources && if cargo deny fetch db; then cargo deny check advisories; else echo 'SKIPPED advisories: their database cannot be fetched'; fi",
        needs: &[Tool::Cargo("cargo-deny")],
    },
    Slice {
        name: "instructions",
        covers: "instructions of hot paths against the baseline",
        command: "cargo xtask instructions",
        needs: &[Tool::Program("valgrind", "valgrind"), GUNGRAUN],
    },
    plain(
        "packages",
        "the crates that are ready to publish, built as a registry would",
        "cargo publish --dry-run --allow-dirty -p kvcore -p kvbackend-cpu",
    ),
    Slice {
        name: "arm",
        covers: "fast kernels on 64-bit ARM, under an emulator",
        command: "cargo xtask arm",
        needs: arm::NEEDS,
    },
    plain(
        "loom",
        "concurrent paths of the block pool under interleavings with any number of preemptions",
        "cargo xtask loom --exhaustive",
    ),
    Slice {
        name: "sanitizer",
        covers: "all tests of crates with unsafe code, under AddressSanitizer",
        command: "cargo xtask sanitize --all",
        needs: &[sanitize::SANITIZER],
    },
    Slice {
        name: "sanitizer-ascend",
        covers: "the tests of the Ascend backend on the simulator of CANN, under AddressSanitizer",
        command: "cargo xtask sanitize --ascend",
        needs: &[sanitize::SANITIZER],
    },
    Slice {
        name: "cuda-double",
        covers: "the CUDA driver double's own tests",
        command: "cargo xtask cuda-double --selftest",
        needs: cuda_double::NEEDS,
    },
    plain(
        "wgpu",
        "the conformance suite in every variant and element type of wgpu",
        "cargo xtask conform --backend wgpu --every",
    ),
    plain(
        "fuzz",
        "chat templates, tokenizers and requests, drawn at random",
        "cargo run --release --quiet --all-features --example fuzz -- --seconds 120",
    ),
    plain(
        "quality",
        "the accuracy and the cost of each strategy on the built-in model, as docs/quality.md has them",
        "cargo run --release -p kvcli -- eval --questions 40 --plot docs/quality.svg",
    ),
    Slice {
        name: "published",
        covers: "strategies of reuse on a published model: the question chooses well",
        command: "cargo xtask published --quick",
        needs: &[published::MODEL],
    },
    Slice {
        name: "published-goldens",
        covers: "greedy answers of a published model against transformers, as floats and as blocks",
        command: "cargo xtask published --goldens",
        needs: published::NEEDS,
    },
    Slice {
        name: "published-bench",
        covers: "times of a published model, from the file's blocks: prefill, few rows, decoding, documents found",
        command: "cargo bench -p kvlab --bench peer_model -- --model \"$PWD/target/published/smollm2.gguf\" --prefill 500 --rows 1,16 --decode 16 --chunks",
        needs: &[published::MODEL],
    },
    Slice {
        name: "vllm",
        covers: "the connector inside vLLM on the CPU, against transformers, on small models of six kinds",
        command: "cargo xtask python --vllm connector",
        needs: python::NEEDS_VLLM,
    },
    Slice {
        name: "vllm-prefix",
        covers: "the connector's tier for ordinary prompts inside vLLM, against transformers",
        command: "cargo xtask python --vllm prefix",
        needs: python::NEEDS_VLLM,
    },
    Slice {
        name: "vllm-published",
        covers: "the connector inside vLLM, against transformers, on a published model",
        command: "cargo xtask python --vllm published",
        needs: python::NEEDS_VLLM,
    },
    Slice {
        name: "vllm-docs",
        covers: "the commands of docs/vllm.md: a server, curl, clients",
        command: "cargo xtask python --vllm docs",
        needs: python::NEEDS_VLLM,
    },
    Slice {
        name: "serve",
        covers: "kvc serve with unmodified clients of OpenAI, Anthropic, Cohere, LangChain and LlamaIndex, its page in Chromium, and its times beside its engine's",
        command: "cargo build --release --workspace --all-features --bin kvc && python3 proof/serve/run.py",
        needs: &[Tool::Program("chromium", "chromium"), published::MODEL],
    },
    plain(
        "benches-cpu",
        "every benchmark of the CPU in small sizes, and the ratios that are required",
        "cargo xtask bench --quick && cargo xtask bench --quick --backend products && cargo xtask bench --quick --backend disk && cargo bench --quiet --workspace --all-features --bench find_documents",
    ),
    Slice {
        name: "benches-cuda",
        covers: "every benchmark of CUDA in small sizes, through the double of the driver",
        command: "cargo xtask bench --quick --backend cuda",
        needs: cuda_double::NEEDS,
    },
    plain(
        "benches-wgpu",
        "every benchmark of wgpu in small sizes",
        "cargo xtask bench --quick --backend wgpu",
    ),
];

/// Runs the chosen slices.
pub(crate) fn deep(args: &DeepArgs) -> Result {
    if args.missing {
        for command in tools::commands(SLICES.iter().flat_map(|slice| slice.needs).copied()) {
            println!("{command}");
        }
        return Ok(());
    }
    let mut table = Table::read()?;
    if args.list {
        print!("{}", table.text());
        return Ok(());
    }
    let slices: Vec<&Slice> = match &args.slice {
        Some(name) => vec![SLICES.iter().find(|slice| slice.name == name).ok_or_else(|| unknown(name))?],
        None if args.all => {
            SLICES.iter().filter(|slice| !table.row(slice).is_some_and(is_of_this_code)).collect()
        }
        None => vec![table.longest_unrun()],
    };
    let mut failed = Vec::new();
    for slice in &slices {
        println!("deep: {}, {}", slice.name, slice.covers);
        let outcome = step::run(slice.command);
        // Saved after each slice, so an interrupted run keeps the finished slices.
        table.set(
            slice,
            Row { when: now()?, commit: commit()?, seconds: outcome.seconds, passed: outcome.passed },
        );
        table.write()?;
        if !outcome.passed {
            failed.push(slice.name);
        }
    }
    println!(
        "deep: {} of {} passed; docs/deep.md says when each slice ran",
        slices.len() - failed.len(),
        slices.len()
    );
    none_of("failed", &failed)
}

/// Returns the tools that the next slice needs.
pub(crate) fn next_needs() -> Result<impl Iterator<Item = Tool>> {
    Ok(Table::read()?.longest_unrun().needs.iter().copied())
}

fn unknown(name: &str) -> String {
    let names: Vec<&str> = SLICES.iter().map(|slice| slice.name).collect();
    format!("there is no slice {name:?}; the slices are {}", names.join(", "))
}

/// Returns true if a slice last passed on the current files. Changes to documents do not count.
fn is_of_this_code(row: &Row) -> bool {
    let unchanged = || {
        let mut command = Command::new("git");
        command.args(["diff", "--quiet", &row.commit, "--", ".", ":(exclude)docs"]).current_dir(root());
        command.stderr(std::process::Stdio::null()).status().is_ok_and(|status| status.success())
    };
    row.passed && unchanged()
}

/// Returns the current commit, with a plus sign if any file other than a document has changed.
fn commit() -> Result<String> {
    let git = |args: &[&str]| first_line("git", &[&["-C", &root().to_string_lossy()], args].concat());
    let head = git(&["rev-parse", "--short=10", "HEAD"]).ok_or("`git rev-parse` cannot be run")?;
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs"]).is_some();
    Ok(head + if changed { "+" } else { "" })
}

/// Returns the current time in a format that sorts.
fn now() -> Result<String> {
    first_line("date", &["-u", "+%Y-%m-%d %H:%M"]).ok_or_else(|| "`date` cannot be run".to_owned())
}
