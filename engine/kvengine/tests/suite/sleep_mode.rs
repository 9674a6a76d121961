//! Sleep mode: whole pools of an engine release their memory, and nothing else changes.

use kvbackend_cpu::{CpuBackend, Execution};
use kvchunk::{Acquired, ChunkContext, ChunkHasher, ComputeMode, HashAlgorithm, ReuseCell, TenantId};
use kvcore::{CacheKind, KeyScope};
use kvengine::{Engine, EngineConfig, Error, Generation, PoolTag, PromptTokens, Request, Slept};
use rstest::rstest;

use crate::asking::{ask_three, hits};
use crate::common::{Golden, distance, load_model};
use crate::faulty::Faulty;

fn config(format: &str) -> EngineConfig {
    EngineConfig {
        kv_format: format.parse().unwrap(),
        block_size: 4,
        kv_memory: Some(1 << 20),
        enable_sleep_mode: true,
        ..EngineConfig::default()
    }
}

fn engine(name: &str, execution: Execution, format: &str) -> Engine {
    Engine::new(load_model(name), CpuBackend::with_execution(execution), b"t", &config(format)).unwrap()
}

fn ask(engine: &mut Engine, golden: &Golden) -> Generation {
    ask_three(engine, &golden.prompt, ReuseCell::SEQUENTIAL_ALONE)
}

#[rstest]
fn an_engine_sleeps_and_wakes_and_its_chunks_are_hits_with_the_same_logits(
    #[values("llama", "deepseek-v3")] name: &str,
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values("f32", "bf16", "int8:4", "fp8-e4m3")] format: &str,
) {
    let golden = Golden::load(name);
    let mut engine = engine(name, execution, format);
    ask(&mut engine, &golden);
    let before = ask(&mut engine, &golden);
    let addresses = |engine: &Engine| -> Vec<u64> {
        engine.cache().arena().storages().map(|storage| storage.address()).collect()
    };
    let (at, blocks) = (addresses(&engine), engine.report().chunks.unwrap());
    let block_bytes = engine.cache().arena().layout().block_bytes();

    let slept = engine.sleep(&PoolTag::ALL).unwrap();
    assert_eq!(
        slept.saved_bytes,
        (blocks.total - blocks.free) * block_bytes,
        "chunks are kept, nothing else"
    );
    assert!(4 * slept.released_bytes > 3 * (1 << 20), "{slept:?} of one MiB");
    assert!(PoolTag::ALL.iter().all(|&tag| engine.is_sleeping(tag)));
    assert_eq!(engine.sleep(&PoolTag::ALL).unwrap(), Slept::default(), "it sleeps already");
    let refused = engine.generate(&Request::new(PromptTokens::Plain(vec![1, 2])), &mut ()).unwrap_err();
    assert!(refused.to_string().contains("wake_up"), "{refused}");
    engine.check_invariants().unwrap();

    assert!(engine.wake_up(&PoolTag::ALL).unwrap());
    assert!(!engine.wake_up(&PoolTag::ALL).unwrap(), "it is awake");
    assert_eq!(addresses(&engine), at);
    // The system prompt is recomputed, in a batch with a different shape.
    let after = ask(&mut engine, &golden);
    assert_eq!((hits(&before), hits(&after)), (3, 3));
    assert!(after.cached_tokens < before.cached_tokens, "the system prompt was forgotten");
    assert_eq!(before.tokens, after.tokens);
    if format == "f32" {
        assert!(distance(&before.logits.concat(), &after.logits.concat()) < 1e-4);
    }
    // If only the chunks sleep, nothing is recomputed, and all bits are equal.
    let before = ask(&mut engine, &golden);
    engine.sleep(&[PoolTag::ChunkCache]).unwrap();
    engine.wake_up(&[PoolTag::ChunkCache]).unwrap();
    let after = ask(&mut engine, &golden);
    assert_eq!((before.tokens, before.logits), (after.tokens, after.logits));
}

#[test]
fn one_pool_sleeps_alone_and_requests_go_without_its_chunks() {
    let golden = Golden::load("llama");
    let mut engine = engine("llama", Execution::Immediate, "f32");
    let before = ask(&mut engine, &golden);
    let slept = engine.sleep(&[PoolTag::ChunkCache]).unwrap();
    assert!(slept.saved_bytes > 0 && slept.released_bytes > 0);
    assert_eq!(
        (engine.is_sleeping(PoolTag::ChunkCache), engine.is_sleeping(PoolTag::KvCache)),
        (true, false)
    );
    let meanwhile = ask(&mut engine, &golden);
    assert_eq!((hits(&meanwhile), meanwhile.tokens), (0, before.tokens.clone()));
    assert!(engine.wake_up(&[PoolTag::ChunkCache]).unwrap());
    assert_eq!(hits(&ask(&mut engine, &golden)), 3);
    // If only the other pool sleeps, chunks are unchanged.
    let slept = engine.sleep(&[PoolTag::KvCache]).unwrap();
    assert!(slept.saved_bytes == 0 && slept.released_bytes > 0);
    assert!(engine.wake_up(&PoolTag::ALL).unwrap());
    assert_eq!(hits(&ask(&mut engine, &golden)), 3);
}

#[test]
fn a_held_chunk_keeps_both_pools_awake_and_the_error_says_what_holds_them() {
    let golden = Golden::load("llama");
    let mut engine = engine("llama", Execution::Immediate, "f32");
    ask(&mut engine, &golden);
    let chunks = engine.chunks().unwrap().clone();
    let context = ChunkContext::new(KeyScope::new("m", b"w").root(), ComputeMode::Alone, &[]);
    let hasher = ChunkHasher::new(HashAlgorithm::Blake3, context, 4);
    let piece = hasher.pieces(&[1, 2, 3], 64).next().unwrap();
    let Acquired::Compute(reservation) = chunks.acquire(TenantId::default(), &piece, 0) else { panic!() };
    for _ in 0..2 {
        let refused = engine.sleep(&PoolTag::ALL).unwrap_err();
        assert!(matches!(
            refused,
            Error::Chunk(kvchunk::Error::PoolInUse { held: 0, flights: 1, others: 0 })
        ));
        assert!(refused.to_string().contains("wait for these requests to finish"), "{refused}");
        assert!(PoolTag::ALL.iter().all(|&tag| !engine.is_sleeping(tag)), "all or none");
    }
    let held = reservation.store();
    let refused = engine.sleep(&[PoolTag::ChunkCache]).unwrap_err();
    assert!(matches!(refused, Error::Chunk(kvchunk::Error::PoolInUse { held: 1, .. })));
    drop(held);
    engine.sleep(&PoolTag::ALL).unwrap();
    assert!(engine.wake_up(&PoolTag::ALL).unwrap());
    assert_eq!(hits(&ask(&mut engine, &golden)), 3);
}

#[test]
fn blocks_that_somebody_holds_keep_the_pool_of_sequences_awake() {
    let mut engine = engine("llama", Execution::Immediate, "f32");
    let held = engine.cache().as_paged().unwrap().pool().allocate(3).unwrap();
    let refused = engine.sleep(&PoolTag::ALL).unwrap_err();
    assert!(matches!(refused, Error::InUse { pool: PoolTag::KvCache, held: 3 }), "{refused}");
    assert!(refused.to_string().contains("3 blocks of the kv_cache"), "{refused}");
    drop(held);
    engine.sleep(&PoolTag::ALL).unwrap();
}

#[test]
fn requests_that_wait_keep_the_pool_of_sequences_awake() {
    let golden = Golden::load("llama");
    let mut engine = engine("llama", Execution::Immediate, "f32");
    let tokens = golden.prompt.system().to_vec();
    let mut answer = engine.submit(Request::new(PromptTokens::Plain(tokens))).unwrap();
    for tags in [PoolTag::ALL.as_slice(), &[PoolTag::KvCache]] {
        let refused = engine.sleep(tags).unwrap_err();
        assert!(matches!(refused, Error::Waiting { requests: 1 }), "{refused}");
        assert!(PoolTag::ALL.iter().all(|&tag| !engine.is_sleeping(tag)), "all or none");
    }
    // Requests are answered without chunks while these sleep.
    engine.sleep(&[PoolTag::ChunkCache]).unwrap();
    while !engine.step().unwrap().is_idle() {}
    assert!(std::iter::from_fn(|| answer.try_next()).all(|event| event.is_ok()));
    engine.sleep(&PoolTag::ALL).unwrap();
}

#[test]
fn engines_that_cannot_sleep_say_what_to_do() {
    let plain = EngineConfig { enable_sleep_mode: false, ..config("f32") };
    let mut plain = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &plain).unwrap();
    for refused in [plain.sleep(&PoolTag::ALL).unwrap_err(), plain.wake_up(&PoolTag::ALL).unwrap_err()] {
        assert!(refused.to_string().contains("enable_sleep_mode"), "{refused}");
    }
    let fixed = EngineConfig { cache: CacheKind::Static, ..config("f32") };
    let refused = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &fixed).unwrap_err();
    assert!(refused.to_string().contains("paged"), "{refused}");
    // This backend cannot reserve memory.
    let refused = Engine::new(load_model("llama"), Faulty::new(), b"t", &config("f32")).unwrap_err();
    assert!(matches!(refused, Error::Core(kvcore::Error::Unsupported { .. })), "{refused}");
}
