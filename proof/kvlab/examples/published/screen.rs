//! The screen: ranks all strategies by their divergence from full attention's own answers to sixty prompts.
//!
//! The results of each draw are kept in `proof/kvlab/tests/published`, and the table is made from them. An
//! interrupted run can be continued, even on another machine. If a strategy is added to the list, only
//! that strategy and full attention are asked again.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::{
    AnswerLine, EvalCall, FLOPS, FULL, Form, KEPT, QUALITY, SMOLLM2, ask, plain, program, read, with_full,
    write_table,
};
use xtask::published::folder;
use xtask::run::{Result, create_folder, read as read_text, root, write as write_text};

/// The command in the table's marker line.
const TABLE: &str = "cargo xtask published";

/// The plot that goes with the table.
const PLOT: &str = "docs/published.svg";

/// The numbers of documents per question to measure.
const DOCUMENTS: [usize; 2] = [2, 4];

/// The strategies that are compared with full attention, in table order: positions, mode, recomputation.
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
    "sequential, with-system, blend:0.3@1",
    "sequential, with-system, blend:0.5@1",
    "sequential, with-system, blend:0.2@5",
    "sequential, with-system, blend:0.1@10",
    "sequential, with-system, blend:0.2@10",
    "sequential, with-system, blend:0.2@10:keys",
    "sequential, with-system, blend:0.2@10:both",
    "sequential, with-system, blend:0.2@15",
    "sequential, alone, blend:0.2@1",
    "sequential, alone, blend:0.5@1",
    "sequential, alone, blend:0.2@10",
    "sequential, sink:4, blend:0.2@1",
    "sequential, with-system, question:0.05",
    "sequential, with-system, question:0.1",
    "sequential, with-system, question:0.2",
    "sequential, with-system, question:0.3",
    "sequential, with-system, question:0.5",
    "sequential, with-system, question:0.2@0",
    "sequential, with-system, question:0.2@20",
    "sequential, with-system, question:0.2@25",
    "sequential, alone, question:0.2",
    "sequential, sink:4, question:0.2",
    "overlapped, with-system, question:0.2",
    "sequential, with-system, joint:0.2@1",
    "sequential, with-system, joint:0.2@5",
];

/// The strategy that all others are measured against, prompt by prompt.
const NEAR: &str = "sequential, with-system, question:0.2";

/// The strategies of `--quick`. The last one must be nearest to full attention.
const QUICK: [&str; 3] = [
    "overlapped, with-system, none",
    "sequential, with-system, none",
    "sequential, with-system, question:0.2",
];

/// The number of draws.
const DRAWS: usize = 5;
/// The number of questions of each kind per draw.
const QUESTIONS: usize = 4;
/// The number of questions per draw, over all three kinds.
const PROMPTS: usize = 3 * QUESTIONS;

/// The settings that all calls share. Each call sets the documents, draws and questions.
const SCREEN: EvalCall = EvalCall {
    model: &SMOLLM2,
    form: Form::Firms,
    documents: 0,
    first: 0,
    draws: 0,
    questions: 0,
    local: false,
};

/// Means over one strategy's answers.
#[derive(Clone, Default)]
struct WaySum {
    divergence: f64,
    /// The divergence for each draw and question.
    each: BTreeMap<(usize, usize), f64>,
    agreement: f64,
    recomputed: f64,
    operations: f64,
}

/// The kept draws of questions about one number of documents.
#[derive(Serialize, Deserialize)]
struct KeptScreen {
    documents: usize,
    /// In the same order as [`ARMS`].
    ways: Vec<WayDraws>,
}

/// The kept divergences and costs of one strategy.
#[derive(Default, Serialize, Deserialize)]
struct WayDraws {
    name: String,
    /// The divergence of each question, draw by draw.
    divergence: Vec<f64>,
    /// The mean per draw, like the two shares below.
    agreement: Vec<f64>,
    recomputed: Vec<f64>,
    operations: Vec<f64>,
}

impl KeptScreen {
    fn new(documents: usize) -> Self {
        let way = |name: &&str| WayDraws { name: (*name).to_owned(), ..WayDraws::default() };
        Self { documents, ways: ARMS.iter().map(way).collect() }
    }

    /// Reads the kept draws of the current strategies.
    fn read(documents: usize) -> Result<Self> {
        let (path, mut now) = (Self::path(documents), Self::new(documents));
        if path.exists() {
            let text = read_text(&path)?;
            let kept: Self = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
            now.take(kept);
        }
        Ok(now)
    }

    /// Takes over the results of the strategies that still exist, by name.
    fn take(&mut self, kept: Self) {
        for way in kept.ways {
            if let Some(now) = self.ways.iter_mut().find(|now| now.name == way.name) {
                *now = way;
            }
        }
    }

    fn write(&self) -> Result {
        let path = Self::path(self.documents);
        let text = serde_json::to_string(self).map_err(|e| e.to_string())?;
        // One strategy per line.
        let text = text.replace("{\"name\"", "\n{\"name\"") + "\n";
        write_text(&path, &text)
    }

    fn path(documents: usize) -> PathBuf {
        root().join(KEPT).join(SMOLLM2.name).join(format!("screen-{documents}.json"))
    }

    /// Returns the number of draws that all strategies have answered.
    fn draws(&self) -> usize {
        self.ways.iter().map(WayDraws::draws).min().unwrap_or(0)
    }

    /// Returns the strategies that have not answered a draw.
    fn missing(&self, draw: usize) -> Vec<&'static str> {
        let missing = |(_, way): &(_, &WayDraws)| way.draws() <= draw;
        ARMS.iter().zip(&self.ways).filter(missing).map(|(arm, _)| *arm).collect()
    }

    /// Returns the answers in the format of `kvc eval`, after full attention's own. Costs and agreement are
    /// means over a draw.
    fn lines(&self) -> String {
        let mut text = String::new();
        let full = WayDraws {
            name: FULL.to_owned(),
            divergence: vec![0.0; self.draws() * PROMPTS],
            agreement: vec![1.0; self.draws()],
            recomputed: vec![1.0; self.draws()],
            operations: vec![1.0; self.draws()],
        };
        for way in [&full].into_iter().chain(&self.ways) {
            for (at, divergence) in way.divergence[..self.draws() * PROMPTS].iter().enumerate() {
                let (draw, question) = (at / PROMPTS, at % PROMPTS);
                text += &AnswerLine {
                    name: way.name.clone(),
                    draw,
                    question,
                    right: None,
                    divergence: Some(*divergence),
                    agreement: Some(way.agreement[draw]),
                    recomputed: way.recomputed[draw],
                    flops: way.operations[draw] * FLOPS,
                    ttft_ms: 0.0,
                }
                .line();
            }
        }
        text
    }

    /// Adds a draw's answers, for the strategies that are due for this draw.
    fn add(&mut self, draw: usize, answers: &[AnswerLine]) -> Result {
        let sums = sums(answers);
        for way in self.ways.iter_mut().filter(|way| way.draws() == draw) {
            let Some(sum) = sums.get(&way.name) else { continue };
            if sum.each.len() != PROMPTS {
                return Err(format!("{} has answered {} questions of {PROMPTS}", way.name, sum.each.len()));
            }
            way.divergence.extend(sum.each.values().map(|x| rounded(*x)));
            way.agreement.push(rounded(sum.agreement));
            way.recomputed.push(rounded(sum.recomputed));
            way.operations.push(rounded(sum.operations));
        }
        Ok(())
    }
}

impl WayDraws {
    fn draws(&self) -> usize {
        self.agreement.len()
    }
}

fn rounded(x: f64) -> f64 {
    (x * 1e5).round() / 1e5
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Asks all strategies the draws that they have not answered so far.
pub(super) fn run() -> Result {
    for documents in DOCUMENTS {
        loop {
            let kept = gather(documents)?;
            let draw = kept.draws();
            if draw == DRAWS {
                break;
            }
            let arms = kept.missing(draw);
            println!("{documents} documents, draw {} of {DRAWS}, {} ways", draw + 1, arms.len());
            let asked = EvalCall { documents, first: draw, draws: 1, questions: QUESTIONS, ..SCREEN };
            ask(&arms, asked, "divergence", &answers(documents, draw)?)?;
        }
    }
    Ok(())
}

/// Adds the results of draws whose answers exist, and returns all kept draws.
fn gather(documents: usize) -> Result<KeptScreen> {
    let mut kept = KeptScreen::read(documents)?;
    for draw in kept.draws()..DRAWS {
        let file = answers(documents, draw)?;
        if file.exists() {
            kept.add(draw, &read(&file)?)?;
            kept.write()?;
        }
    }
    Ok(kept)
}

/// Returns the file of a draw's answers. Creates its folder.
fn answers(documents: usize, draw: usize) -> Result<PathBuf> {
    Ok(place()?.join(format!("{documents}-{draw}.jsonl")))
}

/// Creates and returns the folder of the answers.
fn place() -> Result<PathBuf> {
    let folder = folder().join("screen");
    create_folder(&folder)?;
    Ok(folder)
}

/// Asks a few questions with three strategies. Fails unless recomputation guided by the question comes
/// nearest to full attention.
pub(super) fn quick() -> Result {
    let answers = folder().join("quick.jsonl");
    ask(&QUICK, EvalCall { documents: 2, draws: 2, questions: 2, ..SCREEN }, "divergence", &answers)?;
    let sums = sums(&read(&answers)?);
    let far = |name: &str| sums.get(name).map_or(f64::NAN, |sum| sum.divergence);
    let [nearest, others @ ..] = [QUICK[2], QUICK[1], QUICK[0]].map(far);
    println!(
        "divergence from full attention: {nearest:.3} by the question, {others:.3?} without recomputation"
    );
    let holds = others.iter().all(|other| nearest < 0.6 * other);
    if holds { Ok(()) } else { Err("the question does not choose well".to_owned()) }
}

/// Returns each strategy's means over its answers. Costs are relative to full attention's, question by
/// question.
fn sums(answers: &[AnswerLine]) -> BTreeMap<String, WaySum> {
    let mut sums: BTreeMap<String, WaySum> = BTreeMap::new();
    for (answer, full) in with_full(answers) {
        let (Some(divergence), Some(agreement)) = (answer.divergence, answer.agreement) else { continue };
        let sum = sums.entry(plain(&answer.name)).or_default();
        sum.divergence += divergence;
        sum.agreement += agreement;
        sum.recomputed += answer.recomputed;
        sum.operations += answer.flops / full.flops;
        sum.each.insert((answer.draw, answer.question), divergence);
    }
    for sum in sums.values_mut() {
        let asked = sum.each.len() as f64;
        for part in [&mut sum.divergence, &mut sum.agreement, &mut sum.recomputed, &mut sum.operations] {
            *part /= asked;
        }
    }
    sums
}

/// Returns the mean difference between two strategies' divergences, prompt by prompt, and half the width of
/// its 95 % confidence interval.
fn beyond(way: &[f64], other: &[f64]) -> Option<(f64, f64)> {
    let differences: Vec<f64> = way.iter().zip(other).map(|(x, y)| x - y).collect();
    let (n, mean) = (differences.len() as f64, mean(&differences));
    let variance = differences.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (n > 1.0).then(|| (mean, 1.96 * (variance / n).sqrt()))
}

/// Writes the table in docs/quality.md.
pub(super) fn write() -> Result {
    let mut all = DOCUMENTS.map(gather).into_iter().collect::<Result<Vec<_>>>()?;
    all.retain(|kept| kept.draws() > 0);
    if all.is_empty() {
        println!("there are no stored answers to screen; the table in docs/quality.md is unchanged");
        return Ok(());
    }
    if let Some(most) = all.last() {
        plot(most)?;
    }
    write_table(QUALITY, TABLE, &table(&all))
}

/// Plots divergence against operations with `kvc eval`, from the kept answers.
fn plot(kept: &KeptScreen) -> Result {
    let file = place()?.join(format!("kept-{}.jsonl", kept.documents));
    write_text(&file, &kept.lines())?;
    let mut command = Command::new(program());
    command.args(["eval", "--json", "--plot"]).arg(root().join(PLOT)).arg("--read").arg(file);
    let output = command.output().map_err(|e| format!("`kvc eval` cannot be run: {e}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("`kvc eval` says {said}")) }
}

/// Formats the table. Tokens and operations are shown for the largest number of documents.
fn table(all: &[KeptScreen]) -> String {
    let mut table = String::from("| positions, mode, recomputed |");
    for kept in all {
        let prompts = kept.draws() * PROMPTS;
        let _ = write!(table, " {} documents, {prompts} prompts | beyond `question:0.2` |", kept.documents);
    }
    let _ =
        writeln!(table, " tokens recomputed | operations |\n|---|{}---|---|", "---|".repeat(2 * all.len()));
    for (i, arm) in ARMS.iter().enumerate() {
        let _ = write!(table, "| {arm} |");
        for kept in all {
            let (draws, way) = (kept.draws(), &kept.ways[i]);
            let far = |way: &'_ WayDraws| way.divergence[..draws * PROMPTS].to_vec();
            let _ = write!(table, " {:.3} ({:.3}) |", mean(&far(way)), mean(&way.agreement[..draws]));
            let near = kept.ways.iter().find(|near| near.name == NEAR && *arm != NEAR);
            match near.and_then(|near| beyond(&far(way), &far(near))) {
                Some((mean, half)) => {
                    let _ = write!(table, " {mean:+.3} ± {half:.3} |");
                }
                None => table += " – |",
            }
        }
        if let Some(last) = all.last() {
            let percent = |shares: &[f64]| format!("{:.0} %", 100.0 * mean(&shares[..last.draws()]));
            let way = &last.ways[i];
            let _ = writeln!(table, " {} | {} |", percent(&way.recomputed), percent(&way.operations));
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(name: &str, question: usize, divergence: f64, flops: f64) -> AnswerLine {
        AnswerLine {
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
        assert_eq!(sum.each.len(), 2, "what full attention was not asked counts for nothing");
        assert!((sum.divergence - 0.2).abs() < 1e-12 && (sum.operations - 0.3).abs() < 1e-12);
        assert_eq!(sums["full attention"].operations, 1.0);
    }

    #[test]
    fn distances_between_ways_are_paired_by_question() {
        let (mean, half) = beyond(&[0.2, 0.6], &[0.1, 0.5]).unwrap();
        assert!((mean - 0.1).abs() < 1e-12 && half.abs() < 1e-12, "{mean} ± {half}");
        assert!(beyond(&[1.0], &[0.5]).is_none(), "one question has no spread");
    }

    #[test]
    fn draws_are_kept_in_order_and_none_by_half() {
        let draw = |far: f64| -> Vec<AnswerLine> {
            let ways = ARMS.iter().flat_map(|arm| (0..PROMPTS).map(move |i| answer(arm, i, far, 50.0)));
            (0..PROMPTS).map(|i| answer(FULL, i, 0.0, 100.0)).chain(ways).collect()
        };
        let mut kept = KeptScreen::new(2);
        kept.add(0, &draw(0.25)).unwrap();
        kept.add(1, &draw(0.5)).unwrap();
        assert_eq!((kept.draws(), kept.ways[3].divergence.len()), (2, 2 * PROMPTS));
        let text = table(&[kept]);
        assert!(
            text.contains("2 documents, 24 prompts")
                && text.contains("| 0.375 (0.625) | +0.000 ± 0.000 | 50 % | 50 % |")
        );
        assert!(
            KeptScreen::new(2).add(0, &draw(0.25)[1..]).is_err(),
            "a question that full attention was not asked"
        );
    }

    #[test]
    fn a_new_strategy_is_asked_alone() {
        let draw = |arms: &[&str], far: f64| -> Vec<AnswerLine> {
            let of = |name: &str| (0..PROMPTS).map(|i| answer(name, i, far, 50.0)).collect::<Vec<_>>();
            [FULL].iter().chain(arms).flat_map(|name| of(name)).collect()
        };
        let (new, old) = (ARMS[2], [&ARMS[..2], &ARMS[3..]].concat());
        let mut kept = KeptScreen::new(2);
        kept.add(0, &draw(&old, 0.25)).unwrap();
        kept.add(1, &draw(&old, 0.25)).unwrap();
        assert_eq!((kept.draws(), kept.missing(0)), (0, vec![new]));
        kept.add(0, &draw(ARMS, 0.5)).unwrap();
        let mut again = KeptScreen::new(2);
        again.take(kept);
        assert_eq!((again.draws(), again.missing(1)), (1, vec![new]), "kept by name");
        let text = table(&[again]);
        assert!(text.contains("12 prompts") && text.contains("| 0.500 (0.500) |"));
        assert_eq!(text.matches("| 0.250 (0.750) |").count(), old.len(), "what was asked before stays");
    }

    #[test]
    fn kept_draws_are_whole() {
        for documents in DOCUMENTS {
            let kept = KeptScreen::read(documents).unwrap();
            let whole =
                |way: &WayDraws| way.divergence.len() == way.draws() * PROMPTS && way.draws() <= DRAWS;
            assert!(kept.ways.iter().all(whole), "{documents} documents");
            assert!(kept.draws() > 0, "{documents} documents: nothing is kept");
        }
    }

    #[test]
    fn the_page_shows_the_kept_draws() {
        let kept = DOCUMENTS.map(|documents| KeptScreen::read(documents).unwrap());
        let page = include_str!("../../../../docs/quality.md");
        let written = "`cargo xtask published --table` writes it";
        assert_eq!(xtask::page::table(page, TABLE), Some(table(&kept).trim()), "{written}");
    }

    #[test]
    fn names_are_those_of_the_table() {
        assert_eq!(plain("a, b, random:0.2@0"), "a, b, random:0.2");
        assert_eq!(plain("a, b, question:0.2@0"), "a, b, question:0.2@0");
        assert_eq!(plain("a, b, blend:0.2@10:keys"), "a, b, blend:0.2@10:keys");
        assert!(QUICK.iter().chain([&NEAR]).all(|way| ARMS.contains(way)));
    }
}
