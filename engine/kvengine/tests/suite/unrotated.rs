//! Keys that are stored unrotated and rotated when they are read.

use crate::common::{Golden, Lab, OWN_ERRORS, Setup, cell_name, distance, for_every, golden_name, reordered};
use crate::recompute::{assert_everything_is_recomputed, assert_nothing_is_recomputed};
use kvchunk::ReuseCell;
use kvcore::{KeyForm, KeyScope, Logits, SequenceInput, SequenceStart};

fn lab(name: &str, format: &str) -> Lab {
    let format = format.parse().unwrap();
    Lab::new(name, Setup { keys: KeyForm::Unrotated, format, ..Setup::default() })
}

for_every! {
    fn every_cell_equals_transformers(name: every model, cell: every cell) {
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

    /// Checks the errors like the test matrix for rotated keys. The reference rounds keys before it rotates
    /// them.
    fn no_format_adds_an_error_by_reuse(
        name: every model,
        #[values("f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str,
        cell: every cell
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

    /// Checks that recomputed keys are also stored unrotated, and that a checkpoint compares keys in the same
    /// form.
    fn rule_4_recomputing_everything_equals_full_attention(
        name: every model,
        #[values("link:100", "blend:1", "full", "blend:0.999@1:keys")] strategy: &str,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str,
        cell: sequential cell
    ) {
        assert_everything_is_recomputed((name, format, KeyForm::Unrotated), strategy, cell);
    }

    fn rule_4_recomputing_nothing_is_the_cells_own_reference(
        name: every model,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str
    ) {
        assert_nothing_is_recomputed(name, format, KeyForm::Unrotated);
    }
}

/// Checks the first layer, where a key depends only on its token, so that chunks and ordinary prefills store
/// equal keys.
#[test]
fn the_same_token_is_the_same_key_wherever_it_stands() {
    let stored = |keys| {
        let (golden, mut lab) = Lab::golden("llama", Setup { keys, ..Setup::default() });
        let run = lab.run(&golden.prompt, ReuseCell::OVERLAPPED_ALONE, true);
        let as_chunk = lab.bytes(&run.held.holds()[1].block_ids()[..1]);
        // Compute the same prompt as an ordinary prompt. Its tokens 12 to 15 are the second chunk.
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
