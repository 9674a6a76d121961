//! Page-sparse decoding: the omitted blocks do not depend on the positions of keys or on other requests.

use std::path::Path;

use kvchunk::{ChunkedPrompt, ReuseCell};
use kvcore::{DType, KeyForm};
use kvengine::{Engine, EngineConfig, Error, Generation, PromptTokens, Request, Scheduling, SparseDecode};
use kvmodel::TextCodec;

use crate::asking::{engine_with, tiny_rag};
use crate::common::{Golden, for_every};
use crate::crowd::{alone, answer_all, assert_nothing_held, assert_same, engine};

/// Returns a request with a long prompt.
fn long(len: u32, seed: u32, sparse: Option<SparseDecode>) -> Request {
    let prompt = (0..len).map(|i| 3 + (seed + i * 7 + i * i % 11) % 40).collect();
    let request = Request {
        max_new_tokens: 9,
        keep_logits: true,
        ignore_end: true,
        ..Request::new(PromptTokens::Plain(prompt))
    };
    Request { sparse, ..request }
}

/// Returns the largest difference between the logits of two answers, up to the first token that differs.
fn apart(a: &Generation, b: &Generation) -> f32 {
    let same = a.tokens.iter().zip(&b.tokens).take_while(|(a, b)| a == b).count();
    let rows = a.logits.iter().zip(&b.logits).take(same + 1);
    rows.flat_map(|(a, b)| a.iter().zip(b).map(|(a, b)| (a - b).abs())).fold(0.0, f32::max)
}

#[test]
fn enough_blocks_change_nothing_and_few_blocks_change_only_later_tokens() {
    let dense = &alone(&long(70, 1, None))[0];
    let whole = &alone(&long(70, 1, Some(SparseDecode { pages: 20, dense_layers: 0 })))[0];
    assert_same(whole, dense, "20 blocks hold all of 79 tokens");
    let few = &alone(&long(70, 1, Some(SparseDecode { pages: 4, dense_layers: 0 })))[0];
    assert_eq!(few.logits[0], dense.logits[0], "the prompt is computed with everything in sight");
    assert!(apart(few, dense) > 1e-3, "4 blocks of 18 are not all");
    let deep = &alone(&long(70, 1, Some(SparseDecode { pages: 4, dense_layers: 99 })))[0];
    assert_same(deep, dense, "no layer is sparse");
}

/// An exact request continues an answer that was decoded with few blocks in sight.
#[test]
fn approximate_answers_are_found_by_nobody_else() {
    let sparse = Some(SparseDecode { pages: 4, dense_layers: 0 });
    let first = Request { max_new_tokens: 24, ..long(70, 1, sparse) };
    let mut engine = engine(128, Scheduling::default());
    let answer = engine.generate(&first, &mut ()).unwrap();
    let mut tokens: Vec<u32> = first.prompt.iter().collect();
    tokens.extend(&answer.tokens);
    let next = |sparse| {
        let request =
            Request { max_new_tokens: 3, keep_logits: true, ignore_end: true, ..long(70, 1, sparse) };
        Request { prompt: std::sync::Arc::new(PromptTokens::Plain(tokens.clone())), ..request }
    };
    for sparse in [None, sparse] {
        let got = engine.generate(&next(sparse), &mut ()).unwrap();
        assert_eq!(
            got.cached_tokens, 68,
            "the whole blocks of the prompt of 70 tokens, and none of the answer"
        );
        let expected = &alone(&next(sparse))[0];
        assert!(apart(&got, expected) < 1e-4, "{}", apart(&got, expected));
        // What was computed exactly is found by its own next request.
        let again = engine.generate(&next(sparse), &mut ()).unwrap();
        assert_eq!(again.cached_tokens, 92);
        engine.cache().as_paged().unwrap().pool().clear_cached();
        engine.generate(&first, &mut ()).unwrap();
    }
    assert_nothing_held(&engine);
}

for_every! {
    /// Bounds are computed from keys at the positions where they are used, so the same blocks are chosen at
    /// every position of the documents and in every form of stored keys.
    fn keys_are_bounded_at_their_place(#[values("llama", "deepseek-v3")] name: &str, cell: moving cell) {
        let golden = Golden::load(name).prompt;
        let chunks = golden.chunks().iter().map(|chunk| chunk.iter().copied().cycle().take(19).collect());
        let prompt =
            ChunkedPrompt::new(golden.system().to_vec(), chunks.collect(), golden.question().to_vec()).unwrap();
        let answer = |keys, sparse| {
            let mut engine = engine_with(name, DType::F32.into(), keys);
            let request = Request { cell, sparse, ..Request::new(PromptTokens::Chunked(prompt.clone())) };
            let request = Request { max_new_tokens: 6, keep_logits: true, ignore_end: true, ..request };
            engine.generate(&request, &mut ()).unwrap()
        };
        let sparse = Some(SparseDecode { pages: 6, dense_layers: 1 });
        let (rotated, unrotated) = (answer(KeyForm::Rotated, sparse), answer(KeyForm::Unrotated, sparse));
        assert!(apart(&rotated, &answer(KeyForm::Rotated, None)) > 1e-4, "something is left out");
        assert_same(&unrotated, &rotated, "keys stored unrotated");
    }
}

#[test]
fn sparse_samples_among_others_that_give_way_answer_as_each_alone() {
    let sparse = Some(SparseDecode { pages: 6, dense_layers: 1 });
    let requests: Vec<Request> = (0..6u32)
        .map(|i| {
            let request = long(30 + 9 * i, i, sparse.filter(|_| i % 3 != 2));
            Request { lookup: if i == 4 { 3 } else { 0 }, samples: if i == 3 { 2 } else { 1 }, ..request }
        })
        .collect();
    let mut engine = engine(64, Scheduling { step_tokens: 16, watermark: 1, ..Scheduling::default() });
    let (last, reads) = answer_all(&mut engine, &requests);
    assert!(last.preemptions > 0, "{last:?}");
    for (i, (read, request)) in reads.iter().zip(&requests).enumerate().filter(|(i, _)| *i != 4) {
        for (got, expected) in read.samples().iter().zip(&alone(request)) {
            assert_same(got, expected, &format!("request {i}"));
        }
    }
    assert!(
        reads[4].ends[0].is_some(),
        "a step with guesses sees everything, so that it is another approximation"
    );
    assert_nothing_held(&engine);
}

#[test]
fn a_setting_without_a_choice_is_refused() {
    let mut engine = engine(64, Scheduling::default());
    let refused = engine.submit(long(9, 0, Some(SparseDecode::new(3)))).unwrap_err();
    assert!(matches!(refused, Error::Pages(_)) && refused.to_string().contains("at least 4"), "{refused}");
    assert_nothing_held(&engine);
}

/// The built-in model finds facts in six documents, although a token sees only a quarter of their blocks.
#[test]
fn facts_are_found_in_a_quarter_of_a_context() {
    let (mut engine, codec) = tiny_rag(&EngineConfig { block_size: 4, ..EngineConfig::default() });
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/documents");
    let documents = ["harbour", "market", "school", "forest", "station", "kitchen"]
        .map(|name| std::fs::read_to_string(folder.join(format!("{name}.txt"))).unwrap());
    let text = documents.join(" ");
    let stated = |fact: &str| {
        let (name, value) = fact.split_once(" is ")?;
        Some((name.trim().to_owned(), value.trim().to_owned())).filter(|(_, value)| value != "same")
    };
    let facts: Vec<_> = text.split('.').filter_map(stated).collect();
    let blocks = codec.encode(&text, false).unwrap().len() / 4;
    let quarter = SparseDecode { pages: blocks / 4, dense_layers: 1 };
    let mut right = [0; 2];
    for (name, value) in &facts {
        for (right, sparse) in right.iter_mut().zip([None, Some(quarter)]) {
            *right += usize::from(asked(&mut engine, &codec, &text, name, sparse) == *value);
        }
    }
    assert!(facts.len() > 30 && right[0] * 10 >= facts.len() * 9, "{right:?} of {}", facts.len());
    assert!(right[1] * 20 >= right[0] * 19, "{right:?} of {}: a twentieth may be lost", facts.len());
}

/// Returns the answer to a question. The question mark is forced as the first token of the answer, so that a
/// decode step looks for the fact.
fn asked(
    engine: &mut Engine,
    codec: &TextCodec,
    text: &str,
    name: &str,
    sparse: Option<SparseDecode>,
) -> String {
    let prompt = codec.encode(&format!("you answer questions {text} {name}"), true).unwrap();
    let mark = codec.encode(" ?", false).unwrap()[0];
    let request =
        Request { max_new_tokens: 2, sparse, keep_logits: true, ..Request::new(PromptTokens::Plain(prompt)) };
    let request = Request { logit_bias: [(mark, 1e6)].into(), ignore_end: true, ..request };
    let answer = engine.generate(&request, &mut ()).unwrap();
    assert_eq!(answer.tokens[0], mark);
    let logits = answer.logits[1].iter().enumerate();
    let best = logits.max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token as u32).unwrap();
    codec.decode(&[best]).unwrap().trim().to_owned()
}
