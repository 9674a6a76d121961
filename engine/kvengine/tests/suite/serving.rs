//! Many requests at once: each is answered as if it were alone, no matter what the other requests do, and
//! nothing stays held.

use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvcore::ManualClock;
use kvengine::{
    AnswerEvent, BeamSearch, Engine, EngineConfig, Error, FinishReason, PromptTokens, Request, Sampling,
    Scheduling,
};
use rstest::rstest;

use crate::common::load_model;
use crate::crowd::{
    MODEL, Read, VOCABULARY, alone, answer_all, assert_each, assert_nothing_held, assert_same, engine,
    engine_of, engine_on, mixed, roomy, run, submit_all,
};

#[test]
fn an_answer_of_one_is_that_of_generate() {
    for (i, request) in mixed(24, 1).into_iter().enumerate() {
        let served = alone(&request);
        let expected = roomy().generate(&request, &mut ()).unwrap();
        assert_same(&served[0], &expected, &format!("request {i}"));
        assert_eq!(served[0].prompt_tokens, expected.prompt_tokens);
        assert_eq!(served[0].recomputed_tokens, expected.recomputed_tokens, "request {i}");
    }
}

/// The number of requests that are cancelled.
const CANCELLED: usize = 12;

#[rstest]
#[case(Scheduling::default())]
#[case(Scheduling { step_tokens: 7, running: 5, watermark: 1 })]
fn requests_at_once_answer_as_each_alone_in_a_tenth_of_their_memory(#[case] scheduling: Scheduling) {
    let requests = mixed(256, 2);
    let expected: Vec<_> = requests.iter().map(alone).collect();
    let blocks: usize = requests
        .iter()
        .map(|r| {
            (r.prompt.len() + r.max_new_tokens).div_ceil(4) + (r.samples - 1) * r.max_new_tokens.div_ceil(4)
        })
        .sum();
    let serve = || {
        let mut engine = engine(blocks / 10, scheduling);
        let (mut answers, mut reads) = submit_all(&mut engine, &requests);
        // Some requests of each kind are cancelled midway.
        for step in 0..CANCELLED {
            assert!(engine.step().unwrap().tokens <= scheduling.step_tokens);
            engine.check_invariants().unwrap();
            answers[step * 19].cancel();
        }
        let end = run(&mut engine, &mut answers, &mut reads);
        assert_nothing_held(&engine);
        (reads, end)
    };
    let (reads, (last, steps)) = serve();
    if scheduling == Scheduling::default() {
        assert!(last.swaps > 0 && last.preemptions > last.swaps, "both ways to give way: {last:?}");
    }
    let (mut cancelled, mut whole, mut answers) = (0, 0, 0);
    for (i, (read, expected)) in reads.iter().zip(&expected).enumerate() {
        if i % 19 == 0 && i / 19 < CANCELLED && read.error.is_some() {
            assert!(matches!(read.error, Some(Error::Cancelled)), "{:?}", read.error);
            cancelled += 1;
            continue;
        }
        assert!(read.error.is_none(), "request {i}: {:?}", read.error);
        for (sample, expected) in expected.iter().enumerate() {
            let got = read.ends[sample].as_ref().unwrap();
            assert_eq!(got.tokens, read.tokens[sample], "what was streamed");
            whole += usize::from(assert_same(got, expected, &format!("request {i}, sample {sample}")));
            answers += 1;
        }
    }
    assert!(cancelled > CANCELLED / 2, "{cancelled} were cancelled before they ended");
    assert!(whole * 10 > answers * 9, "{whole} of {answers} answers were compared to their end");
    let (again, (last_again, steps_again)) = serve();
    assert_eq!((last, steps), (last_again, steps_again), "the same order of events");
    for (a, b) in reads.iter().zip(&again) {
        assert_eq!(a.tokens, b.tokens);
    }
}

#[test]
fn a_request_larger_than_the_pool_is_refused_and_one_that_outgrows_the_pool_ends_others_go_on() {
    let mut engine = engine(16, Scheduling { watermark: 0, ..Scheduling::default() });
    let plain = |len: u32, max_new_tokens| Request {
        max_new_tokens,
        ..Request::new(PromptTokens::Plain((0..len).map(|i| 3 + i % 40).collect()))
    };
    let refused = engine.submit(plain(60, 1)).unwrap_err();
    assert!(matches!(refused, Error::Core(kvcore::Error::OutOfBlocks { .. })), "{refused}");
    let requests = [plain(30, 30), plain(6, 5)];
    let (_, reads) = answer_all(&mut engine, &requests);
    let cut = &reads[0].samples()[0];
    assert_eq!(cut.finish, FinishReason::Length);
    assert!(!cut.tokens.is_empty() && cut.tokens == reads[0].tokens[0], "what fitted was answered");
    assert_eq!(reads[1].ends[0].as_ref().unwrap().tokens.len(), 5);
    assert_nothing_held(&engine);
}

/// The preempted request has outgrown the pool by the time it is admitted again, both when it is recomputed
/// and when it is restored from host memory.
#[rstest]
fn a_request_that_gave_way_and_never_fits_again_ends_and_others_go_on(
    #[values(0, 1 << 20)] swap_memory: usize,
) {
    let scheduling = Scheduling { watermark: 0, ..Scheduling::default() };
    let mut engine = engine_on(CpuBackend::new(), 16, scheduling, swap_memory);
    let blocks = engine.cache().as_paged().unwrap().pool().counts().total;
    let plain = |first: u32, len: u32, max_new_tokens, priority| {
        let request = Request::new(PromptTokens::Plain((0..len).map(|i| 3 + (first + i) % 40).collect()));
        Request { max_new_tokens, priority, ignore_end: true, ..request }
    };
    // Each request would fit alone, except the first request, whose answer is longer than the pool.
    let requests = [plain(1, 14, 4 * blocks, 0), plain(9, 14, 16, 1), plain(5, 6, 3, 0)];
    let (last, reads) = answer_all(&mut engine, &requests);
    assert!(last.preemptions > 0, "{last:?}");
    let cut = &reads[0].samples()[0];
    assert_eq!(cut.finish, FinishReason::Length);
    assert!(cut.tokens.len() > 16, "it went on after it came back");
    for (read, request) in reads.iter().zip(&requests).skip(1) {
        assert_eq!(read.ends[0].as_ref().unwrap().tokens.len(), request.max_new_tokens);
    }
    assert_nothing_held(&engine);
}

#[test]
fn a_client_that_stops_reading_delays_no_other_request() {
    let mut engine = engine(64, Scheduling::default());
    let requests = mixed(12, 7);
    let (mut answers, mut reads) = submit_all(&mut engine, &requests);
    // The first answer is not read until all requests are answered.
    run(&mut engine, &mut answers[1..], &mut reads[1..]);
    assert_nothing_held(&engine);
    assert!(!answers[0].is_over(), "what came is kept");
    reads[0].take(&mut answers[0]);
    assert!(answers[0].is_over());
    assert_each(&reads, &requests, alone);
}

#[test]
fn a_hundred_cancelled_in_the_middle_of_their_prompts_hold_nothing() {
    // Each request is first in the order of service when it is submitted, and is in the middle of its prompt
    // when its answer is dropped.
    let mut engine = engine(400, Scheduling { step_tokens: 5, ..Scheduling::default() });
    let long = mixed(400, 3).into_iter().filter(|request| request.prompt.len() > 12).take(100);
    let mut in_the_middle = 0;
    for (i, request) in long.enumerate() {
        let answer = engine.submit(Request { priority: i as i32 + 2, ..request }).unwrap();
        let step = engine.step().unwrap();
        in_the_middle += usize::from(step.running == 1 && step.tokens > 0);
        // Dropping an answer cancels its request.
        drop(answer);
        engine.check_invariants().unwrap();
    }
    assert_eq!(in_the_middle, 100);
    assert!(engine.step().unwrap().is_idle());
    assert_nothing_held(&engine);
}

/// Guesses, pieces of prompts and recomputed pieces share the tokens of a step with the
/// answers.
#[test]
fn no_step_computes_more_than_its_tokens() {
    for step_tokens in [9, 40] {
        let mut engine = engine(4096, Scheduling { step_tokens, ..Scheduling::default() });
        let mut requests = mixed(40, 11);
        // Every answer gets one token per step, so there must not be more answers than tokens in a step.
        requests.retain(|request| request.samples == 1);
        for request in &mut requests {
            request.lookup = 4000;
        }
        let requests = &requests[..9];
        let (mut answers, mut reads) = submit_all(&mut engine, requests);
        loop {
            let step = engine.step().unwrap();
            assert!(step.tokens <= step_tokens, "{step:?}");
            answers.iter_mut().zip(&mut reads).for_each(|(answer, read)| read.take(answer));
            if step.is_idle() {
                break;
            }
        }
        let drafted: usize = reads.iter().map(|read| read.ends[0].as_ref().unwrap().drafted_tokens).sum();
        assert!(drafted > 0, "something was guessed");
        assert_each(&reads, requests, alone);
        assert_nothing_held(&engine);
    }
}

#[test]
fn limits_without_end_and_answers_without_number_are_taken_or_refused() {
    let unlimited = Scheduling { step_tokens: usize::MAX, running: usize::MAX, watermark: 0 };
    let mut engine = engine(512, unlimited);
    let request = Request { max_new_tokens: 2, ..Request::new(PromptTokens::Plain((3..40).collect())) };
    for _ in 0..2 {
        assert_eq!(engine.generate(&request, &mut ()).unwrap().tokens.len(), 2, "the second finds a prefix");
    }
    let beams = BeamSearch { width: usize::MAX, ..BeamSearch::default() };
    for many in [
        Request { samples: usize::MAX, ..request.clone() },
        Request { beams: Some(beams), ..request.clone() },
    ] {
        let error = engine.submit(many).map(drop).unwrap_err();
        assert!(matches!(error, Error::TooManyAnswers { asked: usize::MAX, .. }), "{error}");
    }
    assert_nothing_held(&engine);
}

#[test]
fn every_sample_ends_once_whenever_it_is_declared_complete() {
    let plain =
        Request { max_new_tokens: 6, ignore_end: true, ..Request::new(PromptTokens::Plain(vec![7, 9, 11])) };
    let sampled = Request {
        samples: 3,
        sampling: Sampling { temperature: 1.0, ..Sampling::default() },
        ..plain.clone()
    };
    let beams = Request { samples: 2, beams: Some(BeamSearch::default()), ..plain.clone() };
    let nothing = Request { max_new_tokens: 0, ..beams.clone() };
    for request in [plain, sampled, beams, nothing] {
        for before in 0..3 {
            let mut engine = roomy();
            let mut answer = engine.submit(request.clone()).unwrap();
            for _ in 0..before {
                engine.step().unwrap();
            }
            answer.complete(0);
            while !engine.step().unwrap().is_idle() {}
            let mut ends = vec![0; request.samples];
            while let Some(event) = answer.try_next() {
                if let AnswerEvent::End { sample, .. } = event.unwrap() {
                    ends[sample] += 1;
                }
            }
            assert_eq!(ends, vec![1; request.samples], "{} beams, {before} steps", request.beams.is_some());
            assert_nothing_held(&engine);
        }
    }
}

#[test]
fn time_ends_a_request_and_a_text_that_is_complete_ends_its_sample() {
    let clock = ManualClock::default();
    let mut engine = engine_of(load_model(MODEL), CpuBackend::new(), 4096, Scheduling::default(), 0, &clock);
    let limit = Duration::from_millis(30);
    let plain = PromptTokens::Plain(vec![7, 9, 11]);
    let request = Request { max_new_tokens: 50, ..Request::new(plain) };
    let late = Request { time_limit: Some(limit), ..request.clone() };
    let mut answers = [engine.submit(late).unwrap(), engine.submit(request.clone()).unwrap()];
    let mut reads = [Read::new(&request), Read::new(&request)];
    for _ in 0..3 {
        engine.step().unwrap();
        clock.advance(Duration::from_millis(9));
    }
    clock.advance(Duration::from_millis(9));
    answers[1].complete(0);
    run(&mut engine, &mut answers, &mut reads);
    assert!(
        matches!(reads[0].error, Some(Error::TimeOut { limit: l }) if l == limit),
        "{:?}",
        reads[0].error
    );
    let complete = reads[1].ends[0].as_ref().unwrap();
    assert_eq!((complete.tokens.len(), complete.finish), (3, FinishReason::StopString));
    assert_nothing_held(&engine);
}

#[test]
fn another_thread_and_a_future_read_as_the_engine_computes() {
    let mut engine = roomy();
    let request = Request { max_new_tokens: 6, ..Request::new(PromptTokens::Plain(vec![7, 9, 11])) };
    let (blocking, mut polled) = (engine.submit(request.clone()).unwrap(), engine.submit(request).unwrap());
    let by_iterator = std::thread::spawn(move || blocking.map(Result::unwrap).count());
    let by_future = std::thread::spawn(move || {
        let mut count = 0;
        while pollster::block_on(std::future::poll_fn(|context| polled.poll_next(context))).is_some() {
            count += 1;
        }
        count
    });
    while !engine.step().unwrap().is_idle() {}
    assert_eq!((by_iterator.join().unwrap(), by_future.join().unwrap()), (7, 7), "six tokens and an end");
}

#[test]
fn log_probabilities_are_of_the_models_own_distribution_sampled_or_given() {
    let request = Request {
        max_new_tokens: 4,
        keep_logits: true,
        logprobs: Some(2),
        sampling: Sampling { temperature: 2.0, frequency_penalty: 0.5, seed: 3, ..Sampling::default() },
        logit_bias: [(9, f32::NEG_INFINITY)].into(),
        ..Request::new(PromptTokens::Plain(vec![7, 9, 11]))
    };
    let mut engine = roomy();
    let sampled = engine.generate(&request, &mut ()).unwrap();
    assert!(!sampled.tokens.contains(&9));
    let given = Request { forced: Some(sampled.tokens.clone().into()), ..request.clone() };
    let given = engine.generate(&given, &mut ()).unwrap();
    for answer in [&sampled, &given] {
        assert_eq!(answer.logprobs.len(), answer.tokens.len());
        for ((got, logits), &token) in answer.logprobs.iter().zip(&answer.logits).zip(&answer.tokens) {
            let sum: f32 = logits.iter().map(|x| x.exp()).sum();
            assert_eq!((got.token, got.top.len()), (token, 2));
            assert!((got.logprob - (logits[token as usize].exp() / sum).ln()).abs() < 1e-4);
            assert!(got.top[0].1 >= got.top[1].1 && got.top[0].1 >= got.logprob);
        }
    }
    let stray = Request { logit_bias: [(VOCABULARY, 1.0)].into(), ..request.clone() };
    assert!(matches!(engine.submit(stray), Err(Error::Model(_))));
    let nan = Request { logit_bias: [(1, f32::NAN)].into(), ..request };
    assert!(matches!(engine.submit(nan), Err(Error::Sampling { setting: "logit_bias", .. })));
    assert_nothing_held(&engine);
}

/// Short and long requests to a model whose frequencies change with the length need two passes in one step.
#[test]
fn requests_of_two_regimes_in_one_step_answer_as_each_alone() {
    let make = || {
        let config = EngineConfig { block_size: 4, ..EngineConfig::default() };
        Engine::new(load_model("llama-dynamic"), CpuBackend::new(), b"t", &config).unwrap()
    };
    let most = make().model().config().max_positions as u32;
    let requests: Vec<Request> = (0..6)
        .map(|i| {
            let prompt = (0..if i % 2 == 0 { 5 } else { most - 9 }).map(|j| 3 + (i + j * 7) % 40).collect();
            let request = Request::new(PromptTokens::Plain(prompt));
            Request { max_new_tokens: 6, keep_logits: true, ignore_end: true, ..request }
        })
        .collect();
    let mut engine = make();
    let (_, reads) = answer_all(&mut engine, &requests);
    assert_each(&reads, &requests, |request| vec![make().generate(request, &mut ()).unwrap()]);
    assert_nothing_held(&engine);
}
