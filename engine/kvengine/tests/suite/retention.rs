//! Checks which blocks stay cached when blocks run out: by policy, by priority and by time.

use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvchunk::ChunkedPrompt;
use kvcore::{PolicyKind, Retention};
use kvengine::{Engine, EngineConfig, PromptTokens, Request};

use crate::common::load_model;

/// Returns an engine whose sequences have room for three prompts of sixteen tokens.
fn engine(cache_policy: PolicyKind, cache_ttl: Option<Duration>) -> Engine {
    let mut config = EngineConfig { block_size: 4, cache_policy, cache_ttl, ..EngineConfig::default() };
    config.kv_memory = Some(1 << 16);
    config.chunks.memory_share = 0.25;
    let probe = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
    config.kv_memory = Some(18 * probe.cache().arena().layout().block_bytes());
    Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap()
}

fn ask(engine: &mut Engine, first: u32, retention: Option<Retention>) -> usize {
    let prompt = PromptTokens::Plain((0..17).map(|i| 3 + (first + i * first) % 40).collect());
    let request = Request { max_new_tokens: 1, retention, ..Request::new(prompt) };
    engine.generate(&request, &mut ()).unwrap().cached_tokens
}

#[test]
fn a_prompt_of_worth_outlives_later_ones() {
    let dear = Retention { priority: 90, lasts: None };
    for (policy, retention, kept) in [
        (PolicyKind::Priority, Some(dear), 16),
        (PolicyKind::Priority, None, 0),
        (PolicyKind::Lru, Some(dear), 0),
    ] {
        let mut engine = engine(policy, None);
        assert_eq!(ask(&mut engine, 1, retention), 0);
        for other in 2..6 {
            ask(&mut engine, other, None);
        }
        assert_eq!(ask(&mut engine, 1, None), kept, "{policy:?} {retention:?}");
        engine.check_invariants().unwrap();
    }
}

#[test]
fn what_has_expired_is_computed_again() {
    for (ttl, kept) in [(None, 16), (Some(Duration::from_secs(3600)), 16), (Some(Duration::ZERO), 0)] {
        let mut engine = engine(PolicyKind::Lru, ttl);
        ask(&mut engine, 1, None);
        assert_eq!(ask(&mut engine, 1, None), kept, "{ttl:?}");
        engine.check_invariants().unwrap();
    }
}

#[test]
fn a_pinned_prompt_outlives_later_ones_until_its_claim_is_dropped() {
    for policy in [PolicyKind::Lru, PolicyKind::Priority] {
        let mut engine = engine(policy, None);
        let prompt = PromptTokens::Plain((0..17).map(|i| 3 + (1 + i) % 40).collect());
        assert_eq!(engine.pin(&Request::new(prompt.clone())).unwrap().tokens(), 0, "nothing is cached");
        ask(&mut engine, 1, None);
        let pinned = engine.pin(&Request::new(prompt)).unwrap();
        for other in 2..6 {
            ask(&mut engine, other, None);
        }
        assert_eq!((pinned.tokens(), ask(&mut engine, 1, None)), (16, 16), "{policy:?}");
        engine.check_invariants().unwrap();
        drop(pinned);
        for other in 2..6 {
            ask(&mut engine, other, None);
        }
        assert_eq!(ask(&mut engine, 1, None), 0, "{policy:?}");
        engine.check_invariants().unwrap();
    }
}

#[test]
fn pinned_documents_outlive_later_ones_until_their_claim_is_dropped() {
    let room = 8;
    let mut config = EngineConfig { block_size: 4, ..EngineConfig::default() };
    (config.kv_memory, config.chunks.memory_share) = (Some(1 << 20), 0.5);
    let probe = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
    config.kv_memory = Some(2 * room * probe.cache().arena().layout().block_bytes());
    let mut engine = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
    let document = |first: u32| (0..12).map(|i| 3 + (first * 7 + i * i) % 40).collect::<Vec<u32>>();
    let request = |first: u32| {
        let prompt = ChunkedPrompt::new(vec![1, 2, 3, 4], vec![document(first)], vec![5, 6]).unwrap();
        Request { max_new_tokens: 1, ..Request::new(PromptTokens::Chunked(prompt)) }
    };
    let found = |engine: &mut Engine, first| {
        let answer = engine.generate(&request(first), &mut ()).unwrap();
        if answer.chunks[0].hit { answer.chunks[0].tokens } else { 0 }
    };
    assert_eq!(engine.pin(&request(1)).unwrap().document_tokens(), 0, "nothing is cached");
    assert_eq!(found(&mut engine, 1), 0);
    let pinned = engine.pin(&request(1)).unwrap();
    assert_eq!((pinned.tokens(), pinned.document_tokens(), pinned.document_blocks()), (4, 12, 3));
    // Each has three of eight blocks, so that the first of three would leave.
    for other in 2..6 {
        assert_eq!(found(&mut engine, other), 0);
    }
    assert_eq!(found(&mut engine, 1), 12);
    engine.check_invariants().unwrap();
    drop(pinned);
    for other in 2..6 {
        found(&mut engine, other);
    }
    assert_eq!(found(&mut engine, 1), 0);
    engine.check_invariants().unwrap();
    let both = ChunkedPrompt::new(vec![1, 2, 3, 4], vec![document(2), document(1)], vec![5, 6]).unwrap();
    let both = Request::new(PromptTokens::Chunked(both));
    let claims = engine.pin(&both).unwrap().into_documents();
    let held: Vec<_> = claims.iter().map(|claim| (claim.tokens(), claim.document_tokens())).collect();
    assert_eq!(held, [(0, 0), (0, 12)], "the first document has left");
}
