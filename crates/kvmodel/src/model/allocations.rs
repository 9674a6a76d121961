//! A decode step allocates what candle's own operations allocate, and nothing else.

use std::hint::black_box;
use std::path::Path;

use allocation_counter::measure;
use candle_core::{Device, Tensor};
use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvchunk::ChunkedPrompt;
use kvcore::{CacheKind, KvFormat, MaxLen};
use rstest::rstest;

use super::Model;
use crate::config::ModelConfig;
use crate::engine::{Engine, EngineConfig, Request};
use crate::layers::{WeightFormat, with_values};
use crate::text::PromptTokens;
use crate::weights::Weights;

/// The numbers of tokens of two answers. Lists that grow by doubling do so before the end of the shorter.
const ANSWERS: [usize; 2] = [6, 22];

fn model(name: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&config).unwrap();
    config.eos.clear();
    let weights = Weights::from_directory(&folder, &mut |_, _| ()).unwrap();
    Model::new(config, weights, WeightFormat::F32).unwrap()
}

/// Runs what candle computes in a decode step, with an output of attention of the right extents.
fn dense_step(model: &Model, attention: &[f32]) {
    let token = Tensor::from_slice(&[1u32], 1, &Device::Cpu).unwrap();
    let mut x = model.embedding.index_select(&token, 0).unwrap();
    for layer in &model.layers {
        let projected = layer.project(&x, None).unwrap();
        for rows in [Some(&projected.q), projected.q_latent.as_ref(), Some(&projected.k), Some(&projected.v)]
        {
            black_box(rows.map(|rows| with_values(rows, |values| Ok(values.len())).unwrap()));
        }
        let heads = model.config.heads;
        let extents = (1, heads, attention.len() / heads);
        let attention = Tensor::from_slice(attention, extents, &Device::Cpu).unwrap();
        x = layer.finish(&x, &attention).unwrap();
    }
    black_box(model.head.forward(&model.norm.forward(&x).unwrap()).unwrap());
}

#[rstest]
fn a_decode_step_allocates_what_candle_does(
    #[values("llama", "qwen3", "deepseek-v3")] name: &str,
    // A static cache keeps no chunks.
    #[values((CacheKind::Paged, false), (CacheKind::Paged, true), (CacheKind::Static, false))]
    (cache, chunked): (CacheKind, bool),
    #[values(KvFormat::Dense(kvcore::DType::F32), KvFormat::Dense(kvcore::DType::BF16))] kv_format: KvFormat,
) {
    let model = model(name);
    let width = model.config.heads * model.kv_extents(kv_format).v_dim;
    let attention = vec![0.5; width];
    dense_step(&model, &attention);
    let dense = measure(|| dense_step(&model, &attention)).count_total;
    assert!(dense > 10 * model.layers.len() as u64, "{dense} allocations are no decoder");

    // Prompt and answer lie in one block.
    let config =
        EngineConfig { kv_format, cache, block_size: 64, max_len: MaxLen::from(64), ..Default::default() };
    let [short, long] = of_answers(model, &config, chunked, chunked);
    let steps = (ANSWERS[1] - ANSWERS[0]) as u64;
    assert_eq!(long - short, steps * dense, "{steps} steps, of which candle allocates {dense} each");
}

#[rstest]
fn a_step_that_takes_a_block_allocates_a_few_times_more(#[values(false, true)] chunked: bool) {
    let model = model("llama");
    let attention = vec![0.5; model.config.heads * model.kv_extents(kvcore::DType::F32).v_dim];
    dense_step(&model, &attention);
    let dense = measure(|| dense_step(&model, &attention)).count_total;
    // The settings of an engine that nobody has configured: blocks of 16, whose full ones are keyed and shared.
    let [short, long] = of_answers(model, &EngineConfig::default(), chunked, true);
    let (steps, blocks) = ((ANSWERS[1] - ANSWERS[0]) as u64, 1);
    let more = (long - short).checked_sub(steps * dense).unwrap();
    assert!(more <= blocks * OF_A_BLOCK, "{more} allocations more than candle's, for {blocks} block");
}

/// Allocations of a step that fills a block and takes the next: the key of the full one, its place in the index, the
/// new guard, and lists of ids that grow.
const OF_A_BLOCK: u64 = 8;

/// Returns the numbers of allocations of two requests that differ in the length of their answers.
fn of_answers(model: Model, config: &EngineConfig, chunked: bool, reuse: bool) -> [u64; 2] {
    let backend = CpuBackend::with_options(&CpuOptions { threads: Some(1), ..CpuOptions::default() });
    let mut engine = Engine::new(model, backend.unwrap(), b"none", config).unwrap();
    let prompt = |first: u32| {
        let tokens: Vec<u32> = (first..first + 33).collect();
        if !chunked {
            return PromptTokens::Plain(tokens);
        }
        let chunks = vec![tokens[..9].to_vec(), tokens[9..20].to_vec()];
        PromptTokens::Chunked(ChunkedPrompt::new(vec![first], chunks, tokens[20..].to_vec()).unwrap())
    };
    let mut count = |answer: usize| {
        let request = Request { max_new_tokens: answer, reuse, ..engine.request(prompt(1)) };
        let mut tokens = 0;
        let counted = measure(|| tokens = engine.generate(&request, &mut ()).unwrap().tokens.len());
        assert_eq!(tokens, answer);
        counted.count_total
    };
    // The first requests grow what stays: plans and buffers of the thread, tables of the caches.
    let _ = ANSWERS.map(&mut count);
    ANSWERS.map(count)
}
