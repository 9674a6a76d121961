//! Serving a workload: hits, times to first token (TTFT), and the predicted speed-up.

use std::time::Duration;

use kvchunk::metrics::Goal;
use kvchunk::{ChunkCacheMetrics, ChunkedPrompt, ColdRule, ReuseCell, SleepUsage};
use serde::Serialize;

use super::RagWorkload;
use crate::error::Result;
use kvengine::{Engine, Generation, PromptTokens, Request};

/// Summary of times, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Times {
    /// The median.
    pub p50: f64,
    /// The 95th percentile.
    pub p95: f64,
    /// The mean.
    pub mean: f64,
}

impl Times {
    pub(super) fn of(times: &[Duration]) -> Self {
        let mut ms: Vec<f64> = times.iter().map(|t| t.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        let at = |q: f64| {
            ms.get(((ms.len() as f64 * q).ceil() as usize).saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Self { p50: at(0.5), p95: at(0.95), mean: ms.iter().sum::<f64>() / ms.len().max(1) as f64 }
    }
}

/// The times of one request, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ArrivalTimes {
    /// The request's index, in order of arrival.
    pub request: usize,
    /// The time to first token.
    pub ttft_ms: f64,
    /// The time to first token without reuse, under the same mask; `None` if the request is not in the
    /// sample.
    pub without_reuse_ms: Option<f64>,
}

/// The results of serving a workload.
#[derive(Debug, Clone, Serialize)]
pub struct RagReport {
    /// The workload.
    pub workload: RagWorkload,
    /// The share of documents that were found in the cache.
    pub document_hit_rate: f64,
    /// The share of requests with at least one document that was found.
    pub any_hit_rate: f64,
    /// The prediction `1 − (1 − p)^k` for `any_hit_rate`.
    pub predicted_any_hit_rate: Option<f64>,
    /// The times to first token, as served.
    pub with_reuse: Times,
    /// The times to first token if everything is recomputed under the same mask, for a sample of the
    /// requests.
    pub without_reuse: Times,
    /// The times to first token if the sample's prompts are computed as ordinary prompts under full
    /// attention.
    pub full_attention: Times,
    /// The share of the time without reuse that is spent on reusable parts: documents and the system prompt.
    pub alpha: f64,
    /// The share of document tokens that were found, in the sample.
    pub beta: f64,
    /// The predicted speed-up `1 / (1 − α β)`.
    pub predicted_speedup: f64,
    /// The measured speed-up: the mean time without reuse divided by the mean time with reuse, in the
    /// sample.
    pub measured_speedup: f64,
    /// The size of the chunk pool in bytes.
    pub chunk_pool_bytes: usize,
    /// The amount of memory in use in the chunk pool at the end, in bytes.
    pub used_bytes: usize,
    /// The metrics of the chunk cache.
    pub chunk_cache: ChunkCacheMetrics,
    /// The targets for a chunk cache from the specification, with the measured values.
    pub goals: Vec<Goal>,
    /// The alarms from the specification. An alarm is raised if its target is missed.
    pub alarms: Vec<Goal>,
    /// The number of sleeping chunks and their sizes at the end, if chunks may sleep.
    pub chunk_sleep: Option<SleepUsage>,
    /// The times of each request, in the order of arrival.
    pub arrivals: Vec<ArrivalTimes>,
}

/// The maximum number of requests that are also measured without reuse.
const SAMPLE: usize = 20;

/// The rule for cold documents. Age does not matter, because a workload may last only seconds.
const COLD: ColdRule =
    ColdRule { min_accesses: 5, idle: Duration::from_secs(3600), spare_younger_than: Duration::ZERO };

/// Serves a workload's prompts one after another, each up to its first token. The engine should be fresh.
///
/// If the engine has storage for sleeping chunks, documents used fewer than five times are put to sleep after
/// every request, while there is room. A hit wakes them before the first token.
///
/// Calls `progress` with the number of requests served so far and the total.
///
/// # Errors
/// Returns the errors of the workload and of the engine, for example if a prompt is too long for the model.
pub fn serve(
    engine: &mut Engine,
    workload: &RagWorkload,
    cell: ReuseCell,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<RagReport> {
    let prompts = workload.prompts(engine.model().config().vocab_size)?;
    // The first request warms up the threads and the memory.
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
    // The sample is measured after the counts are taken: once with everything cached, and once without reuse.
    let (mut without_times, mut full, mut sampled, mut all_hit) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for request in (0..total).step_by(every) {
        let prompt = &prompts[request];
        let mut ask = |reuse, full_attention| ask_of(engine, cell, prompt, reuse, full_attention);
        ask(true, false)?;
        all_hit.push(ask(true, false)?.ttft);
        let without = ask(false, false)?.ttft;
        arrivals[request].without_reuse_ms = Some(without.as_secs_f64() * 1e3);
        without_times.push(without);
        full.push(ask(false, true)?.ttft);
        sampled.push(served[request]);
    }
    let (without_reuse, hit, sampled) = (Times::of(&without_times), Times::of(&all_hit), Times::of(&sampled));
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

/// Puts cold documents to sleep. Documents stay awake if there is no room for them.
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

/// Answers a prompt up to the first token.
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
