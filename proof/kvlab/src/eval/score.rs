//! The scores of arms, computed from their answers.

use serde::{Deserialize, Serialize};

use super::statistics::median;
use super::{Arm, Estimate, Paired, QuestionKind};

/// The answer of one arm to one question.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The index of the draw.
    pub draw: usize,
    /// The index of the question in its draw.
    pub question: usize,
    /// The kind of the question.
    pub kind: QuestionKind,
    /// The index of the arm.
    pub arm: usize,
    /// The answer; empty if only divergences were measured.
    pub answer: String,
    /// True if the answer is right; `None` if only divergences were measured.
    pub right: Option<bool>,
    /// The Kullback–Leibler divergence from full attention along full attention's own answer, in nats per
    /// token, if it was measured.
    pub divergence: Option<f64>,
    /// The share of the tokens in full attention's answer that this arm would have chosen, if it was
    /// measured.
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

/// The score of one arm for one kind of question.
#[derive(Debug, Clone, Serialize)]
pub struct Score {
    /// The arm.
    pub arm: Arm,
    /// The arm's name.
    pub name: String,
    /// The kind of question.
    pub kind: QuestionKind,
    /// The number of questions asked, over all draws.
    pub asked: usize,
    /// The share of right answers, averaged over draws; `None` if only divergences were measured.
    pub accuracy: Option<Estimate>,
    /// The comparison with full attention's answers, question by question; `None` if full attention was not
    /// asked.
    pub paired: Option<Paired>,
    /// The Kullback–Leibler divergence from full attention, in nats per token, averaged over questions.
    pub divergence: Option<Estimate>,
    /// The divergence minus the divergence of the first arm with reuse, averaged over questions; `None` for
    /// that arm and for full attention.
    pub beyond: Option<Estimate>,
    /// The share of full attention's tokens that this arm would have chosen, averaged over questions.
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
    let first = arms.iter().position(|arm| arm.cell.is_some());
    let each = arms.iter().enumerate().flat_map(|(at, arm)| QuestionKind::ALL.map(|kind| (at, arm, kind)));
    each.filter_map(|(at, arm, kind)| score((at, arm), (full, first), kind, trials)).collect()
}

/// Scores an arm. Compares it with full attention and with the first arm with reuse, if these arms were
/// asked.
fn score(
    (at, arm): (usize, &Arm),
    (full, first): (Option<usize>, Option<usize>),
    kind: QuestionKind,
    trials: &[Trial],
) -> Option<Score> {
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
    let in_arm = |arm: usize, trial: &Trial| {
        of_arm(arm).find(|other| (other.draw, other.question) == (trial.draw, trial.question))
    };
    let pair = |trial: &&Trial| Some((in_arm(full?, trial)?.right?, trial.right?));
    let pairs: Vec<(bool, bool)> = all.iter().filter_map(pair).collect();
    let first = first.filter(|first| *first != at && arm.cell.is_some());
    let farther = |trial: &&Trial| Some(trial.divergence? - in_arm(first?, trial)?.divergence?);
    let farther: Vec<f64> = all.iter().filter_map(farther).collect();
    Some(Score {
        arm: *arm,
        name: arm.name(),
        kind,
        asked: all.len(),
        accuracy: (!accuracies.is_empty()).then(|| Estimate::of(&accuracies)),
        paired: (!pairs.is_empty()).then(|| Paired::of(pairs)),
        divergence: over(|trial| trial.divergence),
        beyond: (!farther.is_empty()).then(|| Estimate::of(&farther)),
        agreement: over(|trial| trial.agreement),
        recomputed: mean(|trial| trial.recomputed),
        found: mean(|trial| trial.found),
        flops: mean(|trial| trial.flops as f64),
        ttft_ms: median(all.iter().map(|trial| trial.ttft_ms).collect()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_compared_with_the_first_way_question_by_question() {
        let names = ["full", "sequential,alone,none", "sequential,alone,link:4"];
        let arms = names.map(|name| name.parse::<Arm>().unwrap());
        let trial = |arm: usize, question: usize, divergence: f64| Trial {
            draw: 0,
            question,
            kind: QuestionKind::Local,
            arm,
            answer: String::new(),
            right: None,
            divergence: Some(divergence),
            agreement: Some(1.0),
            recomputed: 0.0,
            found: 1.0,
            flops: 1,
            ttft_ms: 1.0,
        };
        let of = |arm: usize, far: [f64; 2]| [trial(arm, 0, far[0]), trial(arm, 1, far[1])];
        let trials = [of(0, [0.0, 0.0]), of(1, [0.2, 0.8]), of(2, [0.1, 0.7])].concat();
        let scores = scores(&arms, &trials);
        assert_eq!((scores[0].beyond, scores[1].beyond), (None, None));
        let beyond = scores[2].beyond.unwrap();
        assert!((beyond.mean + 0.1).abs() < 1e-12 && beyond.half_width.unwrap() < 1e-12, "{beyond:?}");
        assert!(scores[2].divergence.unwrap().half_width.unwrap() > 1.0, "the questions differ by more");
    }
}
