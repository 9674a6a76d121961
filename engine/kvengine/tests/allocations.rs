//! A decode step of the engine makes the same allocations as the model's decode step, and no others.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::hint::black_box;
use std::path::Path;

use allocation_counter::measure;
use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvchunk::ChunkedPrompt;
use kvcore::{CacheKind, DType, KvFormat, MaxLen};
use kvengine::{Engine, EngineConfig, PromptTokens, Request};
use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
use rstest::rstest;

#[path = "../../kvmodel/tests/suite/greedy.rs"]
#[allow(dead_code, reason = "other suites use the rest")]
mod greedy;

use greedy::Greedy;

/// The lengths of two answers, in tokens. Lists that grow by doubling last grow before the end of the shorter
/// answer.
const ANSWERS: [usize; 2] = [6, 22];

fn model(name: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvmodel/tests/goldens").join(name);
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&config).unwrap();
    config.eos.clear();
    let weights = Weights::from_directory(&folder, &mut |_, _| ()).unwrap();
    Model::new(config, weights, WeightFormat::Stored).unwrap()
}

/// Returns the number of allocations in the model's own decode step.
fn of_model(model: &Model, kv_format: KvFormat) -> u64 {
    let mut sequence = Greedy::new(model, kv_format, 64, 64);
    sequence.prefill(&[1, 2, 3, 4, 5]);
    for token in 0..4 {
        sequence.step(token);
    }
    measure(|| _ = black_box(sequence.step(4))).count_total
}

#[rstest]
fn a_decode_step_allocates_what_the_models_step_does(
    #[values("llama", "qwen3", "deepseek-v3")] name: &str,
    // A static cache does not keep chunks.
    #[values((CacheKind::Paged, false), (CacheKind::Paged, true), (CacheKind::Static, false))]
    (cache, chunked): (CacheKind, bool),
    #[values(KvFormat::Dense(DType::F32), KvFormat::Dense(DType::BF16))] kv_format: KvFormat,
) {
    let model = model(name);
    let of_model = of_model(&model, kv_format);

    // The prompt and the answer fit in one block.
    let config =
        EngineConfig { kv_format, cache, block_size: 64, max_len: MaxLen::from(64), ..Default::default() };
    let [short, long] = of_answers(model, &config, chunked, chunked);
    let steps = (ANSWERS[1] - ANSWERS[0]) as u64;
    assert_eq!(long - short, steps * of_model, "{steps} steps, of which the model allocates {of_model} each");
}

#[rstest]
fn a_step_that_takes_a_block_allocates_a_few_times_more(#[values(false, true)] chunked: bool) {
    let model = model("llama");
    let of_model = of_model(&model, DType::F32.into());
    // The engine's default settings: blocks of 16 tokens, which get a key and are shared once they are full.
    let [short, long] = of_answers(model, &EngineConfig::default(), chunked, true);
    let (steps, blocks) = ((ANSWERS[1] - ANSWERS[0]) as u64, 1);
    let more = (long - short).checked_sub(steps * of_model).unwrap();
    assert!(more <= blocks * OF_A_BLOCK, "{more} allocations more than the model's, for {blocks} block");
}

/// The maximum number of allocations in a step that fills a block and takes the next block: the full block's
/// key, its entry in the index, the new guard, and growing lists of IDs.
const OF_A_BLOCK: u64 = 8;

/// Returns the number of allocations for each of two requests, which differ only in the length of their
/// answers.
fn of_answers(model: Model, config: &EngineConfig, chunked: bool, reuse: bool) -> [u64; 2] {
    let options = CpuOptions { threads: Some(1), ..CpuOptions::default() };
    let mut engine =
        Engine::new(model, CpuBackend::with_options(&options).unwrap(), b"none", config).unwrap();
    let prompt = |first: u32| {
        let tokens: Vec<u32> = (first..first + 33).collect();
        if !chunked {
            return PromptTokens::Plain(tokens);
        }
        // The question is long, so that the list of its tokens does not grow between the two answers.
        let chunks = vec![tokens[..3].to_vec(), tokens[3..6].to_vec()];
        PromptTokens::Chunked(ChunkedPrompt::new(vec![first], chunks, tokens[6..].to_vec()).unwrap())
    };
    let mut count = |answer: usize| {
        let request = Request { max_new_tokens: answer, reuse, ..engine.request(prompt(1)) };
        let mut tokens = 0;
        let counted = measure(|| tokens = engine.generate(&request, &mut ()).unwrap().tokens.len());
        assert_eq!(tokens, answer);
        counted.count_total
    };
    // The first requests grow memory that is kept: the thread's plans and buffers, and the caches' tables.
    let _ = ANSWERS.map(&mut count);
    ANSWERS.map(count)
}

/// Returns the number of allocations in a step with this many answers, once all lists have grown.
fn of_step(answers: u32) -> u64 {
    let options = CpuOptions { threads: Some(1), ..CpuOptions::default() };
    // All tokens of a sequence fit in one block.
    let config = EngineConfig { block_size: 64, ..EngineConfig::default() };
    let backend = CpuBackend::with_options(&options).unwrap();
    let mut engine = Engine::new(model("llama"), backend, b"none", &config).unwrap();
    let request = |first| Request {
        max_new_tokens: 48,
        ignore_end: true,
        ..Request::new(PromptTokens::Plain(vec![first % 40, 5, 7]))
    };
    let mut reads: Vec<_> = (0..answers).map(|i| engine.submit(request(i)).unwrap()).collect();
    let mut step = || {
        engine.step().unwrap();
        for answer in &mut reads {
            while answer.try_next().is_some() {}
        }
    };
    for _ in 0..40 {
        step();
    }
    let counted = measure(&mut step).count_total;
    assert_eq!(measure(&mut step).count_total, counted, "no step differs from the next");
    counted
}

#[test]
fn a_step_allocates_nothing_for_a_sequence() {
    // Steps with few rows are not compared, because the dense steps compute them differently.
    assert_eq!(of_step(32), of_step(128));
}
