//! Measures the cost of reusing a stored chunk: hashing, lookup (including the token comparison), placement,
//! and building the segment for attention. The baseline is a BLAKE3 chain over the same tokens in blocks of
//! 16.
//!
//! Prints one JSON object per line, as `kernels_against_memcpy` of `kvbench` does. No KV bytes are touched,
//! because the benchmark stores no KV. `--tokens N` sets the longest chunk (default 4096).

use std::hint::black_box;
use std::time::Instant;

use kvchunk::{
    Acquired, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher, ComputeMode,
    HashAlgorithm, PositionReindexer, TenantId,
};
use kvcore::{KeyScope, Rope, RopeConfig};

const BLOCK_SIZE: usize = 16;

/// Returns the time per run in seconds: the best of 20 averages over 50 runs, after one warm-up run.
fn time(mut work: impl FnMut()) -> f64 {
    work();
    let once = || {
        let start = Instant::now();
        for _ in 0..50 {
            work();
        }
        start.elapsed().as_secs_f64() / 50.0
    };
    std::iter::repeat_with(once).take(20).fold(f64::INFINITY, f64::min)
}

/// Returns the value of `--tokens` on the command line, or 4096 if there is none.
fn longest() -> usize {
    let args: Vec<String> = std::env::args().collect();
    let given = args.iter().position(|arg| arg == "--tokens").and_then(|i| args.get(i + 1)?.parse().ok());
    given.unwrap_or(4096)
}

fn main() -> kvchunk::Result<()> {
    let root = KeyScope::new("bench", b"w").root();
    let system: Vec<u32> = (0..200).collect();
    let rope = Rope::new(RopeConfig::new(64, 500_000.0), 1 << 20)?;
    let reindexer = PositionReindexer::new(&rope);
    for algorithm in HashAlgorithm::ALL {
        for length in [longest() / 4, longest() / 2, longest()] {
            let tokens: Vec<u32> = (0..length as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 15).collect();
            let chain = time(|| drop(black_box(root.chain(black_box(&tokens), BLOCK_SIZE))));
            // The cache also holds a thousand other chunks.
            let config = ChunkCacheConfig {
                hash_algorithm: algorithm,
                max_chunks: 2000,
                ..ChunkCacheConfig::default()
            };
            let pool = ChunkBlockPool::new(0..4096, BLOCK_SIZE)?;
            let cache = ChunkCacheManager::new(config, pool)?;
            let context = || ChunkContext::new(root, ComputeMode::WithSystem, &system);
            let hasher = ChunkHasher::new(algorithm, context(), BLOCK_SIZE);
            let others: Vec<Vec<u32>> = (0..1000).map(|i| vec![i; 20]).collect();
            for tokens in others.iter().chain([&tokens]) {
                for piece in hasher.pieces(tokens, 4096) {
                    if let Acquired::Compute(reservation) = cache.acquire(TenantId::default(), &piece, 200) {
                        drop(reservation.store());
                    }
                }
            }
            let mut position = 200;
            let reuse = time(|| {
                let hasher = ChunkHasher::new(algorithm, context(), BLOCK_SIZE);
                for piece in hasher.pieces(black_box(&tokens), 4096) {
                    if let Acquired::Hit(chunk) = cache.acquire(TenantId::default(), &piece, 200) {
                        position = (position + 17) % 100_000 + 200;
                        // The assembler places a hit in the same way.
                        let placed = cache.reindex(&reindexer, chunk, position);
                        let placed = placed.map(|placed| placed.at_offset_in_merged_kv(200).segment());
                        black_box(placed.is_ok());
                    }
                }
            });
            let metrics = cache.metrics();
            assert!(metrics.miss_count == 1001, "the chunk was found every time");
            let line = serde_json::json!({
                "what": format!("reuse of a stored chunk, {}", serde_json::to_value(algorithm).unwrap_or_default().as_str().unwrap_or_default()),
                "size": length, "unit": "tokens", "seconds": reuse,
                "limit": "BLAKE3 chain of its tokens", "limit_seconds": chain, "ratio": chain / reuse,
            });
            println!("{line}");
        }
    }
    Ok(())
}
