//! Timing and the JSON lines that `cargo xtask bench` reads.
//!
//! `{"what", "size", "unit", "seconds", "limit", "limit_seconds", "ratio"}`, where a ratio of 1 means as
//! fast as the limit; rows that differ in `size` only are a sweep.

use std::hint::black_box;
use std::time::Instant;

/// Best of three, after one run to warm up.
pub(crate) fn time(mut work: impl FnMut()) -> f64 {
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
pub(crate) fn row(what: &str, bytes: usize, seconds: f64, limit: &str, limit_seconds: f64) -> f64 {
    let ratio = limit_seconds / seconds;
    let line = serde_json::json!({
        "what": what, "size": bytes, "unit": "bytes", "seconds": seconds,
        "limit": limit, "limit_seconds": limit_seconds, "ratio": ratio,
    });
    println!("{line}");
    ratio
}

/// Threads that copy `bytes` bytes once, each its part.
pub(crate) fn memcpy_seconds(bytes: usize, threads: usize) -> f64 {
    let (src, mut dst) = (vec![1u8; bytes], vec![0u8; bytes]);
    let part = bytes.div_ceil(threads);
    time(|| {
        std::thread::scope(|scope| {
            let mut parts = dst.chunks_mut(part).zip(src.chunks(part));
            let own = parts.next();
            for (to, from) in parts {
                scope.spawn(move || black_box(to).copy_from_slice(black_box(from)));
            }
            if let Some((to, from)) = own {
                black_box(to).copy_from_slice(black_box(from));
            }
        });
    })
}

/// The number after a flag of the command line.
pub(crate) fn option(flag: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    let given = args.iter().position(|arg| arg == flag).and_then(|i| args.get(i + 1)?.parse().ok());
    given.unwrap_or(default)
}

/// Block numbers in the order in which a pool in use hands them out.
pub(crate) fn shuffled(blocks: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..blocks).collect();
    let mut state = 1u64;
    for i in (1..order.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        order.swap(i, (state >> 33) as usize % (i + 1));
    }
    order
}
