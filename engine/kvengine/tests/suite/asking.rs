//! An engine over a golden model, and requests to it.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ChunkedPrompt, Recompute, RecomputeStrategy, ReuseCell};
use kvcore::{Gather, KeyForm, KvFormat, MemoryKind, Scatter, WriteSlots, allocate_tensor};
use kvengine::{Engine, EngineConfig, Generation, PromptTokens, Request};
use kvmodel::{Model, ModelDirectory, TextCodec, WeightFormat};

use crate::common::load_model;

/// Creates an engine with blocks of four tokens, and room for everything.
pub(crate) fn engine(name: &str, kv_format: KvFormat) -> Engine {
    engine_with(name, kv_format, KeyForm::Rotated)
}

/// Creates an engine like [`engine`], but stores keys in the form `keys`.
pub(crate) fn engine_with(name: &str, kv_format: KvFormat, keys: KeyForm) -> Engine {
    engine_of(load_model(name), EngineConfig { kv_format, keys, ..EngineConfig::default() })
}

/// Creates an engine like [`engine`], but with other settings.
pub(crate) fn engine_of(model: Model, config: EngineConfig) -> Engine {
    let chunks = ChunkCacheConfig { memory_share: 0.3, ..ChunkCacheConfig::default() };
    let config = EngineConfig { block_size: 4, kv_memory: Some(8 << 20), chunks, ..config };
    Engine::new(model, CpuBackend::new(), b"t", &config).unwrap()
}

/// Creates an engine for the built-in model, and returns it with the model's codec.
pub(crate) fn tiny_rag(config: &EngineConfig) -> (Engine, TextCodec) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    let ModelDirectory { model, codec, .. } =
        ModelDirectory::load(&folder, WeightFormat::Stored, &mut |_, _| ()).unwrap();
    (Engine::new(model, CpuBackend::new(), codec.digest(), config).unwrap(), codec)
}

/// Asks for one token, unless `change` changes that. The answer's logits are the logits after the prefill.
pub(crate) fn ask(
    engine: &mut Engine,
    prompt: &ChunkedPrompt,
    change: impl FnOnce(&mut Request),
) -> Generation {
    let mut request = Request::new(PromptTokens::Chunked(prompt.clone()));
    (request.max_new_tokens, request.keep_logits) = (1, true);
    change(&mut request);
    let generation = engine.generate(&request, &mut ()).unwrap();
    engine.check_invariants().unwrap();
    generation
}

/// Asks for three tokens.
pub(crate) fn ask_three(engine: &mut Engine, prompt: &ChunkedPrompt, cell: ReuseCell) -> Generation {
    ask(engine, prompt, |request| (request.cell, request.max_new_tokens) = (cell, 3))
}

/// Returns a change that sets a request's strategy and cell.
pub(crate) fn with(strategy: &str, cell: ReuseCell) -> impl FnOnce(&mut Request) {
    by(&Arc::new(strategy.parse::<Recompute>().unwrap()), cell)
}

/// Returns a change that sets a request's strategy and cell, like [`with`].
pub(crate) fn by<S: RecomputeStrategy + 'static>(
    strategy: &Arc<S>,
    cell: ReuseCell,
) -> impl FnOnce(&mut Request) + use<S> {
    let strategy = Arc::clone(strategy);
    move |request| (request.recompute, request.cell) = (strategy, cell)
}

pub(crate) fn hits(answer: &Generation) -> usize {
    answer.chunks.iter().filter(|chunk| chunk.hit).count()
}

/// Returns the last row of logits.
pub(crate) fn last(rows: &[f32], vocabulary: usize) -> &[f32] {
    &rows[rows.len() - vocabulary..]
}

/// Overwrites all keys, all values or both in the chunk pool with zeros, in the given layers.
pub(crate) fn spoil(engine: &Engine, layers: Range<usize>, [keys, values]: [bool; 2]) {
    let arena = engine.cache().arena();
    let shape = arena.layout().shape();
    let KvFormat::Dense(dtype) = shape.format else { panic!("rows of codes") };
    let stream = engine.backend().stream().unwrap();
    for block in engine.chunks().unwrap().pool().blocks().range() {
        let first = i64::from(block) * shape.block_size as i64;
        let slots: Arc<[i64]> = (first..first + shape.block_size as i64).collect();
        for layer in layers.clone() {
            let rows = |heads, dim| {
                let rows = &[slots.len(), heads, dim];
                allocate_tensor(engine.backend(), MemoryKind::Device, dtype, rows).unwrap()
            };
            let (k, v) = (rows(shape.k_heads, shape.k_dim), rows(shape.v_heads, shape.v_dim));
            let (arena, slots) = (arena.clone(), Arc::clone(&slots));
            let gather = Gather { arena, layer, slots, k, v, rotation: None };
            stream.gather(&gather).unwrap();
            let Gather { arena, slots, k, v, .. } = gather;
            for view in
                [(keys, &k), (values, &v)].into_iter().filter_map(|(spoilt, view)| spoilt.then_some(view))
            {
                stream.write(view, &vec![0; dtype.bytes_for(view.len()).unwrap()]).unwrap();
            }
            stream
                .scatter(&Scatter { arena, layer, k, v, slots: WriteSlots::unchecked(slots), rotation: None })
                .unwrap();
        }
    }
    stream.synchronize().unwrap();
}
