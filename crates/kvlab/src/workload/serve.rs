//! Serving a workload: hits, times to first token, and the speed-up that a model of it predicts.

use std::time::Duration;

use kvchunk::{ChunkCacheMetrics, ChunkedPrompt, ColdRule, ReuseCell, SleepUsage};
use kvcore::Goal;
use serde::Serialize;

use super::RagWorkload;
use crate::error::Result;
use kvmodel::PromptTokens;
use kvmodel::{Engine, Generation, Request};

/// Quantiles of times, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Times {
    /// Half of the requests took no longer.
    pub p50: f64,
    /// Nineteen in twenty took no longer.
    pub p95: f64,
    /// The average.
    pub mean: f64,
}

impl Times {
    fn of(times: &[Duration]) -> Self {
        let mut ms: Vec<f64> = times.iter().map(|t| t.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        let at = |q: f64| {
            ms.get(((ms.len() as f64 * q).ceil() as usize).saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Self { p50: at(0.5), p95: at(0.95), mean: ms.iter().sum::<f64>() / ms.len().max(1) as f64 }
    }
}

/// Times of one request, in milliseconds, in the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ArrivalTimes {
    /// Its number.
    pub request: usize,
    /// To first token, as served.
    pub ttft_ms: f64,
    /// The same computed anew under the same mask, of requests that were measured so.
    pub without_reuse_ms: Option<f64>,
}

/// What serving a workload took.
#[derive(Debug, Clone, Serialize)]
pub struct RagReport {
    /// The workload.
    pub workload: RagWorkload,
    /// Share of the documents that were found.
    pub document_hit_rate: f64,
    /// Share of the requests of which at least one document was found.
    pub any_hit_rate: f64,
    /// What `1 − (1 − p)^k` says of the latter.
    pub predicted_any_hit_rate: Option<f64>,
    /// Time to first token as served.
    pub with_reuse: Times,
    /// The same with everything computed anew, under the same mask; of a sample of the requests.
    pub without_reuse: Times,
    /// The same as ordinary prompts under full attention.
    pub full_attention: Times,
    /// Share of the time without reuse that goes into what reuse finds: documents, and the system prompt.
    pub alpha: f64,
    /// Share of document tokens that were found, in the sample.
    pub beta: f64,
    /// `1 / (1 − α β)`.
    pub predicted_speedup: f64,
    /// Mean time without reuse over mean time with it, in the sample.
    pub measured_speedup: f64,
    /// Bytes of the chunk pool.
    pub chunk_pool_bytes: usize,
    /// Bytes of it in use at the end.
    pub used_bytes: usize,
    /// What the chunk cache counted and timed.
    pub chunk_cache: ChunkCacheMetrics,
    /// The seed's goals for a chunk cache, beside what was measured.
    pub goals: Vec<Goal>,
    /// Its alarms: one that is missed is raised.
    pub alarms: Vec<Goal>,
    /// What slept at the end, if documents may.
    pub chunk_sleep: Option<SleepUsage>,
    /// Request by request.
    pub arrivals: Vec<ArrivalTimes>,
}

/// Requests of a workload that are also measured without reuse.
const SAMPLE: usize = 20;

/// Documents are cold at any age, so that a workload needs not last for minutes.
const COLD: ColdRule =
    ColdRule { min_accesses: 5, idle: Duration::from_secs(3600), spare_younger_than: Duration::ZERO };

/// Serves a workload's prompts one after another, each up to its first token. The engine should be new.
/// If it has a place for chunks to sleep, documents used less than five times sleep after every request, as far as
/// there is room; a hit wakes them on the way to its first token.
///
/// `progress` is told how many of how many are served.
///
/// # Errors
/// Of the workload, or of the engine: a prompt too long for the model.
pub fn serve(
    engine: &mut Engine,
    workload: &RagWorkload,
    cell: ReuseCell,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<RagReport> {
    let prompts = workload.prompts(engine.model().config().vocab_size)?;
    // Threads and memory warm up.
    ask_of(engine, cell, &prompts[0], false, false)?;
    let (mut served, mut arrivals, mut hits, mut any) = (Vec::new(), Vec::new(), 0, 0);
    let (every, total) = (prompts.len().div_ceil(SAMPLE), prompts.len());
    let mut reused = (0, 0);
    for (request, prompt) in prompts.iter().enumerate() {
        let got = ask_of(engine, cell, prompt, true, false)?;
        let found = got.chunks.iter().filter(|chunk| chunk.hit);
        hits += found.clone().count();
        any += usize::from(found.clone().count() > 0);
        if request % every == 0 {
            reused.0 += found.map(|chunk| chunk.tokens).sum::<usize>();
            reused.1 += got.chunks.iter().map(|chunk| chunk.tokens).sum::<usize>();
        }
        served.push(got.ttft);
        let ttft_ms = got.ttft.as_secs_f64() * 1e3;
        arrivals.push(ArrivalTimes { request, ttft_ms, without_reuse_ms: None });
        progress(request + 1, total);
        sleep(engine)?;
    }
    let (chunk_cache, chunk_sleep) = (counts(engine), engine.report().chunk_sleep);
    // Afterwards, so that it is not in the counts: a sample with everything cached, and with nothing.
    let (mut anew, mut full, mut sampled, mut all_hit) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for request in (0..total).step_by(every) {
        let prompt = &prompts[request];
        let mut ask = |reuse, full_attention| ask_of(engine, cell, prompt, reuse, full_attention);
        ask(true, false)?;
        all_hit.push(ask(true, false)?.ttft);
        let without = ask(false, false)?.ttft;
        arrivals[request].without_reuse_ms = Some(without.as_secs_f64() * 1e3);
        anew.push(without);
        full.push(ask(false, true)?.ttft);
        sampled.push(served[request]);
    }
    let (without_reuse, hit, sampled) = (Times::of(&anew), Times::of(&all_hit), Times::of(&sampled));
    let alpha = (1.0 - hit.mean / without_reuse.mean).max(0.0);
    let beta = reused.0 as f64 / reused.1.max(1) as f64;
    let block_bytes = engine.cache().arena().layout().block_bytes();
    let all = prompts.len() as f64;
    Ok(RagReport {
        workload: *workload,
        document_hit_rate: hits as f64 / (all * workload.per_request as f64),
        any_hit_rate: any as f64 / all,
        predicted_any_hit_rate: workload.predicted_any_hit(),
        with_reuse: Times::of(&served),
        without_reuse,
        full_attention: Times::of(&full),
        alpha,
        beta,
        predicted_speedup: 1.0 / (1.0 - alpha * beta),
        measured_speedup: without_reuse.mean / sampled.mean,
        chunk_pool_bytes: chunk_cache.total_blocks * block_bytes,
        used_bytes: chunk_cache.used_blocks * block_bytes,
        goals: chunk_cache.goals().to_vec(),
        alarms: chunk_cache.alarms().to_vec(),
        chunk_cache,
        chunk_sleep,
        arrivals,
    })
}

/// Cold documents fall asleep. Those for which there is no room stay awake.
fn sleep(engine: &Engine) -> Result<()> {
    if let (Some(chunks), Some(_)) = (engine.chunks(), engine.report().chunk_sleep) {
        match chunks.sleep_cold_chunks(COLD) {
            Ok(_) | Err(kvchunk::Error::SleepFull { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn counts(engine: &Engine) -> ChunkCacheMetrics {
    engine.chunks().map(kvchunk::ChunkCacheManager::metrics).unwrap_or_default()
}

/// A prompt up to its first token.
fn ask_of(
    engine: &mut Engine,
    cell: ReuseCell,
    prompt: &ChunkedPrompt,
    reuse: bool,
    full_attention: bool,
) -> Result<Generation> {
    let request = Request::new(PromptTokens::Chunked(prompt.clone()));
    let request = Request { cell, reuse, full_attention, max_new_tokens: 1, ..request };
    Ok(engine.generate(&request, &mut ())?)
}
