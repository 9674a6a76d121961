//! Time to first token (TTFT) of one prompt: cold, with all chunks cached, without reuse, and the floor,
//! which is the question alone after the same KV.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvchunk::{ChunkedPrompt, PositionStrategy, ReuseCell};
use serde::Serialize;

use super::{Popularity, RagWorkload};
use crate::error::Result;
use kvengine::{Engine, PromptTokens, Request};

/// A measured time, and the time that it is compared with.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TtftRow {
    /// The name of the measurement.
    pub what: &'static str,
    /// The number of tokens in the prompt.
    pub tokens: usize,
    /// The measured time.
    pub took: Duration,
    /// The name of the measurement to compare with.
    pub limit: &'static str,
    /// The time of that measurement.
    pub limit_took: Duration,
    /// The target of this row, if it has one.
    pub target: Option<TtftTarget>,
}

impl TtftRow {
    /// Returns the limit's time divided by the measured time. A ratio above 1 means faster than the
    /// limit.
    pub fn ratio(&self) -> f64 {
        self.limit_took.as_secs_f64() / self.took.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Returns true if the row reaches its target, or `None` if it has no target.
    pub fn is_met(&self) -> Option<bool> {
        self.target.map(|target| match target {
            TtftTarget::TimesAsFast(least) => self.ratio() >= least,
            TtftTarget::TimesAsLong(most) => self.ratio() * most >= 1.0,
        })
    }
}

/// A target for a time, relative to the time it is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TtftTarget {
    /// At least this many times as fast.
    TimesAsFast(f64),
    /// At most this many times as long.
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

/// The number of full prefills, each with ordinary attention and with the reuse mask. The best time of
/// each kind is reported. A cold prompt cannot be repeated.
const PREFILLS: usize = 3;

/// The number of hits, and of questions alone, before each full prefill. The best times are reported.
const HITS: usize = 4;

/// The targets for a prompt whose chunks are all cached: against its full prefill, and against its question
/// alone.
const TARGETS: [TtftTarget; 2] = [TtftTarget::TimesAsFast(10.0), TtftTarget::TimesAsLong(1.1)];

/// Measures a prompt of `chunks` documents of `length` tokens each, with a question of 32 tokens, in a cell.
/// Hits are measured with the documents in other orders, unless their positions are part of their cache keys.
///
/// # Errors
/// Returns the errors of the engine, for example if a prompt is too long for the model, or the chunk pool is
/// too small for the documents.
pub fn ttft_rows(engine: &mut Engine, chunks: usize, length: usize, cell: ReuseCell) -> Result<Vec<TtftRow>> {
    let workload = RagWorkload {
        requests: 1 + PREFILLS * HITS,
        document_tokens: length,
        per_request: chunks,
        decoys: cell.mode.num_decoys(),
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
    let cold = ttft(chunked(), &|_| ())?;
    let with_question = |order: Vec<Vec<u32>>, question: &[u32]| {
        ChunkedPrompt::new(prompt.system().to_vec(), order, question.to_vec())?
            .with_decoys(Arc::clone(prompt.decoys()))
    };
    // The context is cached as an ordinary prefix, and only a question follows it. Each question has new
    // tokens, which are not cached.
    let alone = |question: &[u32]| -> Result<PromptTokens> {
        Ok(PromptTokens::Plain(with_question(prompt.chunks().to_vec(), question)?.flatten()))
    };
    ttft(alone(prompt.question())?, &|_| ())?;
    // All measurements take turns. Hits and questions alone also swap their order, because the first run
    // after a full prefill is slower.
    let [mut hit, mut floor, mut full, mut masked] = [Duration::MAX; 4];
    for (i, other) in prompts.iter().enumerate().skip(1) {
        let mut order = prompt.chunks().to_vec();
        if cell.strategy != PositionStrategy::Absolute {
            order.rotate_left(i % chunks);
        }
        // No question was asked before, neither in this order nor after the documents as a prefix.
        let question: Vec<u32> = other.question().iter().rev().copied().collect();
        let moved = PromptTokens::Chunked(with_question(order, &question)?);
        let mut asked = [(moved, &mut hit), (alone(other.question())?, &mut floor)];
        if i % 2 == 0 {
            asked.reverse();
        }
        for (prompt, best) in asked {
            *best = (*best).min(ttft(prompt, &|_| ())?);
        }
        if i % HITS == 0 {
            full = full.min(ttft(chunked(), &|r| (r.full_attention, r.reuse) = (true, false))?);
            masked = masked.min(ttft(chunked(), &|r| r.reuse = false)?);
        }
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
