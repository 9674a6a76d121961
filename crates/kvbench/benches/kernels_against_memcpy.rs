//! Kernels against `memcpy` of the same bytes, both on one thread and on all; a step of decoding against a streaming
//! read of the KV bytes, and a prefill against a GEMM of its operations, on all threads. Limits are measured in the
//! same run.
//!
//! `--mib N` sets the largest size of each side (default 64), `--context N` the longest context of a decode step
//! (default 16,384) and eight times the longest prefill.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::hint::black_box;

use gemm::Parallelism;
use kvbackend_cpu::CpuOptions;
use kvcore::kernels::CopyTensor;
use kvcore::{DType, MemoryKind, Result, allocate_tensor};

use kvbench::lab::{DIM, HEADS, Lab, QUERY_HEADS};
use kvbench::limits::{memcpy_seconds, pool, read_seconds};
use kvbench::{option, row, time};

fn all_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn options(threads: usize) -> CpuOptions {
    CpuOptions { threads: Some(threads), ..CpuOptions::default() }
}

fn movement(dtype: DType, mib: usize, threads: usize) -> Result<()> {
    let tokens = (mib << 20) / (2 * HEADS * DIM * dtype.bits() / 8);
    let lab = Lab::new(dtype, tokens, &options(threads))?;
    let (stream, both) = (&lab.stream, lab.bytes());
    let memcpy = memcpy_seconds(both, threads);
    let report = |what: &str, bytes: usize, seconds: f64| {
        let limit = memcpy * bytes as f64 / both as f64;
        row(&format!("{what} {dtype}, {threads} threads"), bytes, seconds, "memcpy", limit);
    };
    let op = lab.scatter()?;
    report("scatter", both, time(|| stream.scatter(&op).expect("scatter")));
    let op = lab.gather()?;
    report("gather", both, time(|| stream.gather(&op).expect("gather")));
    let op = lab.copy_blocks();
    report("copy_blocks", both, time(|| stream.copy_blocks(&op).expect("copy")));
    let op = lab.rotate_keys();
    report("rotate_keys (K rotated, V copied)", both, time(|| stream.rotate_keys(&op).expect("rotate")));
    let op = lab.rope()?;
    report("rope", both / 2, time(|| stream.rope(&op).expect("rope")));
    for (what, axes) in [("heads before tokens", [1, 0, 2]), ("tokens innermost", [1, 2, 0])] {
        let src = op.rows.permute(&axes)?;
        let dst = allocate_tensor(lab.backend.as_ref(), MemoryKind::Device, dtype, src.shape())?;
        let copy = CopyTensor { src, dst };
        let seconds = time(|| stream.copy_tensor(&copy).expect("copy"));
        report(&format!("copy_tensor ({what})"), both / 2, seconds);
    }
    Ok(())
}

fn decode(dtype: DType, context: usize) -> Result<()> {
    let lab = Lab::new(dtype, context, &options(all_threads()))?;
    let op = lab.attend(1, true)?;
    let seconds = time(|| lab.stream.attend(&op).expect("attend"));
    let (what, limit) = (format!("attend, decode, GQA 4, {dtype}"), "streaming read");
    row(&what, lab.bytes(), seconds, limit, read_seconds(lab.bytes(), all_threads()));
    Ok(())
}

/// A prompt of `tokens` tokens. Its operations are those that the mask leaves, two products of each pair of tokens.
fn prefill(dtype: DType, tokens: usize) -> Result<()> {
    let lab = Lab::new(dtype, tokens, &options(all_threads()))?;
    let op = lab.attend(lab.tokens, true)?;
    let seconds = time(|| lab.stream.attend(&op).expect("attend"));
    let pairs = lab.tokens * (lab.tokens + 1) / 2;
    let flops = 2.0 * 2.0 * (QUERY_HEADS * DIM * pairs) as f64;
    let (what, limit) = (format!("attend, prefill, GQA 4, {dtype}"), "GEMM in f32");
    row(&what, lab.bytes(), seconds, limit, gemm_seconds(flops, all_threads()));
    Ok(())
}

/// Seconds of a product of square matrices of f32 on `threads` threads, for as many operations as `flops`.
fn gemm_seconds(flops: f64, threads: usize) -> f64 {
    const N: usize = 1024;
    let (a, b, mut c) = (vec![1.0f32; N * N], vec![1.0f32; N * N], vec![0.0f32; N * N]);
    let (pool, column) = (pool(threads), N as isize);
    let parallelism = if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
    let seconds = time(|| {
        pool.install(|| {
            // SAFETY: each matrix has N rows of N elements, and the result is apart from what is read.
            unsafe {
                gemm::gemm(
                    N,
                    N,
                    N,
                    c.as_mut_ptr(),
                    1,
                    column,
                    false,
                    a.as_ptr(),
                    1,
                    column,
                    b.as_ptr(),
                    1,
                    column,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    parallelism,
                );
            }
        });
        black_box(&mut c);
    });
    seconds * flops / (2.0 * (N * N * N) as f64)
}

fn main() -> Result<()> {
    let (mib, context) = (option("--mib", 64), option("--context", 16 * 1024));
    for dtype in [DType::BF16, DType::F32] {
        for size in [mib / 4, mib / 2, mib] {
            for threads in [1, all_threads()] {
                movement(dtype, size.max(1), threads)?;
            }
        }
        for context in [context / 16, context / 4, context] {
            decode(dtype, context)?;
        }
        for tokens in [context / 32, context / 16, context / 8] {
            prefill(dtype, tokens)?;
        }
    }
    Ok(())
}
