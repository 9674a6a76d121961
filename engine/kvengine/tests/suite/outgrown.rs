//! Answers that outgrow the pool: they end with the tokens so far, and other requests go on.

use kvcore::{CacheKind, DType};
use kvengine::{
    BeamSearch, Engine, EngineConfig, Error, FinishReason, Generation, PromptTokens, Request, Sampling,
    Scheduling,
};
use rstest::rstest;

use crate::common::{Golden, endless};
use crate::crowd::{answer_all, engine, roomy};
use crate::failure::assert_nothing_held;

/// The number of tokens that the pool of sequences of these tests has room for.
const ROOM: usize = 48;
const PROMPT: usize = 10;

fn small() -> Engine {
    // A quarter of the memory is for chunks.
    let engine = engine(ROOM / 3, Scheduling { watermark: 0, ..Scheduling::default() });
    assert_eq!(engine.cache().as_paged().unwrap().pool().counts().total * 4, ROOM);
    engine
}

fn long(max_new_tokens: usize) -> Request {
    let prompt = (0..PROMPT as u32).map(|i| 3 + i % 40).collect();
    Request { max_new_tokens, ignore_end: true, ..Request::new(PromptTokens::Plain(prompt)) }
}

/// Answers a request, and checks that all samples were cut short, and are the beginning of what an engine with
/// plenty of memory answers.
fn cut_short(engine: &mut Engine, request: &Request) -> Vec<Generation> {
    let (_, reads) = answer_all(engine, std::slice::from_ref(request));
    assert_nothing_held(engine);
    let samples = reads[0].samples();
    for (generation, streamed) in samples.iter().zip(&reads[0].tokens) {
        assert_eq!((&generation.tokens, generation.finish), (streamed, FinishReason::Length));
        assert!(generation.tokens.len() < request.max_new_tokens, "{}", generation.tokens.len());
    }
    samples
}

#[rstest]
#[case::alone(long(500))]
#[case::with_guesses(Request { lookup: 4, ..long(500) })]
#[case::warm(Request { sampling: Sampling { temperature: 0.8, seed: 4, ..Sampling::default() }, ..long(500) })]
#[case::without_reuse(Request { reuse: false, ..long(500) })]
fn an_answer_keeps_what_it_has(#[case] request: Request) {
    let generation = &cut_short(&mut small(), &request)[0];
    // The last token needs no room, because it is not fed back.
    assert!((ROOM - PROMPT - 4..=ROOM - PROMPT + 1).contains(&generation.tokens.len()), "{generation:?}");
    let most = generation.tokens.len();
    let roomy = roomy().generate(&Request { max_new_tokens: most, ..request }, &mut ()).unwrap();
    assert_eq!(generation.tokens, roomy.tokens);
}

#[test]
fn all_samples_keep_what_they_have() {
    let sampling = Sampling { temperature: 0.8, seed: 4, ..Sampling::default() };
    let samples = cut_short(&mut small(), &Request { samples: 3, sampling, ..long(500) });
    assert!(samples.iter().all(|sample| sample.tokens.len() > 8), "{samples:?}");
}

#[test]
fn a_beam_search_returns_its_best_beams_so_far() {
    let beams = Some(BeamSearch { width: 3, length_penalty: 1.0 });
    let samples = cut_short(&mut small(), &Request { samples: 2, beams, ..long(500) });
    assert!(samples.iter().all(|sample| sample.tokens.len() > 4), "{samples:?}");
    assert!(samples[0].score.unwrap() >= samples[1].score.unwrap());
}

#[test]
fn a_chunked_prompts_answer_keeps_what_it_has() {
    let request = Request::new(PromptTokens::Chunked(Golden::load("llama").prompt));
    let request = Request { max_new_tokens: 900, ignore_end: true, ..request };
    let mut engine = engine(60, Scheduling { watermark: 0, ..Scheduling::default() });
    assert!(cut_short(&mut engine, &request)[0].tokens.len() > 8);
}

#[test]
fn an_answer_of_a_grouped_cache_keeps_what_it_has() {
    let config = EngineConfig {
        cache: CacheKind::Grouped,
        block_size: 4,
        kv_memory: Some(40_000),
        kv_format: DType::F32.into(),
        ..EngineConfig::default()
    };
    let model = endless(crate::common::config("gemma3"), "gemma3");
    let mut engine = Engine::new(model, kvbackend_cpu::CpuBackend::new(), b"t", &config).unwrap();
    let generation = engine.generate(&long(900), &mut ()).unwrap();
    assert_eq!(generation.finish, FinishReason::Length);
    assert!((1..900).contains(&generation.tokens.len()), "{}", generation.tokens.len());
    assert_nothing_held(&engine);
}

#[test]
fn a_forced_answer_is_needed_as_a_whole() {
    let forced: Vec<u32> = (0..500).map(|i| 3 + i % 40).collect();
    let request = Request { forced: Some(forced.into()), ..long(500) };
    let error = small().generate(&request, &mut ()).unwrap_err();
    assert!(matches!(error, Error::Core(kvcore::Error::OutOfBlocks { .. })), "{error}");
}

#[test]
fn another_request_is_answered_in_full() {
    let (_, mut reads) = answer_all(&mut small(), &[long(500), Request { priority: 1, ..long(20) }]);
    assert_eq!(reads[1].samples()[0].tokens.len(), 20);
    assert!(reads[0].error.take().is_none());
    assert_eq!(reads[0].samples()[0].finish, FinishReason::Length);
    assert!(reads[0].samples()[0].tokens.len() > 30);
}
