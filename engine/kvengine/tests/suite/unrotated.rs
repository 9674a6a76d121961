//! The second form of storage: keys as the model made them, rotated when they are read.

use crate::asking::{ask, engine_with, last, with};
use crate::common::{
    Golden, Lab, OWN_ERRORS, Setup, cell_name, distance, errors_of, for_every_model, full_of, golden_name,
    reordered,
};
use kvchunk::ReuseCell;
use kvcore::{KeyForm, KeyScope, Logits, SequenceInput, SequenceStart};

fn lab(name: &str, format: &str) -> Lab {
    let format = format.parse().unwrap();
    Lab::new(name, Setup { keys: KeyForm::Unrotated, format, ..Setup::default() })
}

for_every_model! {
    fn every_cell_equals_transformers(
        name: &str,
        #[values(
            ReuseCell::OVERLAPPED_WITH_SYSTEM,
            ReuseCell::OVERLAPPED_ALONE,
            ReuseCell::SEQUENTIAL_ALONE,
            ReuseCell::SEQUENTIAL_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_ALONE
        )]
        cell: ReuseCell
    ) {
        let golden = Golden::load(name);
        let expected = golden.logits(golden_name(cell));
        let mut lab = lab(name, "f32");
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
    /// Checks the errors as in the matrix of rotated keys. The reference rounds keys before it rotates them.
    fn no_format_adds_an_error_by_reuse(
        name: &str,
        #[values("f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str,
        #[values(
            ReuseCell::OVERLAPPED_WITH_SYSTEM,
            ReuseCell::OVERLAPPED_ALONE,
            ReuseCell::SEQUENTIAL_ALONE,
            ReuseCell::SEQUENTIAL_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_ALONE
        )]
        cell: ReuseCell
    ) {
        let golden = Golden::load(name);
        let own = golden.own_error(&format!("{format}_unrotated"), cell);
        let mut lab = lab(name, format);
        drop(lab.run(&reordered(&golden.prompt), cell, true));
        drop(lab.run(&golden.prompt, cell, true));
        let hit = lab.run(&golden.prompt, cell, true);
        assert!(hit.reports.iter().all(|report| report.hit && report.exact));
        let gap = distance(&hit.logits, &golden.logits(golden_name(cell)));
        println!("| {name} | {}, unrotated keys | {format} | all chunks hit | {gap:.3e} | {own:.3e} |", cell_name(cell));
        assert!(gap <= OWN_ERRORS * own, "{gap} against {own}");
    }
}

for_every_model! {
    /// Checks that recomputed keys are stored unrotated like the others, and that a checkpoint compares like with
    /// like.
    fn rule_4_recomputing_everything_equals_full_attention(
        name: &str,
        #[values("link:100", "blend:1", "full", "blend:0.999@1:keys")] strategy: &str,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str,
        #[values(
            ReuseCell::SEQUENTIAL_ALONE,
            ReuseCell::SEQUENTIAL_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_ALONE
        )]
        cell: ReuseCell
    ) {
        let golden = Golden::load(name);
        let mut engine = engine_with(name, format.parse().unwrap(), KeyForm::Unrotated);
        let limit = match format {
            "f32" => 1e-4,
            _ => OWN_ERRORS * golden.own_errors(&format!("{format}_unrotated"), &full_of(cell)).pop().unwrap(),
        };
        let (full, vocabulary) = (golden.logits("full"), engine.model().config().vocab_size);
        for round in 0..2 {
            let got = ask(&mut engine, &golden.prompt, with(strategy, cell));
            assert_eq!(got.chunks.iter().all(|chunk| chunk.hit), round == 1);
            let gap = distance(&got.logits[0], last(&full, vocabulary));
            assert!(gap < limit, "{strategy} {cell:?}, round {round}: {gap} against {limit}");
        }
    }
}

for_every_model! {
    fn rule_4_recomputing_nothing_is_the_cells_own_reference(
        name: &str,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str
    ) {
        let golden = Golden::load(name);
        let mut engine = engine_with(name, format.parse().unwrap(), KeyForm::Unrotated);
        let vocabulary = engine.model().config().vocab_size;
        for cell in ReuseCell::ALL {
            let (expected, cache) = (golden.logits(golden_name(cell)), format!("{format}_unrotated"));
            let limit = match format {
                "f32" => 1e-4,
                _ => OWN_ERRORS * golden.own_errors(&cache, errors_of(cell)).pop().unwrap(),
            };
            for strategy in ["link:0", "blend:0", "random:0", "none"] {
                let got = ask(&mut engine, &golden.prompt, with(strategy, cell));
                assert_eq!(got.recomputed_tokens, 0);
                let gap = distance(&got.logits[0], last(&expected, vocabulary));
                assert!(gap < limit, "{strategy} {cell:?}: {gap} against {limit}");
            }
        }
    }
}

/// Checks the first layer, where a key depends on its token alone, so that chunks and ordinary prefills store
/// equal keys.
#[test]
fn the_same_token_is_the_same_key_wherever_it_stands() {
    let stored = |keys| {
        let golden = Golden::load("llama");
        let mut lab = Lab::new("llama", Setup { keys, ..Setup::default() });
        let run = lab.run(&golden.prompt, ReuseCell::OVERLAPPED_ALONE, true);
        let as_chunk = lab.bytes(&run.held.holds()[1].block_ids()[..1]);
        // This is the same prompt as an ordinary one. Its tokens 12 to 15 are the second chunk.
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
