//! The repository's model on an engine, with its world.

use std::path::PathBuf;

use kvbackend_cpu::CpuBackend;
use kvchunk::ChunkCacheConfig;
use kvengine::{Engine, EngineConfig};
use kvlab::{QuestionKind, Trial, World};
use kvmodel::{ModelDirectory, TextCodec, WeightFormat};

pub(crate) fn tiny_rag() -> (Engine, TextCodec, World) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    let world = World::from_json(&std::fs::read_to_string(folder.join("world.json")).unwrap()).unwrap();
    let ModelDirectory { model, codec, .. } =
        ModelDirectory::load(&folder, WeightFormat::Stored, &mut |_, _| ()).unwrap();
    let chunks = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let config = EngineConfig { chunks, kv_memory: Some(16 << 20), ..EngineConfig::default() };
    let engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    (engine, codec, world)
}

/// Returns two arms' answers to local questions with these grades. In each pair, full attention's grade comes
/// first.
pub(crate) fn trials(pairs: impl IntoIterator<Item = (bool, bool)>) -> Vec<Trial> {
    let of = |question: usize, arm: usize, right: bool| Trial {
        draw: 0,
        question,
        kind: QuestionKind::Local,
        arm,
        answer: String::new(),
        right: Some(right),
        divergence: None,
        agreement: None,
        recomputed: 0.0,
        found: 1.0,
        flops: 1,
        ttft_ms: 1.0,
    };
    let each = pairs.into_iter().enumerate();
    each.flat_map(|(at, (full, other))| [of(at, 0, full), of(at, 1, other)]).collect()
}
