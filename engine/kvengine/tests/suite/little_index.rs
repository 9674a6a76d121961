//! Requests that share documents end, however few chunks and blocks of chunks the cache keeps.

use kvbackend_cpu::CpuBackend;
use kvchunk::ChunkCacheConfig;
use kvcore::ManualClock;
use kvengine::{Error, Scheduling};
use rstest::rstest;

use crate::common::load_model;
use crate::crowd::{MODEL, alone, assert_each, assert_nothing_held, engine_keeping, mixed, run, submit_all};

const SCHEDULING: Scheduling = Scheduling { step_tokens: 16, running: 12, watermark: 1 };

/// A clock that stands still ends no wait. A request that waits for another one's chunk must be told that the
/// chunk is lost.
#[rstest]
#[case("one chunk", 1, 0.25)]
#[case("two chunks", 2, 0.25)]
#[case("the chunks of one request and a half", 3, 0.25)]
#[case("the blocks of one request", 1 << 20, 0.06)]
#[case("one chunk in few blocks", 1, 0.06)]
fn every_request_ends_with_the_answer_that_it_gets_alone(
    #[case] what: &str,
    #[case] max_chunks: usize,
    #[case] memory_share: f64,
    #[values(1, 2)] seed: u64,
) {
    let chunks = ChunkCacheConfig { max_chunks, memory_share, ..ChunkCacheConfig::default() };
    let (model, clock) = (load_model(MODEL), ManualClock::default());
    let mut engine = engine_keeping(chunks, model, CpuBackend::new(), 128, SCHEDULING, 1 << 20, &clock);
    let requests = mixed(48, seed);
    let (mut answers, mut reads) = submit_all(&mut engine, &requests);
    // Requests go away while others wait for what they compute.
    let mut cancelled = Vec::new();
    for at in [5, 17, 30] {
        engine.step().unwrap();
        answers[at].cancel();
        cancelled.push(at);
    }
    run(&mut engine, &mut answers, &mut reads);
    for at in cancelled.into_iter().rev() {
        let (read, _) = (reads.remove(at), answers.remove(at));
        assert!(read.error.is_none_or(|error| matches!(error, Error::Cancelled)), "{what}");
    }
    let left = requests.iter().enumerate().filter(|(i, _)| ![5, 17, 30].contains(i));
    let left: Vec<_> = left.map(|(_, request)| request.clone()).collect();
    assert_each(&reads, &left, alone);
    assert_nothing_held(&engine);
}
