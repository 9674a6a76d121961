//! Durations counted in buckets whose ends double.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::Serialize;

/// Exponent of the first bucket's end: 2^6 = 64 ns.
const FIRST: u32 = 6;
/// Exponent of the last end: 2^30 ns, the first end beyond a second.
const LAST: u32 = 30;
/// Number of buckets, including the one without an end.
const BUCKETS: usize = (LAST - FIRST) as usize + 2;

/// A histogram of durations in buckets whose ends double, from 64 ns to about 1 s. Any number of threads
/// record at once without a lock, by three relaxed atomic operations.
///
/// ```
/// use std::time::Duration;
/// use kvmetrics::LatencyHistogram;
/// let histogram = LatencyHistogram::default();
/// for ns in [50, 90, 100, 5_000] {
///     histogram.record(Duration::from_nanos(ns));
/// }
/// let seen = histogram.snapshot();
/// assert_eq!((seen.count(), seen.max()), (4, Duration::from_nanos(5_000)));
/// assert_eq!(seen.quantile(0.5), Some(Duration::from_nanos(128)));   // the end of its bucket
/// ```
#[derive(Debug, Default)]
pub struct LatencyHistogram {
    buckets: [AtomicU64; BUCKETS],
    sum: AtomicU64,
    max: AtomicU64,
}

impl LatencyHistogram {
    /// Records one duration.
    pub fn record(&self, took: Duration) {
        let ns = took.as_nanos().min(u128::from(u64::MAX)) as u64;
        self.buckets[bucket(ns)].fetch_add(1, Relaxed);
        self.sum.fetch_add(ns, Relaxed);
        self.max.fetch_max(ns, Relaxed);
    }

    /// Returns the durations recorded so far. Concurrent records may be included in part.
    pub fn snapshot(&self) -> Latencies {
        Latencies {
            counts: std::array::from_fn(|i| self.buckets[i].load(Relaxed)),
            sum: Duration::from_nanos(self.sum.load(Relaxed)),
            max: Duration::from_nanos(self.max.load(Relaxed)),
        }
    }
}

/// Returns the first bucket whose end is not below `ns`.
fn bucket(ns: u64) -> usize {
    let exponent = u64::BITS - ns.saturating_sub(1).leading_zeros();
    (exponent.max(FIRST) - FIRST).min(LAST - FIRST + 1) as usize
}

/// The contents of a [`LatencyHistogram`] at one moment. Serialises as a summary in seconds, with the
/// counts of its buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(into = "Summary")]
pub struct Latencies {
    counts: [u64; BUCKETS],
    sum: Duration,
    max: Duration,
}

impl Latencies {
    /// Returns the number of durations recorded.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of all durations.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// Returns the longest duration.
    pub fn max(&self) -> Duration {
        self.max
    }

    /// Returns a duration that the share `q` of all durations does not exceed, or `None` if there are none.
    /// The result is the end of the quantile's bucket, but at most the longest duration. It is never less
    /// than the exact quantile, and less than twice the exact quantile between 64 ns and the last bucket's
    /// end (about 1 s).
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let rank = (q.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0) as u64;
        let mut below = 0;
        let at = self.counts.iter().position(|&count| {
            below += count;
            below >= rank
        })?;
        Some(Self::end(at).map_or(self.max, |end| end.min(self.max)))
    }

    /// Returns the buckets as `(end, number of durations)`. The last bucket has no end.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        self.counts.iter().enumerate().map(|(at, &count)| (Self::end(at), count))
    }

    fn end(bucket: usize) -> Option<Duration> {
        (bucket + 1 < BUCKETS).then(|| Duration::from_nanos(1 << (FIRST as usize + bucket)))
    }
}

/// The summary of [`Latencies`] that is serialised.
#[derive(Serialize)]
struct Summary {
    count: u64,
    sum_seconds: f64,
    max_seconds: f64,
    p50_seconds: Option<f64>,
    p99_seconds: Option<f64>,
    bucket_counts: [u64; BUCKETS],
}

impl From<Latencies> for Summary {
    fn from(l: Latencies) -> Self {
        Self {
            count: l.count(),
            sum_seconds: l.sum.as_secs_f64(),
            max_seconds: l.max.as_secs_f64(),
            p50_seconds: l.quantile(0.5).map(|d| d.as_secs_f64()),
            p99_seconds: l.quantile(0.99).map(|d| d.as_secs_f64()),
            bucket_counts: l.counts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_belong_to_their_bucket() {
        for (ns, expected) in [(0, 0), (64, 0), (65, 1), (128, 1), (129, 2), (1 << 30, 24), (u64::MAX, 25)] {
            assert_eq!(bucket(ns), expected, "{ns} ns");
        }
        assert_eq!(bucket((1 << 30) + 1), BUCKETS - 1);
        let ends: Vec<_> = Latencies::default().buckets().map(|(end, _)| end).collect();
        assert_eq!(ends[0], Some(Duration::from_nanos(64)));
        assert!(ends[BUCKETS - 2] >= Some(Duration::from_secs(1)) && ends[BUCKETS - 1].is_none());
    }

    #[test]
    fn quantiles_are_bounds_within_a_factor_of_two() {
        let histogram = LatencyHistogram::default();
        assert_eq!(histogram.snapshot().quantile(0.99), None);
        (1..=1000).for_each(|i| histogram.record(Duration::from_nanos(100 * i)));
        let seen = histogram.snapshot();
        for (q, exact) in [(0.0, 100), (0.5, 50_000), (0.9, 90_000), (0.99, 99_000), (1.0, 100_000)] {
            let bound = seen.quantile(q).unwrap().as_nanos();
            assert!(exact <= bound && bound < 2 * exact, "{q}: {bound}");
        }
        assert_eq!(seen.sum(), Duration::from_micros(50_050));
        histogram.record(Duration::MAX);
        assert_eq!(histogram.snapshot().quantile(1.0), Some(Duration::from_nanos(u64::MAX)));
    }

    #[test]
    fn records_of_many_threads_are_all_counted() {
        let histogram = LatencyHistogram::default();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let histogram = &histogram;
                scope.spawn(move || {
                    (0..1000).for_each(|i| histogram.record(Duration::from_nanos(thread * 1000 + i)));
                });
            }
        });
        let seen = histogram.snapshot();
        assert_eq!((seen.count(), seen.max()), (4000, Duration::from_nanos(3999)));
        assert_eq!(seen.sum(), Duration::from_nanos((0..4000).sum()));
    }
}
