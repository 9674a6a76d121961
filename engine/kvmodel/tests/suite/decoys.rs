//! Chunks that are computed behind decoys or in slots: logits against transformers, purity, keys, and the cost
//! of a chunk. The question never sees the decoys.

use std::sync::Arc;

use kvchunk::{ChunkedPrompt, ComputeMode, Error, PositionPlan, PositionStrategy, ReuseCell};
use kvcore::KeyForm;
use rstest::rstest;

use crate::common::{Golden, Lab, OWN_ERRORS, Setup, cell_name, distance, golden_name};
use crate::exactness::all_hit;

/// The number of decoys before every chunk of the goldens, and the number of slots.
const DECOYS: u32 = 3;

fn behind(decoys: u32, strategy: PositionStrategy) -> ReuseCell {
    ReuseCell { mode: ComputeMode::Behind(decoys), strategy }
}

/// Returns the prompt with other decoys.
fn with_decoys(prompt: &ChunkedPrompt, decoys: &[Vec<u32>]) -> ChunkedPrompt {
    prompt.clone().with_decoys(decoys.into()).unwrap()
}

#[rstest]
fn every_position_strategy_equals_its_explicit_mask(
    #[values("llama", "mistral", "qwen2", "qwen3", "gemma3", "deepseek-v3")] name: &str,
    #[values(PositionStrategy::Overlapped, PositionStrategy::Sequential, PositionStrategy::Absolute)]
    strategy: PositionStrategy,
    #[values(ComputeMode::Behind(DECOYS), ComputeMode::Slots(DECOYS))] mode: ComputeMode,
) {
    let (golden, cell) = (Golden::behind_decoys(name), ReuseCell { mode, strategy });
    let mut lab = Lab::new(name, Setup::default());
    let uncached = lab.run(&golden.prompt, cell, false).logits;
    let cold = Lab::new(name, Setup::default()).run(&golden.prompt, cell, true).logits;
    let hit = all_hit(&mut lab, &golden, cell);
    for (what, logits) in [("without reuse", uncached), ("nothing cached", cold), ("all chunks hit", hit)] {
        let gap = distance(&logits, &golden.logits(golden_name(cell)));
        println!("| {name} | {} | f32 | {what} | {gap:.3e} |", cell_name(cell));
        assert!(gap < 1e-4, "{what}: {gap}");
    }
    lab.assert_nothing_held();
}

#[rstest]
fn every_format_adds_no_error_by_reuse(
    #[values("llama", "mistral", "qwen2", "qwen3", "gemma3", "deepseek-v3")] name: &str,
    #[values("f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str,
    #[values(KeyForm::Rotated, KeyForm::Unrotated)] keys: KeyForm,
    #[values(PositionStrategy::Overlapped, PositionStrategy::Sequential, PositionStrategy::Absolute)]
    strategy: PositionStrategy,
    #[values(ComputeMode::Behind(DECOYS), ComputeMode::Slots(DECOYS))] mode: ComputeMode,
) {
    let (golden, cell) = (Golden::behind_decoys(name), ReuseCell { mode, strategy });
    let mut lab = Lab::new(name, Setup { format: format.parse().unwrap(), keys, ..Setup::default() });
    let cache = if keys == KeyForm::Unrotated { format!("{format}_unrotated") } else { format.to_owned() };
    let own = golden.own_errors(&cache, golden_name(cell)).into_iter().fold(0.0, f32::max);
    let gap = distance(&all_hit(&mut lab, &golden, cell), &golden.logits(golden_name(cell)));
    println!("| {name} | {} | {cache} | all chunks hit | {gap:.3e} | {own:.3e} |", cell_name(cell));
    assert!(gap <= OWN_ERRORS * own, "{gap} against {own}");
}

#[test]
fn a_chunk_is_found_behind_the_same_decoys_only() {
    let golden = Golden::behind_decoys("llama");
    let (prompt, cell) = (&golden.prompt, behind(2, PositionStrategy::Sequential));
    let mut lab = Lab::new("llama", Setup::default());
    let first = lab.run(prompt, cell, true);
    let decoys = prompt.decoys();
    let hits = |lab: &mut Lab, decoys: &[Vec<u32>], cell| {
        let run = lab.run(&with_decoys(prompt, decoys), cell, true);
        let hits: Vec<bool> = run.reports.iter().map(|report| report.hit).collect();
        (hits, run.logits)
    };
    // The third decoy is not seen.
    let (found, logits) = hits(&mut lab, &decoys[..2], cell);
    assert!(found == [true; 3] && distance(&logits, &first.logits) < 1e-5);
    let others = [
        (vec![decoys[1].clone(), decoys[0].clone()], cell),
        (vec![decoys[0].clone(), decoys[2].clone()], cell),
        (vec![decoys[0].clone()], behind(1, PositionStrategy::Sequential)),
        (Vec::new(), ReuseCell { mode: ComputeMode::WithSystem, ..cell }),
    ];
    for (decoys, cell) in others {
        let (found, logits) = hits(&mut lab, &decoys, cell);
        assert_eq!(found, [false; 3], "{decoys:?}");
        assert!(distance(&logits, &first.logits) > 1e-3, "{decoys:?}");
    }
    assert_eq!(lab.chunks.metrics().approximate_hits, 0);
}

#[test]
fn a_chunk_keeps_the_slot_in_which_it_is_stored() {
    let golden = Golden::behind_decoys("llama");
    let cell = ReuseCell { mode: ComputeMode::Slots(DECOYS), strategy: PositionStrategy::Sequential };
    let mut lab = Lab::new("llama", Setup::default());
    let run = |lab: &mut Lab, chunks: &[&Vec<u32>], cell| {
        let chunks = chunks.iter().map(|&chunk| chunk.clone()).collect();
        let (system, question) = (golden.prompt.system().to_vec(), golden.prompt.question().to_vec());
        let prompt = ChunkedPrompt::new(system, chunks, question).unwrap();
        let run = lab.run(&with_decoys(&prompt, golden.prompt.decoys()), cell, true);
        run.reports.iter().map(|report| report.hit).collect::<Vec<_>>()
    };
    let [first, second, third] = golden.prompt.chunks() else { panic!("three chunks") };
    assert_eq!(run(&mut lab, &[first, second], cell), [false, false]);
    // The slots 0 and 1 belong to the first two chunks, wherever these are in the prompt.
    assert_eq!(run(&mut lab, &[third, second, first], cell), [false, true, true]);
    assert_eq!(run(&mut lab, &[second, first, third], cell), [true; 3]);
    // The second chunk is in slot 1, after four decoys.
    assert_eq!(run(&mut lab, &[second], behind(4, cell.strategy)), [true]);
    assert_eq!(run(&mut lab, &[second], behind(3, cell.strategy)), [false]);
    // Now that it is stored in slot 0 too, it makes room for a chunk that is stored only in slot 1.
    let fourth = &vec![9; 8];
    assert_eq!(run(&mut lab, &[fourth], behind(4, cell.strategy)), [false]);
    assert_eq!(run(&mut lab, &[second, fourth], cell), [true; 2]);
    lab.assert_nothing_held();
}

#[test]
fn the_bytes_do_not_depend_on_when_the_decoys_were_computed() {
    let golden = Golden::behind_decoys("llama");
    let cell = behind(DECOYS, PositionStrategy::Overlapped);
    let only = |chunk: usize| {
        let (system, question) = (golden.prompt.system().to_vec(), golden.prompt.question().to_vec());
        let prompt =
            ChunkedPrompt::new(system, vec![golden.prompt.chunks()[chunk].clone()], question).unwrap();
        with_decoys(&prompt, golden.prompt.decoys())
    };
    let bytes = |lab: &mut Lab| {
        let run = lab.run(&only(1), cell, true);
        assert!(!run.reports[0].hit);
        let piece = &run.held.holds()[0];
        (piece.chunk_hash(), lab.bytes(piece.block_ids()))
    };
    let together = bytes(&mut Lab::new("llama", Setup::default()));
    let mut lab = Lab::new("llama", Setup::default());
    drop(lab.run(&only(0), cell, true));
    let later = bytes(&mut lab);
    assert_eq!(together.0, later.0);
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let gap = distance(&floats(&together.1), &floats(&later.1));
    assert!(gap < 1e-5, "{gap}");
}

#[test]
fn decoys_are_computed_once_and_a_chunk_costs_its_own_tokens() {
    let golden = Golden::behind_decoys("llama");
    let cell = behind(DECOYS, PositionStrategy::Sequential);
    let mut lab = Lab::new("llama", Setup::default());
    let computed = |lab: &mut Lab, prompt: &ChunkedPrompt| -> usize {
        let plan = PositionPlan::new(prompt, cell, lab.model.config().max_positions).unwrap();
        let (ropes, root) = lab.regime(plan.question_position as usize + prompt.question().len());
        let reindexer = kvchunk::PositionReindexer::for_layers(&ropes);
        let assembly = lab.assembler(root, cell, &reindexer).assemble(prompt).unwrap();
        let tokens = assembly.inputs().iter().map(|input| input.tokens.len()).sum();
        drop(lab.forward(&ropes, assembly.inputs()));
        drop(assembly.commit().unwrap());
        tokens
    };
    let prompt = &golden.prompt;
    let decoys = prompt.decoys_in(cell.mode).unwrap().iter().map(Vec::len).sum::<usize>();
    let system = prompt.system().len();
    let documents: usize = prompt.chunks().iter().map(Vec::len).sum();
    // The system prompt is computed for the question, and again as the start of the decoys' prefix.
    assert_eq!(computed(&mut lab, prompt), system + (system + decoys) + documents);
    assert_eq!(computed(&mut lab, prompt), 0);
    let chunks = vec![prompt.chunks()[1].clone(), vec![9; 8]];
    let more = ChunkedPrompt::new(prompt.system().to_vec(), chunks, prompt.question().to_vec()).unwrap();
    assert_eq!(computed(&mut lab, &with_decoys(&more, prompt.decoys())), 8);
    lab.assert_nothing_held();
}

#[test]
fn decoys_that_are_missing_empty_or_too_long_are_errors() {
    let golden = Golden::behind_decoys("llama");
    for mode in [ComputeMode::Behind(6), ComputeMode::Slots(4)] {
        let cell = ReuseCell { mode, strategy: PositionStrategy::Overlapped };
        let few = PositionPlan::new(&golden.prompt, cell, 256).unwrap_err();
        assert_eq!(few, Error::FewDecoys { mode, given: 5 });
    }
    let cell = ReuseCell { mode: ComputeMode::Slots(2), strategy: PositionStrategy::Sequential };
    let few = PositionPlan::new(&golden.prompt, cell, 256).unwrap_err();
    assert_eq!(few, Error::FewSlots { slots: 2, chunks: 3 });
    let empty = golden.prompt.clone().with_decoys(Arc::new([vec![1], Vec::new()])).unwrap_err();
    assert_eq!(empty, Error::EmptyPart { part: "decoy 2".to_owned() });
    let long = with_decoys(&golden.prompt, &[vec![1; 300]]);
    let plan = PositionPlan::new(&long, behind(1, PositionStrategy::Overlapped), 256);
    assert!(matches!(plan, Err(Error::TooLong { .. })), "{plan:?}");
}
