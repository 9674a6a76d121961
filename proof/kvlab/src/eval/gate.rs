//! The gate decides whether reuse is fit for a model. It checks identities that must hold, and a bound on
//! the loss of accuracy.

use kvchunk::{DeviationOf, PositionStrategy, Recompute, Reuse, ReuseCell};
use kvcore::{DType, KvFormat};
use serde::Serialize;

use super::{Arm, EvalOptions, Measure, Paired, PromptStyle, Question, QuestionKind, Trial, evaluate};
use crate::error::Result;
use kvengine::{Engine, Generation, Request};
use kvmodel::TextCodec;

/// The limits that the checks of a [`Gate`] apply.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GateLimits {
    /// The maximum difference between logits of two computations that read the same stored KV, relative to
    /// the logits' range.
    pub logits: f64,
    /// The maximum difference between logits if one computation stores keys that were rotated for other
    /// positions, relative to the logits' range. A cache with fewer bits rounds such keys differently.
    pub moved: f64,
    /// The maximum loss of accuracy on local questions compared with full attention, as a share of all
    /// questions.
    pub accuracy: f64,
    /// The minimum share of local questions that full attention must answer correctly for the gate to pass.
    /// Below it, the gate can still fail; otherwise it cannot say.
    pub floor: f64,
}

impl GateLimits {
    /// Returns the limits for a cache format. With fewer bits, two computations of the same result may
    /// differ more.
    pub fn of(format: KvFormat) -> Self {
        let moved = match format {
            KvFormat::Dense(DType::F32) => 1e-3,
            KvFormat::Dense(_) => 1e-2,
            _ => 0.1,
        };
        Self { moved, ..Self::default() }
    }
}

impl Default for GateLimits {
    /// Returns a thousandth of the range for both differences, two percentage points of accuracy, and half
    /// the questions as the floor.
    fn default() -> Self {
        Self { logits: 1e-3, moved: 1e-3, accuracy: 0.02, floor: 0.5 }
    }
}

/// The verdict of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The claim holds.
    Holds,
    /// The claim is refuted.
    Fails,
    /// The data neither confirm nor refute the claim.
    CannotSay,
}

/// One check of the gate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GateCheck {
    /// The claim that must hold.
    pub what: String,
    /// The measured value. For a loss of accuracy, the largest loss that the answers do not refute.
    pub measured: f64,
    /// The maximum allowed value.
    pub limit: f64,
    /// The verdict.
    pub verdict: Verdict,
}

impl GateCheck {
    /// Checks that a difference is within a limit. NaN is never within it.
    fn of(what: &str, measured: f64, limit: f64) -> Self {
        let verdict = if measured <= limit { Verdict::Holds } else { Verdict::Fails };
        Self { what: what.to_owned(), measured, limit, verdict }
    }

    /// Checks the number of right answers that are lost compared with full attention, which answers the
    /// share `right` of the questions correctly. The floor matters only if the answers do not refute the
    /// claim.
    fn of_answers(paired: Paired, right: f64, limits: &GateLimits) -> Self {
        let (asked, limit) = (paired.asked, limits.accuracy);
        let points = |share: f64| format!("{:.1}", 100.0 * share);
        let check = |what, measured, verdict| Self { what, measured, limit, verdict };
        let lost = format!(
            "{asked} local questions: {} points lost compared with full attention",
            points(paired.loss())
        );
        let bounds = format!(
            "at least {} and at most {} (95 % confidence each)",
            points(paired.at_least()),
            points(paired.at_most())
        );
        if paired.at_least() > limit {
            return check(format!("{lost}, {bounds}"), paired.at_most(), Verdict::Fails);
        }
        if right < limits.floor {
            let what = format!(
                "full attention answers {} % of {asked} local questions correctly, too few to judge a loss (at least {} \
                 % are needed)",
                points(right),
                points(limits.floor)
            );
            return check(what, f64::NAN, Verdict::CannotSay);
        }
        if paired.at_most() <= limit {
            return check(format!("{lost}, {bounds}"), paired.at_most(), Verdict::Holds);
        }
        let more = match paired.needed(limit) {
            Some(needed) => {
                format!("about {} more questions are needed to decide", needed.saturating_sub(asked).max(1))
            }
            None => "more questions like these would not decide it".to_owned(),
        };
        check(format!("{lost}, {bounds}; {more}"), paired.at_most(), Verdict::CannotSay)
    }

    /// Describes the claim, with the measured and the allowed value.
    pub fn words(&self) -> String {
        format!("{} (measured {:.2e}, at most {:.2e})", self.what, self.measured, self.limit)
    }

    /// Returns true if the check holds.
    pub fn holds(&self) -> bool {
        self.verdict == Verdict::Holds
    }
}

/// The result of the gate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gate {
    /// All checks.
    pub checks: Vec<GateCheck>,
}

impl Gate {
    /// Returns true if all checks hold: reuse in this cell is fit for this model.
    pub fn is_open(&self) -> bool {
        self.failing().next().is_none()
    }

    /// Returns whether reuse in this cell is fit for this model, or `None` if no check fails but at least one
    /// check could not be decided.
    pub fn is_fit(&self) -> Option<bool> {
        let refuted = self.checks.iter().any(|check| check.verdict == Verdict::Fails);
        (refuted || self.is_open()).then_some(!refuted)
    }

    /// Returns the checks that do not hold.
    pub fn failing(&self) -> impl Iterator<Item = &GateCheck> {
        self.checks.iter().filter(|check| !check.holds())
    }

    /// Checks that all of these hold on an engine with this kind of reuse:
    ///
    /// - Reuse equals a computation from scratch under the same mask.
    /// - Recomputing all tokens by any strategy equals full attention at the positions of an ordinary prompt.
    ///   At the cell's own positions, all strategies equal each other.
    /// - Recomputing no tokens changes nothing.
    /// - The loss of right answers to local questions, compared with full attention, is bounded.
    ///
    /// Documents are cached in one order and used in another, unless their positions are part of their cache
    /// keys.
    ///
    /// # Errors
    /// Returns the errors of the engine.
    pub fn check(
        engine: &mut Engine,
        codec: &TextCodec,
        questions: &[Vec<Question>],
        way: Reuse,
        limits: GateLimits,
        options: &EvalOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let samples: Vec<&Question> = questions.iter().flatten().take(3).collect();
        let local: Vec<Vec<Question>> = questions
            .iter()
            .map(|seed| seed.iter().filter(|q| q.kind == QuestionKind::Local).cloned().collect())
            .collect();
        let mut checks = Vec::new();
        for identity in identities(way.cell, engine.model().config().num_layers()) {
            let mut worst: f64 = 0.0;
            for question in &samples {
                worst = larger(worst, identity.measure(engine, codec, question, &options.style)?);
            }
            let limit = if identity.recomputes() { limits.moved } else { limits.logits };
            checks.push(GateCheck::of(identity.what, worst, limit));
        }
        let arms = [Arm::full_attention(), way.into()];
        let options = EvalOptions { measure: Measure::Answers, ..options.clone() };
        let evaluation =
            evaluate(engine, codec, &local, &arms, &options, Vec::new(), &mut |_, done, total| {
                progress(done, total);
                Ok(())
            })?;
        checks.push(Self::of_answers(&evaluation.trials, &limits));
        Ok(Self { checks })
    }

    /// Pairs the answers of two arms, full attention first, in the order of the trials.
    pub fn pairs(trials: &[Trial]) -> Paired {
        Paired::of(rights(trials, 0).zip(rights(trials, 1)))
    }

    /// Judges the answers of two arms. Full attention must come first.
    pub fn of_answers(trials: &[Trial], limits: &GateLimits) -> GateCheck {
        let paired = Self::pairs(trials);
        if paired.asked == 0 {
            return GateCheck {
                what: "there are no local questions to compare answers to".to_owned(),
                measured: f64::NAN,
                limit: limits.accuracy,
                verdict: Verdict::CannotSay,
            };
        }
        let right = rights(trials, 0).filter(|right| *right).count() as f64 / paired.asked as f64;
        GateCheck::of_answers(paired, right, limits)
    }
}

/// Returns the grades of an arm's answers, in the order of the trials.
fn rights(trials: &[Trial], arm: usize) -> impl Iterator<Item = bool> {
    trials.iter().filter(move |trial| trial.arm == arm).filter_map(|trial| trial.right)
}

/// Two computations of the same result, which must agree.
#[derive(Debug, Clone, Copy)]
struct Identity {
    what: &'static str,
    cell: ReuseCell,
    recompute: Recompute,
    against: Against,
}

/// The second computation in an identity.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Against {
    /// The first computation, but without reuse.
    NoReuse,
    /// Full attention over the whole prompt.
    FullAttention,
    /// Another strategy in the same cell.
    Strategy(Recompute),
}

/// Returns the identities that must hold in a cell of a model with `layers` layers.
fn identities(cell: ReuseCell, layers: usize) -> Vec<Identity> {
    let of = DeviationOf::default();
    let blend = |share| Recompute::Blend { share, layer: 0, of };
    // A share just below 1 is rounded up to every token, but unlike 1 it still computes the evidence.
    let almost = 1.0 - f64::EPSILON;
    let middle = (layers > 1).then_some((layers / 2).max(1));
    let through = middle.map(|layer| Recompute::Blend { share: almost, layer, of });
    let question = Recompute::Question { share: almost, from: None };
    let joint = Recompute::Joint { share: almost, layer: middle.unwrap_or(0), of };
    let whole = Recompute::Link { tokens: usize::MAX };
    let none = |what, recompute| (what, cell, recompute, Against::Strategy(Recompute::None));
    let overlapped = cell.strategy == PositionStrategy::Overlapped;
    let strategy = if overlapped { PositionStrategy::Sequential } else { cell.strategy };
    let ordinary = ReuseCell { strategy, ..cell };
    let full = |what, recompute| (what, ordinary, recompute, Against::FullAttention);
    let mut all = vec![
        ("reuse equals computing from scratch under the same mask", cell, Recompute::None, Against::NoReuse),
        none("recomputing no token changes nothing", Recompute::Link { tokens: 0 }),
        none("blending no token changes nothing", blend(0.0)),
        full("recomputing every token equals full attention", Recompute::Full),
        full("linking whole documents equals full attention", whole),
        full("blending every token equals full attention", blend(1.0)),
        full("recomputing every token, chosen by the question's attention, equals full attention", question),
        full("recomputing every token, chosen by attention and deviation, equals full attention", joint),
    ];
    all.extend(
        through.map(|blend| full("blending every token at a checkpoint equals full attention", blend)),
    );
    if overlapped {
        let itself = |what, recompute| (what, cell, recompute, Against::Strategy(Recompute::Full));
        all.push(itself("blending every token equals recomputing it, with these settings", blend(1.0)));
        let what = "blending every token at a checkpoint equals recomputing it, with these settings";
        all.extend(through.map(|blend| itself(what, blend)));
    }
    let identity = |(what, cell, recompute, against)| Identity { what, cell, recompute, against };
    all.into_iter().map(identity).collect()
}

/// Returns the larger of two numbers. NaN counts as larger than any number.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

impl Identity {
    /// Returns true if the second computation computes keys and values instead of reading the stored
    /// ones.
    fn recomputes(&self) -> bool {
        matches!(self.against, Against::FullAttention | Against::Strategy(Recompute::Full))
    }

    /// Measures the difference between the two computations' logits, relative to the logits' range.
    fn measure(
        &self,
        engine: &mut Engine,
        codec: &TextCodec,
        question: &Question,
        style: &PromptStyle,
    ) -> Result<f64> {
        let order: Vec<usize> = (0..question.documents.len()).collect();
        let mut elsewhere = order.clone();
        if self.cell.strategy != PositionStrategy::Absolute && order.len() > 1 {
            elsewhere.rotate_left(1);
        }
        let mut ask = |arm: Arm, order: &[usize], reuse: bool| -> Result<Generation> {
            let request = arm.request(question, order, codec, style)?;
            let reuse = reuse && request.reuse;
            Ok(engine
                .generate(&Request { max_new_tokens: 1, keep_logits: true, reuse, ..request }, &mut ())?)
        };
        let arm = Arm::reuse(self.cell, self.recompute);
        ask(Arm::reuse(self.cell, Recompute::None), &elsewhere, true)?;
        let got = ask(arm, &order, true)?;
        let expected = match self.against {
            Against::NoReuse => ask(arm, &order, false)?,
            Against::FullAttention => ask(Arm::full_attention(), &order, false)?,
            Against::Strategy(other) => ask(Arm::reuse(self.cell, other), &order, true)?,
        };
        let pairs = got.logits.iter().flatten().zip(expected.logits.iter().flatten());
        let gap = pairs.map(|(a, b)| f64::from((a - b).abs())).fold(0.0, larger);
        let all = expected.logits.iter().flatten().map(|&x| f64::from(x));
        let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), x| (l.min(x), h.max(x)));
        Ok(gap / (high - low).max(f64::MIN_POSITIVE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_asked_for_itself_and_for_both_ends_of_a_blend() {
        for cell in ReuseCell::ALL {
            for layers in 1..4 {
                let all = identities(cell, layers);
                let checkpoints = usize::from(layers > 1);
                let overlapped = usize::from(cell.strategy == PositionStrategy::Overlapped);
                let expected = 8 + checkpoints + overlapped * (1 + checkpoints);
                assert_eq!(all.len(), expected, "{cell:?}, {layers} layers");
                let elsewhere = all.iter().filter(|identity| identity.cell != cell).count();
                assert_eq!(elsewhere, overlapped * (5 + checkpoints), "{cell:?}, {layers} layers");
                for identity in &all {
                    let Recompute::Blend { share, layer, .. } = identity.recompute else { continue };
                    assert!(layer < layers, "{identity:?}");
                    assert_eq!(layer > 0, share > 0.0 && share < 1.0, "{identity:?}");
                }
            }
        }
    }
}
