//! Recompute strategies: their endpoints are known, and shared blocks are never written.

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, PositionStrategy, ReuseCell, Tenant};
use kvengine::{Engine, EngineConfig, PromptTokens, Request};

use crate::asking::{ask, engine, last, with};
use crate::common::{
    Golden, OWN_ERRORS, distance, errors_of, for_every_model, full_of, golden_name, load_model,
};

for_every_model! {
    fn rule_4_recomputing_everything_equals_full_attention(
        name: &str,
        // The last strategy takes all tokens through a checkpoint in the middle of the model.
        #[values("link:100", "blend:1", "full", "blend:0.999@1:both")] strategy: &str,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str,
        #[values(
            ReuseCell::SEQUENTIAL_ALONE,
            ReuseCell::SEQUENTIAL_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_ALONE
        )]
        cell: ReuseCell
    ) {
        let golden = Golden::load(name);
        let mut engine = engine(name, format.parse().unwrap());
        let vocabulary = engine.model().config().vocab_size;
        let full = golden.logits("full");
        let limit = match format {
            "f32" => 1e-4,
            _ => OWN_ERRORS * golden.own_errors(format, &full_of(cell)).pop().unwrap(),
        };
        // Nothing is cached in the first round, everything in the second.
        for round in 0..2 {
            let got = ask(&mut engine, &golden.prompt, with(strategy, cell));
            let gap = distance(&got.logits[0], last(&full, vocabulary));
            assert!(gap < limit, "{strategy} {cell:?}, round {round}: {gap}");
            assert_eq!(got.chunks.iter().all(|chunk| chunk.hit), round == 1);
        }
        let none = ask(&mut engine, &golden.prompt, with("none", cell));
        assert!(distance(&none.logits[0], last(&full, vocabulary)) > 1e-3, "without it, it is another answer");
    }
}

/// Strategies that compute equal results in batches of different shapes.
struct Alike<'a> {
    strategies: &'a [&'a str],
    like: &'a str,
    /// The largest difference between their results in f32.
    limit: f32,
    /// The name of the golden that they all equal in a cell, and the name of the one with the errors of
    /// transformers in other formats.
    golden: fn(ReuseCell) -> (String, String),
}

impl Alike<'_> {
    /// Checks that they agree to `limit` in f32. In other formats each must be as close to f32 as
    /// transformers, which rounds the same numbers, cell by cell.
    fn check(&self, name: &str, cells: &[ReuseCell], format: &str) {
        let golden = Golden::load(name);
        let mut engine = engine(name, format.parse().unwrap());
        for cell in cells {
            ask(&mut engine, &golden.prompt, with("none", *cell));
        }
        let vocabulary = engine.model().config().vocab_size;
        let answer = |engine: &mut Engine, strategy, cell| {
            ask(engine, &golden.prompt, with(strategy, cell)).logits.remove(0)
        };
        for strategy in self.strategies {
            for &cell in cells {
                let got = answer(&mut engine, strategy, cell);
                let expected = answer(&mut engine, self.like, cell);
                let gap = distance(&got, &expected);
                let (reference, errors) = (self.golden)(cell);
                if format == "f32" {
                    assert!(gap < self.limit, "{strategy}, {cell:?}: {gap}");
                    let off = distance(&got, last(&golden.logits(&reference), vocabulary));
                    assert!(off < 1e-4, "{strategy}, {cell:?}: {off} from transformers");
                    continue;
                }
                let own = golden.own_errors(format, &errors).pop().unwrap();
                for logits in [&got, &expected] {
                    let error = distance(logits, last(&golden.logits(&reference), vocabulary));
                    assert!(error <= OWN_ERRORS * own, "{strategy}, {cell:?}: {error} against {own}");
                }
            }
        }
    }
}

for_every_model! {
    fn rule_4_all_strategies_end_at_the_same_logits(
        name: &str,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str
    ) {
        let golden = |cell: ReuseCell| {
            let overlapped = cell.strategy == PositionStrategy::Overlapped;
            (if overlapped { "overlapped_full" } else { "full" }.to_owned(), full_of(cell))
        };
        let ends = Alike { strategies: &["link:100", "blend:1"], like: "full", limit: 1e-4, golden };
        ends.check(name, &ReuseCell::ALL, format);
        let (prompt, mut engine) = (Golden::load(name).prompt, engine(name, format.parse().unwrap()));
        for strategy in ["full", "blend:1"] {
            let got = ask(&mut engine, &prompt, with(strategy, ReuseCell::OVERLAPPED_ALONE));
            assert_eq!(got.recomputed_tokens, prompt.chunks().iter().map(Vec::len).sum::<usize>());
        }
    }
}

for_every_model! {
    fn rule_4_recomputing_nothing_is_the_cells_own_reference(
        name: &str,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str
    ) {
        let nothing = ["link:0", "blend:0", "random:0"];
        let golden = |cell| (golden_name(cell).to_owned(), errors_of(cell).to_owned());
        Alike { strategies: &nothing, like: "none", limit: 1e-5, golden }.check(name, &ReuseCell::ALL, format);
        let (prompt, mut engine) = (Golden::load(name).prompt, engine(name, format.parse().unwrap()));
        for strategy in nothing {
            assert_eq!(ask(&mut engine, &prompt, with(strategy, ReuseCell::OVERLAPPED_WITH_SYSTEM)).recomputed_tokens, 0);
        }
    }
}

#[test]
fn rule_3_shared_blocks_are_never_written_by_recomputation() {
    let golden = Golden::load("llama");
    for strategy in ["link:3", "blend:0.5@1:both", "random:0.5", "full"] {
        let mut engine = engine("llama", "f32".parse().unwrap());
        ask(&mut engine, &golden.prompt, with("none", ReuseCell::OVERLAPPED_WITH_SYSTEM));
        let before = ask(&mut engine, &golden.prompt, with("none", ReuseCell::OVERLAPPED_WITH_SYSTEM));
        let between = ask(&mut engine, &golden.prompt, with(strategy, ReuseCell::OVERLAPPED_WITH_SYSTEM));
        assert!(distance(&before.logits[0], &between.logits[0]) > 1e-6, "{strategy} changes the answer");
        let after = ask(&mut engine, &golden.prompt, with("none", ReuseCell::OVERLAPPED_WITH_SYSTEM));
        assert!(after.chunks.iter().all(|chunk| chunk.hit));
        assert_eq!(distance(&before.logits[0], &after.logits[0]), 0.0, "{strategy}");
        let report = engine.report();
        let main = report.main.unwrap();
        assert_eq!(main.free + main.cached, main.total, "own blocks are free again");
    }
}

#[test]
fn a_pool_too_small_for_copies_is_an_error_that_holds_nothing() {
    let golden = Golden::load("llama");
    let chunks = ChunkCacheConfig { memory_share: 0.7, ..ChunkCacheConfig::default() };
    let block_bytes = 4 * 2 * 2 * 2 * 8 * 4; // tokens, layers, K and V, heads, dim, bytes
    let config =
        EngineConfig { block_size: 4, kv_memory: Some(block_bytes * 22), chunks, ..EngineConfig::default() };
    let mut engine = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
    ask(&mut engine, &golden.prompt, with("none", ReuseCell::OVERLAPPED_WITH_SYSTEM));
    for strategy in ["full", "blend:0.9@1"] {
        let mut request = Request::new(PromptTokens::Chunked(golden.prompt.clone()));
        with(strategy, ReuseCell::OVERLAPPED_WITH_SYSTEM)(&mut request);
        let error = engine.generate(&request, &mut ()).unwrap_err().to_string();
        assert!(error.contains("block"), "{error}");
        let main = engine.report().main.unwrap();
        assert_eq!(main.free + main.cached, main.total);
        engine.check_invariants().unwrap();
    }
    ask(&mut engine, &golden.prompt, with("none", ReuseCell::OVERLAPPED_WITH_SYSTEM));
}

for_every_model! {
    fn rule_4_the_overlapped_end_is_the_unmasked_causal_reference(
        name: &str,
        #[values(ReuseCell::OVERLAPPED_WITH_SYSTEM, ReuseCell::OVERLAPPED_ALONE)] cell: ReuseCell,
        #[values("link:100", "blend:1", "full", "blend:0.999@1")] strategy: &str
    ) {
        let golden = Golden::load(name);
        let mut engine = engine(name, "f32".parse().unwrap());
        let vocabulary = engine.model().config().vocab_size;
        let got = ask(&mut engine, &golden.prompt, with(strategy, cell));
        let gap = distance(&got.logits[0], last(&golden.logits("overlapped_full"), vocabulary));
        assert!(gap < 1e-4, "{strategy} {cell:?}: {gap}");
    }
}

#[test]
fn tenants_share_neither_chunks_nor_prefixes() {
    let golden = Golden::load("llama");
    let with_tenants = || {
        let engine = engine("llama", "f32".parse().unwrap());
        for tag in ["alice", "bob"] {
            engine.chunks().unwrap().add_tenant(Tenant::new(tag)).unwrap();
        }
        engine
    };
    let as_tenant = |engine: &mut Engine, tag: Option<&str>, full_attention: bool| {
        let tenant = tag.map(str::to_owned);
        ask(engine, &golden.prompt, |request| {
            (request.tenant, request.full_attention) = (tenant, full_attention);
        })
    };
    let mut engine = with_tenants();
    for full_attention in [false, true] {
        engine = with_tenants();
        assert_eq!(as_tenant(&mut engine, Some("alice"), full_attention).cached_tokens, 0);
        assert_eq!(as_tenant(&mut engine, Some("bob"), full_attention).cached_tokens, 0, "{full_attention}");
        assert!(as_tenant(&mut engine, Some("alice"), full_attention).cached_tokens > 0);
    }
    as_tenant(&mut engine, None, false);
    assert!(as_tenant(&mut engine, Some(Tenant::DEFAULT_TAG), false).cached_tokens > 0, "the same tenant");
    for prompt in [PromptTokens::Plain(vec![1, 2]), PromptTokens::Chunked(golden.prompt.clone())] {
        let request = Request { tenant: Some("carol".to_owned()), ..Request::new(prompt) };
        assert!(engine.generate(&request, &mut ()).unwrap_err().to_string().contains("carol"));
    }
    engine.check_invariants().unwrap();
}
