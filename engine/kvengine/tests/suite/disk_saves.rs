//! Requests whose results cannot be copied for the disk: each request is answered all the same, and the error is
//! counted.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvchunk::{ChunkCacheConfig, LoadRule, ReuseCell};
use kvengine::{Engine, EngineConfig, PromptTokens, Request};
use kvtier::SlabConfig;
use rstest::rstest;

use crate::common::{Golden, load_model};
use crate::failure::assert_nothing_held;
use crate::faulty::Faulty;

/// Starts an engine on a backend that can refuse, over a disk in `folder`.
fn started(backend: Arc<Faulty>, folder: &Path) -> Engine {
    let chunks = ChunkCacheConfig { memory_share: 0.3, ..ChunkCacheConfig::default() };
    let config = EngineConfig { block_size: 4, kv_memory: Some(8 << 20), chunks, ..EngineConfig::default() };
    let mut engine = Engine::new(load_model("llama"), backend, b"t", &config).unwrap();
    let config = SlabConfig { limit: 8 << 20, cell_bytes: 8 << 10, ..SlabConfig::default() };
    engine.open_disk(folder, config).unwrap();
    engine.load_from_disk(LoadRule::Always(Duration::from_secs(20)));
    engine
}

#[rstest]
fn saves_that_the_backend_refuses_are_counted_and_change_no_answer(
    #[values(true, false)] is_chunked: bool,
    // Far memory is staged in a copy of its own.
    #[values((true, "swap_blocks"), (true, "allocate_host"), (true, "read_bytes"), (false, "read_bytes"))]
    (is_far, operation): (bool, &'static str),
) {
    let prompt = Golden::load("llama").prompt;
    let tokens =
        if is_chunked { PromptTokens::Chunked(prompt) } else { PromptTokens::Plain(prompt.flatten()) };
    let request =
        Request { max_new_tokens: 5, cell: ReuseCell::SEQUENTIAL_WITH_SYSTEM, ..Request::new(tokens) };
    let saved = |engine: &Engine| {
        assert!(engine.disk().unwrap().flush(Duration::from_secs(20)));
        engine.disk().unwrap().usage().records
    };
    let mut all = None;
    for passing in 0.. {
        let backend = if is_far { Faulty::far() } else { Faulty::new() };
        let folder = tempfile::tempdir().unwrap();
        let mut engine = started(Arc::clone(&backend), folder.path());
        let expected = engine.generate(&request, &mut ()).unwrap().tokens;
        let records = *all.get_or_insert_with(|| saved(&engine));
        drop(engine);
        let folder = tempfile::tempdir().unwrap();
        let mut engine = started(Arc::clone(&backend), folder.path());
        backend.refuse_only(operation, passing);
        assert_eq!(engine.generate(&request, &mut ()).unwrap().tokens, expected, "{operation} {passing}");
        assert_nothing_held(&engine);
        let is_over = backend.disarm();
        let metrics = engine.disk_metrics().unwrap();
        assert_eq!(metrics.save_errors, u64::from(!is_over), "{operation} {passing}");
        assert_eq!(saved(&engine) < records, !is_over, "what was refused is not on the disk");
        let text = kvchunk::TierMetrics::prometheus(&[("disk", &metrics)]);
        assert!(
            text.contains(&format!("kv_tier_save_errors_total{{tier=\"disk\"}} {}.0\n", u8::from(!is_over)))
        );
        // What is on the disk is right.
        drop(engine);
        let mut engine = started(Arc::clone(&backend), folder.path());
        assert_eq!(engine.generate(&request, &mut ()).unwrap().tokens, expected, "{operation} {passing}");
        if is_over {
            assert!(passing > 2, "only {passing} operations");
            return;
        }
    }
}
