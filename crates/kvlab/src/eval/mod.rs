//! Evaluation: the share of right answers under full attention, under reuse and under each recompute
//! strategy, with the costs.
//!
//! Every answer goes through the real cache. Documents are cached first, by a prompt that has them in another
//! order, and are found after that. Nothing is emulated by a mask.
//!
//! An [`Arm`] is one way to answer. [`evaluate`] asks all questions in all arms, and returns a [`Score`] per
//! arm and kind of question, with confidence intervals over seeds.

use std::sync::Arc;
use std::time::Duration;

use kvchunk::{ContextScaling, PositionStrategy, Recompute, ReuseCell};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use crate::error::Result;
use kvmodel::TextCodec;
use kvmodel::{Engine, Request};

mod gate;
mod question;
mod statistics;
mod world;

pub use gate::{Gate, GateCheck, GateLimits};
pub use question::{Question, QuestionKind};
pub use statistics::Estimate;
pub use world::World;

/// One way to answer: a cell, a recompute strategy and a context scaling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Arm {
    /// The compute mode and position strategy of reuse; `None` for ordinary full attention.
    pub cell: Option<ReuseCell>,
    /// The strategy that chooses tokens to recompute.
    pub recompute: Recompute,
    /// The temperature and scale of the question's attention to documents.
    pub scaling: ContextScaling,
}

impl Arm {
    /// Creates the arm of ordinary full attention over the whole prompt, with which all other arms are
    /// compared.
    pub fn full_attention() -> Self {
        Self { cell: None, recompute: Recompute::None, scaling: ContextScaling::default() }
    }

    /// Creates an arm of reuse in a cell.
    pub fn reuse(cell: ReuseCell, recompute: Recompute) -> Self {
        Self { cell: Some(cell), recompute, scaling: ContextScaling::default() }
    }

    /// Returns the arm's name in tables.
    pub fn name(&self) -> String {
        let Some(cell) = self.cell else { return "full attention".to_owned() };
        let word = |value: serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let strategy = serde_json::to_value(cell.strategy).map(word).unwrap_or_default();
        let mode = serde_json::to_value(cell.mode).map(word).unwrap_or_default();
        let name = format!("{strategy}, {mode}, {}", self.recompute);
        if self.scaling.is_plain() {
            return name;
        }
        format!("{name}, T {} S {}", self.scaling.temperature, self.scaling.scale)
    }

    /// Creates a request for the answer to a chunked prompt.
    fn request(
        &self,
        question: &Question,
        order: &[usize],
        codec: &TextCodec,
        separator: &str,
    ) -> Result<Request> {
        let prompt = codec.prompt(&question.prompt(order, separator), separator, true)?;
        let mut request = Request::new(prompt);
        request.full_attention = self.cell.is_none();
        // Full attention computes its whole prompt. The prefixes of other arms would make it look faster.
        request.reuse = self.cell.is_some();
        request.cell = self.cell.unwrap_or_default();
        request.recompute = Arc::new(self.recompute);
        request.scaling = self.scaling;
        Ok(request)
    }
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
    /// The share of right answers, over seeds.
    pub accuracy: Estimate,
    /// The share of document tokens that were recomputed; 1 under full attention.
    pub recomputed: f64,
    /// The share of document tokens that were found in the cache; 0 under full attention.
    pub found: f64,
    /// The counted floating-point operations of the prefill, on average.
    pub flops: f64,
    /// The median time to first token (TTFT), in milliseconds.
    pub ttft_ms: f64,
}

/// The outcome of one question.
struct QuestionOutcome {
    right: bool,
    recomputed: f64,
    flops: u64,
    ttft: Duration,
    /// The share of the document tokens that were found.
    found: f64,
}

/// Asks the questions of every seed in every arm. `questions` has one list per seed. Calls `progress` with
/// the number of answers so far and in total.
///
/// # Errors
/// Returns the errors of the engine, such as that of a prompt that the model cannot take.
pub fn evaluate(
    engine: &mut Engine,
    codec: &TextCodec,
    questions: &[Vec<Question>],
    arms: &[Arm],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Score>> {
    let total = arms.len() * questions.iter().map(Vec::len).sum::<usize>();
    let mut done = 0;
    let mut scores = Vec::new();
    for arm in arms {
        let mut outcomes: Vec<Vec<(QuestionKind, QuestionOutcome)>> = Vec::new();
        for (seed, asked) in questions.iter().enumerate() {
            let mut rng = StdRng::seed_from_u64(seed as u64);
            let mut of_seed = Vec::new();
            for question in asked {
                of_seed.push((question.kind, ask(engine, codec, question, arm, &mut rng)?));
                done += 1;
                progress(done, total);
            }
            outcomes.push(of_seed);
        }
        for kind in QuestionKind::ALL {
            scores.extend(score(arm, kind, &outcomes));
        }
    }
    Ok(scores)
}

/// Answers one question, with all its documents cached.
fn ask(
    engine: &mut Engine,
    codec: &TextCodec,
    question: &Question,
    arm: &Arm,
    rng: &mut StdRng,
) -> Result<QuestionOutcome> {
    let order: Vec<usize> = (0..question.documents.len()).collect();
    // The limit is equal for both prompts, since it takes part in the regime of dynamic frequencies.
    let max_new_tokens = codec.encode(&question.answer, false)?.len() + 2;
    if let Some(cell) = arm.cell {
        let mut elsewhere = order.clone();
        if cell.strategy != PositionStrategy::Absolute && order.len() > 1 {
            elsewhere.rotate_left(rng.random_range(1..order.len()));
        }
        let warm = Arm { recompute: Recompute::None, ..*arm };
        let warm = warm.request(question, &elsewhere, codec, engine.separator())?;
        engine.generate(&Request { max_new_tokens, ..warm }, &mut ())?;
    }
    let request = Request { max_new_tokens, ..arm.request(question, &order, codec, engine.separator())? };
    let generation = engine.generate(&request, &mut ())?;
    let document_tokens: usize = generation.chunks.iter().map(|chunk| chunk.tokens).sum();
    let found: usize = generation.chunks.iter().filter(|chunk| chunk.hit).map(|chunk| chunk.tokens).sum();
    Ok(QuestionOutcome {
        found: found as f64 / document_tokens.max(1) as f64,
        right: question.accepts(&codec.decode(&generation.tokens)?),
        recomputed: match arm.cell {
            None => 1.0,
            Some(_) => generation.recomputed_tokens as f64 / document_tokens.max(1) as f64,
        },
        flops: generation.prefill_flops,
        ttft: generation.ttft,
    })
}

/// Scores an arm on a kind of question. Returns `None` if there was no question of this kind.
fn score(arm: &Arm, kind: QuestionKind, seeds: &[Vec<(QuestionKind, QuestionOutcome)>]) -> Option<Score> {
    let of_kind = |seed: &Vec<(QuestionKind, QuestionOutcome)>| -> Option<f64> {
        let rights: Vec<bool> = seed.iter().filter(|(k, _)| *k == kind).map(|(_, o)| o.right).collect();
        let right = rights.iter().filter(|right| **right).count();
        (!rights.is_empty()).then(|| right as f64 / rights.len() as f64)
    };
    let all: Vec<&QuestionOutcome> =
        seeds.iter().flatten().filter(|(k, _)| *k == kind).map(|(_, o)| o).collect();
    let mean = |of: fn(&QuestionOutcome) -> f64| all.iter().map(|o| of(o)).sum::<f64>() / all.len() as f64;
    let mut times: Vec<f64> = all.iter().map(|o| o.ttft.as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    let ttft_ms = *times.get(times.len() / 2)?;
    Some(Score {
        arm: *arm,
        name: arm.name(),
        kind,
        asked: all.len(),
        accuracy: Estimate::of(&seeds.iter().filter_map(of_kind).collect::<Vec<_>>()),
        recomputed: mean(|o| o.recomputed),
        found: mean(|o| o.found),
        flops: mean(|o| o.flops as f64),
        ttft_ms,
    })
}
