//! Measurements of approximate reuse: quantised caches, chunks from another system prompt, and chunks
//! that slept in fewer bits. Every measurement is printed as a table row. No format bounds the error of a
//! logit. The tests therefore check that transformers has the same error with the same format, and that
//! approximate results are marked.

use crate::common::{
    Golden, Lab, OWN_ERRORS, Run, Setup, cell_name, distance, for_every, golden_name, reordered,
};
use kvchunk::{ChunkedPrompt, ColdRule, ComputeMode, PositionStrategy, ReuseCell, SleepForm};

/// The formats, finest first: steps of 1/127 of a group's largest number, three and two mantissa bits, and
/// steps of 1/7.
const FORMATS: [&str; 4] = ["int8:4", "fp8-e4m3", "fp8-e5m2", "int4:4"];

/// Returns the second answer to a prompt whose chunks were first used elsewhere, if the cell lets them move.
fn hit(lab: &mut Lab, golden: &Golden, cell: ReuseCell) -> Run {
    let prompt = &golden.prompt;
    let absolute = cell.strategy == PositionStrategy::Absolute;
    drop(lab.run(&if absolute { prompt.clone() } else { reordered(prompt) }, cell, true));
    let hit = lab.run(prompt, cell, true);
    assert!(hit.reports.iter().all(|r| r.hit));
    hit
}

/// Checks that eight-bit integers are at least 16 times as fine as any other format.
fn assert_eight_bits_are_finest(errors: [f32; 4]) {
    assert!(errors.iter().all(|error| *error > 1e-4 && error.is_finite()), "{errors:?}");
    assert!(errors[1..].iter().all(|error| errors[0] < *error), "{errors:?}");
}

for_every! {
    /// Checks that an answer, recomputed or from the cache, is as far from f32 as transformers' answer
    /// with a cache of the same format.
    fn quantised_caches_add_no_error_by_reuse(name: every model) {
        let golden = Golden::load(name);
        let answers = FORMATS.map(|format| {
            ReuseCell::ALL.map(|cell| {
                let mut lab = Lab::new(name, Setup { format: format.parse().unwrap(), ..Setup::default() });
                let computed = lab.run(&golden.prompt, cell, false).logits;
                let hit = hit(&mut lab, &golden, cell);
                assert!(hit.reports.iter().all(|r| r.exact), "its format is in the key");
                assert_eq!(lab.chunks.metrics().approximate_hits, 0);
                let (expected, own) = (golden.logits(golden_name(cell)), golden.own_error(format, cell));
                let gap = distance(&hit.logits, &expected);
                println!("| {name} | {} | {format} | all chunks hit | {gap:.3e} | {own:.3e} |", cell_name(cell));
                for gap in [gap, distance(&computed, &expected)] {
                    assert!(gap <= OWN_ERRORS * own, "{format}, {cell:?}: {gap} against {own}");
                }
                gap
            })
        });
        for cell in 0..ReuseCell::ALL.len() {
            assert_eight_bits_are_finest(answers.map(|of_format| of_format[cell]));
        }
    }
}

/// Returns the prompt under a system prompt with different tokens, `more` of them than before. The question
/// is shorter by the same number, so the regime of the embedding does not change.
fn under_another_system_prompt(prompt: &ChunkedPrompt, more: isize) -> ChunkedPrompt {
    let system = prompt.system().len().checked_add_signed(more).unwrap() as u32;
    let question = prompt.question().len().checked_add_signed(-more).unwrap() as u32;
    let system = (0..system).map(|i| (i * 11 + 3) % 48).collect();
    ChunkedPrompt::new(system, prompt.chunks().to_vec(), (1..=question).collect()).unwrap()
}

for_every! {
    fn chunks_of_another_system_prompt_are_approximate_where_they_saw_it(
        name: every model,
        cell: every cell,
        #[values(-1, 0, 1)] more: isize
    ) {
        let golden = Golden::load(name);
        let (prompt, expected) = (&golden.prompt, golden.logits(golden_name(cell)));
        let saw = cell.mode == ComputeMode::WithSystem;
        let moved = cell.strategy == PositionStrategy::Absolute && more != 0;
        for cross_system_reuse in [false, true] {
            let mut lab = Lab::new(name, Setup { cross_system_reuse, ..Setup::default() });
            drop(lab.run(&under_another_system_prompt(prompt, more), cell, true));
            let run = lab.run(prompt, cell, true);
            // Chunks move forward only.
            let approximate = cross_system_reuse && saw && !moved && more <= 0;
            for report in &run.reports {
                assert_eq!((report.hit, report.exact), (approximate || !saw && !moved, !approximate));
            }
            let counted = lab.chunks.metrics().approximate_hits;
            assert_eq!(counted, if approximate { run.reports.len() as u64 } else { 0 });
            let gap = distance(&run.logits, &expected);
            if approximate {
                println!("| {name} | {} | f32 | another system prompt | {gap:.3e} |", cell_name(cell));
            }
            // At its place in the prompt, the chunk in the question's window is further from the system
            // prompt than the width of Mistral's window.
            let unseen = name == "mistral" && cell.strategy == PositionStrategy::Absolute;
            assert_eq!(gap > 1e-3, approximate && !unseen, "{gap}");
            assert!(if approximate { gap.is_finite() } else { gap < 1e-4 }, "{gap}");
        }
    }

    fn chunks_that_slept_in_fewer_bits_are_approximate(name: every model, cell: every cell) {
        let golden = Golden::load(name);
        let expected = golden.logits(golden_name(cell));
        let woken = |form: SleepForm| {
            let mut lab = Lab::new(name, Setup { sleep: Some(form), ..Setup::default() });
            let awake = hit(&mut lab, &golden, cell).logits;
            assert_eq!(lab.chunks.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap(), golden.prompt.chunks().len());
            let exact = !matches!(form, SleepForm::Quantised(_));
            let mut woken = Vec::new();
            // The answer stays as approximate as it was after the chunk woke.
            for hits in [3, 6] {
                let run = lab.run(&golden.prompt, cell, true);
                assert!(run.reports.iter().all(|r| r.hit && r.exact == exact), "{form:?}");
                let counted = lab.chunks.metrics();
                assert_eq!((counted.slept, counted.woken, counted.sleeping_chunks), (3, 3, 0));
                assert_eq!(counted.approximate_hits, if exact { 0 } else { hits });
                woken.push(run.logits);
            }
            lab.assert_nothing_held();
            assert_eq!(woken[0], woken[1]);
            (awake, woken.remove(0))
        };
        for form in [SleepForm::Plain, SleepForm::Compressed] {
            let (awake, woken) = woken(form);
            assert_eq!(awake, woken, "{form:?}");
        }
        let errors = FORMATS.map(|format| {
            let gap = distance(&woken(SleepForm::Quantised(format.parse().unwrap())).1, &expected);
            println!("| {name} | {} | f32 | slept in {format} | {gap:.3e} |", cell_name(cell));
            gap
        });
        assert_eight_bits_are_finest(errors);
    }
}
