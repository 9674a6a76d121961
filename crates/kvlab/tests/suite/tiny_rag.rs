//! The model in the repository gives right answers to questions about documents that it never saw.

use std::path::PathBuf;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, Recompute, ReuseCell};
use kvlab::{Arm, Question, QuestionKind, World, evaluate};
use kvmodel::{Engine, EngineConfig, ModelDirectory, WeightFormat};

/// System prompts. Most consist of words that are no single tokens.
const SYSTEMS: [&str; 4] = [
    "you answer questions from short documents .",
    "answer briefly",
    "Answer the question using the documents below.",
    "You are a helpful assistant. Context:",
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag")
}

/// Returns local questions in five draws, under changing system prompts.
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
    let ModelDirectory { model, codec } =
        ModelDirectory::load(&folder(), WeightFormat::F32, &mut |_, _| ()).unwrap();
    // The pool has room for all documents of a question, so that every one is found.
    let chunks = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let config = EngineConfig { chunks, ..EngineConfig::default() };
    let mut engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    let questions = local_questions(40);
    let reuse = ReuseCell::ALL.map(|cell| Arm::reuse(cell, Recompute::None));
    let arms: Vec<Arm> = [Arm::full_attention()].into_iter().chain(reuse).collect();
    let scores = evaluate(&mut engine, &codec, &questions, &arms, &mut |_, _| ()).unwrap();
    assert_eq!(scores.len(), 7);
    for score in &scores {
        println!("{}: {:.1} % of {}", score.name, 100.0 * score.accuracy.mean, score.asked);
        assert!(score.asked == 200 && score.accuracy.mean >= 0.95, "{}: {:?}", score.name, score.accuracy);
        let lost = scores[0].accuracy.mean - score.accuracy.mean;
        assert!(lost <= 0.01, "{} loses {lost}", score.name);
        // Every answer goes through the real cache: every document is found, and none is recomputed.
        let reused = score.arm.cell.is_some();
        let expected = if reused { (1.0, 0.0) } else { (0.0, 1.0) };
        assert_eq!((score.found, score.recomputed), expected, "{}", score.name);
    }
    engine.check_invariants().unwrap();
}

#[test]
fn any_text_encodes_and_long_prompts_fit() {
    let ModelDirectory { model, codec } =
        ModelDirectory::load(&folder(), WeightFormat::F32, &mut |_, _| ()).unwrap();
    assert!(model.config().max_positions >= 1024);
    for text in ["Zürich, 東京 and 🚆!", "\u{0}\u{7f}", "ALBA   is\nred"] {
        let tokens = codec.encode(text, true).unwrap();
        assert!(tokens.iter().all(|&t| (t as usize) < model.config().vocab_size));
        let normalised = text.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(codec.decode(&tokens).unwrap().trim(), normalised);
    }
}
