//! Tuning: searches for the cheapest kind of reuse whose loss compared with full attention can be bounded.
//!
//! A few questions measure the divergence of all candidates from full attention. A candidate is dropped if a
//! cheaper one with chunks of the same mode is certainly nearer to full attention. The remaining
//! candidates answer many questions, cheapest first, until the answers of one candidate bound its loss.

use kvengine::Engine;
use kvmodel::TextCodec;
use serde::Serialize;

use super::statistics::median;
use super::{
    Arm, Estimate, EvalOptions, Evaluation, Gate, GateLimits, Measure, Paired, Question, Trial, Verdict,
    evaluate,
};
use crate::error::{Error, Result};

/// Settings of a search.
#[derive(Debug, Clone)]
pub struct TuneOptions {
    /// The candidates, in any order.
    pub candidates: Vec<Arm>,
    /// The maximum loss, and the minimum share of questions that full attention must answer correctly.
    pub limits: GateLimits,
    /// The options for asking the questions.
    pub eval: EvalOptions,
}

/// The measurements of one candidate.
#[derive(Debug, Clone, Serialize)]
pub struct TuneRow {
    /// The candidate.
    pub arm: Arm,
    /// The candidate's name.
    pub name: String,
    /// The Kullback–Leibler divergence from full attention along full attention's own answers, in nats
    /// per token.
    pub divergence: f64,
    /// The operation count of the prefill, relative to full attention's.
    pub operations: f64,
    /// The median time to first token, relative to full attention's.
    pub ttft: f64,
    /// The divergence for each question.
    #[serde(skip)]
    pub each: Vec<f64>,
    /// The comparison with full attention's answers; `None` if the candidate was dropped or a cheaper one was
    /// chosen.
    pub paired: Option<Paired>,
    /// The verdict on the loss, according to the answers.
    pub verdict: Option<Verdict>,
}

/// The result of a search.
#[derive(Debug, Clone, Serialize)]
pub struct Tuning {
    /// The candidates, cheapest first.
    pub rows: Vec<TuneRow>,
    /// The index of the chosen row; `None` if full attention answers too few questions correctly to judge by.
    pub chosen: Option<usize>,
    /// The share of right answers under full attention.
    pub right: f64,
}

impl Tuning {
    /// Returns the chosen row.
    pub fn choice(&self) -> Option<&TuneRow> {
        self.chosen.and_then(|row| self.rows.get(row))
    }

    /// Searches for the cheapest kind of reuse whose answers bound the loss. The `screened` questions rank
    /// the candidates by divergence. The answers to the draws of `judged` questions are compared with full
    /// attention's. Calls `progress` with the number of questions asked so far and the maximum.
    ///
    /// If no candidate's loss is bounded, the candidate with the smallest upper bound is chosen. No candidate
    /// is chosen if full attention answers too few questions correctly to judge by, because divergence does
    /// not rank chunks of different modes.
    ///
    /// # Errors
    /// Returns [`Error::NothingToTune`] if there are no reuse candidates or no questions, and the errors of
    /// the engine.
    pub fn search(
        engine: &mut Engine,
        codec: &TextCodec,
        (screened, judged): (&[Question], &[Vec<Question>]),
        options: &TuneOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let asked: usize = judged.iter().map(Vec::len).sum();
        let mut arms = vec![Arm::full_attention()];
        arms.extend(options.candidates.iter().filter(|arm| arm.cell.is_some()));
        if arms.len() < 2 || asked == 0 || screened.is_empty() {
            return Err(Error::NothingToTune);
        }
        let screening = screened.len() * arms.len();
        let eval = EvalOptions { measure: Measure::Divergence, ..options.eval.clone() };
        let screened = [screened.to_vec()];
        let seen = evaluate(engine, codec, &screened, &arms, &eval, Vec::new(), &mut |_, done, _| {
            progress(done, screening + asked);
            Ok(())
        })?;
        let mut rows = rows(&arms, &seen);
        let nearest = front(&rows);
        let (total, mut done) = (screening + asked * (1 + nearest.len()), screening);
        let mut judge = Judge { engine, codec, judged, options, full: Vec::new() };
        for &row in &nearest {
            let (paired, verdict) = judge.judge(rows[row].arm, &mut || {
                done += 1;
                progress(done, total);
            })?;
            (rows[row].paired, rows[row].verdict) = (Some(paired), Some(verdict));
            // No candidate can be judged if full attention answers too few questions correctly.
            if verdict == Verdict::Holds || judge.right() < options.limits.floor {
                break;
            }
        }
        let right = judge.right();
        let chosen = (right >= options.limits.floor).then(|| choose(&rows));
        Ok(Self { rows, chosen, right })
    }
}

/// Returns one row per candidate, cheapest first.
fn rows(arms: &[Arm], seen: &Evaluation) -> Vec<TuneRow> {
    let of = |arm: usize, of: fn(&Trial) -> f64| -> Vec<f64> {
        seen.trials.iter().filter(|trial| trial.arm == arm).map(of).collect()
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let flops = |trial: &Trial| trial.flops as f64;
    let ttft = |trial: &Trial| trial.ttft_ms;
    let (all, first) = (mean(&of(0, flops)), median(of(0, ttft)));
    let row = |(at, arm): (usize, &Arm)| {
        let each = of(at, |trial| trial.divergence.unwrap_or(f64::NAN));
        TuneRow {
            arm: *arm,
            name: arm.name(),
            divergence: mean(&each),
            operations: mean(&of(at, flops)) / all,
            ttft: median(of(at, ttft)) / first,
            each,
            paired: None,
            verdict: None,
        }
    };
    let mut rows: Vec<TuneRow> = arms.iter().enumerate().skip(1).map(row).collect();
    rows.sort_by(|a, b| a.operations.total_cmp(&b.operations).then(a.divergence.total_cmp(&b.divergence)));
    rows
}

// Decision: docs/decisions/chunks.md#divergence-orders-strategies-within-a-mode
/// Returns the indices of the rows to ask. A row is left out if a cheaper row of the same mode is certainly
/// nearer to full attention.
fn front(rows: &[TuneRow]) -> Vec<usize> {
    let mode = |row: &TuneRow| row.arm.cell.map(|cell| cell.mode);
    let beaten = |at: usize| {
        let cheaper = rows[..at].iter().filter(|other| mode(other) == mode(&rows[at]));
        cheaper.into_iter().any(|other| is_nearer(&other.each, &rows[at].each))
    };
    (0..rows.len()).filter(|&at| !beaten(at)).collect()
}

/// Returns true if one candidate is certainly nearer to full attention than another, question by question:
/// the 95 % interval of the mean difference does not include 0.
fn is_nearer(one: &[f64], other: &[f64]) -> bool {
    let differences: Vec<f64> = one.iter().zip(other).map(|(one, other)| other - one).collect();
    let Estimate { mean, half_width } = Estimate::of(&differences);
    half_width.is_some_and(|half| mean > half)
}

/// Returns the index of the chosen row: the first row whose loss is bounded, or else the row with the
/// smallest upper bound.
fn choose(rows: &[TuneRow]) -> usize {
    if let Some(holds) = rows.iter().position(|row| row.verdict == Some(Verdict::Holds)) {
        return holds;
    }
    let badness = |row: &TuneRow| row.paired.map_or(f64::INFINITY, |paired| paired.at_most());
    let least = |&a: &usize, &b: &usize| badness(&rows[a]).total_cmp(&badness(&rows[b])).then(a.cmp(&b));
    (0..rows.len()).min_by(least).unwrap_or(0)
}

/// Compares candidates' answers with full attention's. Full attention is asked only once.
struct Judge<'a> {
    engine: &'a mut Engine,
    codec: &'a TextCodec,
    judged: &'a [Vec<Question>],
    options: &'a TuneOptions,
    /// Full attention's answers to the first draws.
    full: Vec<Vec<Trial>>,
}

impl Judge<'_> {
    fn ask(&mut self, arm: Arm, draw: usize, step: &mut dyn FnMut()) -> Result<Vec<Trial>> {
        let eval = EvalOptions {
            measure: Measure::Answers,
            first_draw: self.options.eval.first_draw + draw,
            ..self.options.eval.clone()
        };
        let questions = &self.judged[draw..=draw];
        let mut answered = |_: &Trial, _, _| {
            step();
            Ok(())
        };
        let (engine, codec) = (&mut *self.engine, self.codec);
        Ok(evaluate(engine, codec, questions, &[arm], &eval, Vec::new(), &mut answered)?.trials)
    }

    /// Returns the share of right answers among full attention's answers so far.
    fn right(&self) -> f64 {
        let all: Vec<bool> = self.full.iter().flatten().filter_map(|trial| trial.right).collect();
        all.iter().filter(|right| **right).count() as f64 / all.len().max(1) as f64
    }

    /// Asks a candidate draw by draw, until the answers show that its loss exceeds the limit or all draws
    /// have been asked.
    fn judge(&mut self, arm: Arm, step: &mut dyn FnMut()) -> Result<(Paired, Verdict)> {
        let mut trials: Vec<Trial> = Vec::new();
        let mut last = (Paired::default(), Verdict::CannotSay);
        for draw in 0..self.judged.len() {
            if self.full.len() == draw {
                let full = self.ask(Arm::full_attention(), draw, step)?;
                self.full.push(full);
            }
            let candidate = self.ask(arm, draw, step)?;
            trials.extend(self.full[draw].iter().cloned());
            trials.extend(candidate.into_iter().map(|trial| Trial { arm: 1, ..trial }));
            last = (Gate::pairs(&trials), Gate::of_answers(&trials, &self.options.limits).verdict);
            if last.1 == Verdict::Fails {
                break;
            }
        }
        Ok(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, operations: f64, divergence: f64) -> TuneRow {
        let arm: Arm = name.parse().unwrap();
        TuneRow {
            arm,
            name: arm.name(),
            divergence,
            operations,
            ttft: operations,
            each: [0.9, 1.0, 1.1].map(|share| share * divergence).into(),
            paired: None,
            verdict: None,
        }
    }

    fn some() -> Vec<TuneRow> {
        vec![
            row("overlapped,with-system,none", 0.05, 0.26),
            row("sequential,with-system,none", 0.06, 0.24),
            row("sequential,with-system,link:16", 0.15, 0.3),
            row("sequential,with-system,question:0.2", 0.3, 0.1),
        ]
    }

    #[test]
    fn a_row_farther_than_a_cheaper_one_of_its_mode_is_not_asked() {
        assert_eq!(front(&some()), [0, 1, 3]);
        let mut alone = some();
        alone.insert(3, row("sequential,alone,link:16", 0.2, 0.3));
        assert_eq!(front(&alone), [0, 1, 3, 4], "no other mode tells about it");
    }

    #[test]
    fn a_difference_that_may_be_chance_excludes_nothing() {
        let near = [0.1, 0.5, 0.1, 0.4];
        assert!(is_nearer(&near, &near.map(|x| x + 0.1)) && !is_nearer(&near, &near));
        assert!(!is_nearer(&near, &[0.4, 0.1, 0.5, 0.2]) && !is_nearer(&[0.1], &[9.0]), "too few to tell");
    }

    #[test]
    fn the_cheapest_that_holds_is_chosen_and_the_least_bound_where_none_does() {
        let mut rows = some();
        let judged = |row: &mut TuneRow, lost: usize, verdict: Verdict| {
            row.paired = Some(Paired { asked: 400, lost, gained: 2 });
            row.verdict = Some(verdict);
        };
        judged(&mut rows[0], 90, Verdict::Fails);
        judged(&mut rows[1], 60, Verdict::Fails);
        judged(&mut rows[3], 12, Verdict::CannotSay);
        assert_eq!(choose(&rows), 3);
        judged(&mut rows[1], 3, Verdict::Holds);
        assert_eq!(choose(&rows), 1);
    }
}
