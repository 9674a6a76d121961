//! Times kernels at a few sizes, as a report for people: `cargo bench -p kvbench --bench
//! criterion_kernels`.
//!
//! Tokens have 8 heads of 128 in bf16, in blocks of 16. Throughput counts the K and V bytes that a kernel
//! reads. `cargo xtask instructions` catches regressions, and `cargo xtask bench` makes comparisons.
#![allow(missing_docs, reason = "what the macros make has none")]
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvbackend_cpu::CpuOptions;
use kvcore::DType;

use kvbench::lab::Lab;

fn lab(tokens: usize) -> Lab {
    Lab::new(DType::BF16, tokens, &CpuOptions::default()).expect("memory")
}

fn moves(c: &mut Criterion) {
    let mut group = c.benchmark_group("moves, tokens");
    for tokens in [16usize, 512, 16_384] {
        let lab = lab(tokens);
        let stream = &lab.stream;
        group.throughput(Throughput::Bytes(lab.bytes() as u64));
        let op = lab.scatter().expect("memory");
        group.bench_function(BenchmarkId::new("scatter", tokens), |b| {
            b.iter(|| stream.scatter(&op).expect("scatter"));
        });
        let op = lab.gather().expect("memory");
        group.bench_function(BenchmarkId::new("gather", tokens), |b| {
            b.iter(|| stream.gather(&op).expect("gather"));
        });
        let op = lab.copy_blocks();
        group.bench_function(BenchmarkId::new("copy_blocks", tokens), |b| {
            b.iter(|| stream.copy_blocks(&op).expect("copy"));
        });
        let op = lab.rotate_keys();
        group.bench_function(BenchmarkId::new("rotate_keys", tokens), |b| {
            b.iter(|| stream.rotate_keys(&op).expect("rotate"));
        });
        group.throughput(Throughput::Bytes(lab.bytes() as u64 / 2));
        let op = lab.rope().expect("memory");
        group.bench_function(BenchmarkId::new("rope", tokens), |b| {
            b.iter(|| stream.rope(&op).expect("rope"));
        });
    }
    group.finish();
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("attend, rows of tokens");
    group.sample_size(10);
    for (rows, tokens) in [(1usize, 1024usize), (1, 8192), (256, 256), (512, 512)] {
        let lab = lab(tokens);
        let op = lab.attend(rows, true).expect("memory");
        group.throughput(Throughput::Bytes(lab.bytes() as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{rows} of {tokens}")), |b| {
            b.iter(|| lab.stream.attend(&op).expect("attend"));
        });
    }
    group.finish();
}

criterion_group!(benches, moves, attention);
criterion_main!(benches);
