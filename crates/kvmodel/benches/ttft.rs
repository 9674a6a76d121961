//! Time to first token of a prompt of chunks: cold, all chunks hit, without reuse, and the floor, which
//! is the question alone after the same KV.
//!
//! Prints one JSON object a line, as `kernels_against_memcpy` of `kvbackend-cpu` does; here a ratio is
//! "times as fast as the limit". `--layers L --hidden H --chunks N --tokens T` set the size.

use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ChunkedPrompt};
use kvcore::RopeConfig;
use kvmodel::{
    Engine, EngineConfig, Family, LayerConfig, Model, ModelConfig, PromptTokens, Request, WeightFormat,
    Weights,
};

fn number(name: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)?.parse().ok()).unwrap_or(default)
}

fn model(layers: usize, hidden: usize) -> kvmodel::Result<Model> {
    let head_dim = 64;
    let heads = hidden / head_dim;
    let config = ModelConfig {
        family: Family::Llama,
        vocab_size: 4096,
        hidden_size: hidden,
        intermediate_size: hidden * 11 / 4,
        layers: vec![LayerConfig { rope: RopeConfig::new(head_dim, 500_000.0), window: None }; layers],
        heads,
        kv_heads: heads.div_ceil(4),
        head_dim,
        latent: None,
        experts: None,
        softmax_scale: 1.0 / (head_dim as f32).sqrt(),
        rms_norm_eps: 1e-5,
        max_positions: 8192,
        tied_head: true,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        eos: Vec::new(),
    };
    Model::new(config, Weights::random(1), WeightFormat::F32)
}

fn tokens(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 7) % 4096)
        .collect()
}

fn row(what: &str, tokens: usize, took: Duration, limit: &str, against: Duration) {
    let (seconds, limit_seconds) = (took.as_secs_f64(), against.as_secs_f64());
    let line = serde_json::json!({
        "what": what, "size": tokens, "unit": "tokens", "seconds": seconds,
        "limit": limit, "limit_seconds": limit_seconds, "ratio": limit_seconds / seconds,
    });
    println!("{line}");
}

fn main() -> kvmodel::Result<()> {
    let (layers, hidden) = (number("--layers", 4), number("--hidden", 256));
    let (chunks, length) = (number("--chunks", 5), number("--tokens", 256));
    for length in [length / 4, length / 2, length] {
        measure(layers, hidden, chunks, length.max(1))?;
    }
    Ok(())
}

fn measure(layers: usize, hidden: usize, chunks: usize, length: usize) -> kvmodel::Result<()> {
    let half = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let config = EngineConfig { chunks: half, ..EngineConfig::default() };
    let mut engine = Engine::new(model(layers, hidden)?, CpuBackend::new(), b"none", &config)?;
    let (system, question) = (tokens(1, 64), tokens(2, 32));
    let parts: Vec<Vec<u32>> = (0..chunks as u32).map(|i| tokens(10 + i, length)).collect();
    let prompt = ChunkedPrompt::new(system.clone(), parts.clone(), question.clone())?;
    let mut ttft = |prompt: &PromptTokens, change: &dyn Fn(&mut Request)| -> kvmodel::Result<Duration> {
        let mut request = Request { max_new_tokens: 1, ..Request::new(prompt.clone()) };
        change(&mut request);
        Ok(engine.generate(&request, &mut ())?.ttft)
    };
    let chunked = PromptTokens::Chunked(prompt.clone());
    let full = ttft(&chunked, &|r| (r.full_attention, r.reuse) = (true, false))?;
    let masked = ttft(&chunked, &|r| r.reuse = false)?;
    let cold = ttft(&chunked, &|_| ())?;
    let best = |times: Vec<Duration>| times.into_iter().min().unwrap_or_default();
    let mut hits = Vec::new();
    for i in 0..3 {
        let mut order = parts.clone();
        order.rotate_left(i + 1);
        let other = ChunkedPrompt::new(system.clone(), order, question.clone())?;
        hits.push(ttft(&PromptTokens::Chunked(other), &|_| ())?);
    }
    let hit = best(hits);
    // The floor: the same context cached as an ordinary prefix, then a question alone. Each has other
    // tokens, so that none of it is cached.
    let mut floors = Vec::new();
    for i in 0..4 {
        let other = ChunkedPrompt::new(system.clone(), parts.clone(), tokens(100 + i, question.len()))?;
        floors.push(ttft(&PromptTokens::Plain(other.flatten()), &|_| ())?);
    }
    let floor = best(floors.split_off(1));
    let what = |name: &str| format!("TTFT, {name}; {chunks} chunks, {layers} layers of {hidden}");
    let total = prompt.total_tokens();
    row(&what("all chunks hit"), total, hit, "full prefill", full);
    row(&what("all chunks hit"), total, hit, "the question alone after the same KV", floor);
    row(&what("cold, chunks stored"), total, cold, "full prefill", full);
    row(&what("without reuse, same mask"), total, masked, "full prefill", full);
    Ok(())
}
