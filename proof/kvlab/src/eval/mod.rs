//! Evaluation: compares answers under full attention, under reuse and with each recompute strategy, including
//! their costs.
//!
//! Every answer goes through the real cache. A first prompt caches the documents in another order, and later
//! prompts find them there. Reuse is never emulated with a mask.
//!
//! An [`Arm`] is one strategy for answering. [`evaluate`] asks every arm all questions. It measures the share
//! of right answers, or the divergence of each arm from full attention along full attention's own answer,
//! token by token. A few dozen prompts are enough to rank strategies by divergence, but even hundreds of
//! questions are not enough to rank them by their shares of right answers.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use kvchunk::{PositionStrategy, Recompute, ReuseCell};
use kvengine::{Engine, Generation, Request};
use kvmodel::{Observer, TextCodec};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::error::{Error, Result};

mod arm;
mod divergence;
mod gate;
mod grader;
mod paired;
mod question;
mod score;
mod statistics;
mod style;
mod texts;
mod tune;
mod world;

pub use arm::Arm;
use divergence::Divergence;
pub use gate::{Gate, GateCheck, GateLimits, Verdict};
pub use grader::Grader;
pub use paired::Paired;
pub use question::{Question, QuestionKind};
pub use score::{Score, Trial};
pub use statistics::Estimate;
pub use style::PromptStyle;
pub use texts::{TextForm, Texts};
pub use tune::{TuneOptions, TuneRow, Tuning};
pub use world::World;

/// The quantities that an evaluation measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Measure {
    /// The share of right answers.
    #[default]
    Answers,
    /// Divergence from full attention along full attention's own greedy answer. Needs an arm of full
    /// attention.
    Divergence,
    /// Both quantities.
    Both,
}

/// Settings of an evaluation.
#[derive(Debug, Clone, Default)]
pub struct EvalOptions {
    /// The form of the prompts.
    pub style: PromptStyle,
    /// The quantities to measure.
    pub measure: Measure,
    /// The maximum number of tokens per answer; by default a few more than the right answer has.
    pub answer_tokens: Option<usize>,
    /// True to complete each answer even if its grade is already decided.
    pub whole_answers: bool,
    /// The index of the first draw, which is the first list of questions. The index of each draw seeds the
    /// orders of its documents.
    pub first_draw: usize,
}

/// The result of an evaluation.
#[derive(Debug, Clone)]
pub struct Evaluation {
    /// A score for each arm and kind of question.
    pub scores: Vec<Score>,
    /// Every answer.
    pub trials: Vec<Trial>,
}

impl Evaluation {
    /// Scores answers that were given earlier.
    pub fn of(arms: &[Arm], trials: Vec<Trial>) -> Self {
        Self { scores: score::scores(arms, &trials), trials }
    }
}

/// Asks every arm every question. `questions` holds one list per draw. `known` holds answers that the same
/// arms gave to some of these questions earlier, with the same options; they are not asked for again. Calls
/// `answered` after each new answer, with the answer, the number of answers so far and the total.
///
/// # Errors
/// Returns the errors of the engine, for example if a prompt is too long for the model, the errors of the
/// chat template, and the first error of `answered`, which ends the evaluation.
pub fn evaluate(
    engine: &mut Engine,
    codec: &TextCodec,
    questions: &[Vec<Question>],
    arms: &[Arm],
    options: &EvalOptions,
    known: Vec<Trial>,
    answered: &mut dyn FnMut(&Trial, usize, usize) -> std::io::Result<()>,
) -> Result<Evaluation> {
    let total = arms.len() * questions.iter().map(Vec::len).sum::<usize>();
    let place = |trial: &Trial| (trial.draw, trial.question, trial.arm);
    let mut known: HashMap<_, Trial> = known.into_iter().map(|trial| (place(&trial), trial)).collect();
    let (mut trials, mut done) = (Vec::new(), known.len());
    for (draw, asked) in (options.first_draw..).zip(questions) {
        let mut rng = StdRng::seed_from_u64(draw as u64);
        for (number, question) in asked.iter().enumerate() {
            let mut turn = QuestionTurn::new(engine, codec, question, options, &mut rng)?;
            for (at, arm) in arms.iter().enumerate() {
                let trial = if let Some(trial) = known.remove(&(draw, number, at)) {
                    trial
                } else {
                    let trial = Trial { draw, question: number, arm: at, ..turn.ask(arm)? };
                    done += 1;
                    answered(&trial, done, total).map_err(Error::NotKept)?;
                    trial
                };
                trials.push(trial);
            }
        }
    }
    Ok(Evaluation::of(arms, trials))
}

/// One question, which the arms answer one after another.
struct QuestionTurn<'a> {
    engine: &'a mut Engine,
    codec: &'a TextCodec,
    question: &'a Question,
    options: &'a EvalOptions,
    /// The order of the documents in the prompt.
    order: Vec<usize>,
    /// The order in which the documents are first cached.
    elsewhere: Vec<usize>,
    /// The maximum number of new tokens. It is the same for all prompts, because with dynamic RoPE it
    /// affects the frequencies.
    max_new_tokens: usize,
    /// Full attention's own answer, and its logits.
    reference: Option<Generation>,
    /// The cells that the documents are cached for.
    warm: Vec<ReuseCell>,
}

/// Ends an answer as soon as no continuation can change its grade.
struct UntilDecided<'a> {
    codec: &'a TextCodec,
    question: &'a Question,
    tokens: Vec<u32>,
}

impl Observer for UntilDecided<'_> {
    fn token(&mut self, token: u32) -> ControlFlow<()> {
        self.tokens.push(token);
        ControlFlow::Continue(())
    }

    fn is_complete(&self) -> bool {
        let decided = |text: String| self.question.grader.is_decided(&text, &self.question.answer);
        self.codec.decode(&self.tokens).is_ok_and(decided)
    }
}

impl<'a> QuestionTurn<'a> {
    fn new(
        engine: &'a mut Engine,
        codec: &'a TextCodec,
        question: &'a Question,
        options: &'a EvalOptions,
        rng: &mut StdRng,
    ) -> Result<Self> {
        let order: Vec<usize> = (0..question.documents.len()).collect();
        let mut elsewhere = order.clone();
        if order.len() > 1 {
            elsewhere.rotate_left(rng.random_range(1..order.len()));
        }
        let right = codec.encode(&question.answer, false)?.len();
        let max_new_tokens = options.answer_tokens.unwrap_or_else(|| question.grader.room(right));
        let (reference, warm) = (None, Vec::new());
        Ok(Self { engine, codec, question, options, order, elsewhere, max_new_tokens, reference, warm })
    }

    fn request(&self, arm: &Arm, order: &[usize]) -> Result<Request> {
        let request = arm.request(self.question, order, self.codec, &self.options.style)?;
        Ok(Request { max_new_tokens: self.max_new_tokens, ..request })
    }

    // Decision: docs/decisions/tools.md#kvc-eval-warms-the-cache-with-another-order
    /// Caches the question's documents for an arm, in another order unless positions are absolute. Arms with the
    /// same cell share the cached documents. Does nothing for full attention.
    fn warm(&mut self, arm: &Arm) -> Result<()> {
        let Some(cell) = arm.cell.filter(|cell| !self.warm.contains(cell)) else { return Ok(()) };
        let moves = cell.strategy != PositionStrategy::Absolute;
        let warm = Arm { recompute: Recompute::None, ..*arm };
        let warm = self.request(&warm, if moves { &self.elsewhere } else { &self.order })?;
        // Only the prompt matters, not its answer.
        self.engine.generate(&Request { forced: Some([].into()), ..warm }, &mut ())?;
        self.warm.push(cell);
        Ok(())
    }

    /// Asks full attention once for all arms, and keeps its logits. Returns the answer's tokens.
    fn reference(&mut self) -> Result<Arc<[u32]>> {
        let answer = if let Some(known) = self.reference.take() {
            known
        } else {
            let request = self.request(&Arm::full_attention(), &self.order)?;
            self.engine.generate(&Request { keep_logits: true, ..request }, &mut ())?
        };
        let tokens = answer.tokens.as_slice().into();
        self.reference = Some(answer);
        Ok(tokens)
    }

    /// Asks one arm, with all documents cached. The caller fills in the trial's indices.
    fn ask(&mut self, arm: &Arm) -> Result<Trial> {
        let asks = self.options.measure != Measure::Divergence;
        let forced = match self.options.measure {
            Measure::Answers => None,
            _ => Some(self.reference()?),
        };
        self.warm(arm)?;
        let request = self.request(arm, &self.order)?;
        let following =
            forced.map(|forced| Request { forced: Some(forced), keep_logits: true, ..request.clone() });
        let first = following.as_ref().filter(|_| !asks).unwrap_or(&request);
        let generation = if asks && !self.options.whole_answers {
            let (codec, question) = (self.codec, self.question);
            self.engine.generate(first, &mut UntilDecided { codec, question, tokens: Vec::new() })?
        } else {
            self.engine.generate(first, &mut ())?
        };
        let followed = match &following {
            Some(following) if asks => Some(self.engine.generate(following, &mut ())?),
            _ => None,
        };
        let logits = &followed.as_ref().unwrap_or(&generation).logits;
        let divergence = self.reference.as_ref().and_then(|full| Divergence::of(&full.logits, logits));
        let answer = if asks { Some(self.codec.decode(&generation.tokens)?) } else { None };
        let tokens = |hits: bool| -> usize {
            generation.chunks.iter().filter(|chunk| chunk.hit || !hits).map(|chunk| chunk.tokens).sum()
        };
        let all = tokens(false).max(1) as f64;
        Ok(Trial {
            draw: 0,
            question: 0,
            kind: self.question.kind,
            arm: 0,
            right: answer.as_deref().map(|answer| self.question.accepts(answer)),
            answer: answer.unwrap_or_default(),
            divergence: divergence.map(|d| d.nats),
            agreement: divergence.map(|d| d.agreement),
            recomputed: match arm.cell {
                None => 1.0,
                Some(_) => generation.recomputed_tokens as f64 / all,
            },
            found: tokens(true) as f64 / all,
            flops: generation.prefill_flops,
            ttft_ms: generation.ttft.as_secs_f64() * 1e3,
        })
    }
}
