//! The gate closes when an identity fails, and names the identity.

use std::path::PathBuf;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ReuseCell};
use kvcore::{CopyTensor, MemoryKind, allocate_tensor};
use kvlab::{Gate, GateCheck, GateLimits, Question, World};
use kvmodel::{Engine, EngineConfig, ModelDirectory, TextCodec, WeightFormat};

fn engine() -> (Engine, TextCodec, Vec<Vec<Question>>) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    let world = World::from_json(&std::fs::read_to_string(folder.join("world.json")).unwrap()).unwrap();
    let ModelDirectory { model, codec } =
        ModelDirectory::load(&folder, WeightFormat::F32, &mut |_, _| ()).unwrap();
    let chunks = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let config = EngineConfig { chunks, kv_memory: Some(16 << 20), ..EngineConfig::default() };
    let engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    (engine, codec, vec![world.questions(3, 2)])
}

fn check(engine: &mut Engine, codec: &TextCodec, questions: &[Vec<Question>], limits: GateLimits) -> Gate {
    Gate::check(engine, codec, questions, ReuseCell::ALL[1], limits, &mut |_, _| ()).unwrap()
}

/// Writes zeros over every key and value of the chunk pool.
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
    let gate = check(&mut engine, &codec, &questions, GateLimits::default());
    assert!(gate.is_open() && gate.checks.len() == 10, "{gate:?}");
    // The stored contents no longer belong to their keys.
    spoil(&engine);
    let gate = check(&mut engine, &codec, &questions, GateLimits::default());
    assert!(!gate.is_open());
    let failing: Vec<String> = gate.failing().map(GateCheck::words).collect();
    assert!(
        failing[0].starts_with("reuse equals computing anew under the same mask (measured "),
        "{failing:?}"
    );
    // These hold in spite of that: both sides read the same contents, or everything is recomputed.
    for what in ["recomputing", "linking", "blending"] {
        assert!(!failing.iter().any(|words| words.contains(what)), "{failing:?}");
    }
    // Forgotten chunks are recomputed, and are right again.
    engine.chunks().unwrap().clear();
    assert!(check(&mut engine, &codec, &questions, GateLimits::default()).is_open());
}

#[test]
fn the_gate_is_open_in_every_cell_of_a_model_that_reuse_fits() {
    let (mut engine, codec, questions) = engine();
    let limits = GateLimits::default();
    for cell in ReuseCell::ALL {
        let gate = Gate::check(&mut engine, &codec, &questions, cell, limits, &mut |_, _| ()).unwrap();
        assert!(gate.is_open(), "{cell:?}: {gate:?}");
    }
}

#[test]
fn every_identity_is_measured_and_none_holds_under_a_limit_that_nothing_can_reach() {
    let (mut engine, codec, questions) = engine();
    let none = GateLimits { logits: -1.0, moved: -1.0, accuracy: -1.1 };
    let gate = check(&mut engine, &codec, &questions, none);
    assert_eq!(gate.failing().count(), 10, "{gate:?}");
    assert!(gate.checks.iter().all(|check| check.measured.is_finite()), "{gate:?}");
}
