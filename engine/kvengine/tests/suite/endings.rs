//! Token choice over a whole answer, and observers that end an answer.

use std::ops::ControlFlow;

use kvcore::DType;
use kvengine::{EngineConfig, Error, FinishReason, PromptTokens, Request, Sampling};
use kvmodel::{Observer, TextStream};
use rstest::rstest;

use crate::asking::{engine, tiny_rag};
use crate::common::Golden;
use crate::failure::assert_nothing_held;

fn plain(tokens: Vec<u32>) -> Request {
    Request { max_new_tokens: 12, keep_logits: true, ..Request::new(PromptTokens::Plain(tokens)) }
}

#[rstest]
fn a_penalty_follows_its_definition_over_prompt_and_answer(#[values(false, true)] in_parts: bool) {
    const PENALTY: f32 = 1.5;
    let prompt = Golden::load("llama").prompt;
    let mut seen = prompt.flatten();
    let parts = if in_parts { PromptTokens::Chunked(prompt) } else { PromptTokens::Plain(seen.clone()) };
    let greedy = Request { prompt: parts.into(), ..plain(vec![]) };
    let sampling = Sampling { repetition_penalty: PENALTY, ..Sampling::default() };
    let mut engine = engine("llama", DType::F32.into());
    let without = engine.generate(&greedy, &mut ()).unwrap();
    let answer = engine.generate(&Request { sampling, ..greedy }, &mut ()).unwrap();
    for (&token, logits) in answer.tokens.iter().zip(&answer.logits) {
        let score = |(id, &logit): (usize, &f32)| match (seen.contains(&(id as u32)), logit > 0.0) {
            (false, _) => logit,
            (true, true) => logit / PENALTY,
            (true, false) => logit * PENALTY,
        };
        let scores: Vec<f32> = logits.iter().enumerate().map(score).collect();
        assert!(scores.iter().all(|&other| other <= scores[token as usize]));
        seen.push(token);
    }
    assert_ne!(answer.tokens, without.tokens);
}

#[test]
fn settings_outside_their_range_are_refused_before_anything_is_computed() {
    let mut engine = engine("llama", DType::F32.into());
    let sampling = Sampling { top_p: -1.0, ..Sampling::default() };
    let error = engine.generate(&Request { sampling, ..plain(vec![1, 2]) }, &mut ()).unwrap_err();
    assert!(matches!(error, Error::Sampling { setting: "top_p", .. }), "{error}");
    let block = plain((0..9).collect());
    let asked = engine.generate(&Request { sampling, ..block.clone() }, &mut ());
    assert!(asked.is_err());
    assert_eq!(engine.generate(&block, &mut ()).unwrap().cached_tokens, 0);
}

/// An observer that declares the answer complete after this many tokens.
struct After(usize);

impl Observer for After {
    fn token(&mut self, _token: u32) -> ControlFlow<()> {
        self.0 -= 1;
        ControlFlow::Continue(())
    }

    fn is_complete(&self) -> bool {
        self.0 == 0
    }
}

#[test]
fn an_observer_ends_an_answer_and_the_answer_is_returned() {
    let mut engine = engine("llama", DType::F32.into());
    let request = plain((0..9).collect());
    let whole = engine.generate(&request, &mut ()).unwrap();
    let ended = engine.generate(&request, &mut After(5)).unwrap();
    assert_eq!((&ended.tokens[..], ended.finish), (&whole.tokens[..5], FinishReason::StopString));
    assert_eq!(ended.logits.len(), 5);
    assert_nothing_held(&engine);
    // A stop string in the last token is also detected.
    let last = engine.generate(&request, &mut After(12)).unwrap();
    assert_eq!((last.tokens, last.finish), (whole.tokens, FinishReason::StopString));
}

#[test]
fn a_text_stream_ends_an_answer_before_its_stop_string() {
    let (mut engine, codec) = tiny_rag(&EngineConfig::default());
    let prompt = codec.encode("you answer questions alba is red . bora is", true).unwrap();
    let forced = codec.encode(" red . cedo is blue", false).unwrap();
    let request = Request {
        forced: Some(forced.clone().into()),
        max_new_tokens: forced.len(),
        ..Request::new(PromptTokens::Plain(prompt))
    };
    // The stop string begins inside one word and ends inside another word.
    let mut stream = TextStream::new(&codec, ["do is b".to_owned()]).unwrap();
    let answer = engine.generate(&request, &mut stream).unwrap();
    assert_eq!(answer.finish, FinishReason::StopString);
    assert_eq!(answer.tokens, forced);
    assert_eq!(stream.finish().unwrap(), " red . ce");
}

#[test]
fn a_stop_string_that_never_comes_leaves_the_limit_to_end_the_answer() {
    let (mut engine, codec) = tiny_rag(&EngineConfig::default());
    let prompt = codec.encode("you answer questions alba is red . alba ?", true).unwrap();
    let request =
        Request { max_new_tokens: 7, ignore_end: true, ..Request::new(PromptTokens::Plain(prompt)) };
    let mut stream = TextStream::new(&codec, ["nobody says this".to_owned()]).unwrap();
    let answer = engine.generate(&request, &mut stream).unwrap();
    assert_eq!((answer.tokens.len(), answer.finish), (7, FinishReason::Length));
    assert_eq!(stream.finish().unwrap(), codec.decode(&answer.tokens).unwrap(), "nothing is held back");
    assert_nothing_held(&engine);
}
