//! The screen: all ways to answer, ordered by their divergence from full attention's own answers to sixty prompts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use super::{Answer, Asked, QUALITY, ask, folder, plain, read, with_shares, write_table};
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
    "sequential, with-system, question:0.5",
    "sequential, with-system, question:0.2@0",
    "sequential, with-system, question:0.2@10",
    "sequential, with-system, question:0.2@25",
    "sequential, alone, question:0.2",
    "sequential, sink:4, question:0.2",
    "overlapped, with-system, question:0.2",
    "sequential, with-system, joint:0.2@1",
    "sequential, with-system, joint:0.2@5",
];

/// The way from which the distance of all others is measured, prompt by prompt.
const NEAR: &str = "sequential, with-system, question:0.2";

/// What `--quick` asks: the nearest of them last.
const QUICK: [&str; 3] = [
    "overlapped, with-system, none",
    "sequential, with-system, none",
    "sequential, with-system, question:0.2",
];

/// The draws, and the questions of each kind in a draw.
const SIZE: (usize, usize) = (5, 4);

/// What the answers of a way amount to.
#[derive(Clone, Default)]
struct Sum {
    asked: usize,
    divergence: f64,
    /// The divergence of each question.
    each: BTreeMap<(usize, usize), f64>,
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
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    for (answer, share) in with_shares(answers) {
        let (Some(divergence), Some(agreement)) = (answer.divergence, answer.agreement) else { continue };
        let sum = sums.entry(plain(&answer.name)).or_default();
        sum.asked += 1;
        sum.divergence += divergence;
        sum.agreement += agreement;
        sum.recomputed += answer.recomputed;
        sum.operations += share;
        sum.each.insert((answer.draw, answer.question), divergence);
    }
    for sum in sums.values_mut() {
        let asked = sum.asked as f64;
        for part in [&mut sum.divergence, &mut sum.agreement, &mut sum.recomputed, &mut sum.operations] {
            *part /= asked;
        }
    }
    sums
}

/// Returns how much farther from full attention a way is than another one, prompt by prompt: the mean, and half the width of its
/// 95 % confidence interval.
fn beyond(way: &Sum, other: &Sum) -> Option<(f64, f64)> {
    let differences: Vec<f64> =
        way.each.iter().filter_map(|(question, x)| Some(x - other.each.get(question)?)).collect();
    let n = differences.len() as f64;
    let mean = differences.iter().sum::<f64>() / n;
    let variance = differences.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (n > 1.0).then(|| (mean, 1.96 * (variance / n).sqrt()))
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
        let _ = write!(table, " {documents} documents | beyond `question:0.2` |");
    }
    let _ = writeln!(table, " tokens anew | operations |\n|---|{}---|---|", "---|".repeat(2 * there.len()));
    for arm in ARMS {
        let of: Vec<Option<&Sum>> = all.iter().map(|sums| sums.get(*arm)).collect();
        let Some(last) = of.iter().rev().copied().flatten().next() else { continue };
        let _ = write!(table, "| {arm} |");
        for (sum, sums) in of.iter().zip(&all) {
            match sum {
                Some(sum) => {
                    let _ = write!(table, " {:.3} ({:.3}) |", sum.divergence, sum.agreement);
                }
                None => table += " – |",
            }
            let near = sums.get(NEAR).filter(|_| *arm != NEAR);
            match sum.and_then(|sum| beyond(sum, near?)) {
                Some((mean, half)) => {
                    let _ = write!(table, " {mean:+.3} ± {half:.3} |");
                }
                None => table += " – |",
            }
        }
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let _ = writeln!(table, " {} | {} |", percent(last.recomputed), percent(last.operations));
    }
    write_table(QUALITY, TABLE, &table)
}

#[cfg(test)]
mod tests {
    use super::super::FULL;
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
        let sum = &sums["sequential, alone, blend:0.2@10"];
        assert_eq!(sum.asked, 2, "what full attention was not asked counts for nothing");
        assert!((sum.divergence - 0.2).abs() < 1e-12 && (sum.operations - 0.3).abs() < 1e-12);
        assert_eq!(sums["full attention"].operations, 1.0);
    }

    #[test]
    fn distances_between_ways_are_paired_by_question() {
        let of = |name, answers: &[(usize, f64)]| -> Sum {
            let answers: Vec<Answer> = answers
                .iter()
                .flat_map(|&(question, far)| {
                    [answer(FULL, question, 0.0, 1.0), answer(name, question, far, 1.0)]
                })
                .collect();
            sums(&answers)[name].clone()
        };
        let (near, far) =
            (of("a", &[(0, 0.1), (1, 0.5), (2, 0.2)]), of("b", &[(0, 0.2), (1, 0.6), (3, 9.0)]));
        let (mean, half) = beyond(&far, &near).unwrap();
        assert!((mean - 0.1).abs() < 1e-12 && half.abs() < 1e-12, "{mean} ± {half}");
        assert!(beyond(&of("c", &[(2, 1.0)]), &near).is_none(), "one question has no spread");
    }

    #[test]
    fn names_are_those_of_the_table() {
        assert_eq!(plain("a, b, random:0.2@0"), "a, b, random:0.2");
        assert_eq!(plain("a, b, question:0.2@0"), "a, b, question:0.2@0");
        assert_eq!(plain("a, b, blend:0.2@10:keys"), "a, b, blend:0.2@10:keys");
        assert!(QUICK.iter().chain([&NEAR]).all(|way| ARMS.contains(way)));
    }
}
