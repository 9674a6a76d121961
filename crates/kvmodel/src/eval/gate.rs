//! The gate: whether reuse is fit for a model, by identities that must hold and a floor under its quality.

use kvchunk::{Recompute, ReuseCell};
use kvcore::{DType, KvFormat};
use serde::Serialize;

use super::{Arm, Question, QuestionKind, evaluate};
use crate::engine::{Engine, Generation, Request};
use crate::error::Result;
use crate::text::TextCodec;

/// How far results may be apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GateLimits {
    /// Largest difference of logits of computations that read the same stored KV, as a share of the logits'
    /// range.
    pub logits: f64,
    /// The same where one stores keys as rotated elsewhere: what a cache in fewer bits rounds, it rounds
    /// otherwise then.
    pub moved: f64,
    /// Largest loss of accuracy on local questions against full attention, as a share of all.
    pub accuracy: f64,
}

impl GateLimits {
    /// Limits for a cache in a format: the fewer bits, the more two ways to compute the same may differ.
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
    /// A thousandth of the range for both; one point.
    fn default() -> Self {
        Self { logits: 1e-3, moved: 1e-3, accuracy: 0.01 }
    }
}

/// One thing that must hold.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GateCheck {
    /// What must hold.
    pub what: String,
    /// What was measured.
    pub measured: f64,
    /// The most that it may be.
    pub limit: f64,
}

impl GateCheck {
    /// What was measured against what it may be, in words.
    pub fn words(&self) -> String {
        format!("{} (measured {:.2e}, at most {:.2e})", self.what, self.measured, self.limit)
    }

    /// Whether it holds. What is not a number does not.
    pub fn holds(&self) -> bool {
        self.measured <= self.limit
    }
}

/// What the gate found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gate {
    /// Everything that was checked.
    pub checks: Vec<GateCheck>,
}

impl Gate {
    /// Whether all checks hold: reuse in this cell is fit for this model.
    pub fn is_open(&self) -> bool {
        self.failing().next().is_none()
    }

    /// What does not hold.
    pub fn failing(&self) -> impl Iterator<Item = &GateCheck> {
        self.checks.iter().filter(|check| !check.holds())
    }

    /// Checks an engine: that reuse equals computing anew under the same mask, that recomputing everything
    /// equals full attention, that recomputing nothing changes nothing; and, of local questions, that reuse
    /// answers them as well as full attention.
    ///
    /// # Errors
    /// Of the engine.
    pub fn check(
        engine: &mut Engine,
        codec: &TextCodec,
        questions: &[Vec<Question>],
        cell: ReuseCell,
        limits: GateLimits,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let samples: Vec<&Question> = questions.iter().flatten().take(3).collect();
        let local: Vec<Vec<Question>> = questions
            .iter()
            .map(|seed| seed.iter().filter(|q| q.kind == QuestionKind::Local).cloned().collect())
            .collect();
        let mut checks = Vec::new();
        let identities: [(&str, ReuseCell, Recompute, Option<Recompute>); 4] = [
            ("reuse equals computing anew under the same mask", cell, Recompute::None, None),
            (
                "recomputing no token changes nothing",
                cell,
                Recompute::Link { tokens: 0 },
                Some(Recompute::None),
            ),
            ("recomputing every token is full attention", sequential(cell), Recompute::Full, None),
            (
                "linking whole documents is full attention",
                sequential(cell),
                Recompute::Link { tokens: usize::MAX },
                None,
            ),
        ];
        for (what, cell, recompute, against) in identities {
            let mut worst: f64 = 0.0;
            for question in &samples {
                worst = larger(worst, identity(engine, codec, question, cell, recompute, against)?);
            }
            let limit = if full_attention(recompute, against) { limits.moved } else { limits.logits };
            checks.push(GateCheck { what: what.to_owned(), measured: worst, limit });
        }
        let arms = [Arm::full_attention(), Arm::reuse(cell, Recompute::None)];
        let scores = evaluate(engine, codec, &local, &arms, progress)?;
        if let [full, reuse] = &scores[..] {
            let (measured, limit) = (full.accuracy.mean - reuse.accuracy.mean, limits.accuracy);
            let what = format!("{} local questions: loss of accuracy against full attention", full.asked);
            checks.push(GateCheck { what, measured, limit });
        } else {
            // Without any there is nothing to say of quality.
            let what = "no local question is there to compare accuracies with".to_owned();
            checks.push(GateCheck { what, measured: f64::NAN, limit: limits.accuracy });
        }
        Ok(Self { checks })
    }
}

/// Whether an identity is one with full attention.
fn full_attention(recompute: Recompute, against: Option<Recompute>) -> bool {
    against.is_none() && recompute != Recompute::None
}

/// The larger one; what is not a number is larger than any.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// The cell with the positions of an ordinary prompt.
fn sequential(cell: ReuseCell) -> ReuseCell {
    ReuseCell { strategy: kvchunk::PositionStrategy::Sequential, ..cell }
}

/// Difference of the logits of two ways to compute the same, as a share of their range. Without `against`:
/// reuse against no reuse, or against full attention where something is recomputed.
fn identity(
    engine: &mut Engine,
    codec: &TextCodec,
    question: &Question,
    cell: ReuseCell,
    recompute: Recompute,
    against: Option<Recompute>,
) -> Result<f64> {
    let order: Vec<usize> = (0..question.documents.len()).collect();
    let arm = Arm::reuse(cell, recompute);
    let mut ask = |arm: Arm, reuse: bool| -> Result<Generation> {
        let request = arm.request(question, &order, codec, engine.separator())?;
        let reuse = reuse && request.reuse;
        engine.generate(&Request { max_new_tokens: 1, keep_logits: true, reuse, ..request }, &mut ())
    };
    ask(Arm::reuse(cell, Recompute::None), true)?;
    let got = ask(arm, true)?;
    let expected = match against {
        Some(other) => ask(Arm::reuse(cell, other), true)?,
        None if full_attention(recompute, against) => ask(Arm::full_attention(), false)?,
        None => ask(arm, false)?,
    };
    let pairs = got.logits.iter().flatten().zip(expected.logits.iter().flatten());
    let gap = pairs.map(|(a, b)| f64::from((a - b).abs())).fold(0.0, larger);
    let all = expected.logits.iter().flatten().map(|&x| f64::from(x));
    let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), x| (l.min(x), h.max(x)));
    Ok(gap / (high - low).max(f64::MIN_POSITIVE))
}
