//! The metrics of a manager and its pool.

use kvcore::{BlockPool, Lookups, PoolCounts};
use serde::Serialize;

use crate::BlockState;
use crate::requests::share;
use kvchunk::metrics::{Exposition, Goal, Latencies, LatencyColumn, MetricKind, NumberColumn, Target};

/// A snapshot of the metrics of a pool, and of the calls to its [`StorageManager`](super::StorageManager).
///
/// [`prometheus`](Self::prometheus) formats metrics as text for Prometheus, and `serde` can serialise them as
/// JSON.
///
/// ```
/// use kvcore::BlockPool;
/// use kvmanager::{PoolMetrics, StorageManager};
/// let manager = StorageManager::new(BlockPool::new(0..10)?);
/// manager.reserve(1, 4)?;
/// let metrics = manager.metrics();
/// assert_eq!((metrics.available, metrics.in_flight, metrics.utilization), (6, 4, 0.4));
/// assert!(metrics.goals().iter().take(2).all(|goal| goal.met == Some(true)));
/// let text = PoolMetrics::prometheus(&[("main", &metrics)]);
/// assert!(text.contains("kvcore_pool_in_flight_blocks{pool=\"main\"} 4.0\n"));
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolMetrics {
    /// Number of blocks in the pool.
    pub total: usize,
    /// Number of blocks that can be reserved: free and evictable blocks.
    pub available: usize,
    /// Number of blocks held by requests.
    pub in_flight: usize,
    /// `in_flight / total`, or 0 if the pool is empty. Cached blocks are not included, unlike in
    /// [`PoolCounts::utilization`], which includes every block that is not free.
    pub utilization: f64,
    /// Number of blocks in each state.
    pub counts: PoolCounts,
    /// Number of successful reservations.
    pub reservations: u64,
    /// Number of reservations that failed for lack of blocks.
    pub refused: u64,
    /// Number of released requests.
    pub releases: u64,
    /// Number of blocks that were reserved.
    pub reserved_blocks: u64,
    /// Number of blocks that were freed by releases.
    pub released_blocks: u64,
    /// Number of blocks that callers took over to share them.
    pub taken_blocks: u64,
    /// Number of cached blocks that were evicted.
    pub evictions: u64,
    /// The numbers of block keys that lookups found and did not find.
    pub lookups: Lookups,
    /// Latencies of successful reservations, including the time spent waiting for locks. Empty if they were
    /// not measured.
    pub allocation: Latencies,
    /// Latencies of successful releases. Empty if they were not measured.
    pub release: Latencies,
}

const COLUMNS: [NumberColumn<PoolMetrics>; 11] = [
    ("kvcore_pool_size_blocks", MetricKind::Gauge, "Blocks in the pool", |m| m.total as f64),
    ("kvcore_pool_available_blocks", MetricKind::Gauge, "Blocks available for reservations", |m| {
        m.available as f64
    }),
    ("kvcore_pool_in_flight_blocks", MetricKind::Gauge, "Blocks held by requests", |m| m.in_flight as f64),
    ("kvcore_pool_utilization_ratio", MetricKind::Gauge, "Fraction of blocks held by requests", |m| {
        m.utilization
    }),
    ("kvcore_pool_reservations", MetricKind::Counter, "Reservations made", |m| m.reservations as f64),
    (
        "kvcore_pool_refused",
        MetricKind::Counter,
        "Reservations rejected because too few blocks were available",
        |m| m.refused as f64,
    ),
    ("kvcore_pool_releases", MetricKind::Counter, "Requests released", |m| m.releases as f64),
    ("kvcore_pool_reserved_blocks", MetricKind::Counter, "Blocks reserved", |m| m.reserved_blocks as f64),
    ("kvcore_pool_released_blocks", MetricKind::Counter, "Blocks freed by releases", |m| {
        m.released_blocks as f64
    }),
    ("kvcore_pool_taken_blocks", MetricKind::Counter, "Blocks that callers took over to share them", |m| {
        m.taken_blocks as f64
    }),
    ("kvcore_pool_evictions", MetricKind::Counter, "Cached blocks that were evicted", |m| m.evictions as f64),
];

const HISTOGRAMS: [LatencyColumn<PoolMetrics>; 2] = [
    ("kvcore_pool_allocation_seconds", "Time per reservation", |m| &m.allocation),
    ("kvcore_pool_release_seconds", "Time per release", |m| &m.release),
];

impl PoolMetrics {
    /// Reads the metrics that the pool itself provides. All counts of a manager's calls are 0, and the
    /// latencies are empty. Blocks that are being filled or shared count as in flight.
    pub fn of(pool: &BlockPool) -> Self {
        let counts = pool.counts();
        let in_flight = counts.mutable + counts.shared;
        Self {
            total: counts.total,
            available: counts.available(),
            in_flight,
            utilization: share(in_flight, counts.total),
            counts,
            reservations: 0,
            refused: 0,
            releases: 0,
            reserved_blocks: 0,
            released_blocks: 0,
            taken_blocks: 0,
            evictions: pool.evictions(),
            lookups: pool.lookups(),
            allocation: Latencies::default(),
            release: Latencies::default(),
        }
    }

    /// Compares the metrics with fixed goals: more than 10 % of the blocks available, less than 90 % in
    /// flight, reservations below 1 ms and releases below 0.5 ms. For latencies, the 99th percentile is
    /// compared, rounded up to the end of its bucket. If there were no calls, it is unknown whether the goal
    /// is met.
    pub fn goals(&self) -> [Goal; 4] {
        let p99 = |latencies: &Latencies| latencies.quantile(0.99).map(|p99| p99.as_secs_f64());
        let available = Some(share(self.available, self.total));
        [
            Goal::new("available_blocks", "fraction", Target::Above(0.10), available),
            Goal::new("inflight_blocks", "fraction", Target::Below(0.90), Some(self.utilization)),
            Goal::new("allocation_latency_p99", "seconds", Target::Below(1e-3), p99(&self.allocation)),
            Goal::new("release_latency_p99", "seconds", Target::Below(0.5e-3), p99(&self.release)),
        ]
    }

    /// Formats the metrics of several pools for Prometheus. The name of a pool is the value of the label
    /// `pool`.
    pub fn prometheus(pools: &[(&str, &Self)]) -> String {
        let mut text = Exposition::default();
        text.numbers(&COLUMNS, "pool", pools);
        let family = text.family("kvcore_pool_blocks", MetricKind::Gauge, "Blocks by state");
        for (pool, metrics) in pools {
            for state in BlockState::ALL {
                let labels = [("pool", *pool), ("state", state.name())];
                family.sample(&labels, state.count(&metrics.counts) as f64);
            }
        }
        let help = "Block lookups by key";
        let family = text.family("kvcore_pool_lookups", MetricKind::Counter, help);
        for (pool, PoolMetrics { lookups, .. }) in pools {
            family
                .sample(&[("pool", *pool), ("result", "hit")], lookups.hits as f64)
                .sample(&[("pool", *pool), ("result", "miss")], lookups.misses as f64);
        }
        text.latencies(&HISTOGRAMS, "pool", pools);
        text.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use super::*;
    use crate::StorageManager;
    use kvchunk::metrics::LatencyHistogram;
    use kvcore::KeyScope;

    fn metrics(total: u32, reserved: usize) -> PoolMetrics {
        let manager = StorageManager::new(BlockPool::new(0..total).unwrap());
        manager.reserve(1, reserved).unwrap();
        PoolMetrics { allocation: Latencies::default(), ..manager.metrics() }
    }

    #[test]
    fn nothing_of_nothing_is_no_use() {
        assert_eq!((share(0, 0), share(1, 4)), (0.0, 0.25));
        assert_eq!(PoolCounts::default().utilization(), 0.0);
    }

    #[test]
    fn a_pool_without_a_manager_has_metrics_and_cached_blocks_are_not_in_flight() {
        let pool = BlockPool::new(0..10).unwrap();
        let keys = KeyScope::new("m", b"").root().chain(&[1, 2, 3], 1);
        drop(pool.allocate(3).unwrap().register(None, &keys).unwrap());
        let held = (pool.allocate(1).unwrap(), pool.allocate(1).unwrap(), pool.allocate(2).unwrap().share());
        let m = PoolMetrics::of(&pool);
        assert_eq!((m.total, m.available, m.in_flight, m.utilization), (10, 6, 4, 0.4));
        assert_eq!(m.counts.utilization(), 0.7, "three cached ones more are not free");
        assert_eq!((m.lookups, m.evictions, m.reservations), (Lookups::default(), 0, 0));
        assert_eq!(m.goals().map(|goal| goal.met), [Some(true), Some(true), None, None]);
        drop(held);
        drop(pool.lookup_chain(&KeyScope::new("m", b"").root().chain(&[1, 2, 9, 9], 1)));
        drop(pool.admit_prefix(&keys, 4, 0).unwrap());
        assert!(pool.admit_prefix(&keys, 11, 0).is_err() && pool.cached_prefix(&keys) == 3);
        assert_eq!(PoolMetrics::of(&pool).lookups, Lookups { hits: 5, misses: 2 });
        drop(pool.allocate(9).unwrap());
        assert_eq!(PoolMetrics::of(&pool).evictions, 2);
        let managed = StorageManager::new(pool);
        assert_eq!(managed.metrics(), PoolMetrics::of(managed.pool()));
    }

    fn latencies(micros: &[u64]) -> Latencies {
        let histogram = LatencyHistogram::default();
        for &us in micros {
            histogram.record(Duration::from_micros(us));
        }
        histogram.snapshot()
    }

    #[test]
    fn goals_are_compared_with_what_was_measured() {
        let met = |m: &PoolMetrics| m.goals().map(|goal| goal.met);
        assert_eq!(met(&metrics(100, 89)), [Some(true), Some(true), None, None], "nothing was timed");
        assert_eq!(met(&metrics(100, 90)), [Some(false), Some(false), None, None], "more than, less than");
        let slow = PoolMetrics {
            allocation: latencies(&[100; 200]),
            release: latencies(&[600, 600, 100]),
            ..metrics(10, 0)
        };
        assert_eq!(met(&slow), [Some(true), Some(true), Some(true), Some(false)]);
        let [_, in_flight, allocation, release] = slow.goals();
        assert_eq!((in_flight.measured, allocation.measured), (Some(0.0), Some(100e-6)));
        assert_eq!(release.measured, Some(600e-6), "no more than the longest");
        assert_eq!((release.name, release.target), ("release_latency_p99", Target::Below(0.5e-3)));
    }

    /// Checks that each sample follows the header of its family, and returns the samples by name and labels.
    fn samples(text: &str) -> HashMap<String, f64> {
        let (mut all, mut family, mut seen) = (HashMap::new(), String::new(), Vec::new());
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                family = rest.split(' ').next().unwrap().to_owned();
                assert!(!seen.contains(&family), "{family} twice");
                seen.push(family.clone());
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(name, family);
                assert!(!name.ends_with("_total"), "{name}: {kind}");
            } else if line != "# EOF" {
                let (name, value) = line.rsplit_once(' ').unwrap();
                let base = name.split('{').next().unwrap();
                let base = ["_bucket", "_sum", "_count", "_total"]
                    .iter()
                    .find_map(|s| base.strip_suffix(s))
                    .unwrap_or(base);
                assert_eq!(base, family);
                assert!(all.insert(name.to_owned(), value.parse().unwrap()).is_none(), "{name} twice");
            }
        }
        all
    }

    #[test]
    fn prometheus_reads_every_number_of_every_pool() {
        let main = PoolMetrics { allocation: latencies(&[1, 2, 3]), ..metrics(16, 5) };
        let chunks = PoolMetrics { lookups: Lookups { hits: 7, misses: 2 }, ..metrics(4, 4) };
        let all = samples(&PoolMetrics::prometheus(&[("main", &main), ("chunk \"a\"\\\n", &chunks)]));
        for (name, value) in [
            (r#"kvcore_pool_size_blocks{pool="main"}"#, 16.0),
            (r#"kvcore_pool_available_blocks{pool="main"}"#, 11.0),
            (r#"kvcore_pool_in_flight_blocks{pool="main"}"#, 5.0),
            (r#"kvcore_pool_utilization_ratio{pool="main"}"#, 0.3125),
            (r#"kvcore_pool_reserved_blocks_total{pool="main"}"#, 5.0),
            (r#"kvcore_pool_blocks{pool="main",state="reserved"}"#, 5.0),
            (r#"kvcore_pool_blocks{pool="main",state="available"}"#, 11.0),
            (r#"kvcore_pool_allocation_seconds_count{pool="main"}"#, 3.0),
            (r#"kvcore_pool_allocation_seconds_bucket{le="+Inf",pool="main"}"#, 3.0),
            (r#"kvcore_pool_allocation_seconds_bucket{le="0.000002048",pool="main"}"#, 2.0),
            (r#"kvcore_pool_size_blocks{pool="chunk \"a\"\\\n"}"#, 4.0),
            (r#"kvcore_pool_lookups_total{pool="chunk \"a\"\\\n",result="hit"}"#, 7.0),
            (r#"kvcore_pool_lookups_total{pool="chunk \"a\"\\\n",result="miss"}"#, 2.0),
        ] {
            assert_eq!(all.get(name), Some(&value), "{name}");
        }
        assert_eq!(all.len(), 2 * (COLUMNS.len() + 4 + 2 + 2 * 28));
    }

    #[test]
    fn json_has_the_same_numbers() {
        let m = PoolMetrics { release: latencies(&[10]), ..metrics(8, 2) };
        let json = serde_json::to_value(&m).unwrap();
        assert_eq!((&json["available"], &json["counts"]["mutable"]), (&6.into(), &2.into()));
        assert_eq!(json["release"]["p99_seconds"], serde_json::json!(10e-6));
        assert_eq!((&json["lookups"]["hits"], &json["allocation"]["p50_seconds"]), (&0.into(), &().into()));
        let goals = serde_json::to_value(m.goals()).unwrap();
        assert_eq!(goals[1]["target"], serde_json::json!({ "below": 0.9 }));
        assert_eq!((&goals[1]["met"], &goals[2]["met"]), (&true.into(), &().into()));
    }
}
