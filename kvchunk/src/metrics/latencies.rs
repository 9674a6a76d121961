//! Histograms of durations.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde::Serialize;

/// The longest duration that buckets distinguish, in nanoseconds (about 18 minutes). Longer durations are
/// counted as if they had this length.
const LONGEST: u64 = 1 << 40;
/// The number of significant decimal digits in a quantile.
const DIGITS: u8 = 2;
/// The exponents of the bucket bounds for Prometheus, which range from 2^6 ns (64 ns) to 2^30 ns (just over a
/// second).
const EXPONENTS: std::ops::RangeInclusive<u32> = 6..=30;

/// A histogram of durations that any number of threads may record into. Recording the first duration
/// allocates about 30 KiB.
///
/// ```
/// use std::time::Duration;
/// use kvchunk::metrics::LatencyHistogram;
/// let histogram = LatencyHistogram::default();
/// for ns in [50, 90, 100, 5_000] {
///     histogram.record(Duration::from_nanos(ns));
/// }
/// let seen = histogram.snapshot();
/// assert_eq!((seen.count(), seen.max()), (4, Duration::from_nanos(5_000)));
/// assert_eq!(seen.quantile(0.5), Some(Duration::from_nanos(90)));
/// ```
#[derive(Debug, Default)]
pub struct LatencyHistogram(Mutex<Latencies>);

impl LatencyHistogram {
    /// Records one duration.
    pub fn record(&self, took: Duration) {
        self.0.lock().record(took);
    }

    /// Returns the durations recorded so far.
    pub fn snapshot(&self) -> Latencies {
        self.0.lock().clone()
    }
}

/// A snapshot of a [`LatencyHistogram`]. It is serialised as a summary in seconds.
#[derive(Clone, Default, PartialEq, Serialize)]
#[serde(into = "Summary")]
pub struct Latencies {
    /// The histogram, or `None` until the first duration is recorded.
    histogram: Option<Histogram<u64>>,
    sum: Duration,
    longest: Duration,
}

impl Latencies {
    fn record(&mut self, took: Duration) {
        if self.histogram.is_none() {
            // The constructor accepts these constant bounds.
            self.histogram = Histogram::new_with_bounds(1, LONGEST, DIGITS).ok();
        }
        if let Some(histogram) = &mut self.histogram {
            histogram.saturating_record(took.as_nanos().min(u128::from(LONGEST)) as u64);
            self.sum = self.sum.saturating_add(took);
            self.longest = self.longest.max(took);
        }
    }

    /// Returns the number of durations recorded.
    pub fn count(&self) -> u64 {
        self.histogram.as_ref().map_or(0, Histogram::len)
    }

    /// Returns the sum of all durations.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// Returns the longest duration.
    pub fn max(&self) -> Duration {
        self.longest
    }

    // Decision: docs/decisions/managers.md#quantiles-are-rounded-up-to-the-end-of-their-bucket
    /// Returns the smallest duration that the fraction `q` of all durations does not exceed, rounded up to
    /// two significant digits but not above the longest duration. Returns `None` if nothing was recorded.
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let histogram = self.histogram.as_ref().filter(|histogram| !histogram.is_empty())?;
        let bound = Duration::from_nanos(histogram.value_at_quantile(q.clamp(0.0, 1.0)));
        Some(bound.min(self.longest))
    }

    /// Returns cumulative counts for buckets whose bounds double, as `(bound in seconds, number of durations
    /// up to the bound)`.
    pub(crate) fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        EXPONENTS.map(|exponent| {
            let end = 1u64 << exponent;
            let below = self.histogram.as_ref().map_or(0, |histogram| histogram.count_between(0, end));
            (Duration::from_nanos(end).as_secs_f64(), below)
        })
    }
}

impl fmt::Debug for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Latencies")
            .field("count", &self.count())
            .field("p50", &self.quantile(0.5))
            .field("p99", &self.quantile(0.99))
            .field("max", &self.max())
            .finish()
    }
}

/// The summary that [`Latencies`] serialises to.
#[derive(Serialize)]
struct Summary {
    count: u64,
    sum_seconds: f64,
    max_seconds: f64,
    p50_seconds: Option<f64>,
    p99_seconds: Option<f64>,
}

impl From<Latencies> for Summary {
    fn from(l: Latencies) -> Self {
        Self {
            count: l.count(),
            sum_seconds: l.sum.as_secs_f64(),
            max_seconds: l.max().as_secs_f64(),
            p50_seconds: l.quantile(0.5).map(|d| d.as_secs_f64()),
            p99_seconds: l.quantile(0.99).map(|d| d.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_bounds_within_two_digits() {
        let histogram = LatencyHistogram::default();
        assert_eq!((histogram.snapshot().quantile(0.99), histogram.snapshot().count()), (None, 0));
        (1..=1000).for_each(|i| histogram.record(Duration::from_nanos(100 * i)));
        let seen = histogram.snapshot();
        for (q, exact) in [(0.0, 100), (0.5, 50_000), (0.9, 90_000), (0.99, 99_000), (1.0, 100_000)] {
            let bound = seen.quantile(q).unwrap().as_nanos();
            assert!(exact <= bound && bound <= exact + exact / 100, "{q}: {bound}");
        }
        assert_eq!(seen.sum(), Duration::from_micros(50_050));
        histogram.record(Duration::MAX);
        assert_eq!(histogram.snapshot().max(), Duration::MAX);
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
        assert_eq!((seen.count(), seen.sum()), (4000, Duration::from_nanos((0..4000).sum())));
    }
}
