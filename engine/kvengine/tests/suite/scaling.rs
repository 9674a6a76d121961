//! Compares the temperature and scale of the context with transformers, using the formula in
//! (`proof/goldens/models/scaled_attention.py`).

use kvchunk::{ContextScaling, ReuseCell};
use kvengine::{PromptTokens, Request};

use crate::asking::{ask, engine, last};
use crate::common::{Golden, distance, for_every, golden_name};

for_every! {
    fn scaled_documents_equal_the_formula_in_transformers(
        name: every model,
        #[values(
            ReuseCell::OVERLAPPED_WITH_SYSTEM,
            ReuseCell::OVERLAPPED_ALONE
        )]
        cell: ReuseCell
    ) {
        let golden = Golden::load(name);
        let [temperature, scale] = golden.logits("scaling")[..] else { panic!("two numbers") };
        let expected = golden.logits(&format!("scaled.{}", golden_name(cell)));
        let mut engine = engine(name, "f32".parse().unwrap());
        let vocabulary = engine.model().config().vocab_size;
        // In the first round nothing is cached, and in the second round everything is.
        for round in 0..2 {
            let got = ask(&mut engine, &golden.prompt, |request| {
                (request.cell, request.scaling) = (cell, ContextScaling { temperature, scale });
            });
            assert_eq!(got.chunks.iter().all(|chunk| chunk.hit), round == 1);
            let gap = distance(&got.logits[0], last(&expected, vocabulary));
            assert!(gap < 1e-4, "round {round}: {gap}");
        }
        // Each of the two parameters affects the result.
        for other in [(1.0, 1.0), (temperature, 1.0), (1.0, scale)] {
            let got = ask(&mut engine, &golden.prompt, |request| {
                let (temperature, scale) = other;
                (request.cell, request.scaling) = (cell, ContextScaling { temperature, scale });
            });
            let gap = distance(&got.logits[0], last(&expected, vocabulary));
            assert!(gap > 1e-3, "{other:?}: {gap}");
        }
    }
}

#[test]
fn scaling_is_plain_at_one_and_refuses_nonsense() {
    let golden = Golden::load("qwen3");
    let mut engine = engine("qwen3", "f32".parse().unwrap());
    ask(&mut engine, &golden.prompt, |_| ());
    let plain = ask(&mut engine, &golden.prompt, |_| ());
    let one = ContextScaling { temperature: 1.0, scale: 1.0 };
    let same = ask(&mut engine, &golden.prompt, |request| request.scaling = one);
    assert_eq!(distance(&plain.logits[0], &same.logits[0]), 0.0);
    let mut request = Request::new(PromptTokens::Chunked(golden.prompt.clone()));
    request.scaling = ContextScaling { temperature: f32::NAN, scale: 1.0 };
    assert!(engine.generate(&request, &mut ()).is_err());
    engine.check_invariants().unwrap();
}
