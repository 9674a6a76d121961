//! Scores: what the answers of an arm amount to.

use serde::{Deserialize, Serialize};

use super::statistics::median;
use super::{Arm, Estimate, Paired, QuestionKind};

/// The answer of one arm to one question.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The draw of the question, and its number there.
    pub draw: usize,
    /// The number of the question in its draw.
    pub question: usize,
    /// The kind of the question.
    pub kind: QuestionKind,
    /// The number of the arm.
    pub arm: usize,
    /// The answer; empty if only divergences were measured.
    pub answer: String,
    /// True if the answer is right; none if only divergences were measured.
    pub right: Option<bool>,
    /// The Kullback–Leibler divergence from full attention along its own answer, in nats a token, if it was measured.
    pub divergence: Option<f64>,
    /// The share of the tokens of full attention's answer that this arm would have chosen, if it was measured.
    pub agreement: Option<f64>,
    /// The share of document tokens that were recomputed; 1 under full attention.
    pub recomputed: f64,
    /// The share of document tokens that were found in the cache; 0 under full attention.
    pub found: f64,
    /// The counted floating-point operations of the prefill.
    pub flops: u64,
    /// The time to first token (TTFT), in milliseconds.
    pub ttft_ms: f64,
}

/// The score of an arm on one kind of question.
#[derive(Debug, Clone, Serialize)]
pub struct Score {
    /// The arm.
    pub arm: Arm,
    /// The arm's name.
    pub name: String,
    /// The kind of question.
    pub kind: QuestionKind,
    /// The number of questions asked, over all seeds.
    pub asked: usize,
    /// The share of right answers, over seeds; none if only divergences were measured.
    pub accuracy: Option<Estimate>,
    /// The answers beside those of full attention, question by question; none without full attention's.
    pub paired: Option<Paired>,
    /// The Kullback–Leibler divergence from full attention, in nats a token, over questions.
    pub divergence: Option<Estimate>,
    /// The share of full attention's tokens that this arm would have chosen, over questions.
    pub agreement: Option<Estimate>,
    /// The share of document tokens that were recomputed; 1 under full attention.
    pub recomputed: f64,
    /// The share of document tokens that were found in the cache; 0 under full attention.
    pub found: f64,
    /// The counted floating-point operations of the prefill, on average.
    pub flops: f64,
    /// The median time to first token (TTFT), in milliseconds.
    pub ttft_ms: f64,
}

/// Scores every arm on every kind of question that was asked.
pub(super) fn scores(arms: &[Arm], trials: &[Trial]) -> Vec<Score> {
    let full = arms.iter().position(|arm| arm.cell.is_none());
    let each = arms.iter().enumerate().flat_map(|(at, arm)| QuestionKind::ALL.map(|kind| (at, arm, kind)));
    each.filter_map(|(at, arm, kind)| score(arm, at, full, kind, trials)).collect()
}

fn score(arm: &Arm, at: usize, full: Option<usize>, kind: QuestionKind, trials: &[Trial]) -> Option<Score> {
    let of_arm = |wanted: usize| trials.iter().filter(move |t| t.arm == wanted && t.kind == kind);
    let all: Vec<&Trial> = of_arm(at).collect();
    if all.is_empty() {
        return None;
    }
    let mean = |of: fn(&Trial) -> f64| all.iter().map(|trial| of(trial)).sum::<f64>() / all.len() as f64;
    let over = |of: fn(&Trial) -> Option<f64>| {
        let values: Vec<f64> = all.iter().filter_map(|trial| of(trial)).collect();
        (!values.is_empty()).then(|| Estimate::of(&values))
    };
    let draws: std::collections::BTreeSet<usize> = all.iter().map(|trial| trial.draw).collect();
    let of_draw = |draw: usize| {
        let rights = all.iter().filter(|trial| trial.draw == draw).filter_map(|trial| trial.right);
        let rights: Vec<bool> = rights.collect();
        let right = rights.iter().filter(|right| **right).count();
        (!rights.is_empty()).then(|| right as f64 / rights.len() as f64)
    };
    let accuracies: Vec<f64> = draws.into_iter().filter_map(of_draw).collect();
    let pair = |trial: &&Trial| {
        let same = |other: &&Trial| (other.draw, other.question) == (trial.draw, trial.question);
        let full = of_arm(full?).find(same)?;
        Some((full.right?, trial.right?))
    };
    let pairs: Vec<(bool, bool)> = all.iter().filter_map(pair).collect();
    Some(Score {
        arm: *arm,
        name: arm.name(),
        kind,
        asked: all.len(),
        accuracy: (!accuracies.is_empty()).then(|| Estimate::of(&accuracies)),
        paired: (!pairs.is_empty()).then(|| Paired::of(pairs)),
        divergence: over(|trial| trial.divergence),
        agreement: over(|trial| trial.agreement),
        recomputed: mean(|trial| trial.recomputed),
        found: mean(|trial| trial.found),
        flops: mean(|trial| trial.flops as f64),
        ttft_ms: median(all.iter().map(|trial| trial.ttft_ms).collect()),
    })
}
