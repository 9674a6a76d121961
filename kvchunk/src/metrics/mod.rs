//! Measurements of the caches: latencies, goals, and the Prometheus exposition.
//!
//! Latencies are `hdrhistogram` histograms, and `prometheus-client` writes the exposition. Values are read
//! from the caches at each scrape: nothing is registered, and nothing runs in the background.
//!
//! ```
//! use std::time::Duration;
//! use kvchunk::metrics::{Exposition, LatencyHistogram, MetricKind};
//!
//! let lookups = LatencyHistogram::default();
//! lookups.record(Duration::from_micros(3));
//! let mut text = Exposition::default();
//! text.family("lookups", MetricKind::Counter, "Lookups of chunks").sample(&[("cache", "main")], 1.0);
//! text.family("lookup_seconds", MetricKind::Histogram, "Time of a lookup")
//!     .histogram(&[("cache", "main")], &lookups.snapshot());
//! assert!(text.to_string().contains("lookups_total{cache=\"main\"} 1.0"));
//! ```

mod exposition;
mod goals;
mod latencies;

pub use exposition::{Exposition, LatencyColumn, MetricFamily, MetricKind, NumberColumn};
pub use goals::{Goal, Target};
pub use latencies::{Latencies, LatencyHistogram};
