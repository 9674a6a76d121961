//! The text format that Prometheus scrapes, version 0.0.4.

use std::fmt::{self, Write as _};

use super::Latencies;

/// The kind of a metric family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A number that only grows. Its name ends in `_total`.
    Counter,
    /// A number that can rise and fall.
    Gauge,
    /// Counts by bucket.
    Histogram,
}

impl fmt::Display for MetricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        })
    }
}

/// Metrics as text. Each family is written once, with all of its samples.
///
/// ```
/// use kvmetrics::{Exposition, MetricKind};
/// let mut text = Exposition::default();
/// text.family("kvcore_pool_size_blocks", MetricKind::Gauge, "Blocks of a pool.")
///     .sample(&[("pool", "main")], 256.0)
///     .sample(&[("pool", "a \"b\" \\")], 16.0);
/// assert_eq!(text.to_string(), r#"# HELP kvcore_pool_size_blocks Blocks of a pool.
/// ## TYPE kvcore_pool_size_blocks gauge
/// kvcore_pool_size_blocks{pool="main"} 256
/// kvcore_pool_size_blocks{pool="a \"b\" \\"} 16
/// "#);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Exposition(String);

impl Exposition {
    /// Begins a family. `name` and the names of labels match `[a-zA-Z_][a-zA-Z0-9_]*` and come from
    /// programs, not from users. Label values and `help` may be any text and are escaped.
    pub fn family(&mut self, name: &'static str, kind: MetricKind, help: &str) -> Family<'_> {
        self.push(format_args!("# HELP {name} {}\n", help.replace('\\', "\\\\").replace('\n', "\\n")));
        self.push(format_args!("# TYPE {name} {kind}\n"));
        Family { text: self, name }
    }

    fn push(&mut self, text: fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.0.write_fmt(text);
    }

    fn sample(&mut self, name: &str, suffix: &str, labels: &[(&str, &str)], value: f64) {
        self.push(format_args!("{name}{suffix}"));
        for (i, (label, text)) in labels.iter().enumerate() {
            let open = if i == 0 { '{' } else { ',' };
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            self.push(format_args!("{open}{label}=\"{text}\""));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        self.push(format_args!("{close} {}\n", number(value)));
    }
}

impl fmt::Display for Exposition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A family of an [`Exposition`], to which samples are added.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut Exposition,
    name: &'static str,
}

impl Family<'_> {
    /// Adds one number.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: f64) -> &mut Self {
        self.text.sample(self.name, "", labels, value);
        self
    }

    /// Adds all lines of a histogram, in seconds.
    pub fn histogram(&mut self, labels: &[(&str, &str)], latencies: &Latencies) -> &mut Self {
        let mut below = 0;
        for (end, count) in latencies.buckets() {
            below += count;
            let end = number(end.map_or(f64::INFINITY, |end| end.as_secs_f64()));
            let labels = [labels, &[("le", end.as_str())]].concat();
            self.text.sample(self.name, "_bucket", &labels, below as f64);
        }
        self.text.sample(self.name, "_sum", labels, latencies.sum().as_secs_f64());
        self.text.sample(self.name, "_count", labels, below as f64);
        self
    }
}

/// Formats a number as Go reads it, the language of Prometheus.
fn number(value: f64) -> String {
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    value.to_string()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::LatencyHistogram;

    #[test]
    fn text_of_users_is_escaped() {
        let mut text = Exposition::default();
        text.family("a", MetricKind::Counter, "back\\slash\nline")
            .sample(&[("x", "q\"b\\n\n"), ("y", "")], 1.5);
        assert_eq!(
            text.to_string(),
            "# HELP a back\\\\slash\\nline\n# TYPE a counter\na{x=\"q\\\"b\\\\n\\n\",y=\"\"} 1.5\n"
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
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(lines.len(), 26 + 2);
        assert_eq!(lines[0], "t_seconds_bucket{p=\"m\",le=\"0.000000064\"} 1");
        assert_eq!(lines[1], "t_seconds_bucket{p=\"m\",le=\"0.000000128\"} 3");
        assert_eq!(lines[24], "t_seconds_bucket{p=\"m\",le=\"1.073741824\"} 3");
        assert_eq!(
            lines[25..],
            [
                "t_seconds_bucket{p=\"m\",le=\"+Inf\"} 4",
                "t_seconds_sum{p=\"m\"} 5.00000026",
                "t_seconds_count{p=\"m\"} 4"
            ]
        );
    }

    #[test]
    fn numbers_are_written_as_prometheus_reads_them() {
        let numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, 1e21].map(number);
        assert_eq!(numbers, ["NaN", "+Inf", "-Inf", "0", "1000000000000000000000"]);
    }
}
