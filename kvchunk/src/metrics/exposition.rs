//! The Prometheus exposition, written by `prometheus-client` in the `OpenMetrics` format.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::Latencies;

/// The kind of a metric family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A number that only grows. `_total` is appended to the name.
    Counter,
    /// A number that can rise and fall.
    Gauge,
    /// Durations in seconds, counted in buckets.
    Histogram,
}

/// The metrics for one scrape. Each family is written once, with all its samples.
///
/// ```
/// use kvchunk::metrics::{Exposition, MetricKind};
/// let mut text = Exposition::default();
/// text.family("kvcore_pool_size_blocks", MetricKind::Gauge, "Blocks in a pool")
///     .sample(&[("pool", "main")], 256.0)
///     .sample(&[("pool", "a \"b\" \\")], 16.0);
/// assert_eq!(text.to_string(), r#"# HELP kvcore_pool_size_blocks Blocks in a pool.
/// ## TYPE kvcore_pool_size_blocks gauge
/// kvcore_pool_size_blocks{pool="main"} 256.0
/// kvcore_pool_size_blocks{pool="a \"b\" \\"} 16.0
/// ## EOF
/// "#);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Exposition(Vec<MetricFamily>);

impl Exposition {
    /// Begins a metric family. `name` and the label names must match `[a-zA-Z_][a-zA-Z0-9_]*`, and `help`
    /// must be a phrase without a full stop. Label values may be any string.
    pub fn family(&mut self, name: &'static str, kind: MetricKind, help: &'static str) -> &mut MetricFamily {
        let at = self.0.len();
        self.0.push(MetricFamily { name, kind, help, samples: Vec::new() });
        &mut self.0[at]
    }

    /// Adds a family for each of `columns`, with one sample per source in `sources`. `label` names the label
    /// that holds the source's name.
    pub fn numbers<M>(&mut self, columns: &[NumberColumn<M>], label: &str, sources: &[(&str, &M)]) {
        for (name, kind, help, value) in columns {
            let family = self.family(name, *kind, help);
            for (source, metrics) in sources {
                family.sample(&[(label, source)], value(metrics));
            }
        }
    }

    /// Adds a histogram family for each of `columns`, with the latencies of each source in `sources`. `label`
    /// names the label that holds the source's name.
    pub fn latencies<M>(&mut self, columns: &[LatencyColumn<M>], label: &str, sources: &[(&str, &M)]) {
        for (name, help, latencies) in columns {
            let family = self.family(name, MetricKind::Histogram, help);
            for (source, metrics) in sources {
                family.histogram(&[(label, source)], latencies(metrics));
            }
        }
    }
}

/// A number column for metrics `M`: its name, kind, help text and value.
pub type NumberColumn<M> = (&'static str, MetricKind, &'static str, fn(&M) -> f64);

/// A latency column for metrics `M`: its name, help text and value.
pub type LatencyColumn<M> = (&'static str, &'static str, fn(&M) -> &Latencies);

impl fmt::Display for Exposition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut registry = Registry::default();
        for family in &self.0 {
            registry.register_collector(Box::new(family.clone()));
        }
        text::encode(f, &registry)
    }
}

/// A metric family in an [`Exposition`]. Samples can be added to it.
#[derive(Debug, Clone)]
pub struct MetricFamily {
    name: &'static str,
    kind: MetricKind,
    help: &'static str,
    samples: Vec<(Labels, SampleValue)>,
}

/// Label names and their values.
type Labels = Vec<(String, String)>;

#[derive(Debug, Clone)]
enum SampleValue {
    Number(f64),
    Latencies { sum: f64, count: u64, buckets: Vec<(f64, u64)> },
}

impl MetricFamily {
    /// Adds a sample with a single value.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: f64) -> &mut Self {
        self.push(labels, SampleValue::Number(value))
    }

    /// Adds a histogram of durations.
    pub fn histogram(&mut self, labels: &[(&str, &str)], latencies: &Latencies) -> &mut Self {
        let (mut buckets, mut before) = (Vec::new(), 0);
        for (end, below) in latencies.cumulative() {
            buckets.push((end, below.saturating_sub(before)));
            before = below;
        }
        buckets.push((f64::INFINITY, latencies.count().saturating_sub(before)));
        let sum = latencies.sum().as_secs_f64();
        self.push(labels, SampleValue::Latencies { sum, count: latencies.count(), buckets })
    }

    fn push(&mut self, labels: &[(&str, &str)], value: SampleValue) -> &mut Self {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        self.samples.push((labels.iter().map(owned).collect(), value));
        self
    }
}

impl Collector for MetricFamily {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let kind = match self.kind {
            MetricKind::Counter => MetricType::Counter,
            MetricKind::Gauge => MetricType::Gauge,
            MetricKind::Histogram => MetricType::Histogram,
        };
        let help = format!("{}.", self.help);
        let mut family = encoder.encode_descriptor(self.name, &help, None, kind)?;
        for (labels, value) in &self.samples {
            let mut metric = family.encode_family(labels)?;
            match (self.kind, value) {
                (MetricKind::Counter, SampleValue::Number(value)) => {
                    metric.encode_counter::<NoLabelSet, _, f64>(value, None)?;
                }
                (_, SampleValue::Number(value)) => metric.encode_gauge(value)?,
                (_, SampleValue::Latencies { sum, count, buckets }) => {
                    metric.encode_histogram::<NoLabelSet>(*sum, *count, buckets, None)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::metrics::LatencyHistogram;

    #[test]
    fn label_values_of_users_are_escaped() {
        let mut text = Exposition::default();
        text.family("a", MetricKind::Counter, "help").sample(&[("x", "q\"b\\n\n"), ("y", "")], 1.5);
        assert_eq!(
            text.to_string(),
            "# HELP a help.\n# TYPE a counter\na_total{x=\"q\\\"b\\\\n\\n\",y=\"\"} 1.5\n# EOF\n"
        );
    }

    #[test]
    fn histograms_are_cumulative_and_end_in_infinity() {
        let histogram = LatencyHistogram::default();
        for ns in [60, 100, 100, 5_000_000_000] {
            histogram.record(Duration::from_nanos(ns));
        }
        let mut text = Exposition::default();
        text.family("t_seconds", MetricKind::Histogram, "h").histogram(&[("p", "m")], &histogram.snapshot());
        let text = text.to_string();
        let buckets: Vec<u64> = text
            .lines()
            .filter(|line| line.starts_with("t_seconds_bucket"))
            .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
            .collect();
        assert_eq!(buckets.len(), 26);
        assert!(buckets.is_sorted(), "{buckets:?}");
        assert_eq!((buckets[0], buckets[1], buckets[24], buckets[25]), (1, 3, 3, 4));
        assert!(text.contains("t_seconds_bucket{le=\"+Inf\",p=\"m\"} 4\n"), "{text}");
        assert!(
            text.contains("t_seconds_count{p=\"m\"} 4\n")
                && text.contains("t_seconds_sum{p=\"m\"} 5.00000026\n")
        );
    }
}
