//! Servers over the built-in model.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, Reuse};
use kvengine::{Engine, EngineConfig, Scheduling};
use kvmodel::{ModelDirectory, TextCodec, WeightFormat};
use kvserve::{DocumentReuse, ServedModel, Server, ServerConfig};
use serde_json::{Value, json};

use super::client::post;

/// The name of the model in the tests.
pub(crate) const MODEL: &str = "tiny-rag";

/// The system prompt of the demo.
pub(crate) const SYSTEM: &str = include_str!("../../../../examples/system.txt");

/// Documents of the demo, each with its name.
pub(crate) const DOCUMENTS: [(&str, &str); 3] = [
    ("harbour", include_str!("../../../../examples/documents/harbour.txt")),
    ("market", include_str!("../../../../examples/documents/market.txt")),
    ("school", include_str!("../../../../examples/documents/school.txt")),
];

/// A question about the first document, and its answer.
pub(crate) const QUESTION: (&str, &str) = ("alba ?", "red");

/// Returns a request for the answer to the question about the documents, with other fields.
pub(crate) fn question(more: Value) -> Value {
    let mut request = json!({
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION.0}],
        "documents": DOCUMENTS.map(|(name, text)| json!({"id": name, "text": text})),
        "temperature": 0,
        "max_tokens": 8,
    });
    add(&mut request, more);
    request
}

/// Adds fields to a request, or replaces them.
pub(crate) fn add(request: &mut Value, more: Value) {
    if let Value::Object(more) = more {
        for (name, value) in more {
            request[name] = value;
        }
    }
}

/// Returns the built-in model.
pub(crate) fn loaded() -> ModelDirectory {
    let place = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    ModelDirectory::load(&place, WeightFormat::default(), &mut |_, _| ()).unwrap()
}

/// Returns the settings of an engine with a small memory.
pub(crate) fn small() -> EngineConfig {
    EngineConfig {
        kv_memory: Some(32 << 20),
        chunks: ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() },
        enable_sleep_mode: true,
        ..EngineConfig::default()
    }
}

/// Returns an engine over the built-in model.
pub(crate) fn engine() -> (Engine, TextCodec) {
    let ModelDirectory { model, codec, .. } = loaded();
    (Engine::new(model, CpuBackend::new(), codec.digest(), &small()).unwrap(), codec)
}

/// Starts a server with full attention that computes so many answers at the same time.
pub(crate) fn running(most: usize) -> Server {
    let ModelDirectory { model, codec, .. } = loaded();
    let scheduling = Scheduling { running: most, ..Scheduling::default() };
    let config = EngineConfig { scheduling, ..small() };
    let engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    Server::start(ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse: None }, free_port())
        .unwrap()
}

/// Starts a server with full attention on a free port.
pub(crate) fn server() -> Server {
    with(None, free_port())
}

/// Starts a server that reuses documents with the default settings.
pub(crate) fn reusing() -> Server {
    with(Some(reuse()), free_port())
}

/// Returns the default settings for reuse.
pub(crate) fn reuse() -> DocumentReuse {
    DocumentReuse { settings: Reuse::default(), decoys: Arc::default() }
}

/// Starts a server.
pub(crate) fn with(reuse: Option<DocumentReuse>, config: ServerConfig) -> Server {
    let (engine, codec) = engine();
    Server::start(ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse }, config).unwrap()
}

/// Returns the default settings with a free port.
pub(crate) fn free_port() -> ServerConfig {
    let config = ServerConfig::default();
    ServerConfig { address: (config.address.ip(), 0).into(), ..config }
}

/// Checks that nothing is held but the registered documents that requests have used. Empties the caches.
pub(crate) fn assert_only_used_documents_are_held(server: &Server) {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        assert_eq!(post(server.address(), "/reset_prefix_cache", &json!({})).status, 200);
        let chunks = server.with_engine(|engine| engine.report().chunks.unwrap()).unwrap();
        // The last request may have pinned a document in between.
        if chunks.shared == 0 {
            return assert_nothing_is_held(server);
        }
        assert!(Instant::now() < until, "{chunks:?}");
    }
}

/// Checks that no request holds anything.
pub(crate) fn assert_nothing_is_held(server: &Server) {
    let held = server.with_engine(|engine| {
        engine.check_invariants().unwrap();
        let report = engine.report();
        let pools = [report.main, report.chunks];
        pools
            .into_iter()
            .flatten()
            .map(|counts| {
                assert_eq!(
                    counts.total,
                    counts.free + counts.mutable + counts.shared + counts.cached,
                    "{counts:?}"
                );
                counts.mutable + counts.shared
            })
            .sum::<usize>()
    });
    assert_eq!(held, Some(0));
}
