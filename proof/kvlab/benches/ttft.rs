//! Measures the time to first token (TTFT) of a prompt of chunks: cold, with all chunks cached, without
//! reuse, and the floor, which is the question alone after the same KV. Then measures what decoys cost.
//!
//! Prints one JSON object per line, like `kernels_against_memcpy` in `kvbench`. A ratio here means "times as
//! fast as the limit". `--layers L --hidden H --chunks N --tokens T` set the size.

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ComputeMode, ReuseCell};
use kvengine::{Engine, EngineConfig};
use kvlab::{decoy_rows, ttft_rows};
use kvmodel::{Model, ModelConfig, WeightFormat, Weights};

fn number(name: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)?.parse().ok()).unwrap_or(default)
}

fn main() -> kvlab::Result<()> {
    let (layers, hidden) = (number("--layers", 4), number("--hidden", 256));
    let (chunks, length) = (number("--chunks", 5), number("--tokens", 256));
    let config = ModelConfig::benchmark(layers, hidden)?;
    for length in [length / 4, length / 2, length] {
        let half = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
        let model = Model::new(config.clone(), Weights::random(1), WeightFormat::Stored)?;
        let engine = EngineConfig { chunks: half, ..EngineConfig::default() };
        let mut engine = Engine::new(model, CpuBackend::new(), b"none", &engine)?;
        let mut rows = ttft_rows(&mut engine, chunks, length.max(1), ReuseCell::default())?;
        rows.extend(decoy_rows(&mut engine, ComputeMode::Behind(3), chunks, length.max(1))?);
        for row in rows {
            let what = format!("TTFT, {}; {chunks} chunks, {layers} layers of {hidden}", row.what);
            let line = serde_json::json!({
                "what": what, "size": row.tokens, "unit": "tokens", "seconds": row.took.as_secs_f64(),
                "limit": row.limit, "limit_seconds": row.limit_took.as_secs_f64(), "ratio": row.ratio(),
            });
            println!("{line}");
        }
    }
    Ok(())
}
