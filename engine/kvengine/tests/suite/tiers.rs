//! Documents fall from the device to host memory and to a disk as these fill, and come back.

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkedPrompt, LoadRule, ReuseCell, SleepForm};
use kvengine::{ChunkSleep, Engine, EngineConfig, Generation, PromptTokens, Request};
use kvmanager::TierThresholds;
use kvtier::SlabConfig;
use std::time::Duration;

use crate::common::load_model;

const PATIENCE: Duration = Duration::from_secs(20);

/// Creates an engine with room for a few documents on the device, and for as many in host memory.
fn small(sleeps: bool) -> Engine {
    let sleep = ChunkSleep { form: SleepForm::Plain, memory: None, thresholds: TierThresholds::default() };
    let config = EngineConfig {
        block_size: 4,
        kv_memory: Some(1 << 17),
        chunk_sleep: sleeps.then_some(sleep),
        ..EngineConfig::default()
    };
    Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap()
}

fn document(number: u32) -> ChunkedPrompt {
    let tokens = (0..9).map(|i| 3 + (number * 7 + i * (number % 11 + 1)) % 45).collect();
    ChunkedPrompt::new(vec![1, 2], vec![tokens], vec![4]).unwrap()
}

fn ask(engine: &mut Engine, number: u32) -> Generation {
    let request = Request {
        cell: ReuseCell::SEQUENTIAL_WITH_SYSTEM,
        max_new_tokens: 3,
        ..Request::new(PromptTokens::Chunked(document(number)))
    };
    let answer = engine.generate(&request, &mut ()).unwrap();
    engine.check_invariants().unwrap();
    answer
}

/// Asks about as many documents as the device has room for, and half as many more. Returns their number.
fn fill(engine: &mut Engine) -> u32 {
    let blocks = engine.report().chunks.unwrap().total;
    let count = (blocks / 3 * 3 / 2) as u32;
    for number in 0..count {
        ask(engine, number);
        let blocks = engine.report().chunks.unwrap();
        if engine.report().chunk_sleep.is_some() {
            let used = blocks.total - blocks.free;
            assert!(used * 100 <= blocks.total * 85, "{used} of {} after {number}", blocks.total);
        }
    }
    count
}

#[test]
fn documents_that_the_device_has_no_room_for_are_found_in_host_memory() {
    let (mut tiered, mut plain) = (small(true), small(false));
    let count = fill(&mut tiered);
    assert_eq!(fill(&mut plain), count);
    let evicted = plain.chunks().unwrap().metrics().evictions;
    assert!(evicted > 0 && tiered.chunks().unwrap().metrics().evictions == 0);
    let asleep = tiered.report().chunk_sleep.unwrap().pieces;
    assert!(asleep > 0);
    let (found, computed) = (ask(&mut tiered, 0), ask(&mut plain, 0));
    assert_eq!((found.chunks[0].hit, computed.chunks[0].hit), (true, false));
    assert_eq!((found.tokens, found.logits), (computed.tokens, computed.logits), "the same bits");
    assert!(tiered.chunks().unwrap().metrics().woken > 0);
}

#[test]
fn documents_that_host_memory_has_no_room_for_are_found_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let mut engine = small(true);
    let config = SlabConfig { limit: 8 << 20, cell_bytes: 8 << 10, ..SlabConfig::default() };
    engine.open_disk(folder.path(), config).unwrap();
    engine.load_from_disk(LoadRule::Always(PATIENCE));
    let first = ask(&mut engine, 0);
    let mut number = 0;
    while engine.chunks().unwrap().metrics().evictions == 0 {
        number += 1;
        assert!(number < 1000, "host memory never fills");
        ask(&mut engine, number);
        assert!(engine.disk().unwrap().flush(PATIENCE));
    }
    let (before, computed) =
        (engine.disk().unwrap().usage().hits, engine.chunks().unwrap().metrics().tokens_computed);
    let again = ask(&mut engine, 0);
    assert_eq!((again.chunks[0].hit, engine.disk().unwrap().usage().hits), (true, before + 1));
    assert_eq!((again.tokens, again.logits), (first.tokens, first.logits));
    assert_eq!(engine.chunks().unwrap().metrics().tokens_computed, computed);
    // The latest one is on the device, and the one before the evicted ones in host memory.
    assert!(ask(&mut engine, number).chunks[0].hit && ask(&mut engine, number / 2).chunks[0].hit);
    assert_eq!(engine.disk().unwrap().usage().hits, before + 1);
}

#[test]
fn documents_and_prompts_come_back_from_the_memory_above_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let config =
        SlabConfig { limit: 8 << 20, cell_bytes: 8 << 10, memory_bytes: 4 << 20, ..SlabConfig::default() };
    let mut engine = small(false);
    engine.open_disk(folder.path(), config).unwrap();
    engine.load_from_disk(LoadRule::Always(PATIENCE));
    let ordinary: Vec<u32> = (0..30).map(|token| 3 + token * 5 % 45).collect();
    let whole = Request { max_new_tokens: 3, ..Request::new(PromptTokens::Plain(ordinary)) };
    let first = (engine.generate(&whole, &mut ()).unwrap(), ask(&mut engine, 0));
    for number in 1..60 {
        ask(&mut engine, number);
        assert!(engine.disk().unwrap().flush(PATIENCE));
    }
    engine.cache().as_paged().unwrap().pool().clear_cached();
    let before = engine.disk().unwrap().usage();
    let again = (engine.generate(&whole, &mut ()).unwrap(), ask(&mut engine, 0));
    let after = engine.disk().unwrap().usage();
    assert!(again.1.chunks[0].hit && !first.1.chunks[0].hit);
    assert_eq!((&again.0.tokens, &again.0.logits), (&first.0.tokens, &first.0.logits), "the same bits");
    assert_eq!((&again.1.tokens, &again.1.logits), (&first.1.tokens, &first.1.logits), "the same bits");
    // Seven blocks of the ordinary prompt, and the document; none was read from the disk.
    assert!(after.hits >= before.hits + 8, "{before:?} {after:?}");
    assert_eq!(after.memory_hits - before.memory_hits, after.hits - before.hits);
    assert_eq!(again.0.cached_tokens, 28);
}

#[test]
fn saving_a_document_is_no_use_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut engine = small(true);
    let config = SlabConfig { limit: 8 << 20, cell_bytes: 8 << 10, ..SlabConfig::default() };
    engine.open_disk(folder.path(), config).unwrap();
    ask(&mut engine, 0);
    assert!(engine.disk().unwrap().flush(PATIENCE));
    let request = Request {
        cell: ReuseCell::SEQUENTIAL_WITH_SYSTEM,
        ..Request::new(PromptTokens::Chunked(document(0)))
    };
    assert!(engine.save_prompt(&request, &folder.path().join("prompt.kv")).unwrap().tokens > 0);
    let chunks = engine.chunks().unwrap().chunks();
    assert!(chunks.len() == 1 && chunks[0].heat <= 0.5 && chunks[0].access_count == 0, "{chunks:?}");
    ask(&mut engine, 0);
    assert!(engine.chunks().unwrap().chunks()[0].heat > 0.7);
}

#[test]
fn a_hot_document_is_back_on_the_device_after_a_step() {
    let mut engine = small(true);
    ask(&mut engine, 0);
    ask(&mut engine, 0);
    let chunks = engine.chunks().unwrap().clone();
    assert_eq!(chunks.sleep_cold_chunks(kvchunk::ColdRule::EVERYTHING), Ok(1));
    while engine.report().chunk_sleep.unwrap().pieces > 0 {
        // The clock of the engine says when pieces are looked through again.
        ask(&mut engine, 1);
    }
    assert_eq!(chunks.metrics().woken, 1);
    assert!(ask(&mut engine, 0).chunks[0].hit);
    assert_eq!(chunks.metrics().woken, 1);
}
