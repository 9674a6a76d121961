//! Measurements as numbers and as text: latency histograms and the Prometheus exposition format.

mod exposition;
mod goals;
mod latencies;

pub use exposition::{Exposition, Family, MetricKind};
pub use goals::{Goal, Target};
pub use latencies::{Latencies, LatencyHistogram};
