//! The repository's model answers questions about new documents correctly.

use std::path::PathBuf;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, Recompute, ReuseCell};
use kvengine::{Engine, EngineConfig};
use kvlab::{Arm, EvalOptions, Evaluation, Measure, Question, QuestionKind, Trial, World, evaluate};
use kvmodel::{ModelDirectory, TextCodec, WeightFormat};

use crate::common::tiny_rag;

/// System prompts. Most consist of words that are not single tokens.
const SYSTEMS: [&str; 4] = [
    "you answer questions from short documents .",
    "answer briefly",
    "Answer the question using the documents below.",
    "You are a helpful assistant. Context:",
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag")
}

fn mean(score: &kvlab::Score) -> f64 {
    score.accuracy.unwrap().mean
}

fn ask(
    engine: &mut Engine,
    codec: &TextCodec,
    questions: &[Vec<Question>],
    arms: &[Arm],
    options: &EvalOptions,
) -> Evaluation {
    evaluate(engine, codec, questions, arms, options, Vec::new(), &mut |_, _, _| Ok(())).unwrap()
}

/// Returns local questions in five draws, with varying system prompts.
fn local_questions(per_draw: usize) -> Vec<Vec<Question>> {
    let world = World::from_json(&std::fs::read_to_string(folder().join("world.json")).unwrap()).unwrap();
    let of_draw = |seed| {
        let all = world.questions(seed, per_draw).into_iter();
        let local = all.filter(|question| question.kind == QuestionKind::Local);
        let systems = SYSTEMS.iter().cycle();
        local
            .zip(systems)
            .map(|(question, system)| Question { system: (*system).to_owned(), ..question })
            .collect()
    };
    (100..105).map(of_draw).collect()
}

#[test]
fn reuse_stays_within_a_point_of_full_attention_on_local_questions_in_every_cell() {
    let ModelDirectory { model, codec, .. } =
        ModelDirectory::load(&folder(), WeightFormat::Stored, &mut |_, _| ()).unwrap();
    // The pool has room for all of a question's documents, so every one is found.
    let chunks = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let config = EngineConfig { chunks, ..EngineConfig::default() };
    let mut engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    let questions = local_questions(40);
    let reuse = ReuseCell::ALL.map(|cell| Arm::reuse(cell, Recompute::None));
    let arms: Vec<Arm> = [Arm::full_attention()].into_iter().chain(reuse).collect();
    let options = EvalOptions::default();
    let scores = ask(&mut engine, &codec, &questions, &arms, &options).scores;
    assert_eq!(scores.len(), 7);
    for score in &scores {
        println!("{}: {:.1} % of {}", score.name, 100.0 * mean(score), score.asked);
        assert!(score.asked == 200 && mean(score) >= 0.95, "{}: {:?}", score.name, score.accuracy);
        let lost = mean(&scores[0]) - mean(score);
        assert_eq!(score.paired.unwrap().loss(), lost, "{}", score.name);
        assert!(lost <= 0.01, "{} loses {lost}", score.name);
        // Every answer goes through the real cache: every document is found and none is recomputed.
        let reused = score.arm.cell.is_some();
        let expected = if reused { (1.0, 0.0) } else { (0.0, 1.0) };
        assert_eq!((score.found, score.recomputed), expected, "{}", score.name);
    }
    engine.check_invariants().unwrap();
}

#[test]
fn any_text_encodes_and_long_prompts_fit() {
    let ModelDirectory { model, codec, .. } =
        ModelDirectory::load(&folder(), WeightFormat::Stored, &mut |_, _| ()).unwrap();
    assert!(model.config().max_positions >= 1024);
    for text in ["Zürich, 東京 and 🚆!", "\u{0}\u{7f}", "ALBA   is\nred"] {
        let tokens = codec.encode(text, true).unwrap();
        assert!(tokens.iter().all(|&t| (t as usize) < model.config().vocab_size));
        let normalised = text.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(codec.decode(&tokens).unwrap().trim(), normalised);
    }
}

/// Divergence ranks arms by their distance from full attention.
#[test]
fn divergences_are_zero_where_everything_is_recomputed_and_large_where_answers_are_lost() {
    let ModelDirectory { model, codec, .. } =
        ModelDirectory::load(&folder(), WeightFormat::Stored, &mut |_, _| ()).unwrap();
    let chunks = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let config = EngineConfig { chunks, ..EngineConfig::default() };
    let mut engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    let world = World::from_json(&std::fs::read_to_string(folder().join("world.json")).unwrap()).unwrap();
    let arms: Vec<Arm> =
        ["full attention", "sequential, alone, full", "sequential, alone, link:2", "sequential, alone, none"]
            .map(|name| name.parse().unwrap())
            .into();
    let options = EvalOptions { measure: Measure::Both, ..EvalOptions::default() };
    let questions = [world.questions(5, 6)];
    let evaluation = ask(&mut engine, &codec, &questions, &arms, &options);
    assert_eq!(evaluation.trials.len(), 4 * 18);
    let of = |name: &str, kind: QuestionKind| {
        let score = evaluation.scores.iter().find(|score| score.name == name && score.kind == kind).unwrap();
        (score.divergence.unwrap().mean, score.agreement.unwrap().mean)
    };
    for kind in [QuestionKind::Local, QuestionKind::CrossStart, QuestionKind::CrossMiddle] {
        assert_eq!(of("full attention", kind), (0.0, 1.0));
        let (nats, agreement) = of("sequential, alone, full", kind);
        assert!(nats < 1e-6 && agreement == 1.0, "{kind:?}: {nats}");
    }
    let (kept, _) = of("sequential, alone, link:2", QuestionKind::CrossStart);
    let (lost, agreement) = of("sequential, alone, none", QuestionKind::CrossStart);
    assert!(lost > 20.0 * kept && agreement < 0.9, "{lost} and {kept}, {agreement}");
    // If only divergences are measured, no answers are given.
    let options = EvalOptions { measure: Measure::Divergence, ..EvalOptions::default() };
    let alone = ask(&mut engine, &codec, &questions, &arms, &options);
    assert!(alone.scores.iter().all(|score| score.accuracy.is_none() && score.paired.is_none()));
    for (alone, both) in alone.trials.iter().zip(&evaluation.trials) {
        assert_eq!((alone.divergence, alone.agreement), (both.divergence, both.agreement));
    }
    engine.check_invariants().unwrap();
}

#[test]
fn known_answers_are_not_asked_for_again_and_an_answer_that_cannot_be_kept_ends_the_evaluation() {
    let (mut engine, codec, world) = tiny_rag();
    let arms = ["full attention", "sequential, alone, none"].map(|name| name.parse::<Arm>().unwrap());
    let (questions, options) = ([world.questions(5, 2)], EvalOptions::default());
    let mut evaluate = |known: Vec<Trial>, answered: &mut dyn FnMut(&Trial, usize, usize) -> _| {
        evaluate(&mut engine, &codec, &questions, &arms, &options, known, answered)
    };
    let whole = evaluate(Vec::new(), &mut |_, _, _| Ok(())).unwrap();
    let known = || whole.trials.iter().step_by(3).map(|t| Trial { answer: "known".to_owned(), ..t.clone() });
    let mut fresh = Vec::new();
    let continued = evaluate(known().collect(), &mut |trial, done, total| {
        fresh.push(trial.clone());
        assert_eq!((done, total), (known().count() + fresh.len(), whole.trials.len()));
        Ok(())
    });
    let continued = continued.unwrap().trials;
    assert_eq!(continued.len(), whole.trials.len());
    for (at, (trial, one_go)) in continued.iter().zip(&whole.trials).enumerate() {
        assert_eq!(trial.answer == "known", at % 3 == 0);
        assert_eq!(fresh.contains(trial), at % 3 != 0);
        assert_eq!((trial.right, trial.flops, trial.found), (one_go.right, one_go.flops, one_go.found));
    }
    let mut left = 5;
    let failed = evaluate(Vec::new(), &mut |_, _, _| {
        left -= 1;
        if left == 0 { Err(std::io::Error::other("full")) } else { Ok(()) }
    });
    assert!(failed.is_err_and(|error| error.to_string().contains("full")) && left == 0);
}
