//! Recompute strategies: recomputing nothing or everything has a known result, and shared blocks are never
//! written.

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, PositionStrategy, ReuseCell, Tenant};
use kvcore::KeyForm;
use kvengine::{Engine, EngineConfig, PromptTokens, Request};

use crate::asking::{ask, engine, engine_with, last, with};
use crate::common::{Golden, OWN_ERRORS, distance, errors_of, for_every, full_of, golden_name, load_model};

/// Checks that a strategy that recomputes everything gives the logits of full attention, whether nothing or
/// everything is cached.
pub(crate) fn assert_everything_is_recomputed(
    (name, format, keys): (&str, &str, KeyForm),
    strategy: &str,
    cell: ReuseCell,
) -> Engine {
    let golden = Golden::load(name);
    let mut engine = engine_with(name, format.parse().unwrap(), keys);
    let limit = match format {
        "f32" => 1e-4,
        _ => OWN_ERRORS * golden.own_errors(&cache_of(format, keys), &full_of(cell)).pop().unwrap(),
    };
    let (full, vocabulary) = (golden.logits("full"), engine.model().config().vocab_size);
    for round in 0..2 {
        let got = ask(&mut engine, &golden.prompt, with(strategy, cell));
        let gap = distance(&got.logits[0], last(&full, vocabulary));
        assert!(gap < limit, "{strategy} {cell:?}, round {round}: {gap} against {limit}");
        assert_eq!(got.chunks.iter().all(|chunk| chunk.hit), round == 1);
    }
    engine
}

/// Returns the name under which the golden errors of a cache are stored.
fn cache_of(format: &str, keys: KeyForm) -> String {
    format!("{format}{}", if keys == KeyForm::Unrotated { "_unrotated" } else { "" })
}

for_every! {
    fn rule_4_recomputing_everything_equals_full_attention(
        name: every model,
        // The last strategy passes all tokens through a checkpoint in the middle of the model.
        #[values("link:100", "blend:1", "full", "blend:0.999@1:both")] strategy: &str,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str,
        cell: sequential cell
    ) {
        let mut engine = assert_everything_is_recomputed((name, format, KeyForm::Rotated), strategy, cell);
        let (golden, vocabulary) = (Golden::load(name), engine.model().config().vocab_size);
        let none = ask(&mut engine, &golden.prompt, with("none", cell));
        let gap = distance(&none.logits[0], last(&golden.logits("full"), vocabulary));
        assert!(gap > 1e-3, "without it, it is another answer");
    }
}

fn pairs<'a>(strategies: &'a [&'a str]) -> impl Iterator<Item = (&'a str, ReuseCell)> {
    strategies.iter().flat_map(|strategy| ReuseCell::ALL.map(|cell| (*strategy, cell)))
}

/// Strategies that compute equal results in batches of different shapes.
struct Alike<'a> {
    strategies: &'a [&'a str],
    like: &'a str,
    /// The maximum difference between the strategies' results in f32.
    limit: f32,
    /// The name of the golden that all strategies match in a cell, and the name of the golden with the errors
    /// of transformers in other formats.
    golden: fn(ReuseCell) -> (String, String),
}

impl Alike<'_> {
    /// Checks that the strategies agree within `limit` in f32. In other formats, each strategy must be as
    /// close to f32 as transformers, which rounds the same numbers, in every cell.
    fn check(&self, name: &str, format: &str, keys: KeyForm) -> Engine {
        let golden = Golden::load(name);
        let mut engine = engine_with(name, format.parse().unwrap(), keys);
        let vocabulary = engine.model().config().vocab_size;
        let answer = |engine: &mut Engine, strategy, cell| {
            ask(engine, &golden.prompt, with(strategy, cell)).logits.remove(0)
        };
        let assert_near = |logits: &[f32], cell: ReuseCell| {
            let (reference, errors) = (self.golden)(cell);
            let limit = match format {
                "f32" => 1e-4,
                _ => OWN_ERRORS * golden.own_errors(&cache_of(format, keys), &errors).pop().unwrap(),
            };
            let gap = distance(logits, last(&golden.logits(&reference), vocabulary));
            assert!(gap <= limit, "{cell:?}: {gap} from transformers, against {limit}");
        };
        for cell in ReuseCell::ALL {
            let cold = answer(&mut engine, "none", cell);
            if self.like == "none" {
                assert_near(&cold, cell);
            }
        }
        for (strategy, cell) in pairs(self.strategies) {
            let got = answer(&mut engine, strategy, cell);
            let expected = answer(&mut engine, self.like, cell);
            let gap = distance(&got, &expected);
            assert!(format != "f32" || gap < self.limit, "{strategy}, {cell:?}: {gap}");
            assert_near(&got, cell);
            assert_near(&expected, cell);
        }
        engine
    }
}

/// Checks that strategies that recompute nothing give the expected logits of each cell.
pub(crate) fn assert_nothing_is_recomputed(name: &str, format: &str, keys: KeyForm) {
    let nothing = ["link:0", "blend:0", "random:0", "none"];
    let golden = |cell| (golden_name(cell).to_owned(), errors_of(cell).to_owned());
    let mut engine =
        Alike { strategies: &nothing, like: "none", limit: 1e-5, golden }.check(name, format, keys);
    let prompt = Golden::load(name).prompt;
    for (strategy, cell) in pairs(&nothing) {
        assert_eq!(
            ask(&mut engine, &prompt, with(strategy, cell)).recomputed_tokens,
            0,
            "{strategy} {cell:?}"
        );
    }
}

for_every! {
    fn rule_4_all_strategies_end_at_the_same_logits(
        name: every model,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str
    ) {
        let golden = |cell: ReuseCell| {
            let overlapped = cell.strategy == PositionStrategy::Overlapped;
            (if overlapped { "overlapped_full" } else { "full" }.to_owned(), full_of(cell))
        };
        let ends = Alike { strategies: &["link:100", "blend:1"], like: "full", limit: 1e-4, golden };
        let mut engine = ends.check(name, format, KeyForm::Rotated);
        let prompt = Golden::load(name).prompt;
        for strategy in ["full", "blend:1"] {
            let got = ask(&mut engine, &prompt, with(strategy, ReuseCell::OVERLAPPED_ALONE));
            assert_eq!(got.recomputed_tokens, prompt.chunks().iter().map(Vec::len).sum::<usize>());
        }
    }

    fn rule_4_recomputing_nothing_is_the_cells_own_reference(
        name: every model,
        #[values("f32", "f16", "bf16", "int8:4", "int4:4", "fp8-e4m3", "fp8-e5m2")] format: &str
    ) {
        assert_nothing_is_recomputed(name, format, KeyForm::Rotated);
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

for_every! {
    fn rule_4_the_overlapped_end_is_the_unmasked_causal_reference(
        name: every model,
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
