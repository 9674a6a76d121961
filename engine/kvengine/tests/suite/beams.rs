//! Beam search compared with transformers, alone and together with other requests.

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::ChunkedPrompt;
use kvengine::{
    BeamSearch, Engine, EngineConfig, Error, FinishReason, Generation, PromptTokens, Request, Sampling,
    Scheduling,
};
use kvmodel::{Model, ModelConfig, WeightFormat};
use serde::Deserialize;

use crate::common::{config, folder, weights};
use crate::crowd::{answer_all, assert_nothing_held, engine, roomy};

/// A beam search that was run by `proof/goldens/models/beams.py`.
#[derive(Deserialize)]
struct Case {
    prompt: Vec<u32>,
    width: usize,
    length_penalty: f32,
    end: u32,
    answers: Vec<Expected>,
}

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    stopped: bool,
    score: f32,
}

fn cases() -> Vec<Case> {
    serde_json::from_str(&std::fs::read_to_string(folder("llama").join("beams.json")).unwrap()).unwrap()
}

fn request(case: &Case) -> Request {
    let beams = BeamSearch { width: case.width, length_penalty: case.length_penalty };
    let request = Request::new(PromptTokens::Plain(case.prompt.clone()));
    Request { beams: Some(beams), samples: case.width, max_new_tokens: 12, ..request }
}

/// Returns the answers of an engine whose model uses `end` as its end token.
fn answers(request: &Request, end: u32) -> Vec<Generation> {
    let config = ModelConfig { eos: vec![end], ..config("llama") };
    let model = Model::new(config, weights("llama"), WeightFormat::Stored).unwrap();
    let mut engine = Engine::new(model, CpuBackend::new(), b"t", &EngineConfig::default()).unwrap();
    let (_, reads) = answer_all(&mut engine, std::slice::from_ref(request));
    assert_nothing_held(&engine);
    let ends = reads[0].samples();
    for (end, streamed) in ends.iter().zip(&reads[0].tokens) {
        assert_eq!(end.tokens, *streamed);
    }
    ends
}

#[test]
fn beams_are_those_of_transformers() {
    let cases = cases();
    assert!(cases.len() > 5 && cases.iter().flat_map(|case| &case.answers).any(|answer| answer.stopped));
    for (i, case) in cases.iter().enumerate() {
        let got = answers(&request(case), case.end);
        assert_eq!(got.len(), case.answers.len(), "case {i}");
        for (rank, (got, expected)) in got.iter().zip(&case.answers).enumerate() {
            let what = format!("case {i}, answer {rank}");
            assert_eq!(
                (&got.tokens, got.finish == FinishReason::Stop),
                (&expected.tokens, expected.stopped),
                "{what}"
            );
            assert!((got.score.unwrap() - expected.score).abs() < 1e-4, "{what}: {:?}", got.score);
        }
    }
}

#[test]
fn beams_among_others_and_in_little_memory_are_the_same() {
    let requests: Vec<Request> = cases()
        .iter()
        .enumerate()
        .map(|(i, case)| {
            let prompt =
                ChunkedPrompt::new(vec![5, 6], vec![vec![7, 8, 9], vec![11, 12]], case.prompt.clone());
            let prompt =
                if i % 3 == 1 { PromptTokens::Chunked(prompt.unwrap()).into() } else { request(case).prompt };
            Request { prompt, ignore_end: true, samples: 1, ..request(case) }
        })
        .collect();
    let expected: Vec<_> =
        requests.iter().map(|request| roomy().generate(request, &mut ()).unwrap()).collect();
    let mut engine = engine(40, Scheduling { step_tokens: 24, ..Scheduling::default() });
    let (last, reads) = answer_all(&mut engine, &requests);
    assert!(last.preemptions > 0, "{last:?}");
    for (i, (read, expected)) in reads.iter().zip(&expected).enumerate() {
        assert!(read.error.is_none(), "request {i}: {:?}", read.error);
        let got = read.ends[0].as_ref().unwrap();
        assert_eq!(got.tokens, expected.tokens, "request {i}");
        assert!((got.score.unwrap() - expected.score.unwrap()).abs() < 1e-4);
    }
    assert_nothing_held(&engine);
}

#[test]
fn a_search_that_cannot_be_is_refused() {
    let good = request(&cases()[0]);
    let beams = |width, length_penalty| Some(BeamSearch { width, length_penalty });
    for wrong in [
        Request { beams: beams(0, 1.0), ..good.clone() },
        Request { beams: beams(4, f32::NAN), ..good.clone() },
        Request { samples: 5, ..good.clone() },
        Request { sampling: Sampling { temperature: 0.5, ..Sampling::default() }, ..good.clone() },
        Request { logit_bias: Arc::new([(4, 1.0)]), ..good.clone() },
        Request { keep_logits: true, ..good.clone() },
        Request { logprobs: Some(1), ..good.clone() },
    ] {
        assert!(matches!(roomy().submit(wrong), Err(Error::Beams(_))));
    }
    let none = Request { max_new_tokens: 0, samples: 1, ..good };
    assert!(roomy().generate(&none, &mut ()).unwrap().tokens.is_empty());
}
