//! Constraints on answers: every answer obeys its own, and nothing else changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvengine::{
    AnswerConstraint, BeamSearch, Error, FinishReason, NextTokens, PromptTokens, Request, Result, Sampling,
    Scheduling, TokenConstraint,
};
use rstest::rstest;

use crate::crowd::{
    Read, VOCABULARY, alone, answer_all, assert_each, assert_nothing_held, assert_same, engine, mixed, roomy,
    run, submit_all,
};

/// Tokens that grow from one to the next by 1 to `step`, up to `most`, which ends the answer.
#[derive(Debug)]
struct Growing {
    step: u32,
    most: u32,
    fault: Fault,
    states: AtomicUsize,
}

/// The fault after three tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    Error,
    Panic,
    /// Every token takes long.
    Slow,
    Start,
}

struct GrowingState {
    rules: Arc<Growing>,
    last: u32,
    count: usize,
}

impl Growing {
    fn new(step: u32, most: u32) -> Self {
        Self { step, most, fault: Fault::None, states: AtomicUsize::new(0) }
    }

    fn request(self, seed: u64) -> Request {
        let prompt = PromptTokens::Plain((0..9).map(|i| 3 + (i * 7 + seed as u32) % 40).collect());
        let sampling = Sampling { temperature: 1.5, seed, ..Sampling::default() };
        let constraint: Arc<dyn AnswerConstraint> = Arc::new(Rules(Arc::new(self)));
        let request = Request { constraint: Some(constraint), sampling, ..Request::new(prompt) };
        Request { max_new_tokens: 60, keep_logits: true, ..request }
    }

    fn obeys(&self, tokens: &[u32]) -> bool {
        let grows = tokens.windows(2).all(|two| (two[0] + 1..=two[0] + self.step).contains(&two[1]));
        grows && tokens.first().is_none_or(|&first| (3..3 + self.step).contains(&first))
    }
}

#[derive(Debug)]
struct Rules(Arc<Growing>);

impl AnswerConstraint for Rules {
    fn start(&self) -> Result<Box<dyn TokenConstraint>> {
        if self.0.fault == Fault::Start {
            return Err(Error::Constraint("it never starts".to_owned()));
        }
        self.0.states.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(GrowingState { rules: Arc::clone(&self.0), last: 2, count: 0 }))
    }
}

impl TokenConstraint for GrowingState {
    fn next(&mut self) -> Result<NextTokens> {
        let rules = &self.rules;
        match rules.fault {
            Fault::Error if self.count == 3 => {
                return Err(Error::Constraint("it fails after three".to_owned()));
            }
            Fault::Panic if self.count == 3 => panic!("it panics after three"),
            Fault::Slow => std::thread::sleep(Duration::from_millis(25)),
            _ => {}
        }
        if self.last >= rules.most {
            return Ok(NextTokens::Complete);
        }
        let next = self.last + 1..=(self.last + rules.step).min(rules.most);
        Ok(NextTokens::OneOf(next.collect()))
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        assert!(token > self.last, "{token} after {}", self.last);
        (self.last, self.count) = (token, self.count + 1);
        Ok(())
    }

    fn fork(&self) -> Box<dyn TokenConstraint> {
        self.rules.states.fetch_add(1, Ordering::Relaxed);
        Box::new(Self { rules: Arc::clone(&self.rules), ..*self })
    }
}

/// Requests of all kinds, half of them with a constraint, in a pool that is too small for all of them.
#[rstest]
#[case(Scheduling::default(), 110)]
#[case(Scheduling { step_tokens: 7, running: 5, watermark: 0 }, 28)]
fn answers_obey_their_constraints_and_the_others_are_as_alone(
    #[case] scheduling: Scheduling,
    #[case] blocks: usize,
) {
    let constrained = |i: usize| Growing::new(1 + i as u32 % 4, 12 + i as u32 % 33);
    let mut requests: Vec<Request> =
        mixed(96, 11).into_iter().filter(|r| r.forced.is_none() && r.samples < 5).collect();
    for (i, request) in requests.iter_mut().enumerate().filter(|(i, _)| i % 2 == 0) {
        let own = constrained(i).request(i as u64);
        request.constraint = own.constraint;
        (request.max_new_tokens, request.sampling) = (5 + i % 40, own.sampling);
    }
    let expected: Vec<_> = requests.iter().map(alone).collect();
    let mut engine = engine(blocks, scheduling);
    let (last, reads) = answer_all(&mut engine, &requests);
    assert!(last.preemptions > 0, "{last:?}");
    let (mut ended, mut cut) = (0, 0);
    for (i, (read, expected)) in reads.iter().zip(&expected).enumerate() {
        for (sample, (got, expected)) in read.samples().iter().zip(expected).enumerate() {
            assert_same(got, expected, &format!("request {i}, sample {sample}"));
            if i % 2 == 0 {
                let rules = constrained(i);
                assert!(rules.obeys(&got.tokens), "{:?}", got.tokens);
                let complete = got.tokens.last() == Some(&rules.most);
                assert!(complete || got.finish == FinishReason::Length, "{:?}", got.tokens);
                assert_eq!(got.drafted_tokens, 0);
                ended += usize::from(got.finish == FinishReason::Stop);
                cut += usize::from(got.finish == FinishReason::Length);
            }
        }
    }
    assert!(ended > 20 && cut > 5, "{ended} answers ended, {cut} were cut");
    assert_nothing_held(&engine);
}

#[test]
fn every_sample_has_its_own_state_and_they_differ() {
    let rules = Arc::new(Growing::new(4, 47));
    let request = Request {
        samples: 6,
        constraint: Some(Arc::new(Rules(Arc::clone(&rules)))),
        ..Growing::new(4, 47).request(3)
    };
    let samples = alone(&request);
    assert_eq!(rules.states.load(Ordering::Relaxed), 6);
    assert!(samples.iter().all(|sample| rules.obeys(&sample.tokens)));
    assert!(samples.iter().any(|sample| sample.tokens != samples[0].tokens), "{samples:?}");
}

#[test]
fn a_slow_constraint_does_not_hold_up_other_answers() {
    let slow = Growing { fault: Fault::Slow, ..Growing::new(1, 30) };
    let expected = alone(&Growing::new(1, 30).request(5));
    let plain = Request {
        max_new_tokens: 40,
        ignore_end: true,
        keep_logits: true,
        ..Request::new(PromptTokens::Plain(vec![5, 9, 4]))
    };
    let requests = [slow.request(5), plain];
    let mut engine = roomy();
    let (mut answers, mut reads) = submit_all(&mut engine, &requests);
    while reads[1].ends[0].is_none() {
        engine.step().unwrap();
        answers.iter_mut().zip(&mut reads).for_each(|(answer, read)| read.take(answer));
    }
    // Forty passes of this model take a few milliseconds.
    assert!(reads[0].tokens[0].len() < 10, "{:?}", reads[0].tokens);
    run(&mut engine, &mut answers, &mut reads);
    assert_same(&reads[0].samples()[0], &expected[0], "the slow answer");
    assert_each(&reads[1..], &requests[1..], alone);
    assert_nothing_held(&engine);
}

#[rstest]
#[case(Fault::Error, "it fails after three", 3)]
#[case(Fault::Panic, "panicked", 3)]
#[case(Fault::Start, "it never starts", 0)]
fn a_constraint_that_fails_ends_its_own_request_alone(
    #[case] fault: Fault,
    #[case] words: &str,
    #[case] tokens: usize,
) {
    let mut requests: Vec<Request> = mixed(9, 4);
    requests[4] = Growing { fault, ..Growing::new(1, 40) }.request(1);
    let mut engine = roomy();
    let (_, reads) = answer_all(&mut engine, &requests);
    let error = reads[4].error.as_ref().unwrap().to_string();
    assert!(error.contains(words), "{error}");
    assert_eq!(reads[4].tokens[0].len(), tokens);
    for part in [0..4, 5..9] {
        assert_each(&reads[part.clone()], &requests[part], alone);
    }
    assert_nothing_held(&engine);
}

#[test]
fn cancelled_requests_leave_nothing_while_their_constraint_is_worked_out() {
    let slow = |seed| Growing { fault: Fault::Slow, ..Growing::new(2, 40) }.request(seed);
    let requests: Vec<Request> = (0..6).map(slow).collect();
    let mut engine = roomy();
    let (mut answers, mut reads) = submit_all(&mut engine, &requests);
    for answer in &answers {
        engine.step().unwrap();
        answer.cancel();
    }
    run(&mut engine, &mut answers, &mut reads);
    assert!(reads.iter().all(|read: &Read| matches!(read.error, Some(Error::Cancelled))));
    assert_nothing_held(&engine);
}

#[test]
fn biases_choose_among_the_allowed_tokens_and_may_not_exclude_them_all() {
    // Tokens that follow the first are 4 to 7. The bias prefers 40, which is not allowed, and then 6.
    let biased = |bias: &[(u32, f32)]| Request {
        logit_bias: bias.into(),
        max_new_tokens: 1,
        sampling: Sampling::default(),
        ..Growing::new(4, 47).request(1)
    };
    let best = alone(&biased(&[(40, 1000.0), (6, 500.0)]));
    assert_eq!(best[0].tokens, [6]);
    let none: Vec<(u32, f32)> = (3..7).map(|token| (token, f32::NEG_INFINITY)).collect();
    let mut engine = roomy();
    let (_, reads) = answer_all(&mut engine, &[biased(&none), mixed(1, 3).remove(0)]);
    let error = reads[0].error.as_ref().unwrap().to_string();
    assert!(error.contains("logit_bias excludes every token"), "{error}");
    assert!(reads[1].error.is_none());
    assert_nothing_held(&engine);
}

#[test]
fn logprobs_are_the_models_own() {
    let request = Request { logprobs: Some(VOCABULARY as usize), ..Growing::new(3, 40).request(8) };
    let answer = &alone(&request)[0];
    assert!(!answer.logprobs.is_empty());
    for (report, logits) in answer.logprobs.iter().zip(&answer.logits) {
        let likeliest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(logits[report.top[0].0 as usize], likeliest, "the likeliest of all tokens");
        let total: f32 = report.top.iter().map(|(_, logprob)| logprob.exp()).sum();
        assert!((total - 1.0).abs() < 1e-3, "{total}");
    }
}

#[test]
fn settings_that_contradict_a_constraint_are_refused_by_name() {
    let request = || Growing::new(1, 40).request(1);
    let mut engine = roomy();
    for (request, words) in [
        (Request { forced: Some([3, 4].into()), ..request() }, "a forced answer is not chosen"),
        (Request { beams: Some(BeamSearch::default()), ..request() }, "a beam search cannot follow one"),
        (Request { ignore_end: true, ..request() }, "decides where an answer may end"),
    ] {
        let error = engine.submit(request).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    // Guesses are left out.
    let guessed = alone(&Request { lookup: 4, ..request() });
    assert_same(&guessed[0], &alone(&request())[0], "with guesses");
    let none = alone(&Request { max_new_tokens: 0, ..request() });
    assert_eq!((none[0].tokens.len(), none[0].finish), (0, FinishReason::Length));
}
