//! Engines of one model that pull chunks from each other.

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, LocalReplica, ReuseCell};
use kvengine::{Engine, EngineConfig, Generation};
use rstest::rstest;

use crate::asking::{ask, with};
use crate::common::{Golden, distance, model};

/// Creates two such engines.
fn engines(name: &str) -> [Engine; 2] {
    let chunks = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let config = EngineConfig { block_size: 4, kv_memory: Some(4 << 20), chunks, ..EngineConfig::default() };
    let mut replicas = LocalReplica::group(2).into_iter();
    [(); 2].map(|()| {
        let mut engine = Engine::new(model(name, name), CpuBackend::new(), b"t", &config).unwrap();
        let replica = replicas.next().unwrap();
        replica.serve(engine.chunks().unwrap(), &engine.replica_device());
        engine.join(Arc::new(replica));
        engine
    })
}

fn answer(engine: &mut Engine, golden: &Golden, cell: ReuseCell) -> Generation {
    ask(engine, &golden.prompt, |request| {
        with("none", cell)(request);
        request.max_new_tokens = 3;
    })
}

#[rstest]
fn what_one_has_computed_the_other_reads(
    #[values("llama", "mistral", "deepseek-v3")] name: &str,
    #[values(
        ReuseCell::OVERLAPPED_WITH_SYSTEM,
        ReuseCell::OVERLAPPED_ALONE,
        ReuseCell::SEQUENTIAL_ALONE,
        ReuseCell::SEQUENTIAL_WITH_SYSTEM,
        ReuseCell::ABSOLUTE_WITH_SYSTEM,
        ReuseCell::ABSOLUTE_ALONE
    )]
    cell: ReuseCell,
) {
    let golden = Golden::load(name);
    let [mut a, mut b] = engines(name);
    let first = answer(&mut a, &golden, cell);
    let second = answer(&mut b, &golden, cell);
    for (x, y) in first.logits.iter().zip(&second.logits) {
        assert!(distance(x, y) < 1e-4, "the same numbers, wherever they were computed");
    }
    let [of_a, of_b] = [&a, &b].map(|engine| engine.chunks().unwrap().metrics());
    assert_eq!((of_a.fetched, of_a.tokens_computed > 0), (0, true));
    assert_eq!((of_b.fetched, of_b.tokens_computed), (of_a.insertions, 0), "all has come from the other");
    assert!(second.chunks.iter().all(|chunk| chunk.hit && chunk.exact));
    let third = answer(&mut b, &golden, cell);
    assert!(third.chunks.iter().all(|chunk| chunk.hit));
    assert_eq!(b.chunks().unwrap().metrics().fetched, of_b.fetched, "it is here now");
    // The engine that gave the chunks may leave.
    drop(a);
    b.chunks().unwrap().clear();
    let alone = answer(&mut b, &golden, cell);
    assert!(alone.chunks.iter().all(|chunk| !chunk.hit));
    assert!(distance(&alone.logits[0], &first.logits[0]) < 1e-4);
    b.check_invariants().unwrap();
}
