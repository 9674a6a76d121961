//! Compares block bookkeeping with kvbm-logical 1.6.1 (Dynamo's block manager), and block keys with a SHA-256
//! chain.
//!
//! Prints one JSON object per line, like the other benchmarks. `cargo xtask bench` runs it. Sizes and times
//! are for blocks of 16 tokens. Both sides compute their keys before the clock starts. `--quick` measures one
//! small pool briefly.

mod ours;
mod theirs;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use kvcore::KeyScope;
use sha2::{Digest, Sha256};

/// The number of blocks per call: a prompt of 2,048 tokens.
const BATCH: usize = 128;

/// The number of prompts with keys, as a multiple of the number that fit in the pool.
const PROMPTS_PER_POOL: usize = 3;

/// The operations to measure on both pools. Each call works on `BATCH` blocks, unless it takes a count.
trait Pool: Sync {
    /// Creates a pool of `blocks` blocks.
    fn new(blocks: usize) -> Self;
    /// Allocates blocks and frees them.
    fn alloc_free(&self, blocks: usize);
    /// Allocates blocks one by one, as a sequence grows, and frees all blocks.
    fn grow(&self);
    /// Fills the pool with prompts. Prompt `i` of `blocks / BATCH` stays cached.
    fn fill(&self, prompt: usize);
    /// Acquires all blocks of a cached prompt and releases them.
    fn hit(&self, prompt: usize);
    /// Allocates blocks from a full pool, registers them as a new prompt, and releases them.
    fn churn(&self, prompt: usize);
}

#[derive(Clone, Copy)]
enum PoolWork {
    AllocFree,
    /// One guard per block.
    AllocFreeOne,
    /// One guard that acquires another block whenever a decode step has filled the last one.
    Grow,
    Hit,
    Churn,
}

impl PoolWork {
    const ALL: [Self; 5] = [Self::AllocFree, Self::AllocFreeOne, Self::Grow, Self::Hit, Self::Churn];

    /// Returns the number of blocks per call.
    fn batch(self) -> usize {
        if matches!(self, Self::AllocFreeOne) { 1 } else { BATCH }
    }

    fn blocks_a_round(self) -> usize {
        match self {
            Self::AllocFree => 1 << 24,
            Self::AllocFreeOne => 1 << 21,
            Self::Grow => 1 << 22,
            Self::Hit => 1 << 22,
            Self::Churn => 1 << 20,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::AllocFree => "alloc + free of 128",
            Self::AllocFreeOne => "alloc + free of one",
            Self::Grow => "growth by one, 128 times",
            Self::Hit => "prefix hit of 128 + release",
            Self::Churn => "churn of 128 in a full pool",
        }
    }
}

/// Returns the time per block in seconds, on `threads` threads at once, as the best of three rounds. The
/// number of calls per round is divided by `shorter`.
fn seconds<P: Pool>(work: PoolWork, blocks: usize, threads: usize, shorter: usize) -> f64 {
    let pool = P::new(blocks);
    let prompts = blocks / BATCH;
    if matches!(work, PoolWork::Hit | PoolWork::Churn) {
        (0..prompts).for_each(|prompt| pool.fill(prompt));
    }
    // A round is long enough that the time to wake a thread does not matter.
    let calls = work.blocks_a_round() / shorter / work.batch() / threads;
    let round = |thread: usize, round: usize| {
        for call in 0..calls {
            let n = (round * threads + thread) * calls + call;
            match work {
                PoolWork::AllocFree | PoolWork::AllocFreeOne => pool.alloc_free(work.batch()),
                PoolWork::Grow => pool.grow(),
                // Prompts are hit in a different order from the one in which they were filled.
                PoolWork::Hit => pool.hit(n * 7919 % prompts),
                // The prompts form a cycle of three times the pool's size, so each prompt has been
                // evicted before it is used again.
                PoolWork::Churn => pool.churn((prompts + n) % (PROMPTS_PER_POOL * prompts)),
            }
        }
    };
    let mut best = f64::INFINITY;
    for r in 0..4 {
        let start = Barrier::new(threads);
        let (round, start) = (&round, &start);
        let spans: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
            let work = |thread| {
                move || {
                    start.wait();
                    let began = Instant::now();
                    round(thread, r);
                    (began, Instant::now())
                }
            };
            let handles: Vec<_> = (0..threads).map(|thread| scope.spawn(work(thread))).collect();
            handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
        });
        assert_eq!(spans.len(), threads, "a worker failed");
        let (first, last) = (spans.iter().map(|s| s.0).min(), spans.iter().map(|s| s.1).max());
        let took = last.zip(first).map_or(f64::INFINITY, |(last, first)| (last - first).as_secs_f64());
        // The first round is a warm-up.
        if r > 0 {
            best = best.min(took / (calls * threads * work.batch()) as f64);
        }
    }
    best
}

/// Prints a row. Rows of one sweep differ only in size, and the table shows every row.
fn row(sweep: &str, what: &str, size: (usize, &str), seconds: f64, limit: &str, limit_seconds: f64) {
    let (ratio, (size, unit)) = (limit_seconds / seconds, size);
    let line = serde_json::json!({
        "sweep": sweep, "what": what, "size": size, "unit": unit, "seconds": seconds,
        "limit": limit, "limit_seconds": limit_seconds, "ratio": ratio,
    });
    println!("{line}");
}

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let sizes: &[usize] = if quick { &[8192] } else { &[8192, 65_536, 1_048_576] };
    let shorter = if quick { 16 } else { 1 };
    for work in PoolWork::ALL {
        for &blocks in sizes {
            let ours = seconds::<ours::Ours>(work, blocks, 1, shorter);
            // The peer takes minutes to fill a pool that is larger than the target's size.
            let peer = seconds::<theirs::Theirs>(work, blocks.min(65_536), 1, shorter);
            let sweep = format!("block pool: {}, per block", work.name());
            let what = format!("block pool: {}, {blocks} blocks, per block", work.name());
            let limit = if blocks > 65_536 { "kvbm-logical 1.6.1 with 65,536" } else { "kvbm-logical 1.6.1" };
            row(&sweep, &what, (blocks, "blocks"), ours, limit, peer);
            if cores > 1 {
                let both = seconds::<ours::Ours>(work, blocks, 2, shorter);
                let sweep = format!("block pool: {}, two threads, per block", work.name());
                let what = format!("block pool: {}, {blocks} blocks, two threads, per block", work.name());
                row(&sweep, &what, (blocks, "blocks"), both, "one thread", ours);
            }
        }
    }
    keys();
}

/// Measures computing the keys of prompts of up to 8k tokens.
fn keys() {
    [2048u32, 4096, 8192].into_iter().for_each(keys_of);
}

fn keys_of(tokens: u32) {
    let tokens: Vec<u32> = (0..tokens).map(|i| i.wrapping_mul(2_654_435) % 128_000).collect();
    let root = KeyScope::new("model", b"weights").root();
    let time = |work: &dyn Fn()| {
        work();
        (0..200)
            .map(|_| {
                let start = Instant::now();
                work();
                start.elapsed().as_secs_f64()
            })
            .fold(f64::INFINITY, f64::min)
    };
    let ours = time(&|| drop(black_box(root.chain(black_box(&tokens), 16))));
    let sha = time(&|| {
        let mut keys = Vec::with_capacity(tokens.len() / 16);
        let mut parent = [0u8; 32];
        let mut bytes = [0u8; 64];
        for block in black_box(&tokens).chunks_exact(16) {
            for (to, token) in bytes.chunks_exact_mut(4).zip(block) {
                to.copy_from_slice(&token.to_le_bytes());
            }
            parent = Sha256::new().chain_update(parent).chain_update(bytes).finalize().into();
            keys.push(parent);
        }
        drop(black_box(keys));
    });
    let what = "256-bit chained keys, 16-token blocks";
    row(what, what, (tokens.len(), "tokens"), ours, "SHA-256 chain", sha);
}
