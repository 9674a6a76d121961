//! Tables of `kvc eval`.

use std::io::Write;

use kvlab::{Arm, Estimate, Gate, GateLimits, Question, QuestionKind, Score, Trial, Verdict};

use super::kinds;
use crate::error::Result;
use crate::report::table as styled;

/// The minimum number of draws for which intervals are shown. With two draws, most intervals would extend
/// beyond the possible range.
pub(super) const DRAWS: usize = 3;

/// Writes one row per arm, with a column for each kind of question. Costs are relative to full attention.
pub(super) fn table(out: &mut impl Write, scores: &[Score], draws: usize) -> Result<()> {
    let kinds = kinds(scores);
    let (answered, compared) =
        (scores.iter().any(|s| s.accuracy.is_some()), scores.iter().any(|s| s.divergence.is_some()));
    let bounded = scores.iter().any(|s| s.arm.cell.is_some() && s.paired.is_some());
    let ordered = scores.iter().any(|s| s.beyond.is_some());
    let mut header = vec!["positions, mode, recomputed".to_owned()];
    for kind in &kinds {
        header.extend(answered.then(|| kind.name().to_owned()));
        header.extend(bounded.then(|| format!("{}: lost", kind.name())));
        header.extend(compared.then(|| format!("{}: divergence", kind.name())));
        header.extend(ordered.then(|| format!("{}: beyond", kind.name())));
    }
    header.extend(["tokens recomputed", "operations", "TTFT"].map(str::to_owned));
    let mut table = styled(&header.iter().map(String::as_str).collect::<Vec<_>>());
    let names = distinct(scores.iter().map(|score| score.name.as_str()));
    let full = of(scores, names.first().copied().unwrap_or_default(), &kinds);
    for name in names {
        let row = of(scores, name, &kinds);
        let mean = |row: &[&Score], of: fn(&Score) -> f64| {
            row.iter().map(|score| of(score)).sum::<f64>() / row.len().max(1) as f64
        };
        let share = |of: fn(&Score) -> f64| format!("{:5.1} %", 100.0 * mean(&row, of) / mean(&full, of));
        let mut cells = vec![name.to_owned()];
        for score in &row {
            cells.extend(answered.then(|| accuracy(score, draws)));
            cells.extend(bounded.then(|| lost(score)));
            cells.extend(compared.then(|| divergence(score)));
            cells.extend(ordered.then(|| beyond(score)));
        }
        cells.push(format!("{:5.1} %", 100.0 * mean(&row, |score| score.recomputed)));
        cells.extend([share(|score| score.flops), share(|score| score.ttft_ms)]);
        table.add_row(cells);
    }
    writeln!(out, "{table}")?;
    let cold = scores.iter().filter(|score| score.arm.cell.is_some() && score.found < 1.0).count();
    if cold > 0 {
        writeln!(
            out,
            "\nIn {cold} cases, some documents were not cached and had to be computed, so the costs shown are higher \
             than with reuse."
        )?;
    }
    if bounded {
        writeln!(
            out,
            "\nLost, in points per hundred questions: the questions that only full attention answered correctly, minus \
             the questions that only this strategy answered correctly. In brackets: the smallest and the largest loss \
             that the answers do not rule out (one-sided 95 % confidence each)."
        )?;
    }
    for score in scores.iter().filter(|score| bounded && score.arm.cell.is_none()) {
        let (right, floor) = (score.accuracy.map_or(1.0, |right| right.mean), GateLimits::default().floor);
        if right < floor {
            writeln!(
                out,
                "\nFull attention answers only {:.0} % of the {} questions correctly, less than {:.0} %: a small loss \
                 says little about reuse.",
                100.0 * right,
                score.kind.name(),
                100.0 * floor
            )?;
        }
    }
    if compared {
        writeln!(
            out,
            "\nDivergence: the Kullback-Leibler divergence along full attention's own answer, in nats per token. In \
             brackets: the fraction of that answer's tokens that this strategy also chooses."
        )?;
    }
    if ordered {
        writeln!(
            out,
            "\nBeyond: how much further this strategy is from full attention than the first reuse strategy, question by \
             question; ± is a 95 % confidence interval. If the interval contains 0, more questions are needed to rank \
             the two strategies."
        )?;
    }
    if answered && draws >= DRAWS {
        writeln!(out, "\n± is a 95 % confidence interval over draws.")?;
    }
    writeln!(
        out,
        "\nThe operations of the prefill are counted, not measured. They and the time to first token (TTFT) are relative \
         to full attention."
    )?;
    Ok(())
}

fn accuracy(score: &Score, draws: usize) -> String {
    let Some(accuracy) = score.accuracy else { return String::new() };
    match accuracy.half_width.filter(|_| draws >= DRAWS) {
        Some(half) => format!("{:5.1} ± {:.1} %", 100.0 * accuracy.mean, 100.0 * half),
        None => format!("{:5.1} %", 100.0 * accuracy.mean),
    }
}

fn lost(score: &Score) -> String {
    let Some(paired) = score.paired.filter(|_| score.arm.cell.is_some()) else { return String::new() };
    paired.points()
}

fn divergence(score: &Score) -> String {
    let (Some(nats), Some(agreement)) = (score.divergence, score.agreement) else { return String::new() };
    match nats.half_width {
        Some(half) => format!("{:.3} ± {half:.3} ({:.3})", nats.mean, agreement.mean),
        None => format!("{:.3} ({:.3})", nats.mean, agreement.mean),
    }
}

fn beyond(score: &Score) -> String {
    match score.beyond {
        Some(Estimate { mean, half_width: Some(half) }) => format!("{mean:+.3} ± {half:.3}"),
        Some(Estimate { mean, half_width: None }) => format!("{mean:+.3}"),
        None => String::new(),
    }
}

/// Writes the answers to the first `count` questions of each kind. `questions[0]` holds the questions of draw
/// number `first`.
pub(super) fn answers(
    out: &mut impl Write,
    arms: &[Arm],
    (first, questions): (usize, &[Vec<Question>]),
    trials: &[Trial],
    count: usize,
) -> Result<()> {
    let asked = questions.iter().enumerate().flat_map(|(draw, all)| (0..all.len()).map(move |i| (draw, i)));
    let mut shown: Vec<QuestionKind> = Vec::new();
    for (draw, number) in asked {
        let question = &questions[draw][number];
        if shown.iter().filter(|kind| **kind == question.kind).count() >= count {
            continue;
        }
        shown.push(question.kind);
        let mut table = styled(&["strategy", "", "answer"]);
        for trial in trials.iter().filter(|trial| (trial.draw, trial.question) == (first + draw, number)) {
            let mark = match trial.right {
                Some(true) => "right",
                Some(false) => "wrong",
                None => "",
            };
            table.add_row([arms[trial.arm].name(), mark.to_owned(), format!("{:?}", trial.answer.trim())]);
        }
        let (kind, text, right) = (question.kind.name(), &question.question, &question.answer);
        writeln!(out, "{kind}: {text}\nright: {right}\n{table}\n")?;
    }
    Ok(())
}

fn of<'a>(scores: &'a [Score], name: &str, kinds: &[QuestionKind]) -> Vec<&'a Score> {
    kinds.iter().filter_map(|kind| scores.iter().find(|s| s.name == name && s.kind == *kind)).collect()
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen: Vec<&str> = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

/// Writes the checks and the verdict.
pub(super) fn gate(out: &mut impl Write, gate: &Gate) -> Result<()> {
    let mut table = styled(&["check", "measured", "at most", ""]);
    for check in &gate.checks {
        let verdict = match check.verdict {
            Verdict::Holds => "holds",
            Verdict::Fails => "FAILS",
            Verdict::CannotSay => "undecided",
        };
        table.add_row([
            check.what.clone(),
            format!("{:.2e}", check.measured),
            format!("{:.2e}", check.limit),
            verdict.to_owned(),
        ]);
    }
    writeln!(out, "{table}\n")?;
    writeln!(
        out,
        "{}",
        match gate.is_fit() {
            Some(true) => {
                "Reuse suits this model with these settings, for questions about one document. Questions that need \
                 several documents were not asked: `kvc eval` asks them."
            }
            Some(false) => {
                "Reuse does NOT suit this model with these settings: run `kvc eval` to see how much recomputation helps."
            }
            None =>
                "Reuse cannot be judged by these questions: ask more of them (--questions), or ask questions that the \
                 model can answer (--dataset, --texts).",
        }
    )?;
    Ok(())
}
