//! Time to first token of one prompt: cold, with all chunks cached, without reuse, and the floor, which is
//! the question alone after the same KV.

use std::fmt;
use std::time::Duration;

use kvchunk::{ChunkedPrompt, PositionStrategy, ReuseCell};
use serde::Serialize;

use super::{Popularity, RagWorkload};
use crate::error::Result;
use kvmodel::PromptTokens;
use kvmodel::{Engine, Request};

/// A time beside the one that it is compared with.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TtftRow {
    /// What was measured.
    pub what: &'static str,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Its time.
    pub took: Duration,
    /// What it is compared with.
    pub limit: &'static str,
    /// That one's time.
    pub limit_took: Duration,
    /// What is asked of this row, if anything is.
    pub target: Option<TtftTarget>,
}

impl TtftRow {
    /// How many times as fast as the limit.
    pub fn ratio(&self) -> f64 {
        self.limit_took.as_secs_f64() / self.took.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Whether it reaches its target, if it has one.
    pub fn is_met(&self) -> Option<bool> {
        self.target.map(|target| match target {
            TtftTarget::TimesAsFast(least) => self.ratio() >= least,
            TtftTarget::TimesAsLong(most) => self.ratio() * most >= 1.0,
        })
    }
}

/// What a time is asked to be, beside the one that it is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TtftTarget {
    /// At least so many times as fast.
    TimesAsFast(f64),
    /// At most so many times as long.
    TimesAsLong(f64),
}

impl fmt::Display for TtftTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimesAsFast(least) => write!(f, "at least {least} times as fast"),
            Self::TimesAsLong(most) => write!(f, "at most {most} times as long"),
        }
    }
}

/// Repetitions of what is short; the best counts.
const REPETITIONS: usize = 7;

/// What a prompt whose chunks are all cached is asked to be beside its full prefill, and beside its question alone.
const TARGETS: [TtftTarget; 2] = [TtftTarget::TimesAsFast(10.0), TtftTarget::TimesAsLong(1.1)];

/// Measures a prompt of `chunks` documents of `length` tokens with a question of 32, in a cell. Hits are taken with the
/// documents in other orders, unless their places are part of their keys.
///
/// # Errors
/// Of the engine: a prompt too long for the model, or a chunk pool too small for its documents.
pub fn ttft_rows(engine: &mut Engine, chunks: usize, length: usize, cell: ReuseCell) -> Result<Vec<TtftRow>> {
    let workload = RagWorkload {
        requests: 1 + REPETITIONS,
        document_tokens: length,
        per_request: chunks,
        system_tokens: 64,
        popularity: Popularity::Repetition(0.0),
        seed: 0x7f7f,
        ..RagWorkload::default()
    };
    let prompts = workload.prompts(engine.model().config().vocab_size)?;
    let prompt = &prompts[0];
    let mut ttft = |prompt: PromptTokens, change: &dyn Fn(&mut Request)| -> Result<Duration> {
        let mut request = Request { max_new_tokens: 1, cell, ..Request::new(prompt) };
        change(&mut request);
        Ok(engine.generate(&request, &mut ())?.ttft)
    };
    let chunked = || PromptTokens::Chunked(prompt.clone());
    let full = ttft(chunked(), &|r| (r.full_attention, r.reuse) = (true, false))?;
    let masked = ttft(chunked(), &|r| r.reuse = false)?;
    let cold = ttft(chunked(), &|_| ())?;
    let with_question = |order: Vec<Vec<u32>>, question: &[u32]| {
        ChunkedPrompt::new(prompt.system().to_vec(), order, question.to_vec())
    };
    // The same context cached as an ordinary prefix, then a question alone, each time other tokens, so that none of
    // it is cached; what both find is measured in turns.
    let alone = |question: &[u32]| -> Result<PromptTokens> {
        Ok(PromptTokens::Plain(with_question(prompt.chunks().to_vec(), question)?.flatten()))
    };
    ttft(alone(prompt.question())?, &|_| ())?;
    let (mut hit, mut floor) = (Duration::MAX, Duration::MAX);
    for (i, other) in prompts.iter().enumerate().skip(1) {
        let mut order = prompt.chunks().to_vec();
        if cell.strategy != PositionStrategy::Absolute {
            order.rotate_left(i % chunks);
        }
        let moved = with_question(order, prompt.question())?;
        hit = hit.min(ttft(PromptTokens::Chunked(moved), &|_| ())?);
        floor = floor.min(ttft(alone(other.question())?, &|_| ())?);
    }
    let tokens = prompt.total_tokens();
    let row = |what, took, limit, limit_took| TtftRow { what, tokens, took, limit, limit_took, target: None };
    let with = |target, row| TtftRow { target: Some(target), ..row };
    Ok(vec![
        with(TARGETS[0], row("all chunks hit", hit, "full prefill", full)),
        with(TARGETS[1], row("all chunks hit", hit, "the question alone after the same KV", floor)),
        row("cold, chunks stored", cold, "full prefill", full),
        row("without reuse, same mask", masked, "full prefill", full),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_met_at_its_bound_and_not_past_it() {
        let row = |took, limit, target| TtftRow {
            what: "",
            tokens: 1,
            took: Duration::from_millis(took),
            limit: "",
            limit_took: Duration::from_millis(limit),
            target: Some(target),
        };
        let [fast, long] = TARGETS;
        assert_eq!((row(100, 1000, fast).is_met(), row(101, 1000, fast).is_met()), (Some(true), Some(false)));
        assert_eq!((row(109, 100, long).is_met(), row(111, 100, long).is_met()), (Some(true), Some(false)));
        assert_eq!(TtftRow { target: None, ..row(1, 1, fast) }.is_met(), None);
        assert_eq!(long.to_string(), "at most 1.1 times as long");
    }
}
