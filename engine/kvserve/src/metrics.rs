//! The server's own numbers, under the names that vLLM has for them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvchunk::Tenant;
use kvchunk::metrics::{Exposition, LatencyHistogram, MetricKind};
use kvengine::{Engine, Generation, Step};
use kvmanager::PoolMetrics;
use serde::Serialize;

use crate::labels::LabelMetrics;

/// Counters of the server.
#[derive(Debug, Default)]
pub(crate) struct ServerMetrics {
    /// From the arrival of a request to its first token.
    first_token: LatencyHistogram,
    /// Between two tokens of a sample.
    between_tokens: LatencyHistogram,
    /// From the arrival of a request to the end of a sample.
    whole: LatencyHistogram,
    /// From the arrival of a request to its admission by the engine.
    queue: LatencyHistogram,
    stopped: AtomicU64,
    cut: AtomicU64,
    aborted: AtomicU64,
    failed: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    recomputed_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    pub(crate) labels: LabelMetrics,
}

/// Why a sample or a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Stop,
    Length,
    /// The client went away.
    Abort,
    Error,
}

impl ServerMetrics {
    pub(crate) fn first_token(&self, after: Duration) {
        self.first_token.record(after);
    }

    pub(crate) fn next_token(&self, after: Duration) {
        self.between_tokens.record(after);
    }

    pub(crate) fn ended(&self, how: Ended) {
        let counter = match how {
            Ended::Stop => &self.stopped,
            Ended::Length => &self.cut,
            Ended::Abort => &self.aborted,
            Ended::Error => &self.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a sample, with the time since the request arrived, and the time before the engine began with it. The
    /// prompt counts once a request.
    pub(crate) fn sample(
        &self,
        generation: &Generation,
        tokens: usize,
        (after, queued): (Duration, Duration),
        first: bool,
    ) {
        let add = |counter: &AtomicU64, tokens: usize| counter.fetch_add(tokens as u64, Ordering::Relaxed);
        self.whole.record(after);
        add(&self.generation_tokens, tokens);
        if first {
            self.queue.record(queued);
            add(&self.prompt_tokens, generation.prompt_tokens);
            add(&self.cached_tokens, generation.cached_tokens);
            add(&self.recomputed_tokens, generation.recomputed_tokens);
        }
    }

    /// Returns the numbers of all requests so far.
    pub(crate) fn totals(&self) -> Totals {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Totals {
            prompt_tokens: of(&self.prompt_tokens),
            cached_tokens: of(&self.cached_tokens),
            recomputed_tokens: of(&self.recomputed_tokens),
            generation_tokens: of(&self.generation_tokens),
            ended: of(&self.stopped) + of(&self.cut),
        }
    }

    /// Returns the text for Prometheus: these numbers, and those of the engine's caches in `caches`.
    pub(crate) fn exposition(&self, model: &str, step: Step, requests: usize, caches: &CacheText) -> String {
        let labels = &[("model_name", model)][..];
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let mut text = Exposition::default();
        let mut number = |name, kind, help, value| {
            text.family(name, kind, help).sample(labels, value);
        };
        let (counter, gauge) = (MetricKind::Counter, MetricKind::Gauge);
        number("vllm:num_requests_running", gauge, "Requests that are computed", step.running as f64);
        number("vllm:num_requests_waiting", gauge, "Requests that wait to be computed", step.waiting as f64);
        number(
            "kvserve:requests",
            gauge,
            "Requests that are answered or wait, with those whose text is being tokenised",
            requests as f64,
        );
        number(
            "vllm:kv_cache_usage_perc",
            gauge,
            "Share of the blocks of sequences that are in use, from 0 to 1",
            caches.usage,
        );
        number("vllm:num_preemptions", counter, "Preempted requests", step.preemptions as f64);
        number("vllm:prompt_tokens", counter, "Prompt tokens", of(&self.prompt_tokens));
        number("vllm:generation_tokens", counter, "Answer tokens", of(&self.generation_tokens));
        number(
            "vllm:prompt_tokens_cached",
            counter,
            "Prompt tokens that were found in the caches",
            of(&self.cached_tokens),
        );
        number(
            "kvserve:prompt_tokens_recomputed",
            counter,
            "Document tokens that were computed a second time",
            of(&self.recomputed_tokens),
        );
        number(
            "vllm:prefix_cache_queries",
            counter,
            "Prompt tokens that were looked up, in whole blocks",
            caches.queries,
        );
        number(
            "vllm:prefix_cache_hits",
            counter,
            "Prompt tokens that were found, in whole blocks",
            caches.hits,
        );
        let ended = text.family("vllm:request_success", counter, "Ended samples, by the reason");
        for (reason, count) in [
            ("stop", &self.stopped),
            ("length", &self.cut),
            ("abort", &self.aborted),
            ("error", &self.failed),
        ] {
            ended.sample(&[("model_name", model), ("finished_reason", reason)], of(count));
        }
        for (name, help, times) in [
            (
                "vllm:time_to_first_token_seconds",
                "From the arrival of a request to its first token",
                &self.first_token,
            ),
            ("vllm:inter_token_latency_seconds", "Between two tokens of an answer", &self.between_tokens),
            (
                "vllm:e2e_request_latency_seconds",
                "From the arrival of a request to the end of an answer",
                &self.whole,
            ),
            (
                "vllm:request_queue_time_seconds",
                "From the arrival of a request to its admission",
                &self.queue,
            ),
        ] {
            text.family(name, MetricKind::Histogram, help).histogram(labels, &times.snapshot());
        }
        self.labels.describe(&mut text);
        joined([text.to_string()].iter().chain(&caches.texts))
    }
}

/// The numbers of all requests so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Totals {
    prompt_tokens: u64,
    cached_tokens: u64,
    recomputed_tokens: u64,
    generation_tokens: u64,
    /// The number of answers that ended by themselves or at a limit.
    ended: u64,
}

/// The text of the engine's caches.
#[derive(Debug, Default)]
pub(crate) struct CacheText {
    usage: f64,
    queries: f64,
    hits: f64,
    texts: Vec<String>,
}

impl CacheText {
    /// Reads the caches of an engine, and the part of each tenant if there are several. Tenants come from the file of keys,
    /// so that clients cannot add labels.
    pub(crate) fn of(engine: &Engine, by_tenant: bool) -> Self {
        let mut texts = Vec::new();
        let mut all = Self::default();
        let pool = engine.cache().as_paged().map(|paged| PoolMetrics::of(paged.pool()));
        if let Some(pool) = pool {
            let tokens = engine.cache().as_paged().map_or(1, |paged| paged.kv_pool().block_size()) as f64;
            (all.usage, all.queries, all.hits) = (
                pool.utilization,
                tokens * (pool.lookups.hits + pool.lookups.misses) as f64,
                tokens * pool.lookups.hits as f64,
            );
            let chunks = engine.chunks().map(|chunks| PoolMetrics::of(chunks.pool().blocks()));
            let pools = [Some(("main", &pool)), chunks.as_ref().map(|chunks| ("chunks", chunks))];
            texts.push(PoolMetrics::prometheus(&pools.into_iter().flatten().collect::<Vec<_>>()));
        }
        if let Some(chunks) = engine.report().chunk_cache {
            texts.push(kvchunk::ChunkCacheMetrics::prometheus(&[("chunks", &chunks)]));
        }
        if let Some(chunks) = engine.chunks().filter(|_| by_tenant) {
            let all = chunks.metrics_by_tenant();
            let of_keys = all.iter().filter(|(tag, _)| tag != Tenant::DEFAULT_TAG);
            let of_keys: Vec<_> = of_keys.map(|(tag, metrics)| (tag.as_str(), metrics)).collect();
            texts.push(kvchunk::ChunkCacheMetrics::prometheus_by_tenant(&of_keys));
        }
        if let Some(disk) = engine.disk_metrics() {
            texts.push(kvchunk::TierMetrics::prometheus(&[("disk", &disk)]));
        }
        Self { texts, ..all }
    }
}

/// Joins texts, each of which ends with the mark of the end.
fn joined<'a>(texts: impl Iterator<Item = &'a String>) -> String {
    const END: &str = "# EOF\n";
    let mut all: String = texts.map(|text| text.strip_suffix(END).unwrap_or(text)).collect();
    all += END;
    all
}
