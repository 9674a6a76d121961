//! Compares kernels of the CUDA backend on device 0 with the driver's own copy of the same number of bytes on
//! the same card. Times come from device events around batches of launches (`card`).
//!
//! The cache suits a model with 80 layers, 8 KV heads of 128 and 64 query heads, in blocks of 16 tokens.
//! `--mib N` sets the size of the largest pool (default 8,192), `--layers N` its layers (80), `--sequences N`
//! the number of sequences in a decode step (64), `--context N` the tokens of each (8,192), and `--prompt N`
//! the tokens in a prefill (4,096). A pool takes at most a quarter of the free memory. On the driver's test
//! double, sizes are small and rows are marked, because their times say nothing about a card.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

mod attention;
mod card;
mod pool;

use kvbench::option;
use kvcore::{DType, KvFormat, Result};

use card::Card;

/// Sizes of a run.
struct Sizes {
    /// The size of the largest pool in bytes.
    pool: usize,
    layers: usize,
    sequences: usize,
    context: usize,
    prompt: usize,
}

/// Returns a quarter, a half and all of a size.
fn sweep(largest: usize) -> [usize; 3] {
    [largest / 4, largest / 2, largest].map(|size| size.max(1))
}

fn main() -> Result<()> {
    let card = Card::open()?;
    eprintln!("on {}", card.name());
    let size = |flag, on_card, on_double| option(flag, if card.is_double { on_double } else { on_card });
    let sizes = Sizes {
        pool: (size("--mib", 8192, 4) << 20).min(card.free / 4),
        layers: size("--layers", 80, 2),
        sequences: size("--sequences", 64, 2),
        context: size("--context", 8192, 64),
        prompt: size("--prompt", 4096, 64),
    };
    for dtype in [DType::BF16, DType::F32] {
        for bytes in sweep(sizes.pool) {
            pool::moves(&card, dtype, sizes.layers, bytes)?;
        }
    }
    let formats: Vec<KvFormat> =
        ["int8", "int4", "fp8-e4m3"].into_iter().map(str::parse).collect::<Result<_>>()?;
    for &format in &formats {
        for bytes in sweep(sizes.pool) {
            pool::formats(&card, format, sizes.layers, bytes)?;
        }
    }
    let dense = [DType::BF16, DType::F16, DType::F32].map(KvFormat::from);
    for &format in dense.iter().chain(&formats) {
        for context in sweep(sizes.context) {
            attention::decode(&card, format, sizes.sequences, context)?;
        }
        for context in sweep(sizes.context) {
            attention::latent(&card, format, sizes.sequences, context)?;
        }
        for tokens in sweep(sizes.prompt) {
            attention::prefill(&card, format, tokens)?;
        }
    }
    for segments in [1, 8, 32] {
        attention::segments(&card, sizes.sequences, sizes.context, segments)?;
    }
    Ok(())
}
