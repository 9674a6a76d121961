//! Preempted requests are copied to host memory and back, or recomputed, and give the same answer.

use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ChunkedPrompt, Recompute, ReuseCell};
use kvcore::{Backend, ManualClock};
use kvengine::{Engine, FinishReason, PreemptionCosts, PromptTokens, Request, Sampling, Scheduling, Step};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rstest::rstest;

use crate::common::load_model;
use crate::crowd::{
    MODEL, Read, VOCABULARY, alone, answer_all, assert_each, assert_nothing_held, assert_same,
    engine_keeping, engine_on, run, submit_all,
};
use crate::faulty::Faulty;

const SCHEDULING: Scheduling = Scheduling { step_tokens: 64, running: 64, watermark: 1 };
/// The costs with which all blocks are copied to host memory.
const MOVING_IS_FREE: PreemptionCosts =
    PreemptionCosts { token: Duration::from_secs(1), block: Duration::ZERO };
const COMPUTING_IS_FREE: PreemptionCosts =
    PreemptionCosts { token: Duration::ZERO, block: Duration::from_secs(1) };

/// Returns requests that together need three times as many blocks as a small engine has. One request has four
/// samples.
fn requests() -> Vec<Request> {
    let of = |i: u32| {
        let prompt = (0..10 + i).map(|j| 3 + (i * 7 + j * 5) % 40).collect();
        let sampling = Sampling { temperature: if i == 3 { 0.8 } else { 0.0 }, ..Sampling::default() };
        let samples = if i == 3 { 4 } else { 1 };
        let ignore_end = true;
        let request = Request::new(PromptTokens::Plain(prompt));
        Request { max_new_tokens: 20, keep_logits: true, samples, sampling, ignore_end, ..request }
    };
    (0..6).map(of).collect()
}

/// Answers all requests, and checks that each answer is the same as if the request were alone.
fn serve(engine: &mut Engine) -> Step {
    let requests = requests();
    let (last, reads) = answer_all(engine, &requests);
    assert_each(&reads, &requests, alone);
    assert_nothing_held(engine);
    last
}

fn small(backend: Arc<dyn Backend>, swap_memory: usize) -> Engine {
    engine_on(backend, 36, SCHEDULING, swap_memory)
}

#[rstest]
#[case("moving costs nothing", MOVING_IS_FREE, 1 << 20, true)]
#[case("computing costs nothing", COMPUTING_IS_FREE, 1 << 20, false)]
#[case("no host memory", MOVING_IS_FREE, 0, false)]
#[case("host memory for less than a block", MOVING_IS_FREE, 1, false)]
fn what_costs_less_is_done(
    #[case] what: &str,
    #[case] costs: PreemptionCosts,
    #[case] memory: usize,
    #[case] swaps: bool,
) {
    let mut engine = small(CpuBackend::new(), memory);
    engine.set_preemption_costs(costs);
    let last = serve(&mut engine);
    assert!(last.preemptions > 2, "{what}: {last:?}");
    assert_eq!(last.swaps > 0, swaps, "{what}: {last:?}");
    if swaps {
        assert!(2 * last.swaps > last.preemptions, "{what}: all that have computed something: {last:?}");
    }
}

#[test]
fn what_does_not_fit_into_host_memory_is_computed_again() {
    let backend = CpuBackend::new();
    let one = small(backend.clone(), 0);
    let block = one.cache().arena().layout().block_bytes();
    let mut engine = small(backend, 9 * block);
    engine.set_preemption_costs(MOVING_IS_FREE);
    let last = serve(&mut engine);
    assert!(last.swaps > 0 && last.swaps < last.preemptions, "{last:?}");
    assert_eq!(engine.report().swapped.unwrap().total, 9);
}

/// Samples end at different times, and the request is preempted after the first sample has ended. The other
/// samples continue as if the request were alone.
#[rstest]
#[case(MOVING_IS_FREE)]
#[case(COMPUTING_IS_FREE)]
fn samples_that_are_over_stay_over_when_their_request_gives_way(#[case] costs: PreemptionCosts) {
    let requests = requests();
    let mut engine = small(CpuBackend::new(), 1 << 20);
    engine.set_preemption_costs(costs);
    let (mut answers, mut reads) = submit_all(&mut engine, &requests);
    while reads[3].tokens[0].is_empty() {
        assert!(!engine.step().unwrap().is_idle());
        answers.iter_mut().zip(&mut reads).for_each(|(answer, read)| read.take(answer));
    }
    let before = engine.step().unwrap().preemptions;
    answers[3].complete(0);
    let (last, _) = run(&mut engine, &mut answers, &mut reads);
    assert!(last.preemptions > before, "{last:?}");
    let expected = alone(&requests[3]);
    let first = reads[3].ends[0].as_ref().unwrap();
    assert_eq!(
        (&first.tokens, first.finish),
        (&reads[3].tokens[0], FinishReason::StopString),
        "and no token more"
    );
    assert!(first.tokens.len() < 6 && expected[0].tokens.starts_with(&first.tokens));
    for (sample, expected) in expected.iter().enumerate().skip(1) {
        let got = reads[3].ends[sample].as_ref().unwrap();
        assert_same(got, expected, &format!("sample {sample}"));
        assert_eq!(reads[3].tokens[sample], got.tokens);
    }
    assert_nothing_held(&engine);
}

/// A forced answer keeps the logits of all its positions, no matter which of its tokens are cached when the
/// request is admitted again.
#[test]
fn a_given_answer_that_gives_way_keeps_all_its_logits() {
    let mut requests = requests();
    let answer: Arc<[u32]> = (0..18).map(|i| 3 + i * 11 % 40).collect();
    for request in &mut requests {
        (request.samples, request.sampling) = (1, Sampling::default());
    }
    for request in &mut requests[4..] {
        (request.forced, request.lookup) = (Some(answer.clone()), 3);
    }
    let scheduling = Scheduling { step_tokens: 9, ..SCHEDULING };
    let mut engine = engine_on(CpuBackend::new(), 22, scheduling, 0);
    let (last, reads) = answer_all(&mut engine, &requests);
    assert!(last.preemptions > 1, "{last:?}");
    for (i, (read, request)) in reads.iter().zip(&requests).enumerate() {
        let (got, expected) = (read.ends[0].as_ref().unwrap(), &alone(request)[0]);
        assert_eq!(got.logits.len(), expected.logits.len(), "request {i}");
        assert_same(got, expected, &format!("request {i}"));
    }
}

/// The device may refuse any copy to or from host memory. In that case, the request is recomputed.
#[test]
fn a_refused_copy_costs_time_and_nothing_else() {
    for passing in 0.. {
        let backend = Faulty::new();
        let mut engine = small(backend.clone(), 1 << 20);
        engine.set_preemption_costs(MOVING_IS_FREE);
        backend.refuse_only("swap_blocks", passing);
        serve(&mut engine);
        if backend.disarm() {
            assert!(passing > 6, "both ways were refused: {passing} copies");
            break;
        }
        assert!(backend.refused().contains("swap_blocks"));
    }
}

/// Returns requests whose prompts have no block in common: ordinary prompts, or prompts with documents and a strategy.
fn unlike(strategy: Option<&str>) -> Vec<Request> {
    let text = |seed: u64, tokens: usize| -> Vec<u32> {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..tokens).map(|_| rng.random_range(3..VOCABULARY)).collect()
    };
    let of = |seed: u64| {
        let prompt = if strategy.is_some() {
            let documents = vec![text(seed + 100, 7), text(seed + 200, 5)];
            PromptTokens::Chunked(ChunkedPrompt::new(text(seed + 300, 6), documents, text(seed, 14)).unwrap())
        } else {
            PromptTokens::Plain(text(seed, 14))
        };
        let recompute = strategy.unwrap_or("none").parse::<Recompute>().unwrap();
        let request = Request { recompute: Arc::new(recompute), ..Request::new(prompt) };
        Request { max_new_tokens: 20, ignore_end: true, keep_logits: true, ..request }
    };
    (0..6).map(of).collect()
}

/// Returns the number of blocks of a pool that is too small for all of these requests at once.
fn small_for(strategy: Option<&str>) -> usize {
    if strategy.is_some() { 64 } else { 40 }
}

#[rstest]
fn what_a_request_computed_before_it_gave_way_does_not_count_as_cached(
    #[values(None, Some("none"), Some("link:2"), Some("question:0.4"), Some("blend:0.5@1"))] strategy: Option<
        &str,
    >,
    #[values(1, 3)] samples: usize,
) {
    let mut requests = unlike(strategy);
    for request in &mut requests {
        request.samples = samples;
    }
    let mut engine = engine_on(CpuBackend::new(), small_for(strategy), SCHEDULING, 0);
    let (last, reads) = answer_all(&mut engine, &requests);
    assert!(last.preemptions > 2, "{last:?}");
    assert_each(&reads, &requests, alone);
    for (i, got) in reads.iter().flat_map(Read::samples).enumerate() {
        assert_eq!((got.cached_tokens, got.cached_question), (0, 0), "answer {i}");
        assert!(got.chunks.iter().all(|chunk| !chunk.hit && chunk.missed.is_some()), "answer {i}");
    }
}

/// An earlier request has left the beginning of a prompt. The prompt's request is the first to give way.
#[rstest]
fn what_others_left_counts_as_cached_also_after_a_request_gave_way(
    #[values(None, Some("none"))] strategy: Option<&str>,
) {
    let mut requests = unlike(strategy);
    let late = Request { max_new_tokens: 1, ..requests[5].clone() };
    requests[5].priority = -1;
    let mut engine = engine_on(CpuBackend::new(), small_for(strategy), SCHEDULING, 0);
    engine.generate(&late, &mut ()).unwrap();
    let found = engine.generate(&late, &mut ()).unwrap();
    assert!(found.cached_tokens >= 12, "{}", found.cached_tokens);
    let (mut answers, mut reads) = submit_all(&mut engine, &requests[5..]);
    engine.step().unwrap();
    let (more, rest) = submit_all(&mut engine, &requests[..5]);
    answers.extend(more);
    reads.extend(rest);
    let (last, _) = run(&mut engine, &mut answers, &mut reads);
    assert!(last.preemptions > 2, "{last:?}");
    let got = &reads[0].samples()[0];
    assert_eq!(
        (got.cached_tokens, got.cached_question),
        (found.cached_tokens, found.cached_question),
        "as it was found first"
    );
    assert!(got.chunks.iter().all(|chunk| chunk.hit), "{:?}", got.chunks);
}

/// The request stores a document of its own while it waits for one that another engine computes, and gives way before it
/// has both.
#[test]
fn a_document_of_its_own_does_not_count_as_cached_if_a_request_gave_way_while_it_waited() {
    let text =
        |first: u32, tokens: u32| -> Vec<u32> { (0..tokens).map(|i| 3 + (first * i + first) % 44).collect() };
    let chunked = |system: Vec<u32>, documents: Vec<Vec<u32>>| {
        let prompt = ChunkedPrompt::new(system, documents, text(7, 5)).unwrap();
        let cell = ReuseCell::SEQUENTIAL_ALONE;
        Request { cell, max_new_tokens: 2, ..Request::new(PromptTokens::Chunked(prompt)) }
    };
    let chunks = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let scheduling = Scheduling { step_tokens: 10, ..SCHEDULING };
    let (model, clock) = (load_model(MODEL), ManualClock::default());
    let mut other = engine_keeping(chunks, model, CpuBackend::new(), 48, scheduling, 0, &clock);
    let mut engine = other.sharing_memory(load_model(MODEL), b"t").unwrap();
    let (shared, own) = (text(5, 40), text(3, 8));
    let (mut theirs, mut their_reads) = submit_all(&mut other, &[chunked(text(9, 4), vec![shared.clone()])]);
    other.step().unwrap();
    let waiting = Request { priority: -1, ..chunked(text(11, 6), vec![own, shared]) };
    let (mut answers, mut reads) = submit_all(&mut engine, &[waiting]);
    let grows = |first| {
        let request = Request::new(PromptTokens::Plain(text(first, 6)));
        Request { max_new_tokens: 50, ignore_end: true, ..request }
    };
    while engine.report().chunk_cache.unwrap().cached_chunks == 0 {
        engine.step().unwrap();
    }
    let (more, rest) = submit_all(&mut engine, &[grows(13), grows(17)]);
    answers.extend(more);
    reads.extend(rest);
    while engine.step().unwrap().preemptions == 0 {}
    run(&mut other, &mut theirs, &mut their_reads);
    run(&mut engine, &mut answers, &mut reads);
    let got = &reads[0].samples()[0];
    assert_eq!(got.chunks.iter().map(|chunk| chunk.hit).collect::<Vec<_>>(), [false, true]);
    assert!(got.chunks[0].missed.is_some() && got.cached_tokens <= 40, "{got:?}");
}
