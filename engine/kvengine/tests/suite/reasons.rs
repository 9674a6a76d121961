//! Without a disk, an answer says why each chunk was not found, and nothing about the chunks of other tenants.

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ChunkedPrompt, MissReason, ReuseCell, Tenant};
use kvengine::{Engine, EngineConfig, PromptTokens, Request};

use crate::asking::engine_of;
use crate::common::{Golden, load_model};

/// Asks a question, and returns the reason why each chunk was not found.
fn missed(engine: &mut Engine, prompt: &ChunkedPrompt, tenant: Option<&str>) -> Vec<Option<MissReason>> {
    let request = Request {
        cell: ReuseCell::SEQUENTIAL_WITH_SYSTEM,
        tenant: tenant.map(str::to_owned),
        max_new_tokens: 1,
        ..Request::new(PromptTokens::Chunked(prompt.clone()))
    };
    let answer = engine.generate(&request, &mut ()).unwrap();
    engine.check_invariants().unwrap();
    for chunk in &answer.chunks {
        assert_eq!(chunk.hit, chunk.missed.is_none());
    }
    answer.chunks.iter().map(|chunk| chunk.missed).collect()
}

fn of(prompt: &ChunkedPrompt, system: &[u32]) -> ChunkedPrompt {
    ChunkedPrompt::new(system.to_vec(), prompt.chunks().to_vec(), vec![4]).unwrap()
}

#[test]
fn new_found_and_known_behind_another_system_prompt() {
    let prompt = Golden::load("llama").prompt;
    let all = |reason| vec![reason; prompt.chunks().len()];
    let mut engine = engine_of(load_model("llama"), EngineConfig::default());
    assert_eq!(missed(&mut engine, &prompt, None), all(Some(MissReason::New)));
    assert_eq!(missed(&mut engine, &prompt, None), all(None));
    assert_eq!(missed(&mut engine, &of(&prompt, &[7, 8, 9]), None), all(Some(MissReason::OtherContext)));
    assert_eq!(missed(&mut engine, &of(&prompt, &[7, 8, 9]), None), all(None));
    let mut longer = prompt.chunks().to_vec();
    longer[0].push(5);
    let longer = ChunkedPrompt::new(prompt.system().to_vec(), longer, vec![4]).unwrap();
    let mut reasons = all(None);
    reasons[0] = Some(MissReason::New);
    assert_eq!(missed(&mut engine, &longer, None), reasons, "one token more");
    engine.chunks().unwrap().clear();
    assert_eq!(missed(&mut engine, &prompt, None), all(Some(MissReason::New)), "forgotten");
}

#[test]
fn evicted_chunks_are_told_from_new_ones() {
    let chunks = ChunkCacheConfig { max_chunks: 4, ..ChunkCacheConfig::default() };
    let config = EngineConfig { block_size: 4, kv_memory: Some(8 << 20), chunks, ..EngineConfig::default() };
    let mut engine = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
    let document = |number: u32| {
        let tokens = (0..9).map(|i| 3 + (number * 7 + i * (number + 1)) % 45).collect();
        ChunkedPrompt::new(vec![1, 2], vec![tokens], vec![4]).unwrap()
    };
    for number in 0..5 {
        assert_eq!(missed(&mut engine, &document(number), None), [Some(MissReason::New)], "{number}");
    }
    assert_eq!(missed(&mut engine, &document(4), None), [None]);
    assert_eq!(missed(&mut engine, &document(0), None), [Some(MissReason::Evicted)]);
    assert_eq!(missed(&mut engine, &document(0), None), [None]);
    let other = of(&document(0), &[9, 9]);
    assert_eq!(missed(&mut engine, &other, None), [Some(MissReason::OtherContext)]);
}

#[test]
fn tenants_learn_nothing_about_each_other() {
    let prompt = Golden::load("llama").prompt;
    let all = |reason| vec![reason; prompt.chunks().len()];
    let mut engine = engine_of(load_model("llama"), EngineConfig::default());
    for tag in ["alice", "bob"] {
        engine.chunks().unwrap().add_tenant(Tenant::new(tag)).unwrap();
    }
    for tenant in [None, Some("alice"), Some("bob")] {
        assert_eq!(missed(&mut engine, &prompt, tenant), all(Some(MissReason::New)), "{tenant:?}");
    }
    let other = of(&prompt, &[7, 8, 9]);
    assert_eq!(missed(&mut engine, &other, Some("bob")), all(Some(MissReason::OtherContext)), "its own text");
}

/// Answers an ordinary prompt, and returns the reason why its start was not found.
fn start_missed(engine: &mut Engine, tokens: Vec<u32>, tenant: Option<&str>) -> Option<MissReason> {
    let request = Request {
        tenant: tenant.map(str::to_owned),
        max_new_tokens: 1,
        ..Request::new(PromptTokens::Plain(tokens))
    };
    let answer = engine.generate(&request, &mut ()).unwrap();
    engine.check_invariants().unwrap();
    answer.prefix_missed
}

/// A prompt whose blocks of four tokens differ from those of other numbers and from each other.
fn numbered(number: u32) -> Vec<u32> {
    (0..10).flat_map(|block| [number % 40, number / 40, block, 7].map(|token| 3 + token)).collect()
}

#[test]
fn the_start_of_an_ordinary_prompt_has_a_reason() {
    let config = EngineConfig { block_size: 4, kv_memory: Some(1 << 20), ..EngineConfig::default() };
    let mut engine = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
    engine.chunks().unwrap().add_tenant(Tenant::new("other")).unwrap();
    let first = numbered(0);
    assert_eq!(start_missed(&mut engine, first.clone(), None), Some(MissReason::New));
    assert_eq!(start_missed(&mut engine, first.clone(), None), None);
    assert_eq!(start_missed(&mut engine, first[..20].to_vec(), None), None, "a part of it");
    let longer: Vec<u32> = first.iter().copied().chain([9, 8, 7, 6, 5]).collect();
    assert_eq!(start_missed(&mut engine, longer, None), Some(MissReason::New), "its last block is new");
    let behind: Vec<u32> = [40, 41, 42, 43].into_iter().chain(first.clone()).collect();
    assert_eq!(
        start_missed(&mut engine, behind[4..].to_vec(), Some("other")),
        Some(MissReason::New),
        "a secret"
    );
    assert_eq!(start_missed(&mut engine, first[4..].to_vec(), None), Some(MissReason::OtherContext));
    // Without reuse, nothing is looked up.
    let fresh = Request { reuse: false, ..Request::new(PromptTokens::Plain(numbered(1))) };
    assert_eq!(engine.generate(&fresh, &mut ()).unwrap().prefix_missed, None);
    assert_eq!(start_missed(&mut engine, numbered(1), None), Some(MissReason::New), "it was not kept");
    let room = engine.report().main.unwrap().total;
    for number in 2..2 + room as u32 / 5 {
        start_missed(&mut engine, numbered(number), None);
    }
    assert_eq!(start_missed(&mut engine, first, None), Some(MissReason::Evicted));
}

#[test]
fn the_start_of_a_prompt_with_documents_has_a_reason() {
    let prompt = Golden::load("llama").prompt;
    let mut engine =
        engine_of(load_model("llama"), EngineConfig { block_size: 4, ..EngineConfig::default() });
    let mut ask = |prompt: &ChunkedPrompt| {
        let cell = ReuseCell::SEQUENTIAL_WITH_SYSTEM;
        let request =
            Request { cell, max_new_tokens: 1, ..Request::new(PromptTokens::Chunked(prompt.clone())) };
        engine.generate(&request, &mut ()).unwrap().prefix_missed
    };
    assert_eq!(ask(&prompt), Some(MissReason::New));
    assert_eq!(ask(&prompt), None);
    assert_eq!(ask(&of(&prompt, &[7, 8, 9, 10, 11])), Some(MissReason::New));
    let inner = [&[7, 8, 9, 10], &prompt.system()[..4]].concat();
    assert_eq!(ask(&of(&prompt, &inner)), Some(MissReason::OtherContext), "its second block");
}
