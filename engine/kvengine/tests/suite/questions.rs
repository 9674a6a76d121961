//! Recomputation of the tokens that the question attends to most.

use std::sync::Arc;

use kvchunk::{ChunkSpan, Evidence, Findings, RecomputeStrategy, ReuseCell, TokenSelection};
use kvcore::KeyForm;
use rstest::rstest;

use crate::asking::{ask, by, engine_with, spoil, with};
use crate::blending::Spy;
use crate::common::{Golden, distance, for_every};

/// Returns the scores of a question whose chunks are all hits, after they were changed.
fn scores(
    name: &str,
    cell: ReuseCell,
    keys: KeyForm,
    strategy: &str,
    change: impl FnOnce(&kvengine::Engine),
) -> Vec<Vec<f32>> {
    let golden = Golden::load(name);
    let mut engine = engine_with(name, "f32".parse().unwrap(), keys);
    ask(&mut engine, &golden.prompt, with("none", cell));
    change(&engine);
    let spy = Spy::on(strategy);
    let got = ask(&mut engine, &golden.prompt, by(&spy, cell));
    assert!(got.chunks.iter().all(|chunk| chunk.hit));
    let found = spy.found().attention.unwrap().chunks().to_vec();
    assert!(found.iter().flatten().all(|score| score.is_finite() && *score >= 0.0));
    let lengths: Vec<usize> = golden.prompt.chunks().iter().map(Vec::len).collect();
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), lengths, "a score a token");
    found
}

for_every! {
    fn tokens_that_the_question_chooses_are_recomputed_as_those_chosen_by_hand(
        #[values("llama", "qwen3", "mistral", "deepseek-v3")] name: &str,
        cell: moving cell,
    ) {
        let golden = Golden::load(name);
        let mut engine = engine_with(name, "f32".parse().unwrap(), KeyForm::Rotated);
        let mut run = |strategy: &Arc<Spy>| ask(&mut engine, &golden.prompt, by(strategy, cell));
        let choosing = Spy::on("question:0.4@0");
        let asked = run(&choosing);
        let expected = run(&Spy::told(choosing.chosen()));
        assert!(asked.recomputed_tokens > 0 && asked.recomputed_tokens == expected.recomputed_tokens);
        let gap = distance(&asked.logits[0], &expected.logits[0]);
        assert!(gap < 1e-4, "{name} {cell:?}: {gap}: the first pass of the question leaves no trace");
        assert!(asked.prefill_flops > expected.prefill_flops, "it is counted");
    }

    fn keys_are_seen_at_their_place_however_they_are_stored(
        #[values("llama", "llama-yarn", "llama-partial", "qwen3", "mistral", "deepseek-v3")] name: &str,
        cell: moving cell,
    ) {
        let [rotated, unrotated] =
            [KeyForm::Rotated, KeyForm::Unrotated].map(|keys| scores(name, cell, keys, "question:0.4@0", |_| ()));
        let all = [rotated, unrotated].map(|scores| scores.concat());
        let gap = distance(&all[0], &all[1]);
        assert!(gap < 1e-4, "{name} {cell:?}: {gap}");
        assert!(all[0].iter().any(|score| (score - all[0][0]).abs() > 1e-3), "the question prefers some");
    }
}

#[rstest]
fn equal_keys_are_attended_to_equally(#[values("llama", "qwen3", "deepseek-v3")] name: &str) {
    // If all keys are zero, every token gets the same attention from the question.
    let last = engine_with(name, "f32".parse().unwrap(), KeyForm::Rotated).model().config().num_layers() - 1;
    let strategy = format!("question:0.4@{last}");
    let spoilt = |engine: &kvengine::Engine| spoil(engine, last..last + 1, [true, true]);
    let equal = scores(name, ReuseCell::SEQUENTIAL_ALONE, KeyForm::Rotated, &strategy, spoilt).concat();
    assert!(equal[0] > 0.0 && equal.iter().all(|score| (score - equal[0]).abs() < 1e-4), "{equal:?}");
    let usual = scores(name, ReuseCell::SEQUENTIAL_ALONE, KeyForm::Rotated, &strategy, |_| ()).concat();
    assert!(usual.iter().any(|score| (score - usual[0]).abs() > 1e-3));
    // One layer's attention adds up to one for each head and row of the question.
    let golden = Golden::load(name);
    let heads = engine_with(name, "f32".parse().unwrap(), KeyForm::Rotated).model().config().heads;
    let most = (heads * golden.prompt.question().len()) as f32;
    for all in [&equal, &usual] {
        assert!(all.iter().sum::<f32>() < most, "system prompt and question have their part");
    }
}

/// A strategy that requests a blend's deviations and chooses the given tokens.
#[derive(Debug)]
struct Told(Evidence, Vec<Vec<u32>>);

impl RecomputeStrategy for Told {
    fn name(&self) -> String {
        "told".to_owned()
    }
    fn evidence(&self) -> Evidence {
        self.0
    }
    fn select(&self, _: &[ChunkSpan], found: &Findings) -> TokenSelection {
        assert!(found.attention.is_none() && found.deviations.is_some());
        TokenSelection::new(self.1.clone())
    }
}

#[rstest]
fn a_joint_choice_knows_what_the_question_and_a_blend_know(
    #[values("llama-deep", "qwen3", "deepseek-v3")] name: &str,
    #[values(ReuseCell::OVERLAPPED_ALONE, ReuseCell::SEQUENTIAL_ALONE)] cell: ReuseCell,
) {
    let golden = Golden::load(name);
    let mut engine = engine_with(name, "f32".parse().unwrap(), KeyForm::Rotated);
    ask(&mut engine, &golden.prompt, with("none", cell));
    let mut run = |strategy: &Arc<Spy>| ask(&mut engine, &golden.prompt, by(strategy, cell));
    let [question, blend, joint] = ["question:0.4", "blend:0.4@1", "joint:0.4@1"].map(Spy::on);
    let [by_question, by_blend, by_both] = [&question, &blend, &joint].map(&mut run);
    let (found, told) = (joint.found(), [question.found().attention, blend.found().deviations]);
    for (both, alone) in [found.attention, found.deviations].into_iter().zip(told) {
        let [both, alone] = [both, alone].map(|scores| scores.unwrap().chunks().concat());
        assert!(distance(&both, &alone) < 1e-4, "{name} {cell:?}");
    }
    assert_eq!(by_both.recomputed_tokens, by_question.recomputed_tokens);
    // The question's first pass does not affect the results of its second pass.
    let evidence = RecomputeStrategy::evidence(&"blend:0.4@1".parse::<kvchunk::Recompute>().unwrap());
    let told = Arc::new(Told(evidence, joint.chosen()));
    let expected = ask(&mut engine, &golden.prompt, by(&told, cell));
    let gap = distance(&by_both.logits[0], &expected.logits[0]);
    assert!(gap < 1e-4, "{name} {cell:?}: {gap}");
    assert!(by_both.prefill_flops > by_blend.prefill_flops, "the question is counted twice");
}
