//! Whole requests: reuse does not change any token, and bad input does not hold any block.

use crate::common::{Golden, config, distance, folder, for_every, load_model, reordered, weights};
use crate::failure::assert_nothing_held;
use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ChunkedPrompt, ReuseCell};
use kvcore::CacheKind;
use kvengine::{Engine, EngineConfig, Error, FinishReason, PromptTokens, Request, Sampling};
use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
use rstest::rstest;

fn engine(name: &str, config: &EngineConfig) -> Engine {
    Engine::new(load_model(name), CpuBackend::new(), b"none", config).expect("an engine")
}

fn ask(prompt: &ChunkedPrompt, cell: ReuseCell) -> Request {
    Request { cell, max_new_tokens: 12, ..Request::new(PromptTokens::Chunked(prompt.clone())) }
}

fn run(engine: &mut Engine, request: &Request) -> kvengine::Generation {
    let generation = engine.generate(request, &mut ()).expect("an answer");
    assert_nothing_held(engine);
    generation
}

for_every! {
    fn chunks_in_another_order_are_hits_and_change_no_token(
        #[values("llama", "qwen2", "qwen3", "mistral", "gemma3", "llama-dynamic", "deepseek-v3")] name: &str,
        cell: moving cell,
        #[values("f32", "bf16", "int8:8", "int4:4", "fp8-e4m3")] format: &str,
    ) {
        let prompt = Golden::load(name).prompt;
        let kv_format = format.parse().expect("a format");
        let config = EngineConfig { kv_format, block_size: 4, ..EngineConfig::default() };
        let cold = run(&mut engine(name, &config), &ask(&prompt, cell));
        let mut warmed = engine(name, &config);
        run(&mut warmed, &ask(&reordered(&prompt), cell));
        let warm = run(&mut warmed, &ask(&prompt, cell));
        let none = run(&mut warmed, &Request { reuse: false, ..ask(&prompt, cell) });
        assert!(warm.chunks.iter().all(|c| c.hit) && cold.chunks.iter().all(|c| !c.hit));
        assert_eq!((cold.cached_tokens, none.cached_tokens), (0, 0));
        assert_eq!(warm.cached_tokens, prompt.total_tokens() - prompt.question().len());
        assert_eq!(warm.tokens, cold.tokens);
        assert_eq!(none.tokens, cold.tokens);
        assert_eq!((cold.tokens.len(), cold.finish), (12, FinishReason::Length));
    }
}

/// Values that are a thousand times larger, and are scaled back by the output projection, do not change an
/// answer. The largest number in E4M3 is 448.
#[rstest]
fn an_fp8_cache_is_calibrated(#[values("fp8-e4m3", "fp8-e4m3:head")] format: &str) {
    let copy = tempfile::tempdir().expect("a folder");
    let source = folder("llama");
    std::fs::copy(source.join("config.json"), copy.path().join("config.json")).expect("a copy");
    let file = "model.safetensors";
    let mut tensors =
        candle_core::safetensors::load(source.join(file), &candle_core::Device::Cpu).expect("weights");
    for (name, tensor) in &mut tensors {
        let factor = match name {
            name if name.contains("v_proj") => 1000.0,
            name if name.contains("o_proj.weight") => 0.001,
            _ => continue,
        };
        *tensor = (&*tensor * factor).expect("a product");
    }
    candle_core::safetensors::save(&tensors, copy.path().join(file)).expect("a file");
    let prompt = Golden::load("llama").prompt;
    let logits = |folder: &std::path::Path, format: &str| {
        let config = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let weights = Weights::from_directory(folder, &mut |_, _| ()).expect("weights");
        let model =
            Model::new(ModelConfig::from_json(&config).expect("a config"), weights, WeightFormat::Stored);
        let kv_format = format.parse().expect("a format");
        let config = EngineConfig { kv_format, block_size: 4, ..EngineConfig::default() };
        let mut engine =
            Engine::new(model.expect("a model"), CpuBackend::new(), b"none", &config).expect("an engine");
        let request = Request { max_new_tokens: 1, keep_logits: true, ..ask(&prompt, ReuseCell::default()) };
        run(&mut engine, &request).logits.remove(0)
    };
    let exact = logits(&source, "f32");
    let (plain, large) = (logits(&source, format), logits(copy.path(), format));
    let (plain, large) = (distance(&plain, &exact), distance(&large, &exact));
    assert!(
        plain > 1e-4 && large < 2.0 * plain,
        "{large} with large values, {plain} with those of the model"
    );
}

#[test]
fn without_a_chunk_cache_the_system_prompt_is_cached_all_the_same() {
    let prompt = Golden::load("llama").prompt;
    let chunks = ChunkCacheConfig { enabled: false, ..ChunkCacheConfig::default() };
    let mut engine = engine("llama", &EngineConfig { chunks, block_size: 4, ..EngineConfig::default() });
    let first = run(&mut engine, &ask(&prompt, ReuseCell::default()));
    let second = run(&mut engine, &ask(&prompt, ReuseCell::default()));
    assert_eq!((first.cached_tokens, second.cached_tokens), (0, prompt.system().len()));
    assert!(second.chunks.iter().all(|chunk| !chunk.hit));
    assert_eq!(second.tokens, first.tokens);
}

#[test]
fn full_attention_is_the_ordinary_prompt() {
    let prompt = Golden::load("llama").prompt;
    let mut engine = engine("llama", &EngineConfig::default());
    let full = run(&mut engine, &Request { full_attention: true, ..ask(&prompt, ReuseCell::default()) });
    let plain = Request { max_new_tokens: 12, ..Request::new(PromptTokens::Plain(prompt.flatten())) };
    let plain = run(&mut engine, &plain);
    assert_eq!(full.tokens, plain.tokens);
    assert_eq!(plain.cached_tokens, 16, "one block of the same prefix is cached, the rest computed");
    assert!(plain.chunks.is_empty());
}

#[rstest]
fn a_static_cache_answers_as_a_paged_one(#[values("llama", "qwen3")] name: &str) {
    let prompt = Golden::load(name).prompt.flatten();
    let tokens = prompt.len();
    let plain = Request { max_new_tokens: 9, keep_logits: true, ..Request::new(PromptTokens::Plain(prompt)) };
    let paged = run(&mut engine(name, &EngineConfig::default()), &plain);
    let fits =
        EngineConfig { cache: CacheKind::Static, max_len: (tokens + 9).into(), ..EngineConfig::default() };
    let mut in_place = engine(name, &fits);
    for _ in 0..2 {
        let answer = run(&mut in_place, &plain);
        assert_eq!((answer.tokens, answer.logits), (paged.tokens.clone(), paged.logits.clone()));
        assert_eq!(answer.cached_tokens, 0, "a static cache shares nothing");
    }
    // If the cache is too short for the last two tokens, the answer ends before these tokens. If the cache is
    // too short for the prompt, the request fails.
    let mut short = engine(name, &EngineConfig { max_len: (tokens + 6).into(), ..fits.clone() });
    let answer = run(&mut short, &plain);
    assert_eq!((&answer.tokens[..], answer.finish), (&paged.tokens[..7], FinishReason::Length));
    assert_nothing_held(&short);
    let mut short = engine(name, &EngineConfig { max_len: (tokens - 1).into(), ..fits });
    let error = short.generate(&plain, &mut ()).expect_err("no room");
    assert!(error.to_string().contains("length of a static cache"), "{error}");
    assert_nothing_held(&short);
}

#[test]
fn a_static_cache_takes_prompts_in_parts_under_full_attention_only() {
    let prompt = Golden::load("llama").prompt;
    let config = EngineConfig { cache: CacheKind::Static, ..EngineConfig::default() };
    let mut engine = engine("llama", &config);
    let parts = ask(&prompt, ReuseCell::default());
    let error = engine.generate(&parts, &mut ()).expect_err("no chunks");
    assert!(error.to_string().contains("full attention"), "{error}");
    assert_nothing_held(&engine);
    run(&mut engine, &Request { full_attention: true, ..parts });
    let small = EngineConfig { kv_memory: Some(1000), ..config };
    let refused = Engine::new(load_model("llama"), CpuBackend::new(), b"none", &small);
    assert!(matches!(refused, Err(Error::Core(kvcore::Error::NotEnoughMemory { budget: 1000, .. }))));
}

#[test]
fn a_token_at_a_time_equals_the_whole_prompt() {
    let mut engine = engine("qwen3", &EngineConfig { block_size: 4, ..EngineConfig::default() });
    let tokens: Vec<u32> = (0..9).map(|i| i * 5 % 48).collect();
    let mut request =
        Request { max_new_tokens: 6, keep_logits: true, ..Request::new(PromptTokens::Plain(tokens.clone())) };
    let whole = run(&mut engine, &request);
    for step in 1..6 {
        request.prompt = PromptTokens::Plain([&tokens[..], &whole.tokens[..step]].concat()).into();
        request.max_new_tokens = 1;
        let next = run(&mut engine, &request);
        assert!(distance(&next.logits[0], &whole.logits[step]) < 1e-5);
    }
}

#[test]
fn sampling_follows_its_seed() {
    let prompt = Golden::load("llama").prompt;
    let mut engine = engine("llama", &EngineConfig::default());
    let mut draw = |seed| {
        let sampling = Sampling { temperature: 1.5, seed, ..Sampling::default() };
        run(&mut engine, &Request { sampling, ..ask(&prompt, ReuseCell::default()) }).tokens
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}

#[test]
fn the_last_position_ends_an_answer() {
    let mut engine = engine("llama", &EngineConfig::default());
    let tokens = vec![1; 250];
    let request = Request { max_new_tokens: 50, ..Request::new(PromptTokens::Plain(tokens)) };
    let generation = run(&mut engine, &request);
    assert_eq!(
        (generation.tokens.len(), generation.finish),
        (7, FinishReason::Length),
        "positions 250..256 and one more"
    );
}

#[test]
fn rule_6_regimes_are_misses_of_prefixes_and_chunks() {
    // The original context has 16 positions, and the longest request has 64.
    let mut engine = engine("llama-dynamic", &EngineConfig { block_size: 4, ..EngineConfig::default() });
    let plain = |max_new_tokens| Request {
        max_new_tokens,
        keep_logits: true,
        ..Request::new(PromptTokens::Plain((0..12).collect()))
    };
    assert_eq!(run(&mut engine, &plain(1)).cached_tokens, 0);
    assert_eq!(run(&mut engine, &plain(5)).cached_tokens, 8, "positions 0..16 are one regime");
    let longer = run(&mut engine, &plain(6));
    assert_eq!(longer.cached_tokens, 0, "17 positions are another");
    let again = run(&mut engine, &plain(6));
    assert_eq!((again.cached_tokens, &again.tokens), (8, &longer.tokens));
    assert!(distance(&again.logits[0], &longer.logits[0]) < 1e-5);

    let prompt = Golden::load("llama-dynamic").prompt;
    let ask = |max_new_tokens| Request { max_new_tokens, ..ask(&prompt, ReuseCell::default()) };
    let hits = |generation: &kvengine::Generation| generation.chunks.iter().filter(|c| c.hit).count();
    assert_eq!(hits(&run(&mut engine, &ask(2))), 0);
    assert_eq!(hits(&run(&mut engine, &ask(2))), 3);
    assert_eq!(hits(&run(&mut engine, &ask(3))), 0);
    // A request for more tokens is cut off at the model's limit.
    assert_eq!(hits(&run(&mut engine, &ask(100))), 0);
    assert_eq!(hits(&run(&mut engine, &ask(200))), 3);
}

#[test]
fn rule_6_a_position_beyond_the_limit_is_an_error_or_scaled() {
    let prompt = |n: u32| Request {
        max_new_tokens: 1,
        ..Request::new(PromptTokens::Plain((0..n).map(|i| i % 48).collect()))
    };
    let mut dynamic = engine("llama-dynamic", &EngineConfig::default());
    run(&mut dynamic, &prompt(64));
    let error = dynamic.generate(&prompt(65), &mut ()).unwrap_err();
    assert!(matches!(error, Error::Chunk(kvchunk::Error::TooLong { largest: 64, limit: 64 })), "{error}");
    let mut longrope = engine("llama-longrope", &EngineConfig::default());
    run(&mut longrope, &prompt(256));
    assert!(longrope.generate(&prompt(257), &mut ()).unwrap_err().to_string().contains("256"));
}

#[test]
fn bad_prompts_are_errors_and_hold_nothing() {
    let good = Golden::load("llama").prompt;
    let mut engine = engine("llama", &EngineConfig { block_size: 4, ..EngineConfig::default() });
    let chunked = |system: Vec<u32>, chunks: Vec<Vec<u32>>, question: Vec<u32>| {
        PromptTokens::Chunked(ChunkedPrompt::new(system, chunks, question).unwrap())
    };
    for (what, prompt, expected) in [
        ("an empty prompt", PromptTokens::Plain(vec![]), "empty"),
        (
            "a prompt past the positions",
            PromptTokens::Plain(vec![1; 257]),
            "position 256, but the model has only 256",
        ),
        (
            "a token past the vocabulary",
            PromptTokens::Plain(vec![48]),
            "token ID 48 is outside the vocabulary of 48",
        ),
        ("a chunk past the positions", chunked(vec![1], vec![vec![2; 255]], vec![3]), "position 256"),
        ("a chunk past the vocabulary", chunked(vec![1], vec![vec![2], vec![99]], vec![3]), "token ID 99"),
        ("a question past the vocabulary", chunked(vec![1], vec![vec![2]], vec![1 << 31]), "2147483648"),
    ] {
        let error = engine.generate(&Request::new(prompt), &mut ()).expect_err(what).to_string();
        assert!(error.contains(expected), "{what}: {error}");
        assert_nothing_held(&engine);
        let chunks = engine.report().chunk_cache.expect("a paged cache");
        assert_eq!(chunks.cached_chunks, 0, "{what} left a chunk");
    }
    run(&mut engine, &ask(&good, ReuseCell::default()));
}

#[test]
fn a_pool_too_small_is_an_error_and_holds_nothing() {
    let prompt = Golden::load("llama").prompt;
    let model = load_model("llama");
    let shape = model.kv_extents(kvcore::DType::F32).shape(&kvcore::RankInfo::default(), 1, 4).unwrap();
    let block = kvcore::KvLayout::new(shape).unwrap().block_bytes();
    let mut failed = 0;
    for blocks in 2..12 {
        let config =
            EngineConfig { block_size: 4, kv_memory: Some(blocks * block), ..EngineConfig::default() };
        let mut engine = engine("llama", &config);
        match engine.generate(&ask(&prompt, ReuseCell::default()), &mut ()) {
            Err(error) => {
                assert!(error.to_string().contains("out of blocks"), "{error}");
                failed += 1;
            }
            // There is room for the prompt, but not for the whole answer.
            Ok(answer) => assert_eq!(answer.finish, kvengine::FinishReason::Length),
        }
        assert_nothing_held(&engine);
    }
    // The prompt and a token of its answer need eight blocks, and the chunk pool one.
    assert_eq!(failed, 7);
    for bytes in [0, block - 1, block] {
        let config = EngineConfig { block_size: 4, kv_memory: Some(bytes), ..EngineConfig::default() };
        let error = Engine::new(load_model("llama"), CpuBackend::new(), b"", &config).expect_err("no block");
        assert!(matches!(error, Error::Core(kvcore::Error::NotEnoughMemory { .. })), "{error}");
    }
}

#[rstest]
#[case("llama", 0.1)]
// DeepSeek's queries and latents each pass through two quantised products.
#[case("deepseek-v3", 0.2)]
fn quantised_weights_answer_nearly_the_same(#[case] name: &str, #[case] limit: f32) {
    let model = Model::new(config(name), weights(name), WeightFormat::Q8).unwrap();
    assert_ne!(model.revision(), load_model(name).revision(), "their keys and values must not be shared");
    let mut quantised = Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default()).unwrap();
    let request = Request {
        max_new_tokens: 1,
        keep_logits: true,
        ..ask(&Golden::load(name).prompt, ReuseCell::default())
    };
    let exact = run(&mut engine(name, &EngineConfig::default()), &request);
    let rounded = run(&mut quantised, &request);
    let gap = distance(&exact.logits[0], &rounded.logits[0]);
    assert!(gap > 0.0 && gap < limit, "{gap}");
}
