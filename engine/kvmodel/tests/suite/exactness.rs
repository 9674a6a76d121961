//! Logits against Hugging Face transformers: ordinary prompts, and the table "when is reuse exact?" of
//! `docs/exactness.md`, as a matrix of models, cells and element types. Every measurement is printed as a
//! table row.

use crate::common::{Golden, Lab, OWN_ERRORS, Setup, cell_name, distance, for_every, golden_name, reordered};
use kvbackend_cpu::Execution;
use kvchunk::{ChunkedPrompt, ComputeMode, Exactness, PositionStrategy, ReuseCell};
use kvcore::DType;
use rstest::rstest;

for_every! {
    fn logits_equal_transformers(name: every model) {
        let (golden, mut lab) = Lab::golden(name, Setup::default());
        let gap = distance(&lab.plain(&golden.prompt.flatten()), &golden.logits("full"));
        println!("| {name} | full attention | f32 | | {gap:.3e} |");
        assert!(gap < 1e-4, "{gap}");
        lab.assert_nothing_held();
    }
}

/// Returns the logits of a prompt whose chunks all hit, in a laboratory that has already run other
/// prompts.
pub(crate) fn all_hit(lab: &mut Lab, golden: &Golden, cell: ReuseCell) -> Vec<f32> {
    let prompt = &golden.prompt;
    if let ComputeMode::Slots(slots) = cell.mode {
        // A chunk in a slot is the same as a chunk behind the slot's decoys. The golden's slots are in order.
        for (chunk, decoys) in prompt.chunks().iter().zip(slots..) {
            let cell = ReuseCell { mode: ComputeMode::Behind(decoys), ..cell };
            let only = ChunkedPrompt::new(prompt.system().to_vec(), vec![chunk.clone()], vec![1]).unwrap();
            drop(lab.run(&only.with_decoys(prompt.decoys().clone()).unwrap(), cell, true));
        }
    } else {
        let elsewhere = lab.run(&reordered(prompt), cell, true);
        assert!(elsewhere.reused == 0 && elsewhere.reports.iter().all(|r| !r.hit));
    }
    if cell.strategy == PositionStrategy::Absolute {
        let computed = lab.run(prompt, cell, true);
        assert!(computed.reports.iter().all(|r| !r.hit), "another place is another chunk");
    }
    let hit = lab.run(prompt, cell, true);
    assert!(hit.reports.iter().all(|r| r.hit && r.exact));
    assert!(cell.strategy != PositionStrategy::Absolute || hit.reports.iter().all(|r| r.offset == 0));
    assert_eq!(hit.reused, prompt.total_tokens() - prompt.question().len());
    assert_eq!(lab.chunks.metrics().approximate_hits, 0);
    hit.logits
}

for_every! {
    fn every_cell_equals_its_explicit_mask(name: every model, cell: every cell) {
        let (golden, mut lab) = Lab::golden(name, Setup::default());
        let expected = golden.logits(golden_name(cell));

        let uncached = lab.run(&golden.prompt, cell, false);
        assert!(uncached.reused == 0 && uncached.reports.iter().all(|r| !r.hit));
        let cold = Lab::new(name, Setup::default()).run(&golden.prompt, cell, true);
        assert!(cold.reused == 0 && cold.reports.iter().all(|r| !r.hit));
        let hit = all_hit(&mut lab, &golden, cell);
        for (what, logits) in
            [("without reuse", &uncached.logits), ("nothing cached", &cold.logits), ("all chunks hit", &hit)]
        {
            let gap = distance(logits, &expected);
            println!("| {name} | {} | f32 | {what} | {gap:.3e} |", cell_name(cell));
            assert!(gap < 1e-4, "{what}: {gap}");
        }
        drop(uncached);
        lab.assert_nothing_held();
    }

    fn only_the_two_phase_cell_equals_no_single_pass(name: every model) {
        let two_phase = ReuseCell::ALL.into_iter().filter(|cell| cell.exactness() == Exactness::TwoPhase);
        assert_eq!(two_phase.collect::<Vec<_>>(), [ReuseCell::SEQUENTIAL_WITH_SYSTEM]);
        let golden = Golden::load(name);
        let hit = all_hit(&mut Lab::new(name, Setup::default()), &golden, ReuseCell::SEQUENTIAL_WITH_SYSTEM);
        let single = distance(&hit, &golden.logits("sequential_with_system_single"));
        println!("| {name} | {} | f32 | against one pass | {single:.3e} |", cell_name(ReuseCell::SEQUENTIAL_WITH_SYSTEM));
        assert!(single > 1e-2, "{single}");
    }

    /// Checks that the error of reuse relative to f32 matches transformers' error with a cache of the same
    /// element type under the same mask.
    fn half_precision_adds_no_error_by_reuse(
        name: every model,
        #[values(DType::F16, DType::BF16)] dtype: DType,
        cell: every cell
    ) {
        let (golden, mut lab) = Lab::golden(name, Setup { format: dtype.into(), ..Setup::default() });
        let own = golden.own_error(&dtype.to_string(), cell);
        let gap = distance(&all_hit(&mut lab, &golden, cell), &golden.logits(golden_name(cell)));
        println!("| {name} | {} | {dtype} | all chunks hit | {gap:.3e} | {own:.3e} |", cell_name(cell));
        assert!(gap <= OWN_ERRORS * own, "{gap} against {own}");
    }
}

#[rstest]
fn work_that_is_deferred_gives_the_same_logits(#[values("llama", "deepseek-v3")] name: &str) {
    let golden = Golden::load(name);
    let run = |execution| {
        let mut lab = Lab::new(name, Setup { execution, ..Setup::default() });
        all_hit(&mut lab, &golden, ReuseCell::OVERLAPPED_ALONE)
    };
    assert_eq!(run(Execution::Deferred), run(Execution::Immediate));
}
