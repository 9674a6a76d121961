//! Measurements as numbers and as text: latency histograms and the Prometheus exposition format.

mod exposition;
mod histogram;

pub use exposition::{Exposition, Family, MetricKind};
pub use histogram::{Latencies, LatencyHistogram};
