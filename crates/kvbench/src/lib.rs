//! What benchmarks of kernels share: timing, and the JSON lines that `cargo xtask bench` reads.
//!
//! `{"what", "size", "unit", "seconds", "limit", "limit_seconds", "ratio"}`, where a ratio of 1 means as
//! fast as the limit; rows that differ in `size` only are a sweep.

#![allow(clippy::expect_used, clippy::missing_panics_doc, reason = "a benchmark fails by panicking")]

pub mod lab;
pub mod limits;

use std::time::Instant;

/// Best of three, after one run to warm up.
pub fn time(mut work: impl FnMut()) -> f64 {
    work();
    (0..3)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// Prints one row, and returns its ratio.
pub fn row(what: &str, bytes: usize, seconds: f64, limit: &str, limit_seconds: f64) -> f64 {
    let ratio = limit_seconds / seconds;
    let line = serde_json::json!({
        "what": what, "size": bytes, "unit": "bytes", "seconds": seconds,
        "limit": limit, "limit_seconds": limit_seconds, "ratio": ratio,
    });
    println!("{line}");
    ratio
}

/// The number after a flag of the command line.
pub fn option(flag: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    let given = args.iter().position(|arg| arg == flag).and_then(|i| args.get(i + 1)?.parse().ok());
    given.unwrap_or(default)
}
