//! Common parts of the kernel benchmarks: timing, and the JSON lines that `cargo xtask bench` reads.
//!
//! A line is `{"sweep", "what", "size", "unit", "seconds", "limit", "limit_seconds", "ratio"}`. A ratio of 1
//! means that the row is as fast as the limit. Rows that differ only in `size`, or that name the same sweep,
//! form one sweep.
//!
//! - [`lab`]: an arena as a service uses it, and the operations that are measured on it
//! - [`limits`]: limits of the machine, such as `memcpy` on threads that are already running
//! - [`rows`]: rows read back from the output of a benchmark, and sweeps
//! - [`aims`]: the minimum speed that each row should reach
//! - [`table`]: the table of docs/benchmarks.md

#![allow(clippy::expect_used, clippy::missing_panics_doc, reason = "a benchmark fails by panicking")]

pub mod aims;
pub mod lab;
pub mod limits;
pub mod rows;
pub mod table;

use std::time::Instant;

/// The minimum number of turns, the maximum number of turns, and a time in seconds. Between the minimum and
/// the maximum, the turns end once every piece of work has run for that time in total.
const TURNS: (usize, usize, f64) = (3, 60, 0.4);

/// A time in seconds. After the minimum number of turns, the turns also end once all pieces of work together
/// have run for this time.
const ENOUGH_OF_ALL: f64 = 3.0;

/// Returns the time that each piece of work takes, in seconds: the best of several turns, after a
/// warm-up.
///
/// The pieces take turns, so a temporary slowdown of the machine affects all of them.
pub fn in_turns<const N: usize>(mut works: [&mut dyn FnMut(); N]) -> [f64; N] {
    let (mut best, mut total) = ([f64::INFINITY; N], [0.0; N]);
    for work in &mut works {
        work();
    }
    let (least, most, enough) = TURNS;
    for turn in 0..most {
        let all = total.iter().all(|&seconds| seconds >= enough);
        if turn >= least && (all || total.iter().sum::<f64>() >= ENOUGH_OF_ALL) {
            break;
        }
        for (i, work) in works.iter_mut().enumerate() {
            let start = Instant::now();
            work();
            let seconds = start.elapsed().as_secs_f64();
            total[i] += seconds;
            best[i] = best[i].min(seconds);
        }
    }
    best
}

/// Returns the time that one piece of work takes, in seconds: the best of several turns.
pub fn time(mut work: impl FnMut()) -> f64 {
    in_turns([&mut work])[0]
}

/// Prints one row. Returns its ratio of `limit_seconds` to `seconds`.
pub fn row(what: &str, bytes: usize, seconds: f64, limit: &str, limit_seconds: f64) -> f64 {
    print(None, what, bytes, seconds, limit, limit_seconds)
}

/// Prints one row of a named sweep, which the table shows in every size. `what` must name the size.
pub fn row_of_sweep(sweep: &str, what: &str, bytes: usize, seconds: f64, limit: &str, limit_seconds: f64) {
    print(Some(sweep), what, bytes, seconds, limit, limit_seconds);
}

fn print(
    sweep: Option<&str>,
    what: &str,
    bytes: usize,
    seconds: f64,
    limit: &str,
    limit_seconds: f64,
) -> f64 {
    let ratio = limit_seconds / seconds;
    let line = serde_json::json!({
        "sweep": sweep, "what": what, "size": bytes, "unit": "bytes", "seconds": seconds,
        "limit": limit, "limit_seconds": limit_seconds, "ratio": ratio,
    });
    println!("{line}");
    ratio
}

/// Returns the number after a command-line flag, or `default` if the flag is missing.
pub fn option(flag: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    let given = args.iter().position(|arg| arg == flag).and_then(|i| args.get(i + 1)?.parse().ok());
    given.unwrap_or(default)
}
