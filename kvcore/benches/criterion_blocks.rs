//! Human-readable benchmarks of the block pool and of block keys: `cargo bench -p kvcore --bench
//! criterion_blocks`.
//!
//! `cargo xtask instructions` catches regressions, and `cargo xtask bench` makes comparisons.
#![allow(missing_docs, reason = "what the macros make has none")]
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvcore::{BlockPool, KeyScope};

const BLOCK: usize = 16;

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| i.wrapping_mul(2_654_435_761) >> 15).collect()
}

fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("block pool, blocks");
    let root = KeyScope::new("model", b"weights").root();
    for blocks in [1usize, 128, 1024] {
        let pool = BlockPool::new(0..65_536).expect("a pool");
        group.throughput(Throughput::Elements(blocks as u64));
        group.bench_function(BenchmarkId::new("alloc and free", blocks), |b| {
            b.iter(|| drop(black_box(pool.allocate(black_box(blocks)).expect("room"))));
        });
        let keys = root.chain(&tokens((blocks * BLOCK) as u32), BLOCK);
        drop(pool.allocate(blocks).expect("room").register(None, &keys).expect("new keys"));
        group.bench_function(BenchmarkId::new("prefix hit and release", blocks), |b| {
            b.iter(|| drop(black_box(pool.lookup_chain(black_box(&keys)))));
        });
    }
    group.finish();
}

fn keys(c: &mut Criterion) {
    let mut group = c.benchmark_group("chained keys, tokens");
    let root = KeyScope::new("model", b"weights").root();
    for n in [512u32, 8192, 131_072] {
        let tokens = tokens(n);
        group.throughput(Throughput::Elements(u64::from(n)));
        group.bench_function(BenchmarkId::from_parameter(n), |b| {
            b.iter(|| drop(black_box(root.chain(black_box(&tokens), BLOCK))));
        });
    }
    group.finish();
}

criterion_group!(benches, pool, keys);
criterion_main!(benches);
