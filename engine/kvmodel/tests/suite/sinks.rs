//! Chunks that see only the first tokens of the system prompt and themselves.

use crate::common::{Golden, Lab, Setup, distance, for_every, golden_name};
use kvchunk::{ChunkedPrompt, ComputeMode, PositionStrategy, ReuseCell};

const MOVING: [PositionStrategy; 2] = [PositionStrategy::Overlapped, PositionStrategy::Sequential];

fn sink(tokens: usize, strategy: PositionStrategy) -> ReuseCell {
    ReuseCell { mode: ComputeMode::Sink(tokens as u32), strategy }
}

/// Returns the prompt under a system prompt that differs starting at token `from`.
fn with_system(prompt: &ChunkedPrompt, from: usize) -> ChunkedPrompt {
    let mut system = prompt.system().to_vec();
    system[from..].iter_mut().for_each(|token| *token = (*token + 5) % 40);
    ChunkedPrompt::new(system, prompt.chunks().to_vec(), prompt.question().to_vec()).unwrap()
}

for_every! {
    fn a_sink_of_the_whole_system_prompt_is_the_mode_with_it(name: every model) {
        let golden = Golden::load(name);
        let whole = golden.prompt.system().len();
        for strategy in [PositionStrategy::Overlapped, PositionStrategy::Sequential, PositionStrategy::Absolute] {
            let cell = ReuseCell { mode: ComputeMode::WithSystem, strategy };
            let expected = golden.logits(golden_name(cell));
            for tokens in [whole, whole + 7] {
                let mut lab = Lab::new(name, Setup::default());
                let computed = lab.run(&golden.prompt, sink(tokens, strategy), true);
                let found = lab.run(&golden.prompt, sink(tokens, strategy), true);
                assert!(found.reports.iter().all(|report| report.hit));
                for logits in [&computed.logits, &found.logits] {
                    let gap = distance(logits, &expected);
                    assert!(gap < 1e-4, "{strategy:?}, {tokens} tokens: {gap}");
                }
            }
        }
    }

    fn chunks_after_a_sink_serve_every_system_prompt_that_begins_with_it(name: every model) {
        let golden = Golden::load(name);
        let (prompt, seen) = (&golden.prompt, golden.prompt.system().len() - 1);
        for strategy in MOVING {
            let cell = sink(seen, strategy);
            let mut lab = Lab::new(name, Setup::default());
            drop(lab.run(prompt, cell, true));
            let other = with_system(prompt, seen);
            let found = lab.run(&other, cell, true);
            assert!(found.reports.iter().all(|report| report.hit && report.exact), "the rest is not seen");
            let computed = lab.run(&other, cell, false);
            assert!(distance(&found.logits, &computed.logits) < 1e-5);
            // The question sees the rest of the system prompt, but only through a short window.
            let before = lab.run(prompt, cell, false).logits;
            assert!(name == "mistral" || distance(&found.logits, &before) > 1e-4);
            // A different first token makes a different sink.
            let missed = lab.run(&with_system(prompt, 0), cell, true);
            assert!(missed.reports.iter().all(|report| !report.hit));
            assert_eq!(lab.chunks.metrics().approximate_hits, 0);
        }
    }

    fn each_number_of_tokens_is_a_mode_of_its_own(name: every model) {
        let golden = Golden::load(name);
        let (prompt, whole) = (&golden.prompt, golden.prompt.system().len());
        let mut lab = Lab::new(name, Setup::default());
        let strategy = PositionStrategy::Sequential;
        let modes = [ComputeMode::Alone, ComputeMode::WithSystem].map(|mode| ReuseCell { mode, strategy });
        let mut answers: Vec<Vec<f32>> = Vec::new();
        for cell in modes.into_iter().chain((1..whole).map(|tokens| sink(tokens, strategy))) {
            let run = lab.run(prompt, cell, true);
            assert!(run.reports.iter().all(|report| !report.hit), "{cell:?} finds nothing of another mode");
            assert!(answers.iter().all(|other| distance(other, &run.logits) > 1e-6), "{cell:?}");
            answers.push(run.logits);
        }
    }
}
