//! The gate closes if an identity fails, and names that identity.

use kvchunk::{Reuse, ReuseCell};
use kvcore::{CopyTensor, MemoryKind, allocate_tensor};
use kvengine::Engine;
use kvlab::{EvalOptions, Gate, GateCheck, GateLimits, Question, Verdict};
use kvmodel::TextCodec;

use crate::common::{tiny_rag, trials};

fn engine() -> (Engine, TextCodec, Vec<Vec<Question>>) {
    let (engine, codec, world) = tiny_rag();
    (engine, codec, vec![world.questions(3, 10)])
}

/// Limits that ten questions are enough to satisfy.
fn fitting() -> GateLimits {
    GateLimits { accuracy: 0.25, ..GateLimits::default() }
}

fn check(engine: &mut Engine, codec: &TextCodec, questions: &[Vec<Question>], limits: GateLimits) -> Gate {
    in_cell(engine, codec, questions, ReuseCell::OVERLAPPED_ALONE, limits)
}

fn in_cell(
    engine: &mut Engine,
    codec: &TextCodec,
    questions: &[Vec<Question>],
    cell: ReuseCell,
    limits: GateLimits,
) -> Gate {
    let (way, options) = (Reuse::plain(cell), EvalOptions::default());
    Gate::check(engine, codec, questions, way, limits, &options, &mut |_, _| ()).unwrap()
}

/// Overwrites every key and value in the chunk pool with zeros.
fn spoil(engine: &Engine) {
    let (arena, blocks) = (engine.cache().arena(), engine.chunks().unwrap().pool().blocks().range());
    let stream = engine.backend().stream().unwrap();
    let shape = arena.layout().shape();
    for layer in 0..shape.num_layers {
        let (k, v) = arena.layer_views(layer, shape.block_size).unwrap();
        for view in [k, v] {
            let dst = view.slice(0, blocks.start as usize, blocks.end as usize).unwrap();
            let src =
                allocate_tensor(engine.backend(), MemoryKind::Device, dst.dtype(), dst.shape()).unwrap();
            stream.copy_tensor(&CopyTensor { src, dst }).unwrap();
        }
    }
    stream.synchronize().unwrap();
}

#[test]
fn a_failing_identity_closes_the_gate_and_is_named() {
    let (mut engine, codec, questions) = engine();
    let gate = check(&mut engine, &codec, &questions, fitting());
    assert!(gate.is_open() && gate.checks.len() == 12, "{gate:?}");
    // The stored contents no longer match their keys.
    spoil(&engine);
    let gate = check(&mut engine, &codec, &questions, fitting());
    assert!(!gate.is_open());
    let failing: Vec<String> = gate.failing().map(GateCheck::words).collect();
    assert!(
        failing[0].starts_with("reuse equals computing from scratch under the same mask (measured "),
        "{failing:?}"
    );
    // The other identities still hold: both sides read the same contents or recompute everything.
    for what in ["recomputing", "linking", "blending"] {
        assert!(!failing.iter().any(|words| words.contains(what)), "{failing:?}");
    }
    // After the chunks are forgotten, they are recomputed correctly.
    engine.chunks().unwrap().clear();
    assert!(check(&mut engine, &codec, &questions, fitting()).is_open());
}

#[test]
fn the_gate_is_open_in_every_cell_of_a_model_that_reuse_fits() {
    let (mut engine, codec, questions) = engine();
    let limits = fitting();
    for cell in ReuseCell::ALL {
        let gate = in_cell(&mut engine, &codec, &questions, cell, limits);
        assert!(gate.is_open(), "{cell:?}: {gate:?}");
    }
}

#[test]
fn every_identity_is_measured_and_none_holds_under_a_limit_that_nothing_can_reach() {
    let (mut engine, codec, questions) = engine();
    let none = GateLimits { logits: -1.0, moved: -1.0, accuracy: -1.1, floor: 0.0 };
    let gate = check(&mut engine, &codec, &questions, none);
    assert_eq!(gate.failing().count(), 12, "{gate:?}");
    assert!(gate.checks.iter().all(|check| check.measured.is_finite()), "{gate:?}");
}

#[test]
fn answers_are_judged_only_where_they_bound_the_loss() {
    let judged = |lost: usize, gained: usize, both: usize, neither: usize| {
        let pairs = std::iter::repeat_n((true, false), lost)
            .chain(std::iter::repeat_n((false, true), gained))
            .chain(std::iter::repeat_n((true, true), both))
            .chain(std::iter::repeat_n((false, false), neither));
        Gate::of_answers(&trials(pairs), &GateLimits::default())
    };
    // Many questions with hardly any loss; a certain loss; a loss that may be chance; no visible loss.
    assert_eq!(judged(2, 2, 300, 96).verdict, Verdict::Holds);
    let lost = judged(60, 10, 230, 100);
    assert_eq!(lost.verdict, Verdict::Fails);
    assert!(lost.what.contains("12.5 points lost"), "{}", lost.what);
    let unclear = judged(6, 4, 200, 90);
    assert_eq!(unclear.verdict, Verdict::CannotSay);
    assert!(unclear.what.contains("more questions are needed to decide"), "{}", unclear.what);
    let worse = judged(9, 0, 200, 91);
    assert_eq!(worse.verdict, Verdict::CannotSay);
    assert!(worse.what.contains("would not decide it"), "{}", worse.what);
    let clean = judged(0, 0, 50, 0);
    assert!(clean.verdict == Verdict::CannotSay && clean.what.contains("about 8"), "{}", clean.what);
    // Full attention itself answers too few questions correctly.
    let blind = judged(0, 0, 40, 360);
    assert_eq!(blind.verdict, Verdict::CannotSay);
    assert!(blind.what.contains("10.0 % of 400") && blind.what.contains("at least 50.0 %"), "{}", blind.what);
    assert_eq!(Gate::of_answers(&[], &GateLimits::default()).verdict, Verdict::CannotSay);
}
