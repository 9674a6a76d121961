//! An engine's chunks sleep one by one or as whole pools. Hits wake them, with unchanged contents if the form
//! of sleep is exact.

use kvbackend_cpu::{CpuBackend, Execution};
use kvchunk::{ColdRule, ReuseCell, SleepForm, Tenant};
use kvcore::{CacheKind, PoolCounts};
use kvengine::{CacheReport, ChunkSleep, Engine, EngineConfig, Generation, PromptTokens, Request};
use kvmanager::TierThresholds;
use rstest::rstest;

use crate::asking::{ask, ask_three, hits};
use crate::common::{Golden, distance, load_model, reordered};

fn config(format: &str, sleep: Option<(&str, Option<usize>)>) -> EngineConfig {
    EngineConfig {
        kv_format: format.parse().unwrap(),
        block_size: 4,
        kv_memory: Some(1 << 18),
        chunk_sleep: sleep.map(|(form, memory)| {
            let (form, thresholds) = (form.parse().unwrap(), TierThresholds::default());
            ChunkSleep { form, memory, thresholds }
        }),
        ..EngineConfig::default()
    }
}

fn warm(engine: &mut Engine, golden: &Golden, cell: ReuseCell) {
    ask(engine, &reordered(&golden.prompt), |request| request.cell = cell);
}

fn chunk_blocks(report: &CacheReport) -> PoolCounts {
    report.chunks.unwrap()
}

/// Returns the answer to a prompt whose chunks are hits, the answer to the same prompt after the chunks have
/// slept, and the engine that gave the second answer.
fn awake_and_woken(
    name: &str,
    execution: Execution,
    format: &str,
    form: &str,
    cell: ReuseCell,
) -> (Generation, Generation, Engine) {
    let golden = Golden::load(name);
    let engine = |sleep| {
        let backend = CpuBackend::with_execution(execution);
        Engine::new(load_model(name), backend, b"t", &config(format, sleep)).unwrap()
    };
    let mut plain = engine(None);
    warm(&mut plain, &golden, cell);
    let awake = ask_three(&mut plain, &golden.prompt, cell);
    let mut engine = engine(Some((form, None)));
    warm(&mut engine, &golden, cell);
    let before = engine.report();
    assert_eq!(engine.chunks().unwrap().sleep_cold_chunks(ColdRule::EVERYTHING).unwrap(), 3);
    let asleep = engine.report();
    let (usage, block) = (asleep.chunk_sleep.unwrap(), engine.cache().arena().layout().block_bytes());
    assert_eq!((usage.pieces, usage.device_bytes), (3, chunk_blocks(&before).cached * block));
    assert_eq!(chunk_blocks(&asleep).free, chunk_blocks(&asleep).total, "their blocks are free");
    // Overwrite the freed blocks, so that chunks that are not really woken have other contents.
    let other = (0..20).map(|i| i * 3 % 48).collect::<Vec<u32>>();
    let parts = kvchunk::ChunkedPrompt::new(vec![1], vec![other], vec![2]).unwrap();
    engine.generate(&Request::new(PromptTokens::Chunked(parts)), &mut ()).unwrap();
    let woken = ask_three(&mut engine, &golden.prompt, cell);
    let report = engine.report();
    let counted = report.chunk_cache.unwrap();
    assert_eq!((counted.slept, counted.woken, counted.lost), (3, 3, 0));
    assert_eq!(report.chunk_sleep.unwrap().pieces, 0);
    for answer in [&awake, &woken] {
        assert!(answer.chunks.iter().all(|chunk| chunk.hit));
    }
    (awake, woken, engine)
}

#[rstest]
fn woken_chunks_give_the_logits_of_those_that_never_slept(
    #[values("llama", "mistral", "deepseek-v3")] name: &str,
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values("f32", "bf16", "int8:4")] format: &str,
    #[values("plain", "compressed")] form: &str,
    #[values(ReuseCell::OVERLAPPED_WITH_SYSTEM, ReuseCell::SEQUENTIAL_ALONE)] cell: ReuseCell,
) {
    let (awake, woken, engine) = awake_and_woken(name, execution, format, form, cell);
    assert_eq!((awake.tokens, awake.logits), (woken.tokens, woken.logits));
    assert!(woken.chunks.iter().all(|chunk| chunk.exact));
    assert_eq!(engine.report().chunk_cache.unwrap().approximate_hits, 0);
}

#[rstest]
fn quantised_sleep_marks_its_hits_as_approximate(
    #[values("llama", "deepseek-v3")] name: &str,
    #[values("int8:4", "int4:4", "fp8-e4m3")] form: &str,
) {
    let cell = ReuseCell::default();
    let (awake, woken, mut engine) = awake_and_woken(name, Execution::Immediate, "f32", form, cell);
    assert!(!form.parse::<SleepForm>().unwrap().is_exact());
    assert!(woken.chunks.iter().all(|chunk| !chunk.exact) && awake.chunks.iter().all(|chunk| chunk.exact));
    assert_eq!(engine.report().chunk_cache.unwrap().approximate_hits, 3);
    let gap = distance(&awake.logits[0], &woken.logits[0]);
    assert!(gap > 1e-4 && gap.is_finite(), "{gap}");
    // If everything is recomputed without the stored chunks, the answer is exact.
    engine.chunks().unwrap().clear();
    let again = ask_three(&mut engine, &Golden::load(name).prompt, cell);
    assert!(
        again.chunks.iter().all(|chunk| chunk.exact) && distance(&awake.logits[0], &again.logits[0]) < 1e-5
    );
}

#[test]
fn without_a_place_nothing_sleeps_and_a_full_one_keeps_the_rest_awake() {
    let golden = Golden::load("llama");
    let engine = |sleep| {
        let mut engine =
            Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config("f32", sleep)).unwrap();
        warm(&mut engine, &golden, ReuseCell::default());
        engine
    };
    let none = engine(None);
    assert_eq!(none.report().chunk_sleep, None);
    let refused = none.chunks().unwrap().sleep_cold_chunks(ColdRule::EVERYTHING);
    assert_eq!(refused, Err(kvchunk::Error::NoSleep));
    let block = none.cache().arena().layout().block_bytes();
    // The chunks have 4, 9 and 7 tokens, in blocks of 4.
    let mut small = engine(Some(("plain", Some(4 * block))));
    assert_eq!(small.chunks().unwrap().sleep_cold_chunks(ColdRule::EVERYTHING), Ok(2));
    assert_eq!(small.report().chunk_sleep.unwrap().limit_bytes, 4 * block);
    assert_eq!(small.report().chunk_cache.unwrap().sleeping_chunks, 2);
    assert_eq!(hits(&ask_three(&mut small, &golden.prompt, ReuseCell::default())), 3);
}

#[test]
fn one_tenants_chunks_sleep_and_wake_for_that_tenant() {
    let golden = Golden::load("llama");
    let sleep = Some(("compressed", None));
    let mut engine =
        Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config("f32", sleep)).unwrap();
    let alice = engine.chunks().unwrap().add_tenant(Tenant::new("alice")).unwrap();
    let of = |tenant: Option<&str>| Request {
        tenant: tenant.map(str::to_owned),
        max_new_tokens: 1,
        ..Request::new(PromptTokens::Chunked(golden.prompt.clone()))
    };
    for tenant in [None, Some("alice")] {
        engine.generate(&of(tenant), &mut ()).unwrap();
    }
    let chunks = engine.chunks().unwrap().clone();
    assert_eq!(chunks.sleep_cold_chunks_of(alice, ColdRule::EVERYTHING), Ok(3));
    assert!(engine.generate(&of(None), &mut ()).unwrap().chunks.iter().all(|chunk| chunk.hit));
    assert_eq!(chunks.tenant_metrics(alice).sleeping_chunks, 3);
    assert!(engine.generate(&of(Some("alice")), &mut ()).unwrap().chunks.iter().all(|chunk| chunk.hit));
    assert_eq!(chunks.tenant_metrics(alice).woken, 3);
}

#[test]
fn places_that_make_no_sense_are_refused() {
    let refused = |config: &EngineConfig| {
        Engine::new(load_model("llama"), CpuBackend::new(), b"t", config).unwrap_err().to_string()
    };
    let fixed = EngineConfig { cache: CacheKind::Static, ..config("f32", Some(("plain", None))) };
    assert!(refused(&fixed).contains("static and grouped caches"));
    assert!(refused(&config("int8:4", Some(("int4:4", None)))).contains("already quantised"));
    assert!(refused(&config("f32", Some(("int8:5", None)))).contains('5'));
    let small = config("f32", Some(("plain", Some(10))));
    assert!(refused(&small).contains("10"), "{}", refused(&small));
}
