//! Sliding windows: blocks before the window of every layer are freed while a request runs.

use kvbackend_cpu::CpuBackend;
use kvchunk::ChunkedPrompt;
use kvcore::CacheKind;
use kvengine::{Engine, EngineConfig, PromptTokens, Request, Scheduling};
use kvmodel::{Model, ModelConfig};
use rstest::rstest;

use crate::common::{endless, folder};
use crate::crowd::{Read, answer_all, assert_same};

/// The window of every layer.
const WINDOW: usize = 24;

/// Returns the tiny Mistral model with the given window.
fn model(window: usize) -> Model {
    let config = std::fs::read_to_string(folder("mistral").join("config.json")).unwrap();
    let config = config.replace("\"sliding_window\": 8", &format!("\"sliding_window\": {window}"));
    let config = ModelConfig::from_json(&config).unwrap();
    assert_eq!(config.widest_window(), Some(window));
    endless(config, "mistral")
}

/// Returns an engine whose pools have `blocks` blocks of four tokens.
fn engine(blocks: usize) -> Engine {
    let scheduling = Scheduling { step_tokens: 16, watermark: 0, ..Scheduling::default() };
    let mut config = EngineConfig { block_size: 4, scheduling, ..EngineConfig::default() };
    config.kv_memory = Some(1 << 16);
    let probe = Engine::new(model(WINDOW), CpuBackend::new(), b"t", &config).unwrap();
    config.kv_memory = Some(blocks * probe.cache().arena().layout().block_bytes());
    Engine::new(model(WINDOW), CpuBackend::new(), b"t", &config).unwrap()
}

/// Returns the answer of an engine whose cache never frees tokens.
fn expected(request: &Request) -> kvengine::Generation {
    let config = EngineConfig { cache: CacheKind::Static, ..EngineConfig::default() };
    let mut engine = Engine::new(model(WINDOW), CpuBackend::new(), b"t", &config).unwrap();
    engine.generate(&Request { lookup: 0, ..request.clone() }, &mut ()).unwrap()
}

fn request(prompt: usize, lookup: usize) -> Request {
    let tokens = (0..prompt as u32).map(|i| 3 + i * 7 % 40).collect();
    let request = Request { max_new_tokens: 180, lookup, ..Request::new(PromptTokens::Plain(tokens)) };
    Request { ignore_end: true, keep_logits: true, ..request }
}

/// A window of 24 tokens, a piece of 16 tokens and one started block need eleven blocks, no matter how long
/// the prompt and the answer are.
#[rstest]
#[case::long_answer(10, 0)]
#[case::long_prompt(70, 0)]
#[case::with_guesses(70, 4)]
fn memory_stays_flat_under_a_window(#[case] prompt: usize, #[case] lookup: usize) {
    let request = request(prompt, lookup);
    let mut engine = engine(44);
    let mut answer = engine.submit(request.clone()).unwrap();
    let (mut read, mut most) = (Read::new(&request), 0);
    while !engine.step().unwrap().is_idle() {
        engine.check_invariants().unwrap();
        let counts = engine.cache().as_paged().unwrap().pool().counts();
        most = most.max(counts.mutable + counts.shared);
        read.take(&mut answer);
    }
    read.take(&mut answer);
    assert!(most <= (WINDOW + 16).div_ceil(4) + 1, "{most} blocks were held at once");
    assert_same(&read.samples()[0], &expected(&request), "with blocks before the window freed");
}

/// A prompt and an answer that are four times as long as the pool fit, because they are never held as a
/// whole.
#[test]
fn a_request_may_be_longer_than_the_pool() {
    let mut engine = engine(16);
    let blocks = engine.cache().as_paged().unwrap().pool().counts().total;
    let request = request(60, 0);
    assert!(blocks * 4 * 4 <= 240, "{blocks} blocks");
    let got = engine.generate(&request, &mut ()).unwrap();
    assert_same(&got, &expected(&request), "in a pool of a quarter");
}

#[test]
fn samples_and_preempted_requests_free_blocks_too() {
    let mut requests: Vec<Request> = (0..3).map(|i| request(20 + 9 * i, 0)).collect();
    requests[1].samples = 3;
    requests[1].sampling.temperature = 0.8;
    for request in &mut requests {
        request.max_new_tokens = 60;
    }
    let mut engine = engine(32);
    engine.set_preemption_costs(crate::crowd::SWAP_LONG);
    let (last, reads) = answer_all(&mut engine, &requests);
    assert!(last.preemptions > 0, "{last:?}");
    for (i, (read, request)) in reads.iter().zip(&requests).enumerate() {
        let samples = read.samples();
        match &samples[..] {
            [one] => _ = assert_same(one, &expected(request), &format!("request {i}")),
            some => assert!(some.iter().all(|sample| sample.tokens.len() == 60)),
        }
    }
    crate::crowd::assert_nothing_held(&engine);
}

/// Documents are held whole, because each leaves the window at a different position; the question's own
/// sequence is not.
#[test]
fn an_answer_after_documents_frees_its_own_sequence() {
    let chunks = vec![(3..20).collect(), (7..30).collect()];
    let prompt = ChunkedPrompt::new(vec![5, 6], chunks, vec![9, 8, 7]).unwrap();
    let request = Request { max_new_tokens: 180, ..request(0, 0) };
    let request = Request { prompt: PromptTokens::Chunked(prompt).into(), ..request };
    let mut wide = engine(400);
    let expected = wide.generate(&request, &mut ()).unwrap();
    let mut narrow = engine(44);
    let got = narrow.generate(&request, &mut ()).unwrap();
    assert_same(&got, &expected, "in little memory");
    let blocks = narrow.cache().as_paged().unwrap().pool().counts().total;
    assert!(got.tokens.len() > 4 * blocks, "the answer alone is longer than the pool: {blocks} blocks");
}
