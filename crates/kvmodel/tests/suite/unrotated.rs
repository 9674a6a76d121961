//! The second form of storage: keys as the model made them, rotated when they are read.

use std::sync::Arc;

use crate::common::{
    Golden, Lab, OWN_ERRORS, Setup, cell_name, distance, for_every_model, golden_name, load_model, reordered,
};
use kvbackend_cpu::CpuBackend;
use kvchunk::{Recompute, ReuseCell};
use kvcore::{DType, KeyForm, KeyScope, Logits, SequenceInput, SequenceStart};
use kvmodel::{Engine, EngineConfig, PromptTokens, Request};
use rstest::rstest;

fn lab(name: &str, dtype: DType) -> Lab {
    Lab::new(name, Setup { keys: KeyForm::Unrotated, format: dtype.into(), ..Setup::default() })
}

for_every_model! {
    fn every_cell_equals_transformers(name: &str, #[values(0, 1, 2, 3, 4, 5)] cell: usize) {
        let (golden, cell) = (Golden::load(name), ReuseCell::ALL[cell]);
        let expected = golden.logits(golden_name(cell));
        let mut lab = lab(name, DType::F32);
        drop(lab.run(&reordered(&golden.prompt), cell, true));
        let first = lab.run(&golden.prompt, cell, true);
        let hit = lab.run(&golden.prompt, cell, true);
        assert!(hit.reports.iter().all(|report| report.hit));
        for run in [&first, &hit] {
            let gap = distance(&run.logits, &expected);
            assert!(gap < 1e-4, "{name}, {cell:?}: {gap}");
        }
        drop((first, hit));
        lab.assert_nothing_held();
    }
}

for_every_model! {
    fn half_precision_adds_no_error_by_reuse(
        name: &str,
        #[values(DType::F16, DType::BF16)] dtype: DType,
        #[values(0, 1, 2, 3, 4, 5)] cell: usize
    ) {
        let (golden, cell) = (Golden::load(name), ReuseCell::ALL[cell]);
        let own = golden.own_error(&format!("{dtype}_unrotated"), cell);
        let mut lab = lab(name, dtype);
        drop(lab.run(&reordered(&golden.prompt), cell, true));
        drop(lab.run(&golden.prompt, cell, true));
        let hit = lab.run(&golden.prompt, cell, true);
        assert!(hit.reports.iter().all(|report| report.hit));
        let gap = distance(&hit.logits, &golden.logits(golden_name(cell)));
        println!("| {name} | {}, unrotated keys | {dtype} | all chunks hit | {gap:.3e} | {own:.3e} |", cell_name(cell));
        assert!(gap <= OWN_ERRORS * own, "{gap} against {own}");
    }
}

/// Recomputed keys lie unrotated beside the others, and a checkpoint compares like with like.
#[rstest]
fn rule_4_recomputing_everything_equals_full_attention(
    #[values("llama-yarn", "mistral", "deepseek-v3")] name: &str,
    #[values("link:100", "blend:1", "full", "blend:0.999@1:keys")] strategy: &str,
    #[values(2, 3)] cell: usize,
) {
    let golden = Golden::load(name);
    let config = EngineConfig { keys: KeyForm::Unrotated, block_size: 4, ..EngineConfig::default() };
    let mut engine = Engine::new(load_model(name), CpuBackend::new(), b"t", &config).unwrap();
    let request = Request {
        cell: ReuseCell::ALL[cell],
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        max_new_tokens: 1,
        keep_logits: true,
        ..Request::new(PromptTokens::Chunked(golden.prompt.clone()))
    };
    let full = golden.logits("full");
    for round in 0..2 {
        let got = engine.generate(&request, &mut ()).unwrap();
        assert_eq!(got.chunks.iter().all(|chunk| chunk.hit), round == 1);
        let last = &full[full.len() - got.logits[0].len()..];
        let gap = distance(&got.logits[0], last);
        assert!(gap < 1e-4, "{name} {strategy}, round {round}: {gap}");
    }
}

/// In the first layer a key depends on its token alone: then what a chunk stores is what any prefill stores.
#[test]
fn the_same_token_is_the_same_key_wherever_it_stands() {
    let stored = |keys| {
        let golden = Golden::load("llama");
        let mut lab = Lab::new("llama", Setup { keys, ..Setup::default() });
        let run = lab.run(&golden.prompt, ReuseCell::ALL[1], true);
        let as_chunk = lab.bytes(&run.held.handles()[1].block_ids()[..1]);
        // The same prompt as an ordinary one; tokens 12 to 15 are the second chunk.
        let tokens = golden.prompt.flatten();
        assert_eq!(tokens[12..16], golden.prompt.chunks()[1]);
        let (id, longest) = (lab.main.create(SequenceStart::default()).unwrap(), tokens.len());
        let slots = lab.main.grow(id, longest).unwrap();
        let own = lab.main.segment(id).unwrap();
        let block = own.blocks[3];
        let input = SequenceInput::new(tokens, 0, 0, slots, vec![own]).with_logits(Logits::All);
        lab.forward(&lab.regime(longest).0, &[input]);
        let shape = lab.main.arena().layout().shape().clone();
        let keys_of_a_layer = 4 * shape.k_heads * shape.k_dim * size_of::<f32>();
        (as_chunk[..keys_of_a_layer].to_vec(), lab.bytes(&[block])[..keys_of_a_layer].to_vec())
    };
    let (chunk, prefill) = stored(KeyForm::Unrotated);
    assert_eq!(chunk, prefill);
    let (chunk, prefill) = stored(KeyForm::Rotated);
    assert_ne!(chunk, prefill);
}

#[test]
fn the_two_forms_never_share_a_block() {
    let root = |form| KeyScope::new("m", b"").keys(form).root();
    assert_ne!(root(KeyForm::Rotated), root(KeyForm::Unrotated));
}
