//! The screen: all ways to answer, ordered by their divergence from full attention's own answers to sixty prompts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use super::{Answer, Asked, ask, folder, plain, read, write_table};
use crate::run::Result;

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

/// The draws, and the questions of each kind in a draw.
const SIZE: (usize, usize) = (5, 4);

/// What the answers of a way amount to.
#[derive(Clone, Copy, Default)]
struct Sum {
    asked: usize,
    divergence: f64,
    agreement: f64,
    recomputed: f64,
    operations: f64,
}

/// Asks in all ways.
pub(super) fn run() -> Result {
    for documents in DOCUMENTS {
        let asked = Asked { documents, first: 0, draws: SIZE.0, questions: SIZE.1, local: false };
        ask(ARMS, asked, "divergence", &answers(documents))?;
    }
    Ok(())
}

/// Asks few questions in few ways. Fails unless recomputation by the question comes nearest to full attention.
pub(super) fn quick() -> Result {
    let answers = folder().join("quick.jsonl");
    ask(
        &QUICK,
        Asked { documents: 2, first: 0, draws: 2, questions: 2, local: false },
        "divergence",
        &answers,
    )?;
    let sums = sums(&read(&answers)?);
    let far = |name: &str| sums.get(name).map_or(f64::NAN, |sum| sum.divergence);
    let [nearest, others @ ..] = [QUICK[2], QUICK[1], QUICK[0]].map(far);
    println!(
        "divergence from full attention: {nearest:.3} by the question, {others:.3?} without recomputation"
    );
    let holds = others.iter().all(|other| nearest < 0.6 * other);
    if holds { Ok(()) } else { Err("the question does not choose well".to_owned()) }
}

/// Returns the file of answers about so many documents.
fn answers(documents: usize) -> PathBuf {
    folder().join(format!("screen-{documents}.jsonl"))
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

/// Writes the table of docs/quality.md.
pub(super) fn write() -> Result {
    // Of a run that was stopped, some numbers of documents may have no answers yet.
    let there: Vec<usize> = DOCUMENTS.into_iter().filter(|&documents| answers(documents).exists()).collect();
    if there.is_empty() {
        println!("no answers are here to screen by: the table of docs/quality.md stays as it is");
        return Ok(());
    }
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
    write_table(TABLE, &table)
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
            right: None,
            ttft_ms: 1.0,
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
