//! Rotated copies: a prompt as one segment without an offset, for kernels that do not read segments.

use crate::common::{Golden, Lab, OWN_ERRORS, Setup, cell_name, distance, for_every, golden_name, reordered};
use kvbackend_cpu::Execution;
use kvchunk::{Error, PositionPlan, PositionReindexer, PositionStrategy, ReuseCell, RotatedCopy};
use kvcore::{DType, KeyForm, SequenceStart};
use rstest::rstest;

/// Copies a prompt whose chunks all hit. Returns the question's logits over the copy, and the copy. The
/// logits are `None` if the model or the form of keys depends on positions and the positions are not
/// consecutive.
fn over_a_copy(name: &str, setup: Setup, cell: ReuseCell) -> (Option<Vec<f32>>, RotatedCopy) {
    let golden = Golden::load(name);
    let prompt = &golden.prompt;
    let mut lab = Lab::new(name, setup);
    drop(lab.run(&reordered(prompt), cell, true));
    drop(lab.run(prompt, cell, true));
    let plan = PositionPlan::new(prompt, cell, lab.model.config().max_positions).unwrap();
    let (ropes, root) = lab.regime(plan.question_position as usize + prompt.question().len());
    let reindexer = PositionReindexer::for_layers(&ropes);
    let assembly = lab.assembler(root, cell, &reindexer).assemble(prompt).unwrap();
    assert!(assembly.inputs().is_empty() && assembly.reports().iter().all(|report| report.hit));
    let mut held = assembly.commit().unwrap();
    let shared: Vec<_> = held.holds().iter().flat_map(|chunk| chunk.block_ids().to_vec()).collect();
    let before = lab.bytes(&shared);
    let copy = held.rotated_copy(setup.keys, lab.main.pool()).unwrap();
    copy.enqueue(lab.backend.as_ref(), lab.stream.as_ref(), lab.main.arena(), &ropes).unwrap();
    let by_position = setup.keys == KeyForm::Unrotated
        || lab.model.config().layers.iter().any(|layer| layer.window.is_some());
    let segment = if by_position {
        match copy.segment_by_position() {
            Ok(segment) => segment,
            Err(error) => {
                // The next chunk begins right after the system prompt, at a position that an earlier
                // chunk already has.
                let (index, position) = (12, prompt.system().len() as i64);
                assert_eq!(error, Error::NotInARow { index, position });
                return (None, copy);
            }
        }
    } else {
        copy.segment()
    };
    assert_eq!((segment.position_offset, segment.logical_start, segment.stored_start), (0, 0, 0));
    assert_eq!(segment.len, prompt.total_tokens() - prompt.question().len());
    let start = SequenceStart { logical: plan.question_logical, position: plan.question_position };
    let (own, question) = lab.after(prompt.question(), start, vec![segment]);
    let logits = lab.forward(&ropes, &[question]).remove(0);
    assert!(before == lab.bytes(&shared), "the originals are read only");
    lab.main.free(own).unwrap();
    drop(held);
    lab.assert_nothing_held();
    (Some(logits), copy)
}

fn has_windows(name: &str) -> bool {
    ["mistral", "qwen2-layers", "gemma3"].contains(&name)
}

for_every! {
    fn one_segment_equals_transformers_in_every_cell(name: every model, cell: every cell) {
        let in_a_row = cell.strategy != PositionStrategy::Overlapped;
        let (logits, _) = over_a_copy(name, Setup::default(), cell);
        assert_eq!(logits.is_some(), in_a_row || !has_windows(name));
        let Some(logits) = logits else { return };
        let gap = distance(&logits, &Golden::load(name).logits(golden_name(cell)));
        println!("| {name} | {}, rotated copy | f32 | all chunks hit | {gap:.3e} |", cell_name(cell));
        assert!(gap < 1e-4, "{gap}");
    }

    /// Checks the error of half-precision copies: a moved key is rounded twice, both here and in the
    /// reference.
    fn half_precision_copies_add_no_error_to_the_references(
        name: every model,
        #[values(DType::F16, DType::BF16)] dtype: DType,
        cell: every cell
    ) {
        let (logits, _) = over_a_copy(name, Setup { format: dtype.into(), ..Setup::default() }, cell);
        let Some(logits) = logits else { return };
        let golden = Golden::load(name);
        let own = golden.own_error(&format!("{dtype}_copied"), cell);
        let gap = distance(&logits, &golden.logits(golden_name(cell)));
        println!("| {name} | {}, rotated copy | {dtype} | all chunks hit | {gap:.3e} | {own:.3e} |", cell_name(cell));
        assert!(gap <= OWN_ERRORS * own, "{gap} against {own}");
    }

    fn unrotated_keys_are_copied_as_they_are(
        #[values("llama-yarn", "mistral", "deepseek-v3")] name: &str,
        cell: every cell,
    ) {
        let setup = Setup { keys: KeyForm::Unrotated, ..Setup::default() };
        let (logits, _) = over_a_copy(name, setup, cell);
        let in_a_row = cell.strategy != PositionStrategy::Overlapped;
        assert_eq!(logits.is_some(), in_a_row, "unrotated keys are rotated by position");
        let Some(logits) = logits else { return };
        let gap = distance(&logits, &Golden::load(name).logits(golden_name(cell)));
        assert!(gap < 1e-4, "{gap}");
    }
}

/// Checks quantised copies. Moved keys are dequantised, rotated and quantised again; keys that do not move
/// read back unchanged.
#[rstest]
fn a_quantised_cache_is_copied_within_three_times_its_own_error(
    #[values("int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str,
    #[values(ReuseCell::OVERLAPPED_WITH_SYSTEM, ReuseCell::OVERLAPPED_ALONE, ReuseCell::SEQUENTIAL_ALONE)]
    cell: ReuseCell,
) {
    let golden = Golden::load("llama");
    let expected = golden.logits(golden_name(cell));
    let setup = Setup { format: format.parse().unwrap(), ..Setup::default() };
    let own = Lab::new("llama", setup).run(&golden.prompt, cell, true).logits;
    let copied = over_a_copy("llama", setup, cell).0.unwrap();
    let (own_gap, gap) = (distance(&own, &expected), distance(&copied, &expected));
    assert!(own_gap > 1e-3 && gap <= 3.0 * own_gap, "{gap} against {own_gap}");
    let offsets = cell != ReuseCell::OVERLAPPED_WITH_SYSTEM;
    assert_eq!(distance(&own, &copied) > 1e-4, offsets, "only what moves is rounded again");
}

#[test]
fn what_lies_as_the_run_needs_it_is_shared() {
    // Blocks have 4 tokens. The system prompt (5 tokens) and the first chunk (7) meet within a block. The
    // other two chunks begin at a block boundary of the run and are already stored for the positions where
    // they are used.
    let (_, copy) = over_a_copy("llama", Setup::default(), ReuseCell::OVERLAPPED_WITH_SYSTEM);
    let total = copy.merged().total_tokens;
    assert_eq!((total, copy.copied_tokens()), (25, 8));
    assert_eq!(copy.merged().block_ids.len(), 7, "the run has no gaps");
    assert_eq!(copy.merged().slot_mapping.slots().len(), total);
}

#[test]
fn deferred_work_gives_the_same_logits() {
    for name in ["llama", "deepseek-v3"] {
        let run = |execution| {
            over_a_copy(name, Setup { execution, ..Setup::default() }, ReuseCell::SEQUENTIAL_ALONE).0
        };
        assert_eq!(run(Execution::Deferred), run(Execution::Immediate));
    }
}
