//! Logits against Hugging Face transformers: ordinary prompts, and every cell of the table "when is
//! reuse exact?" of `docs/exactness.md`.

use crate::common::{Golden, Lab, Setup, distance, golden_name, reordered};
use kvbackend_cpu::Execution;
use kvchunk::{Exactness, PositionStrategy, ReuseCell};
use kvcore::DType;
use rstest::rstest;

#[rstest]
fn logits_equal_transformers(
    #[values(
        "llama",
        "llama3",
        "llama-yarn",
        "llama-linear",
        "llama-ntk",
        "llama-dynamic",
        "llama-longrope",
        "llama-partial",
        "mistral",
        "qwen2",
        "qwen2-layers",
        "qwen3",
        "deepseek-v3",
        "deepseek-v3-plain"
    )]
    name: &str,
) {
    let golden = Golden::load(name);
    let mut lab = Lab::new(name, Setup::default());
    let gap = distance(&lab.plain(&golden.prompt.flatten()), &golden.logits("full"));
    println!("{name}: largest difference {gap:.1e}");
    assert!(gap < 1e-4, "{gap}");
    lab.assert_nothing_held();
}

#[rstest]
fn reuse_equals_the_explicit_mask_in_every_exact_cell(
    #[values(
        "llama",
        "llama3",
        "llama-yarn",
        "llama-linear",
        "llama-ntk",
        "llama-dynamic",
        "llama-longrope",
        "llama-partial",
        "mistral",
        "qwen2",
        "qwen2-layers",
        "qwen3",
        "deepseek-v3",
        "deepseek-v3-plain"
    )]
    name: &str,
    #[values(0, 1, 2)] cell: usize,
) {
    let cell = ReuseCell::ALL[cell];
    assert_eq!(cell.exactness(), Exactness::Exact);
    let golden = Golden::load(name);
    let expected = golden.logits(golden_name(cell));
    let mut lab = Lab::new(name, Setup::default());

    let uncached = lab.run(&golden.prompt, cell, false);
    assert!(uncached.reused == 0 && uncached.reports.iter().all(|r| !r.hit));
    let cold = Lab::new(name, Setup::default()).run(&golden.prompt, cell, true);
    assert!(cold.reused == 0 && cold.reports.iter().all(|r| !r.hit));
    let warm = lab.run(&reordered(&golden.prompt), cell, true);
    assert!(warm.reports.iter().all(|r| !r.hit));
    let hit = lab.run(&golden.prompt, cell, true);
    assert!(hit.reports.iter().all(|r| r.hit));
    assert_eq!(hit.reused, golden.prompt.total_tokens() - golden.prompt.question().len());
    for (what, run) in [("without reuse", &uncached), ("nothing cached", &cold), ("all chunks hit", &hit)] {
        let gap = distance(&run.logits, &expected);
        println!("{name}, {cell:?}, {what}: {gap:.1e}");
        assert!(gap < 1e-4, "{what}: {gap}");
    }
    drop((uncached, warm, hit));
    lab.assert_nothing_held();
}

/// Under the absolute strategy only the same place is a hit, and both modes are exact.
#[rstest]
fn absolute_positions_equal_the_explicit_mask(
    #[values("llama", "llama-yarn", "llama-dynamic", "mistral", "qwen3", "deepseek-v3")] name: &str,
    #[values(4, 5)] cell: usize,
) {
    let cell = ReuseCell::ALL[cell];
    assert_eq!((cell.exactness(), cell.strategy), (Exactness::Exact, PositionStrategy::Absolute));
    let golden = Golden::load(name);
    let expected = golden.logits(golden_name(cell));
    let mut lab = Lab::new(name, Setup::default());
    let elsewhere = lab.run(&reordered(&golden.prompt), cell, true);
    let cold = lab.run(&golden.prompt, cell, true);
    assert!(cold.reports.iter().all(|r| !r.hit && r.offset == 0), "another place is another chunk");
    let hit = lab.run(&golden.prompt, cell, true);
    assert!(hit.reports.iter().all(|r| r.hit && r.offset == 0));
    for (what, run) in [("nothing cached", &cold), ("all chunks hit", &hit)] {
        let gap = distance(&run.logits, &expected);
        println!("{name}, {cell:?}, {what}: {gap:.1e}");
        assert!(gap < 1e-4, "{what}: {gap}");
    }
    drop((elsewhere, cold, hit));
    lab.assert_nothing_held();
}

#[rstest]
fn sequential_with_system_equals_two_phases_and_no_single_pass(
    #[values(
        "llama",
        "llama3",
        "llama-yarn",
        "llama-linear",
        "llama-ntk",
        "llama-dynamic",
        "llama-longrope",
        "llama-partial",
        "mistral",
        "qwen2",
        "qwen2-layers",
        "qwen3",
        "deepseek-v3",
        "deepseek-v3-plain"
    )]
    name: &str,
) {
    let cell = ReuseCell::ALL[3];
    assert_eq!(cell.exactness(), Exactness::TwoPhase);
    let golden = Golden::load(name);
    let mut lab = Lab::new(name, Setup::default());
    drop(lab.run(&reordered(&golden.prompt), cell, true));
    let hit = lab.run(&golden.prompt, cell, true);
    assert!(hit.reports.iter().all(|r| r.hit));
    let two_phase = distance(&hit.logits, &golden.logits("sequential_with_system_two_phase"));
    let single = distance(&hit.logits, &golden.logits("sequential_with_system_single"));
    println!("{name}: two phases {two_phase:.1e}, one pass {single:.1e}");
    assert!(two_phase < 1e-4, "{two_phase}");
    assert!(single > 1e-2, "{single}");
}

/// The error of reuse against f32 is at most twice that of transformers with a cache of the same element type
/// under the same mask.
#[rstest]
fn half_precision_adds_no_error_by_reuse(
    #[values(
        "llama",
        "llama3",
        "llama-yarn",
        "llama-linear",
        "llama-ntk",
        "llama-dynamic",
        "llama-longrope",
        "llama-partial",
        "mistral",
        "qwen2",
        "qwen2-layers",
        "qwen3",
        "deepseek-v3",
        "deepseek-v3-plain"
    )]
    name: &str,
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(0, 1, 2)] cell: usize,
) {
    let cell = ReuseCell::ALL[cell];
    let golden = Golden::load(name);
    let mut lab = Lab::new(name, Setup { dtype, ..Setup::default() });
    let own = golden.logits(&format!("error_{dtype}.{}", golden_name(cell)))[0];
    drop(lab.run(&reordered(&golden.prompt), cell, true));
    let reuse = distance(&lab.run(&golden.prompt, cell, true).logits, &golden.logits(golden_name(cell)));
    println!("{name}, {dtype}, {cell:?}: reuse {reuse:.1e}, transformers {own:.1e}");
    assert!(own > 1e-6 && reuse <= 2.0 * own, "{reuse} against {own}");
}

#[rstest]
fn work_that_is_deferred_gives_the_same_logits(#[values("llama", "deepseek-v3")] name: &str) {
    let golden = Golden::load(name);
    let run = |execution| {
        let mut lab = Lab::new(name, Setup { execution, ..Setup::default() });
        drop(lab.run(&reordered(&golden.prompt), ReuseCell::ALL[1], true));
        lab.run(&golden.prompt, ReuseCell::ALL[1], true).logits
    };
    assert_eq!(run(Execution::Deferred), run(Execution::Immediate));
}
