//! The metrics of a chunk cache.

use crate::metrics::{Exposition, Latencies, LatencyColumn, MetricKind, NumberColumn};
use serde::{Serialize, Serializer};

/// The metrics of a cache, or of one tenant: counts since the cache was created, and current gauges.
///
/// A lookup ends as a hit or as a miss. A lookup that waits for another request's computation is counted when
/// it is repeated after the computation. Latencies are measured only for the whole cache, and are empty
/// unless [`ChunkCacheConfig::stats`](crate::ChunkCacheConfig::stats) is set.
///
/// The JSON form also contains values derived from the counts: `hit_rate`, `memory_utilization` and the
/// average times `avg_lookup_time_ms`, `avg_wake_time_ms`, `avg_reindex_time_ms` and `avg_compute_time_ms`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(remote = "Self")]
pub struct ChunkCacheMetrics {
    /// Number of piece lookups.
    pub lookup_count: u64,
    /// Number of lookups that found the piece.
    pub hit_count: u64,
    /// Number of lookups that did not find the piece, or found other contents under the same hash.
    pub miss_count: u64,
    /// Number of hits whose error is unbounded, because the piece was computed with another system prompt or
    /// was quantised while it slept. Included in [`hit_count`](Self::hit_count).
    pub approximate_hits: u64,
    /// Number of lookups that waited for a piece that another request was computing.
    pub shared_flights: u64,
    /// Number of pieces stored.
    pub insertions: u64,
    /// Number of pieces evicted to make room.
    pub evictions: u64,
    /// Number of pieces computed for only one request, because nothing could be evicted.
    pub uncached: u64,
    /// Number of pieces that were missing in this cache and came from another replica. Included in
    /// [`miss_count`](Self::miss_count).
    pub fetched: u64,
    /// Number of requests to replicas that failed, because the piece was gone, the replica failed, or the
    /// parcel was wrong.
    pub fetch_failures: u64,
    /// Number of pieces put to sleep.
    pub slept: u64,
    /// Number of pieces woken.
    pub woken: u64,
    /// Number of sleeping pieces that could not be read back and were lost.
    pub lost: u64,
    /// Total number of tokens in the pieces that lookups found.
    pub tokens_reused: u64,
    /// Total number of tokens in the pieces that were computed and stored here.
    pub tokens_computed: u64,
    /// Number of pieces currently stored, awake or asleep.
    pub cached_chunks: usize,
    /// Number of pieces currently asleep. Included in [`cached_chunks`](Self::cached_chunks).
    pub sleeping_chunks: usize,
    /// Total size of the sleeping pieces in bytes, as reported by the store.
    pub sleeping_bytes: usize,
    /// Number of blocks in the pool or, for a tenant, in its quota.
    pub total_blocks: usize,
    /// Number of blocks in the pool that are not free or, for a tenant, the number of blocks in its pieces
    /// and reservations.
    pub used_blocks: usize,
    /// Lookup latencies, excluding the time to wake pieces that were found asleep.
    #[serde(rename = "lookup_time")]
    pub lookups: Latencies,
    /// Latencies of waking a piece.
    #[serde(rename = "wake_time")]
    pub wakes: Latencies,
    /// Latencies of placing a piece at its position.
    #[serde(rename = "reindex_time")]
    pub reindexes: Latencies,
    /// Latencies from reserving a piece to storing it.
    #[serde(rename = "compute_time")]
    pub computes: Latencies,
}

impl ChunkCacheMetrics {
    pub(super) fn hit(&mut self, tokens: usize, exact: bool) {
        self.lookup_count += 1;
        self.hit_count += 1;
        self.approximate_hits += u64::from(!exact);
        self.tokens_reused += tokens as u64;
    }

    pub(super) fn miss(&mut self) {
        self.lookup_count += 1;
        self.miss_count += 1;
    }

    /// Returns the sums of two tenants' counts. Gauges and latencies are left for the caller to fill in.
    pub(super) fn plus(self, other: &Self) -> Self {
        Self {
            lookup_count: self.lookup_count + other.lookup_count,
            hit_count: self.hit_count + other.hit_count,
            miss_count: self.miss_count + other.miss_count,
            approximate_hits: self.approximate_hits + other.approximate_hits,
            shared_flights: self.shared_flights + other.shared_flights,
            insertions: self.insertions + other.insertions,
            evictions: self.evictions + other.evictions,
            uncached: self.uncached + other.uncached,
            fetched: self.fetched + other.fetched,
            fetch_failures: self.fetch_failures + other.fetch_failures,
            slept: self.slept + other.slept,
            woken: self.woken + other.woken,
            lost: self.lost + other.lost,
            tokens_reused: self.tokens_reused + other.tokens_reused,
            tokens_computed: self.tokens_computed + other.tokens_computed,
            ..self
        }
    }

    /// Returns the fraction of lookups that were hits, or 0 before the first lookup.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hit_count as f64, self.lookup_count as f64)
    }

    /// Returns the fraction of blocks in use, from 0 to 1.
    pub fn memory_utilization(&self) -> f64 {
        ratio(self.used_blocks as f64, self.total_blocks as f64)
    }

    /// Returns the average lookup time in milliseconds, or 0 before the first lookup.
    pub fn avg_lookup_time_ms(&self) -> f64 {
        mean_ms(&self.lookups)
    }

    /// Returns the average time to wake a piece in milliseconds, or 0 if none has been woken.
    pub fn avg_wake_time_ms(&self) -> f64 {
        mean_ms(&self.wakes)
    }

    /// Returns the average time to place a piece at a position, in milliseconds, or 0 if none has been
    /// placed.
    pub fn avg_reindex_time_ms(&self) -> f64 {
        mean_ms(&self.reindexes)
    }

    /// Returns the average time to compute a piece in milliseconds, or 0 if none has been computed.
    pub fn avg_compute_time_ms(&self) -> f64 {
        mean_ms(&self.computes)
    }

    /// Formats the metrics of several caches or tenants for Prometheus. Each name becomes the value of the
    /// label `cache`.
    ///
    /// ```
    /// use kvchunk::ChunkCacheMetrics;
    /// let metrics = ChunkCacheMetrics { hit_count: 3, ..ChunkCacheMetrics::default() };
    /// let text = ChunkCacheMetrics::prometheus(&[("alice", &metrics)]);
    /// assert!(text.contains("kvchunk_hits_total{cache=\"alice\"} 3.0\n"));
    /// ```
    pub fn prometheus(caches: &[(&str, &Self)]) -> String {
        let mut text = Exposition::default();
        text.numbers(&NUMBERS, "cache", caches);
        text.latencies(&TIMES, "cache", caches);
        text.to_string()
    }

    /// Formats the metrics of the tenants of one cache for Prometheus, with their tags as values of the label `tenant`.
    /// The names differ from those of [`prometheus`](Self::prometheus), so that sums over a cache count nothing twice.
    ///
    /// ```
    /// use kvchunk::ChunkCacheMetrics;
    /// let metrics = ChunkCacheMetrics { hit_count: 3, ..ChunkCacheMetrics::default() };
    /// let text = ChunkCacheMetrics::prometheus_by_tenant(&[("alice", &metrics)]);
    /// assert!(text.contains("kvchunk_tenant_hits_total{tenant=\"alice\"} 3.0\n"));
    /// ```
    pub fn prometheus_by_tenant(tenants: &[(&str, &Self)]) -> String {
        let mut text = Exposition::default();
        text.numbers(&OF_TENANT, "tenant", tenants);
        text.to_string()
    }
}

/// The JSON form: the counts, and the values derived from them.
#[derive(Serialize)]
struct MetricsTable<'a> {
    #[serde(flatten, serialize_with = "counted")]
    counts: &'a ChunkCacheMetrics,
    hit_rate: f64,
    memory_utilization: f64,
    avg_lookup_time_ms: f64,
    avg_wake_time_ms: f64,
    avg_reindex_time_ms: f64,
    avg_compute_time_ms: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for this signature")]
fn counted<S: Serializer>(counts: &&ChunkCacheMetrics, serializer: S) -> Result<S::Ok, S::Error> {
    ChunkCacheMetrics::serialize(counts, serializer)
}

impl Serialize for ChunkCacheMetrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let printed = MetricsTable {
            counts: self,
            hit_rate: self.hit_rate(),
            memory_utilization: self.memory_utilization(),
            avg_lookup_time_ms: self.avg_lookup_time_ms(),
            avg_wake_time_ms: self.avg_wake_time_ms(),
            avg_reindex_time_ms: self.avg_reindex_time_ms(),
            avg_compute_time_ms: self.avg_compute_time_ms(),
        };
        printed.serialize(serializer)
    }
}

const NUMBERS: [NumberColumn<ChunkCacheMetrics>; 19] = [
    ("kvchunk_hits", MetricKind::Counter, "Pieces found in the cache", |m| m.hit_count as f64),
    ("kvchunk_misses", MetricKind::Counter, "Pieces not found in the cache", |m| m.miss_count as f64),
    ("kvchunk_approximate_hits", MetricKind::Counter, "Hits whose error is unbounded", |m| {
        m.approximate_hits as f64
    }),
    ("kvchunk_shared_flights", MetricKind::Counter, "Lookups that waited for another request", |m| {
        m.shared_flights as f64
    }),
    ("kvchunk_insertions", MetricKind::Counter, "Pieces stored", |m| m.insertions as f64),
    ("kvchunk_evictions", MetricKind::Counter, "Pieces evicted", |m| m.evictions as f64),
    (
        "kvchunk_uncached",
        MetricKind::Counter,
        "Pieces computed for only one request, because nothing could be \
         evicted",
        |m| m.uncached as f64,
    ),
    ("kvchunk_fetched", MetricKind::Counter, "Pieces fetched from another replica", |m| m.fetched as f64),
    ("kvchunk_fetch_failures", MetricKind::Counter, "Failed requests to other replicas", |m| {
        m.fetch_failures as f64
    }),
    ("kvchunk_slept", MetricKind::Counter, "Pieces put to sleep", |m| m.slept as f64),
    ("kvchunk_woken", MetricKind::Counter, "Pieces woken", |m| m.woken as f64),
    ("kvchunk_lost", MetricKind::Counter, "Sleeping pieces that could not be read back", |m| m.lost as f64),
    (
        "kvchunk_reused_tokens",
        MetricKind::Counter,
        "Tokens in pieces that were found in the \
         cache",
        |m| m.tokens_reused as f64,
    ),
    ("kvchunk_computed_tokens", MetricKind::Counter, "Tokens in pieces that were computed", |m| {
        m.tokens_computed as f64
    }),
    ("kvchunk_chunks", MetricKind::Gauge, "Pieces in the cache", |m| m.cached_chunks as f64),
    ("kvchunk_sleeping_chunks", MetricKind::Gauge, "Sleeping pieces", |m| m.sleeping_chunks as f64),
    ("kvchunk_sleeping_bytes", MetricKind::Gauge, "Memory used by sleeping pieces, in bytes", |m| {
        m.sleeping_bytes as f64
    }),
    ("kvchunk_size_blocks", MetricKind::Gauge, "Blocks in the chunk pool", |m| m.total_blocks as f64),
    ("kvchunk_used_blocks", MetricKind::Gauge, "Blocks in the chunk pool that chunks use", |m| {
        m.used_blocks as f64
    }),
];

const OF_TENANT: [NumberColumn<ChunkCacheMetrics>; 9] = [
    ("kvchunk_tenant_hits", MetricKind::Counter, "A tenant's pieces found in the cache", |m| {
        m.hit_count as f64
    }),
    ("kvchunk_tenant_misses", MetricKind::Counter, "A tenant's pieces not found in the cache", |m| {
        m.miss_count as f64
    }),
    ("kvchunk_tenant_insertions", MetricKind::Counter, "A tenant's pieces stored", |m| m.insertions as f64),
    ("kvchunk_tenant_evictions", MetricKind::Counter, "A tenant's pieces evicted", |m| m.evictions as f64),
    (
        "kvchunk_tenant_reused_tokens",
        MetricKind::Counter,
        "Tokens in a tenant's pieces that were found",
        |m| m.tokens_reused as f64,
    ),
    (
        "kvchunk_tenant_computed_tokens",
        MetricKind::Counter,
        "Tokens in a tenant's pieces that were computed",
        |m| m.tokens_computed as f64,
    ),
    ("kvchunk_tenant_chunks", MetricKind::Gauge, "A tenant's pieces in the cache", |m| {
        m.cached_chunks as f64
    }),
    ("kvchunk_tenant_size_blocks", MetricKind::Gauge, "Blocks that a tenant may use", |m| {
        m.total_blocks as f64
    }),
    ("kvchunk_tenant_used_blocks", MetricKind::Gauge, "Blocks that a tenant's pieces use", |m| {
        m.used_blocks as f64
    }),
];

const TIMES: [LatencyColumn<ChunkCacheMetrics>; 4] = [
    ("kvchunk_lookup_seconds", "Time per lookup", |m| &m.lookups),
    ("kvchunk_wake_seconds", "Time to wake a piece", |m| &m.wakes),
    ("kvchunk_reindex_seconds", "Time to place a piece at a position", |m| &m.reindexes),
    ("kvchunk_compute_seconds", "Time from reserving a piece to storing it", |m| &m.computes),
];

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn mean_ms(latencies: &Latencies) -> f64 {
    ratio(latencies.sum().as_secs_f64() * 1e3, latencies.count() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_nothing_is_zero() {
        let metrics = ChunkCacheMetrics::default();
        assert_eq!((metrics.hit_rate(), metrics.memory_utilization()), (0.0, 0.0));
        let times =
            (metrics.avg_lookup_time_ms(), metrics.avg_reindex_time_ms(), metrics.avg_compute_time_ms());
        assert_eq!(times, (0.0, 0.0, 0.0));
    }

    #[test]
    fn json_has_every_field_and_method_of_the_seeds_metrics() {
        let times = crate::metrics::LatencyHistogram::default();
        times.record(std::time::Duration::from_millis(3));
        let metrics = ChunkCacheMetrics {
            lookup_count: 4,
            hit_count: 3,
            total_blocks: 8,
            used_blocks: 2,
            lookups: times.snapshot(),
            ..ChunkCacheMetrics::default()
        };
        let json = serde_json::to_value(metrics).unwrap();
        let numbers = [
            ("lookup_count", 4.0),
            ("hit_count", 3.0),
            ("miss_count", 0.0),
            ("total_blocks", 8.0),
            ("used_blocks", 2.0),
            ("cached_chunks", 0.0),
            ("avg_lookup_time_ms", 3.0),
            ("avg_reindex_time_ms", 0.0),
            ("avg_compute_time_ms", 0.0),
            ("hit_rate", 0.75),
            ("memory_utilization", 0.25),
        ];
        for (name, number) in numbers {
            assert_eq!(json[name].as_f64(), Some(number), "{name}");
        }
    }

    #[test]
    fn prometheus_has_a_sample_of_every_number_of_every_cache() {
        let (a, b) = (ChunkCacheMetrics::default(), ChunkCacheMetrics { evictions: 9, ..Default::default() });
        let text = ChunkCacheMetrics::prometheus(&[("a", &a), ("b", &b)]);
        assert!(text.contains("kvchunk_evictions_total{cache=\"b\"} 9.0\n"));
        assert_eq!(text.matches("# TYPE ").count(), NUMBERS.len() + TIMES.len());
        assert_eq!(text.matches("{cache=\"a\"} ").count(), NUMBERS.len() + 2 * TIMES.len());
    }
}
