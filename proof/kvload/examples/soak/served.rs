//! The server that is soaked.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, Reuse};
use kvengine::{Engine, EngineConfig};
use kvmodel::{ModelDirectory, TextCodec, WeightFormat};
use kvserve::{ApiKeys, DocumentReuse, Limits, ServedModel, Server, ServerConfig};

/// The name of the model.
pub(crate) const MODEL: &str = "tiny-rag";

/// The keys of clients, each with its tenant.
pub(crate) const KEYS: [(&str, &str); 3] = [("key-a", "alice"), ("key-b", "bob"), ("key-c", "carol")];

/// The key of the operator.
pub(crate) const OPERATOR_KEY: &str = "key-operator";

/// The time that a client may take for a head or a body. Idle connections are closed after it.
pub(crate) const RECEIVE_TIME: Duration = Duration::from_secs(30);

/// The memory for keys and values, in bytes: too little for all that is asked for, so that blocks are evicted and requests
/// preempted.
const KV_MEMORY: usize = 16 << 20;

/// The built-in model's template, behind the tools and the form of their calls.
const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}";

/// Starts the server at a free port. Its registered documents are in a file in `folder`, which has those of the interrupted
/// run if one is resumed, and is empty otherwise.
pub(crate) fn start(folder: &Path, resumed: bool) -> Result<Server, Box<dyn std::error::Error>> {
    let documents = folder.join("documents.jsonl");
    if !resumed && documents.exists() {
        std::fs::remove_file(&documents)?;
    }
    let place = xtask::run::root().join("models/tiny-rag");
    let ModelDirectory { model, .. } = ModelDirectory::load(&place, WeightFormat::default(), &mut |_, _| ())?;
    let tokenizer = std::fs::read(place.join("tokenizer.json"))?;
    let config = serde_json::json!({"eos_token": "<|end|>", "chat_template": TEMPLATE}).to_string();
    let codec = TextCodec::from_bytes(&tokenizer, Some(config.as_bytes()))?;
    let config = EngineConfig {
        kv_memory: Some(KV_MEMORY),
        chunks: ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() },
        swap_memory: 8 << 20,
        ..EngineConfig::default()
    };
    let engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config)?;
    let mut keys = ApiKeys::default();
    for (key, tenant) in KEYS.into_iter().chain([(OPERATOR_KEY, "operator")]) {
        keys.add(key, tenant);
    }
    let reuse = DocumentReuse { settings: Reuse::default(), decoys: Arc::default() };
    let limits =
        Limits { receive_time: RECEIVE_TIME, requests: 4096, body_bytes: 1 << 20, ..Limits::default() };
    let defaults = ServerConfig::default();
    let address = (defaults.address.ip(), 0).into();
    let config = ServerConfig {
        address,
        keys: Some(keys),
        documents: Some(documents),
        limits,
        ..ServerConfig::default()
    };
    Ok(Server::start(
        ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse: Some(reuse) },
        config,
    )?)
}
