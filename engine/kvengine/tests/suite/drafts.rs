//! Drafts: guessing tokens ahead changes the number of steps, but never the answer.

use std::sync::Arc;

use kvchunk::{ChunkedPrompt, Recompute};
use kvengine::{Generation, PromptTokens, Request, Sampling, Scheduling};
use rstest::rstest;

use crate::crowd::{Read, answer_all, assert_nothing_held, assert_same, engine, roomy, run};

fn plain(tokens: Vec<u32>) -> Request {
    let request = Request::new(PromptTokens::Plain(tokens));
    Request { max_new_tokens: 40, ignore_end: true, keep_logits: true, ..request }
}

/// Answers a request alone. Returns the first sample and the number of steps.
fn answer(request: &Request) -> (Generation, usize) {
    let mut engine = roomy();
    let mut answers = [engine.submit(request.clone()).unwrap()];
    let mut reads = [Read::new(request)];
    let (_, steps) = run(&mut engine, &mut answers, &mut reads);
    assert_nothing_held(&engine);
    (reads[0].ends[0].take().unwrap(), steps)
}

#[rstest]
#[case::greedy(Sampling::default())]
#[case::drawn(Sampling { temperature: 0.7, top_k: 4, seed: 5, ..Sampling::default() })]
#[case::penalised(Sampling { repetition_penalty: 1.1, frequency_penalty: 0.2, ..Sampling::default() })]
fn a_guessed_answer_is_the_answer(#[case] sampling: Sampling) {
    let (mut drafted, mut accepted) = (0, 0);
    for i in 0..8u32 {
        let prompt: Vec<u32> = (0..24).map(|j| 3 + (i + j % 5) % 40).collect();
        let chunks = vec![prompt[..9].to_vec(), prompt[9..18].to_vec()];
        let chunked = ChunkedPrompt::new(vec![7, 9], chunks, prompt[18..].to_vec()).unwrap();
        let chunked = Request { prompt: PromptTokens::Chunked(chunked).into(), ..plain(vec![]) };
        let recompute = Arc::new("link:2".parse::<Recompute>().unwrap());
        for request in [plain(prompt), Request { recompute, ..chunked.clone() }, chunked] {
            let request = Request { sampling, ..request };
            let (expected, slow) = answer(&request);
            for lookup in [1, 4, 100] {
                let (got, fast) = answer(&Request { lookup, ..request.clone() });
                assert_same(&got, &expected, &format!("prompt {i}, {lookup} guesses"));
                if got.tokens == expected.tokens {
                    assert_eq!(fast + got.accepted_tokens, slow, "each right guess saves a step");
                }
                (drafted, accepted) = (drafted + got.drafted_tokens, accepted + got.accepted_tokens);
            }
        }
    }
    assert!(accepted > 0 && accepted < drafted, "{accepted} of {drafted}");
}

/// Guesses stop before the answer's last token, and before the model's last position.
#[test]
fn guesses_end_with_the_answer_and_the_model() {
    let prompt: Vec<u32> = (0..40).map(|j| 3 + j % 4).collect();
    for max_new_tokens in 1..12 {
        let request = Request { max_new_tokens, lookup: 6, ..plain(prompt.clone()) };
        assert_eq!(answer(&request).0.tokens.len(), max_new_tokens);
    }
    let longest = roomy().model().config().max_positions;
    let request = Request { lookup: 6, ..plain((0..longest as u32 - 3).map(|j| 3 + j % 4).collect()) };
    let (got, _) = answer(&request);
    let (expected, _) = answer(&Request { lookup: 0, ..request });
    assert_eq!(got.tokens.len(), 4, "three positions, and a token after the last");
    assert_same(&got, &expected, "at the model's last position");
}

/// If blocks run out, guesses are dropped before requests are preempted.
#[test]
fn guesses_take_no_block_from_others() {
    let requests: Vec<Request> = (0..2u32)
        .map(|i| Request { max_new_tokens: 14, lookup: 8, ..plain((0..22).map(|j| 3 + i + j % 4).collect()) })
        .collect();
    let mut engine = engine(28, Scheduling { watermark: 0, ..Scheduling::default() });
    let (last, reads) = answer_all(&mut engine, &requests);
    assert_eq!(last.preemptions, 0, "{last:?}");
    for (read, request) in reads.iter().zip(&requests) {
        let (expected, _) = answer(&Request { lookup: 0, ..request.clone() });
        assert_same(read.ends[0].as_ref().unwrap(), &expected, "in little memory");
    }
    assert_nothing_held(&engine);
}
