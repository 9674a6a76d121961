//! Compares kernels with `memcpy` of the same bytes, on one thread and on all threads. On all threads, also
//! compares a decode step with a streaming read of the KV bytes, and a prefill with a GEMM of the same number
//! of operations. A kernel and its limit take turns.
//!
//! `--mib N` sets the largest size of each side (default 64). `--context N` sets the longest context of a
//! decode step (default 16,384), which is eight times the longest prefill.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::hint::black_box;
use std::sync::Arc;

use gemm::Parallelism;
use kvbackend_cpu::CpuOptions;
use kvcore::{CopyTensor, DType, Gather, MemoryKind, Result, Scatter, WriteSlots, allocate_tensor};
use rayon::ThreadPool;

use kvbench::lab::{DIM, HEADS, Lab, QUERY_HEADS, shuffled};
use kvbench::limits::{Memcpy, StreamingRead, pool};
use kvbench::{in_turns, option, row};

fn all_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn options(threads: usize) -> CpuOptions {
    CpuOptions { threads: Some(threads), ..CpuOptions::default() }
}

/// Compares moving bytes with `memcpy` of the same number of bytes on the same number of threads, in turns.
struct Against {
    limit: Memcpy,
    bytes: usize,
    threads: usize,
}

impl Against {
    fn memcpy(bytes: usize, threads: usize) -> Self {
        Self { limit: Memcpy::new(bytes, threads), bytes, threads }
    }

    /// Prints one row of the table. `work` must move `bytes` bytes.
    fn report(&mut self, what: &str, bytes: usize, mut work: impl FnMut()) {
        let [seconds, limit] = in_turns([&mut work, &mut || self.limit.run()]);
        let limit = limit * bytes as f64 / self.bytes as f64;
        let threads = if self.threads == 1 { "1 thread" } else { &format!("{} threads", self.threads) };
        row(&format!("{what}, {threads}"), bytes, seconds, "memcpy", limit);
    }
}

fn movement(dtype: DType, mib: usize, threads: usize) -> Result<()> {
    let tokens = (mib << 20) / (2 * HEADS * DIM * dtype.bits() / 8);
    let lab = Lab::new(dtype, tokens, &options(threads))?;
    let (stream, both) = (&lab.stream, lab.bytes());
    let mut against = Against::memcpy(both, threads);
    let op = lab.scatter()?;
    against.report(&format!("scatter {dtype}"), both, || stream.scatter(&op).expect("scatter"));
    let op = lab.gather()?;
    against.report(&format!("gather {dtype}"), both, || stream.gather(&op).expect("gather"));
    let op = lab.copy_blocks();
    against.report(&format!("copy_blocks {dtype}"), both, || stream.copy_blocks(&op).expect("copy"));
    let op = lab.rope()?;
    for (order, axes) in [("heads before tokens", [1, 0, 2]), ("tokens innermost", [1, 2, 0])] {
        let src = op.rows.permute(&axes)?;
        let dst = allocate_tensor(lab.backend.as_ref(), MemoryKind::Device, dtype, src.shape())?;
        let copy = CopyTensor { src, dst };
        let what = format!("copy_tensor ({order}) {dtype}");
        against.report(&what, both / 2, || stream.copy_tensor(&copy).expect("copy"));
    }
    Ok(())
}

fn rotation(dtype: DType, mib: usize, threads: usize) -> Result<()> {
    let tokens = (mib << 20) / (2 * HEADS * DIM * dtype.bits() / 8);
    let lab = Lab::new(dtype, tokens, &options(threads))?;
    let (stream, both) = (&lab.stream, lab.bytes());
    let mut against = Against::memcpy(both, threads);
    let (what, op) = (format!("rotate_keys (K rotated, V copied) {dtype}"), lab.rotate_keys());
    against.report(&what, both, || stream.rotate_keys(&op).expect("rotate"));
    let (what, op) = (format!("rope {dtype}"), lab.rope()?);
    against.report(&what, both / 2, || stream.rope(&op).expect("rope"));
    Ok(())
}

/// Measures rows with fewer bytes, at the slots of a block table and at slots in random order.
fn small_rows(heads: usize, mib: usize, threads: usize) -> Result<()> {
    let row_bytes = heads * DIM * 2;
    let lab = Lab::of(DType::BF16, heads, (mib << 20) / (2 * row_bytes), &options(threads))?;
    let (mut scatter, mut gather) = (lab.scatter()?, lab.gather()?);
    if heads < HEADS {
        moves_of(&lab, &format!("rows of {row_bytes} B"), threads, &scatter, &gather);
    }
    let slots: Arc<[i64]> = shuffled(lab.tokens as u32).into_iter().map(i64::from).collect();
    (scatter.slots, gather.slots) = (WriteSlots::unchecked(Arc::clone(&slots)), slots);
    moves_of(&lab, &format!("rows of {row_bytes} B, slots in no order"), threads, &scatter, &gather);
    Ok(())
}

fn moves_of(lab: &Lab, of: &str, threads: usize, scatter: &Scatter, gather: &Gather) {
    let mut against = Against::memcpy(lab.bytes(), threads);
    let bytes = lab.bytes();
    against.report(&format!("{of}: scatter bf16"), bytes, || lab.stream.scatter(scatter).expect("scatter"));
    against.report(&format!("{of}: gather bf16"), bytes, || lab.stream.gather(gather).expect("gather"));
}

fn decode(dtype: DType, context: usize) -> Result<()> {
    let lab = Lab::new(dtype, context, &options(all_threads()))?;
    let op = lab.attend(1, true)?;
    let mut read = StreamingRead::new(lab.bytes(), all_threads());
    let mut attend = || lab.stream.attend(&op).expect("attend");
    let [seconds, limit] = in_turns([&mut attend, &mut || read.run()]);
    row(&format!("attend, decode, GQA 4, {dtype}"), lab.bytes(), seconds, "streaming read", limit);
    Ok(())
}

/// Measures the prefill of `tokens` tokens. Counts only operations inside the mask: two dot products for each
/// pair of tokens.
fn prefill(dtype: DType, tokens: usize) -> Result<()> {
    let lab = Lab::new(dtype, tokens, &options(all_threads()))?;
    let op = lab.attend(lab.tokens, true)?;
    let mut gemm = Gemm::new(all_threads());
    let mut attend = || lab.stream.attend(&op).expect("attend");
    let [seconds, product] = in_turns([&mut attend, &mut || gemm.run()]);
    let pairs = lab.tokens * (lab.tokens + 1) / 2;
    let flops = 2.0 * 2.0 * (QUERY_HEADS * DIM * pairs) as f64;
    let limit = product * flops / Gemm::FLOPS;
    row(&format!("attend, prefill, GQA 4, {dtype}"), lab.bytes(), seconds, "GEMM in f32", limit);
    Ok(())
}

/// A product of square f32 matrices.
struct Gemm {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    pool: ThreadPool,
    threads: usize,
}

impl Gemm {
    const N: usize = 1024;
    const FLOPS: f64 = 2.0 * (Self::N * Self::N * Self::N) as f64;

    fn new(threads: usize) -> Self {
        let matrix = || vec![1.0; Self::N * Self::N];
        Self { a: matrix(), b: matrix(), c: matrix(), pool: pool(threads), threads }
    }

    fn run(&mut self) {
        let (n, column) = (Self::N, Self::N as isize);
        let Self { a, b, c, pool, threads } = self;
        let parallelism = if *threads == 1 { Parallelism::None } else { Parallelism::Rayon(*threads) };
        pool.install(|| {
            let (to, a, b) = (c.as_mut_ptr(), a.as_ptr(), b.as_ptr());
            // SAFETY: `a`, `b` and `c` have N rows of N elements each, which matches the strides. `c` is
            // borrowed mutably and does not overlap `a` or `b`.
            unsafe {
                gemm::gemm(
                    n,
                    n,
                    n,
                    to,
                    1,
                    column,
                    false,
                    a,
                    1,
                    column,
                    b,
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
        black_box(c);
    }
}

fn main() -> Result<()> {
    let (mib, context) = (option("--mib", 64), option("--context", 16 * 1024));
    let threads = [1, all_threads()];
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for size in [mib / 4, mib / 2, mib].map(|size| size.max(1)) {
            for threads in threads {
                // Moving f16 is the same work as moving bf16.
                if dtype != DType::F16 {
                    movement(dtype, size, threads)?;
                }
                rotation(dtype, size, threads)?;
            }
        }
        for context in [context / 8, context / 4, context / 2, context] {
            decode(dtype, context)?;
        }
        for tokens in [context / 32, context / 16, context / 8] {
            prefill(dtype, tokens)?;
        }
    }
    for heads in [1, 2, 4, HEADS] {
        for threads in threads {
            small_rows(heads, mib.min(64), threads)?;
        }
    }
    Ok(())
}
