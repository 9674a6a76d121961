//! The operations of `proof/peers/torch_ops.py` (in torch) and `proof/peers/hf_cache.py` (in Hugging Face
//! caches), on the CPU backend.
//!
//! `--threads N` sets the number of threads (default 1); `--only PREFIX` selects operations. Prints one JSON
//! object per line, like `kernels_against_memcpy`. The limit is `memcpy` of the same bytes on the same
//! threads.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::time::Instant;

use kvbackend_cpu::CpuOptions;
use kvcore::{BlockPool, DType, PagedKvCache, Result, SequenceStart, TensorView};

use kvbench::lab::{BLOCK, HEADS, Lab};
use kvbench::limits::Memcpy;
use kvbench::{option, row, time};

fn lab(tokens: usize, threads: usize) -> Result<Lab> {
    Lab::new(DType::BF16, tokens, &CpuOptions { threads: Some(threads), ..CpuOptions::default() })
}

fn report(what: &str, bytes: usize, seconds: f64, threads: usize) {
    let mut memcpy = Memcpy::new(bytes, threads);
    row(what, bytes, seconds, "memcpy", time(|| memcpy.run()));
}

fn moves(tokens: usize, threads: usize) -> Result<()> {
    let lab = lab(tokens, threads)?;
    let (scatter, gather, bytes) = (lab.scatter()?, lab.gather()?, lab.bytes());
    let seconds = time(|| lab.stream.scatter(&scatter).expect("scatter"));
    report(&format!("scatter {tokens}"), bytes, seconds, threads);
    let seconds = time(|| lab.stream.gather(&gather).expect("gather"));
    report(&format!("gather {tokens}"), bytes, seconds, threads);
    Ok(())
}

/// Measures a causal attend of the last `rows` tokens to all `tokens` tokens, with queries that are already
/// rotated.
fn attend(what: &str, rows: usize, tokens: usize, threads: usize) -> Result<()> {
    let lab = lab(tokens, threads)?;
    let op = lab.attend(rows, false)?;
    let seconds = time(|| lab.stream.attend(&op).expect("attend"));
    report(&format!("{what} {tokens}"), lab.bytes(), seconds, threads);
    Ok(())
}

/// The number of tokens to append one by one.
const STEPS: usize = 256;

/// Measures growing a sequence of `context` tokens by a slot in its block table and a row scattered there, as
/// a decode step does in each layer. Prints the median of the steps.
fn append(context: usize) -> Result<()> {
    let lab = lab((context + STEPS).next_multiple_of(BLOCK), 1)?;
    let blocks = lab.arena.layout().shape().num_blocks as u32;
    let mut cache = PagedKvCache::new(lab.arena.clone(), BlockPool::new(0..blocks)?)?;
    let sequence = cache.create(SequenceStart::default())?;
    let mut write = |k: &TensorView, v: &TensorView| {
        let slots = cache.grow(sequence, k.shape()[0])?;
        cache.write(sequence, lab.stream.as_ref(), 0, k.clone(), v.clone(), &slots)
    };
    write(&lab.rows(context, HEADS)?, &lab.rows(context, HEADS)?)?;
    let (k, v) = (lab.rows(1, HEADS)?, lab.rows(1, HEADS)?);
    let mut seconds = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let start = Instant::now();
        write(&k, &v)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    report(&format!("append {context}"), lab.bytes() / lab.tokens, seconds[STEPS / 2], 1);
    Ok(())
}

fn main() -> Result<()> {
    let threads = option("--threads", 1);
    let args: Vec<String> = std::env::args().collect();
    let only = args.iter().position(|arg| arg == "--only").and_then(|i| args.get(i + 1));
    let wanted = |name: &str| only.is_none_or(|only| name.starts_with(only.as_str()));
    if wanted("moves") {
        moves(4096, threads)?;
    }
    for context in [1024, 4096, 16_384] {
        if wanted("append") {
            append(context)?;
        }
    }
    for tokens in [4096, 16_384] {
        if wanted("decode") {
            attend("decode", 1, tokens, threads)?;
        }
    }
    for tokens in [512, 2048] {
        if wanted("prefill") {
            attend("prefill", tokens, tokens, threads)?;
        }
    }
    Ok(())
}
