//! Recompute strategies: their endpoints are known, and shared blocks are never written.

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::{
    ChunkCacheConfig, ChunkedPrompt, ContextScaling, DeviationOf, PositionPlan, PositionStrategy, Recompute,
    RecomputeStrategy, ReuseCell, Tenant,
};
use kvcore::{KvFormat, Logits, SequenceInput, SequenceStart};
use kvmodel::{Engine, EngineConfig, Generation, PromptTokens, Request};
use rstest::rstest;

use crate::common::{Golden, Lab, Setup, assert_rounded_alike, distance, for_every_model, load_model};

/// An engine in blocks of four tokens with room for everything.
fn engine(name: &str, kv_format: KvFormat) -> Engine {
    let chunks = ChunkCacheConfig { memory_share: 0.3, ..ChunkCacheConfig::default() };
    let config = EngineConfig {
        kv_format,
        block_size: 4,
        kv_memory: Some(8 << 20),
        chunks,
        ..EngineConfig::default()
    };
    Engine::new(load_model(name), CpuBackend::new(), b"t", &config).unwrap()
}

fn ask(engine: &mut Engine, prompt: &ChunkedPrompt, change: impl FnOnce(&mut Request)) -> Generation {
    let mut request = Request::new(PromptTokens::Chunked(prompt.clone()));
    // One token: its logits are the prefill's.
    (request.max_new_tokens, request.keep_logits) = (1, true);
    change(&mut request);
    let generation = engine.generate(&request, &mut ()).unwrap();
    engine.check_invariants().unwrap();
    generation
}

fn with(strategy: &str, cell: ReuseCell) -> impl FnOnce(&mut Request) {
    let strategy: Arc<dyn RecomputeStrategy> = Arc::new(strategy.parse::<Recompute>().unwrap());
    move |request| {
        request.recompute = strategy;
        request.cell = cell;
    }
}

/// Logits of the question's last token in a golden of all rows.
fn last(golden: &[f32], vocabulary: usize) -> &[f32] {
    &golden[golden.len() - vocabulary..]
}

for_every_model! {
    fn rule_4_recomputing_everything_equals_full_attention(
        name: &str,
        // The last one takes all tokens through a checkpoint in the middle of the model.
        #[values("link:100", "blend:1", "full", "blend:0.999@1:both")] strategy: &str,
        #[values("f32", "f16", "bf16")] format: &str,
        #[values(2, 3, 4, 5)] cell: usize
    ) {
        let cell = ReuseCell::ALL[cell];
        let golden = Golden::load(name);
        let mut engine = engine(name, format.parse().unwrap());
        let vocabulary = engine.model().config().vocab_size;
        let full = golden.logits("full");
        // In half precision, what transformers adds by a cache of that type, and as much again.
        let limit = match format {
            "f32" => 1e-4,
            _ => 2.0 * golden.logits(&format!("error_{format}.full"))[0],
        };
        // Nothing cached at first, everything the second time.
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

/// What the cache rounds, the strategies round alike: rows meet the same stored KV in every one.
fn assert_strategies_agree(
    name: &str,
    cells: &[ReuseCell],
    format: &str,
    (strategies, like): (&[&str], &str),
    limit: f32,
) {
    let golden = Golden::load(name);
    let new_engine = |format: &str| {
        let mut engine = engine(name, format.parse().unwrap());
        for cell in cells {
            ask(&mut engine, &golden.prompt, with("none", *cell));
        }
        engine
    };
    let (mut exact, mut rounded) = (new_engine("f32"), new_engine(format));
    let last = |engine: &mut Engine, strategy, cell| {
        ask(engine, &golden.prompt, with(strategy, cell)).logits.remove(0)
    };
    for strategy in strategies {
        let answers: Vec<_> = cells
            .iter()
            .map(|&cell| {
                let (got, expected) = (last(&mut rounded, strategy, cell), last(&mut rounded, like, cell));
                let rounding = distance(&expected, &last(&mut exact, like, cell));
                (distance(&got, &expected), rounding)
            })
            .collect();
        println!("{name} {format}, {strategy} like {like}: {answers:?}");
        if format == "f32" {
            assert!(answers.iter().all(|(gap, _)| *gap < limit), "{strategy}: {answers:?}");
        } else {
            assert_rounded_alike(&answers, limit);
        }
    }
}

for_every_model! {
    fn rule_4_all_strategies_end_at_the_same_logits(
        name: &str,
        #[values("f32", "f16", "bf16", "int8:4")] format: &str
    ) {
        let ends = ["link:100", "blend:1"];
        let (overlapped, sequential) = ReuseCell::ALL.split_at(2);
        assert!(overlapped.iter().all(|cell| cell.strategy == PositionStrategy::Overlapped));
        for cells in [overlapped, sequential] {
            assert_strategies_agree(name, cells, format, (&ends, "full"), 1e-4);
        }
        let (prompt, mut engine) = (Golden::load(name).prompt, engine(name, format.parse().unwrap()));
        for strategy in ["full", "blend:1"] {
            let got = ask(&mut engine, &prompt, with(strategy, ReuseCell::ALL[1]));
            assert_eq!(got.recomputed_tokens, prompt.chunks().iter().map(Vec::len).sum::<usize>());
        }
    }
}

for_every_model! {
    fn rule_4_recomputing_nothing_is_the_cells_own_reference(
        name: &str,
        #[values("f32", "f16", "bf16", "int8:4")] format: &str
    ) {
        let nothing = ["link:0", "blend:0", "random:0"];
        assert_strategies_agree(name, &ReuseCell::ALL, format, (&nothing, "none"), 1e-5);
        let (prompt, mut engine) = (Golden::load(name).prompt, engine(name, format.parse().unwrap()));
        for strategy in nothing {
            assert_eq!(ask(&mut engine, &prompt, with(strategy, ReuseCell::ALL[0])).recomputed_tokens, 0);
        }
    }
}

/// Chooses as a blend does, and remembers; or, without a check, chooses what it was told.
#[derive(Debug, Default)]
struct Spy(std::sync::Mutex<Vec<Vec<u32>>>, Option<kvchunk::DeviationCheck>);
impl RecomputeStrategy for Spy {
    fn name(&self) -> String {
        "spy".to_owned()
    }
    fn check(&self) -> Option<kvchunk::DeviationCheck> {
        self.1
    }
    fn select(
        &self,
        chunks: &[kvchunk::ChunkSpan],
        deviations: Option<&kvchunk::Deviations>,
    ) -> kvchunk::TokenSelection {
        if let Some(deviations) = deviations {
            let blend: Recompute = "blend:0.4@0:both".parse().unwrap();
            let chosen = blend.select(chunks, Some(deviations));
            *self.0.lock().unwrap() = chosen.chunks().to_vec();
            return chosen;
        }
        kvchunk::TokenSelection::new(self.0.lock().unwrap().clone())
    }
}

#[rstest]
fn a_blend_between_its_ends_equals_the_same_tokens_chosen_by_hand(
    #[values("llama", "qwen3", "mistral", "deepseek-v3")] name: &str,
    #[values(0, 1, 2, 3)] cell: usize,
) {
    // At layer 0 rows go on before anything was computed above them: what blend computes for the tokens
    // that it chose is then what any strategy computes for them.
    let (golden, cell) = (Golden::load(name), ReuseCell::ALL[cell]);
    let mut engine = engine(name, "f32".parse().unwrap());
    let check = kvchunk::DeviationCheck { layer: 0, of: kvchunk::DeviationOf::Both };
    let choosing = Arc::new(Spy(std::sync::Mutex::default(), Some(check)));
    let strategy: Arc<dyn RecomputeStrategy> = choosing.clone();
    let blended = ask(&mut engine, &golden.prompt, |request| {
        (request.recompute, request.cell) = (strategy, cell);
    });
    let chosen = choosing.0.lock().unwrap().clone();
    let by_hand: Arc<dyn RecomputeStrategy> = Arc::new(Spy(std::sync::Mutex::new(chosen), None));
    let expected = ask(&mut engine, &golden.prompt, |request| {
        (request.recompute, request.cell) = (by_hand, cell);
    });
    assert!(blended.recomputed_tokens > 0);
    assert!(expected.recomputed_tokens >= blended.recomputed_tokens);
    let gap = distance(&blended.logits[0], &expected.logits[0]);
    assert!(gap < 1e-4, "{name} {cell:?}: {gap}");
}

#[rstest]
fn deeper_checkpoints_cost_more_and_move_rows(
    #[values("llama", "deepseek-v3")] name: &str,
    #[values("f32", "bf16")] format: &str,
) {
    let golden = Golden::load(name);
    let mut engine = engine(name, format.parse().unwrap());
    let cell = ReuseCell::ALL[0];
    let none = ask(&mut engine, &golden.prompt, with("none", cell));
    let costs: Vec<_> = ["none", "link:1", "blend:0.3@0", "blend:0.3@1", "full"]
        .map(|strategy| ask(&mut engine, &golden.prompt, with(strategy, cell)))
        .into_iter()
        .map(|got| (got.prefill_flops, got.recomputed_tokens))
        .collect();
    assert!(costs.windows(2).all(|pair| pair[0].0 < pair[1].0), "{costs:?}");
    assert_eq!((costs[0].1, costs[1].1, costs[2].1), (0, 2, costs[3].1));
    assert!(costs[0].0 < none.prefill_flops, "chunks were computed the first time");
    let past = engine.model().config().num_layers();
    let mut request = Request::new(PromptTokens::Chunked(golden.prompt.clone()));
    request.recompute = Arc::new(Recompute::Blend { share: 0.5, layer: past, of: DeviationOf::default() });
    assert!(engine.generate(&request, &mut ()).unwrap_err().to_string().contains("layer"));
    engine.check_invariants().unwrap();
}

#[test]
fn rule_3_shared_blocks_are_never_written_by_recomputation() {
    let golden = Golden::load("llama");
    for strategy in ["link:3", "blend:0.5@1:both", "random:0.5", "full"] {
        let mut engine = engine("llama", "f32".parse().unwrap());
        ask(&mut engine, &golden.prompt, with("none", ReuseCell::ALL[0]));
        let before = ask(&mut engine, &golden.prompt, with("none", ReuseCell::ALL[0]));
        let between = ask(&mut engine, &golden.prompt, with(strategy, ReuseCell::ALL[0]));
        assert!(distance(&before.logits[0], &between.logits[0]) > 1e-6, "{strategy} changes the answer");
        let after = ask(&mut engine, &golden.prompt, with("none", ReuseCell::ALL[0]));
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
    ask(&mut engine, &golden.prompt, with("none", ReuseCell::ALL[0]));
    for strategy in ["full", "blend:0.9@1"] {
        let mut request = Request::new(PromptTokens::Chunked(golden.prompt.clone()));
        with(strategy, ReuseCell::ALL[0])(&mut request);
        let error = engine.generate(&request, &mut ()).unwrap_err().to_string();
        assert!(error.contains("block"), "{error}");
        let main = engine.report().main.unwrap();
        assert_eq!(main.free + main.cached, main.total);
        engine.check_invariants().unwrap();
    }
    ask(&mut engine, &golden.prompt, with("none", ReuseCell::ALL[0]));
}

#[test]
fn context_scaling_is_plain_at_one_and_refuses_nonsense() {
    let golden = Golden::load("qwen3");
    let mut engine = engine("qwen3", "f32".parse().unwrap());
    ask(&mut engine, &golden.prompt, |_| ());
    let plain = ask(&mut engine, &golden.prompt, |_| ());
    let scaled = |engine: &mut Engine, temperature, scale| {
        let scaling = ContextScaling { temperature, scale };
        ask(engine, &golden.prompt, move |request| request.scaling = scaling)
    };
    let same = scaled(&mut engine, 1.0, 1.0);
    assert_eq!(distance(&plain.logits[0], &same.logits[0]), 0.0);
    for (temperature, scale) in [(0.5, 1.0), (1.0, 0.8), (0.9, 0.9)] {
        let got = scaled(&mut engine, temperature, scale);
        assert!(distance(&plain.logits[0], &got.logits[0]) > 1e-4);
    }
    let mut request = Request::new(PromptTokens::Chunked(golden.prompt.clone()));
    request.scaling = ContextScaling { temperature: f32::NAN, scale: 1.0 };
    assert!(engine.generate(&request, &mut ()).is_err());
    engine.check_invariants().unwrap();
}

/// Logits of the question's last token when every token sees all before it, at overlapped positions: in one
/// pass over sequences that follow one another, without any chunk.
fn unmasked_at_overlapped_positions(name: &str, golden: &Golden) -> Vec<f32> {
    let mut lab = Lab::new(name, Setup::default());
    let prompt = &golden.prompt;
    let plan = PositionPlan::new(prompt, ReuseCell::default(), 256).unwrap();
    let starts = plan.chunks.iter().map(|place| (place.logical_start, place.used_start));
    let starts = [(0, 0)].into_iter().chain(starts).chain([(plan.question_logical, plan.question_position)]);
    let parts = [prompt.system()].into_iter().chain(prompt.chunks().iter().map(Vec::as_slice));
    let (mut batch, mut seen) = (Vec::new(), Vec::new());
    for ((logical, position), tokens) in starts.zip(parts.chain([prompt.question()])) {
        let id = lab.main.create(SequenceStart { logical, position }).unwrap();
        let slots = lab.main.grow(id, tokens.len()).unwrap();
        seen.push(lab.main.segment(id).unwrap());
        batch.push(SequenceInput::new(tokens.to_vec(), logical, position, slots, seen.clone()));
    }
    batch.last_mut().unwrap().logits = Logits::Last;
    let longest = plan.question_position as usize + prompt.question().len();
    lab.forward(&lab.regime(longest).0, &batch).remove(0)
}

for_every_model! {
    fn rule_4_the_overlapped_end_is_the_unmasked_causal_reference(
        name: &str,
        #[values(0, 1)] cell: usize,
        #[values("link:100", "blend:1", "full", "blend:0.999@1")] strategy: &str
    ) {
        let cell = ReuseCell::ALL[cell];
        let golden = Golden::load(name);
        let expected = unmasked_at_overlapped_positions(name, &golden);
        let got = ask(&mut engine(name, "f32".parse().unwrap()), &golden.prompt, with(strategy, cell));
        let gap = distance(&got.logits[0], &expected);
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
