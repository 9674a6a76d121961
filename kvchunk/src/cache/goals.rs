//! A chunk cache's goals, with the measured values.

use crate::metrics::{Goal, Target};

use super::ChunkCacheMetrics;

impl ChunkCacheMetrics {
    /// Returns the goals, each with its measured value: more than 70 % of lookups are hits, 70 to 90 % of
    /// blocks are used, lookups take less than 1 ms on average, and placing a piece takes less than 10 ms in
    /// 99 % of cases. A goal's measured value is `None` until there is something to measure.
    ///
    /// ```
    /// use kvchunk::ChunkCacheMetrics;
    /// let metrics = ChunkCacheMetrics { lookup_count: 10, hit_count: 8, ..ChunkCacheMetrics::default() };
    /// assert_eq!(metrics.goals()[0].to_string(), "hit_rate: 0.8 fraction, goal > 0.7: met");
    /// ```
    pub fn goals(&self) -> [Goal; 5] {
        let used = self.used_share();
        [
            Goal::new("hit_rate", "fraction", Target::Above(0.70), self.found_share()),
            Goal::new("memory_utilization", "fraction", Target::Above(0.70), used),
            Goal::new("memory_utilization_limit", "fraction", Target::Below(0.90), used),
            Goal::new("lookup_time_mean", "seconds", Target::Below(1e-3), self.lookup_mean()),
            Goal::new("reindex_time_p99", "seconds", Target::Below(10e-3), self.reindex_p99()),
        ]
    }

    /// Returns the alarm thresholds as goals. A goal that is missed means an alarm.
    pub fn alarms(&self) -> [Goal; 4] {
        [
            Goal::new("hit_rate", "fraction", Target::Above(0.50), self.found_share()),
            Goal::new("memory_utilization", "fraction", Target::Below(0.95), self.used_share()),
            Goal::new("lookup_time_mean", "seconds", Target::Below(5e-3), self.lookup_mean()),
            Goal::new("reindex_time_p99", "seconds", Target::Below(50e-3), self.reindex_p99()),
        ]
    }

    fn found_share(&self) -> Option<f64> {
        (self.lookup_count > 0).then(|| self.hit_rate())
    }

    fn used_share(&self) -> Option<f64> {
        (self.total_blocks > 0).then(|| self.memory_utilization())
    }

    fn lookup_mean(&self) -> Option<f64> {
        (self.lookups.count() > 0).then(|| self.avg_lookup_time_ms() / 1e3)
    }

    fn reindex_p99(&self) -> Option<f64> {
        self.reindexes.quantile(0.99).map(|p99| p99.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Latencies, LatencyHistogram};
    use std::time::Duration;

    fn latencies(micros: u64) -> Latencies {
        let histogram = LatencyHistogram::default();
        histogram.record(Duration::from_micros(micros));
        histogram.snapshot()
    }

    #[test]
    fn goals_and_alarms_are_the_seeds_and_nothing_measured_is_neither_met_nor_missed() {
        let none = ChunkCacheMetrics::default();
        assert!(none.goals().iter().chain(&none.alarms()).all(|goal| goal.met.is_none()));
        let of = |hit_count, used_blocks, lookup, reindex| ChunkCacheMetrics {
            lookup_count: 100,
            hit_count,
            total_blocks: 100,
            used_blocks,
            lookups: latencies(lookup),
            reindexes: latencies(reindex),
            ..ChunkCacheMetrics::default()
        };
        let met = |m: ChunkCacheMetrics| (m.goals().map(|goal| goal.met), m.alarms().map(|goal| goal.met));
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(met(of(80, 80, 20, 100)), ([yes; 5], [yes; 4]));
        assert_eq!(met(of(60, 60, 2_000, 20_000)), ([no, no, yes, no, no], [yes; 4]), "no goal, no alarm");
        assert_eq!(met(of(40, 99, 6_000, 80_000)), ([no, yes, no, no, no], [no; 4]));
    }
}
