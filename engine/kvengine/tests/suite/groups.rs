//! Groups of layers: a model with both windowed and full layers keeps their blocks in separate pools, and
//! gives the same answers as with other caches.

use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvchunk::ChunkedPrompt;
use kvcore::{CacheKind, GroupKind, KvFormat, PoolCounts};
use kvengine::{
    BeamSearch, Engine, EngineConfig, Error, Generation, PreemptionCosts, PromptTokens, Request, Scheduling,
    SparseDecode,
};
use kvmodel::{Model, ModelConfig};
use rstest::rstest;

use crate::common::{endless, folder};
use crate::crowd::{Read, answer_all, assert_each, assert_same};

/// The window of the first layer; the second has none.
const WINDOW: usize = 24;
const STEP: usize = 16;
/// The maximum number of blocks per sequence in the group with the window while a piece of a prompt is
/// computed.
const FLAT: usize = (WINDOW + STEP).div_ceil(4) + 1;

/// Returns the tiny Qwen2 model with one layer of each kind and a window of 24 tokens.
fn model() -> Model {
    let config = std::fs::read_to_string(folder("qwen2-layers").join("config.json")).unwrap();
    let config = config.replace("\"sliding_window\": 8", &format!("\"sliding_window\": {WINDOW}"));
    endless(ModelConfig::from_json(&config).unwrap(), "qwen2-layers")
}

fn config(cache: CacheKind) -> EngineConfig {
    let scheduling = Scheduling { step_tokens: STEP, watermark: 0, ..Scheduling::default() };
    EngineConfig { cache, block_size: 4, scheduling, ..EngineConfig::default() }
}

/// Returns an engine with the given kind of cache and room for everything.
fn roomy(cache: CacheKind) -> Engine {
    Engine::new(model(), CpuBackend::new(), b"t", &config(cache)).unwrap()
}

/// Returns an engine with a grouped cache. Its memory is the size of `blocks` blocks of all layers, and is
/// divided for requests of `len` tokens.
fn grouped(blocks: usize, len: usize) -> Engine {
    let block_bytes = roomy(CacheKind::Paged).cache().arena().layout().block_bytes();
    let memory = Some(blocks * block_bytes);
    let config = EngineConfig { kv_memory: memory, typical_len: len, ..config(CacheKind::Grouped) };
    Engine::new(model(), CpuBackend::new(), b"t", &config).unwrap()
}

fn tokens(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 3 + i * 7 % 40).collect()
}

fn request(prompt: usize, answer: usize) -> Request {
    let request = Request { max_new_tokens: answer, ..Request::new(PromptTokens::Plain(tokens(prompt))) };
    Request { ignore_end: true, keep_logits: true, ..request }
}

/// Returns the number of held blocks in each group, starting with the group that has a window.
fn held(engine: &Engine) -> [usize; 2] {
    let of = |counts: PoolCounts| counts.mutable + counts.shared;
    let groups = engine.report().groups;
    assert_eq!(groups[0].kind, GroupKind::SlidingWindow { window: WINDOW });
    assert_eq!((groups[1].kind, groups.len()), (GroupKind::Full, 2));
    [of(groups[0].blocks), of(groups[1].blocks)]
}

fn assert_nothing_held(engine: &Engine) {
    engine.check_invariants().unwrap();
    assert_eq!((engine.cache().num_sequences(), held(engine)), (0, [0, 0]));
    assert!(engine.report().swapped.is_none_or(|counts| counts.free == counts.total), "host memory");
}

#[rstest]
#[case::long_answer(10, 0)]
#[case::long_prompt(70, 0)]
#[case::with_guesses(70, 4)]
fn memory_of_a_long_answer_stays_flat_in_the_group_with_the_window(
    #[case] prompt: usize,
    #[case] lookup: usize,
) {
    let request = Request { lookup, ..request(prompt, 160) };
    let mut engine = roomy(CacheKind::Grouped);
    let mut answer = engine.submit(request.clone()).unwrap();
    let (mut read, mut most, mut last) = (Read::new(&request), [0, 0], [0, 0]);
    while !engine.step().unwrap().is_idle() {
        engine.check_invariants().unwrap();
        last = held(&engine);
        most = [most[0].max(last[0]), most[1].max(last[1])];
        read.take(&mut answer);
    }
    read.take(&mut answer);
    let got = &read.samples()[0];
    assert!(most[0] <= FLAT, "{most:?} blocks were held at once");
    let all = (prompt + 159).div_ceil(4);
    assert!(most[1] >= all - 1, "the group without a window keeps all of {all} blocks: {most:?}");
    // A uniform cache holds every block in both layers.
    let groups = engine.report().groups;
    let bytes: Vec<usize> = groups.iter().map(|group| group.kv_bytes / group.blocks.total).collect();
    let apart = last[0] * bytes[0] + last[1] * bytes[1];
    let uniform = last[1] * (bytes[0] + bytes[1]);
    assert!(apart * 10 <= uniform * 7, "{apart} bytes, of {uniform}");
    for cache in [CacheKind::Paged, CacheKind::Static] {
        let expected = roomy(cache).generate(&Request { lookup: 0, ..request.clone() }, &mut ()).unwrap();
        assert_same(got, &expected, &format!("as on a {cache} cache"));
    }
    assert_nothing_held(&engine);
}

#[test]
fn a_request_finds_the_prefix_that_every_group_has() {
    let (mut engine, mut uniform) = (roomy(CacheKind::Grouped), roomy(CacheKind::Paged));
    for (prompt, cached) in [(100, 0), (130, 100), (130, 128), (60, 56), (41, 40)] {
        let request = request(prompt, 12);
        let got = engine.generate(&request, &mut ()).unwrap();
        let expected = uniform.generate(&request, &mut ()).unwrap();
        assert_same(&got, &expected, &format!("a prompt of {prompt}"));
        assert!(got.cached_tokens >= cached, "{} of {prompt} tokens", got.cached_tokens);
        assert_eq!(got.cached_tokens, expected.cached_tokens);
        assert_nothing_held(&engine);
    }
    // If the group with the window is small, the ends of prompts are found, but not the tokens before them.
    let mut small = grouped(45, 200);
    let [window, full] = [0, 1].map(|group| small.report().groups[group].blocks.total);
    assert!(window < 24 && full > 50, "{window} and {full} blocks");
    let mut cached = |prompt| small.generate(&request(prompt, 2), &mut ()).unwrap().cached_tokens;
    assert_eq!([cached(120), cached(120), cached(20)], [0, 116, 0]);
}

/// Costs with which copying is free, and costs with which computing is free.
const COSTS: [PreemptionCosts; 2] = [
    PreemptionCosts { token: Duration::from_secs(1), block: Duration::ZERO },
    PreemptionCosts { token: Duration::ZERO, block: Duration::from_secs(1) },
];

#[rstest]
fn requests_that_give_way_are_answered_as_alone(
    #[values(0, 1)] costs: usize,
    // Either the group without a window runs out of blocks, or the group with the window does.
    #[values((60, 70), (116, 256))] (blocks, len): (usize, usize),
) {
    let mut requests: Vec<Request> = (0..5).map(|i| request(20 + 9 * i, 60)).collect();
    requests[1].samples = 3;
    requests[1].sampling.temperature = 0.8;
    requests[2].lookup = 4;
    (requests[4].beams, requests[4].keep_logits) =
        (Some(BeamSearch { width: 3, length_penalty: 1.0 }), false);
    let mut engine = grouped(blocks, len);
    engine.set_preemption_costs(COSTS[costs]);
    let (last, reads) = answer_all(&mut engine, &requests);
    assert!(last.preemptions > 1 && (last.swaps > 0) == (costs == 0), "{last:?}");
    assert_each(&reads, &requests, alone);
    assert_nothing_held(&engine);
}

/// Returns the samples of a request that is answered alone with a uniform cache.
fn alone(request: &Request) -> Vec<Generation> {
    answer_all(&mut roomy(CacheKind::Paged), std::slice::from_ref(request)).1[0].samples()
}

#[rstest]
#[case::of_the_window(20, 256, 100, 10)]
#[case::of_all_tokens(20, 16, 150, 38)]
fn a_request_that_one_group_cannot_hold_is_refused(
    #[case] blocks: usize,
    #[case] len: usize,
    #[case] prompt: usize,
    #[case] needed: usize,
) {
    let mut engine = grouped(blocks, len);
    let error = engine.submit(request(prompt, 2)).map(drop).unwrap_err();
    let Error::Core(kvcore::Error::OutOfBlocks { asked, total, .. }) = error else { panic!("{error}") };
    assert!(asked == needed && total < needed, "{asked} of {total} blocks");
    assert_nothing_held(&engine);
}

#[test]
fn a_grouped_cache_keeps_no_chunks_and_says_so() {
    let mut engine = roomy(CacheKind::Grouped);
    let prompt =
        ChunkedPrompt::new(vec![5, 6], vec![(3..20).collect(), (7..30).collect()], vec![9, 8]).unwrap();
    let chunked = Request { prompt: PromptTokens::Chunked(prompt).into(), ..request(1, 8) };
    let error = engine.generate(&chunked, &mut ()).unwrap_err();
    assert!(matches!(error, Error::NoChunks(_)) && error.to_string().contains("full attention"), "{error}");
    let whole = Request { full_attention: true, ..chunked };
    let got = engine.generate(&whole, &mut ()).unwrap();
    assert_same(&got, &roomy(CacheKind::Paged).generate(&whole, &mut ()).unwrap(), "full attention");
    let sparse = Request { sparse: Some(SparseDecode::new(8)), ..request(60, 8) };
    assert!(matches!(engine.generate(&sparse, &mut ()), Err(Error::Pages(_))));
    assert!(matches!(engine.sharing_memory(model(), b"t"), Err(Error::NoChunks(_))));
    let asleep = EngineConfig { enable_sleep_mode: true, ..config(CacheKind::Grouped) };
    let error = Engine::new(model(), CpuBackend::new(), b"t", &asleep).map(drop);
    assert!(matches!(error, Err(Error::NoSleepMode(_))));
    assert_nothing_held(&engine);
}

/// In an fp8 cache, each group has the scales of its own layers.
#[rstest]
fn every_format_is_stored_as_in_one_arena(
    #[values("bf16", "int8:8", "fp8-e4m3", "fp8-e5m2:head")] format: &str,
) {
    let Ok(kv_format) = format.parse::<KvFormat>() else { panic!("{format}") };
    let answer = |cache| {
        let config = EngineConfig { kv_format, ..config(cache) };
        let mut engine = Engine::new(model(), CpuBackend::new(), b"t", &config).unwrap();
        engine.generate(&request(40, 30), &mut ()).unwrap()
    };
    assert_same(&answer(CacheKind::Grouped), &answer(CacheKind::Paged), format);
}

/// Gemma 3's window is shorter than the prompt, and its sixth layer has none.
#[test]
fn layers_of_gemma_3_are_two_groups_that_answer_as_one() {
    let answer = |cache| {
        let model = endless(crate::common::config("gemma3"), "gemma3");
        let mut engine = Engine::new(model, CpuBackend::new(), b"t", &config(cache)).unwrap();
        let generation = engine.generate(&request(40, 30), &mut ()).unwrap();
        (generation, engine.report().groups)
    };
    let ((grouped, groups), (paged, _)) = (answer(CacheKind::Grouped), answer(CacheKind::Paged));
    let groups: Vec<_> = groups.iter().map(|group| (group.kind, group.layers)).collect();
    assert_eq!(groups, [(GroupKind::SlidingWindow { window: 8 }, 6), (GroupKind::Full, 1)]);
    assert_same(&grouped, &paged, "gemma3");
}

#[rstest]
#[case("llama", GroupKind::Full)]
#[case("mistral", GroupKind::SlidingWindow { window: 8 })]
#[case("deepseek-v3", GroupKind::Latent)]
fn layers_of_one_kind_are_one_group(#[case] name: &str, #[case] kind: GroupKind) {
    let model = || endless(crate::common::config(name), name);
    let mut engine = Engine::new(model(), CpuBackend::new(), b"t", &config(CacheKind::Grouped)).unwrap();
    let mut uniform = Engine::new(model(), CpuBackend::new(), b"t", &config(CacheKind::Paged)).unwrap();
    let groups = engine.report().groups;
    assert_eq!((groups.len(), groups[0].kind, groups[0].layers), (1, kind, model().config().num_layers()));
    let request = request(30, 20);
    let got = engine.generate(&request, &mut ()).unwrap();
    assert_same(&got, &uniform.generate(&request, &mut ()).unwrap(), name);
}
