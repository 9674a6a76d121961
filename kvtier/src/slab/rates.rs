//! Measures how fast a disk reads, as moving averages of latency and bandwidth.

use std::time::{Duration, Instant};

/// Reads that end within this number of bytes measure the latency, and larger ones the bandwidth.
const SMALL: usize = 1 << 20;

/// The longest time after which a disk that is never idle is measured.
const LONGEST: Duration = Duration::from_millis(250);

/// The weight of the newest measurement.
const WEIGHT: f64 = 0.4;

/// Moving averages of a disk's latency and bandwidth while it reads.
#[derive(Debug, Default)]
pub(super) struct ReadRates {
    /// The seconds that pass before the first byte.
    latency: Option<f64>,
    /// The seconds per byte, from all reads together.
    byte: Option<f64>,
    /// The number of loads under way.
    loads: usize,
    /// The time since when bytes are counted, and their number.
    since: Option<Instant>,
    bytes: usize,
}

impl ReadRates {
    /// Records that a load begins.
    pub(super) fn begin(&mut self) {
        if self.loads == 0 {
            (self.since, self.bytes) = (Some(Instant::now()), 0);
        }
        self.loads += 1;
    }

    /// Records that a load has ended and read `bytes`.
    pub(super) fn end(&mut self, bytes: usize) {
        self.loads = self.loads.saturating_sub(1);
        self.bytes += bytes;
        let Some(since) = self.since else { return };
        let elapsed = since.elapsed();
        if self.bytes > 0 && (self.loads == 0 || elapsed >= LONGEST) {
            self.measured(self.bytes, elapsed);
            (self.since, self.bytes) = (Some(Instant::now()), 0);
        }
    }

    /// Adds a measurement.
    fn measured(&mut self, bytes: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        let mix = |before: Option<f64>, now: f64| {
            Some(before.map_or(now, |before| (1.0 - WEIGHT) * before + WEIGHT * now))
        };
        if bytes < SMALL {
            let transfer = self.byte.unwrap_or_default() * bytes as f64;
            self.latency = mix(self.latency, (seconds - transfer).max(0.0));
        } else {
            self.byte = mix(self.byte, seconds / bytes as f64);
        }
    }

    /// Returns the time in which the disk is expected to read `bytes`, or `None` if nothing was measured.
    pub(super) fn expected(&self, bytes: usize) -> Option<Duration> {
        let (latency, byte) = (self.latency, self.byte);
        (latency.is_some() || byte.is_some()).then(|| {
            let seconds = latency.unwrap_or_default() + byte.unwrap_or_default() * bytes as f64;
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_expected_follows_what_was_measured() {
        let mut rates = ReadRates::default();
        assert_eq!(rates.expected(1000), None);
        rates.measured(4096, Duration::from_millis(2));
        assert_eq!(rates.expected(100 << 20), Some(Duration::from_millis(2)));
        rates.measured(10 << 20, Duration::from_secs(1));
        let expected = rates.expected(20 << 20).unwrap();
        assert!((2.001..2.003).contains(&expected.as_secs_f64()), "{expected:?}");
        for _ in 0..20 {
            rates.measured(10 << 20, Duration::from_millis(10));
        }
        assert!(rates.expected(20 << 20).unwrap() < Duration::from_millis(23));
    }

    #[test]
    fn loads_that_overlap_are_measured_together() {
        let mut rates = ReadRates::default();
        rates.begin();
        rates.begin();
        rates.end(2 << 20);
        assert_eq!(rates.expected(1), None, "another load is under way");
        rates.end(2 << 20);
        assert!(rates.byte.is_some_and(|byte| byte * f64::from(4 << 20) > 0.0) && rates.latency.is_none());
        rates.begin();
        rates.end(0);
        assert!(rates.latency.is_none(), "a load that failed measures nothing");
    }
}
