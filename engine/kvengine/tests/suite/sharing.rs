//! One cache for two models, and colliding hashes: an answer never uses another model's KV.

use crate::asking::{ask_three, engine_of, hits};
use crate::common::{Golden, Lab, Setup, distance, for_every, golden_name, model};
use kvbackend_cpu::CpuBackend;
use kvchunk::{
    Acquired, ChunkContext, ChunkHasher, HashAlgorithm, PositionPlan, PositionStrategy, ReuseCell, TenantId,
};
use kvcore::{CacheKind, KeyScope};
use kvengine::{Engine, EngineConfig};
use kvmodel::Model;

fn engine(model: Model) -> Engine {
    engine_of(model, EngineConfig::default())
}

for_every! {
    #[case::other_weights(("llama-linear", "llama-linear"), ("llama-linear", "llama-yarn"))]
    #[case::another_rope(("llama-linear", "llama-linear"), ("llama-yarn", "llama-linear"))]
    #[case::another_family(("llama", "llama"), ("mistral", "mistral"))]
    #[case::latent(("deepseek-v3", "deepseek-v3"), ("deepseek-v3-plain", "deepseek-v3-plain"))]
    fn two_models_in_one_cache_never_serve_each_others_kv(
        #[case] first: (&str, &str),
        #[case] second: (&str, &str),
        cell: every cell,
    ) {
        let prompt = Golden::load("llama").prompt;
        // Each prompt is first a miss and then a hit, in the model's own caches.
        let alone = [first, second].map(|(config, weights)| {
            let mut engine = engine(model(config, weights));
            [(); 2].map(|()| ask_three(&mut engine, &prompt, cell).logits)
        });
        assert!(distance(&alone[0][0][0], &alone[1][0][0]) > 1e-2, "they are other models");
        let a = engine(model(first.0, first.1));
        let b = a.sharing_memory(model(second.0, second.1), b"t").unwrap();
        let mut engines = [a, b];
        for round in 0..2 {
            for (engine, alone) in engines.iter_mut().zip(&alone) {
                let got = ask_three(engine, &prompt, cell);
                assert_eq!(hits(&got), if round == 0 { 0 } else { 3 }, "round {round}");
                assert_eq!(got.cached_tokens > 0, round > 0, "nor is the system prompt another model's");
                assert!(got.logits == alone[round], "round {round}");
            }
        }
        let counted = engines.each_ref().map(|engine| engine.report().chunk_cache.unwrap().cached_chunks);
        assert_eq!(counted, [6, 6], "one index has the chunks of both");
        // Both engines run at the same time, while chunks are added and removed.
        std::thread::scope(|scope| {
            for (engine, alone) in engines.iter_mut().zip(&alone) {
                let prompt = &prompt;
                scope.spawn(move || {
                    for round in 0..20 {
                        if round % 5 == 0 {
                            engine.chunks().unwrap().clear();
                        }
                        let got = ask_three(engine, prompt, cell);
                        let equal = got.logits.iter().zip(&alone[0]).all(|(a, b)| distance(a, b) < 1e-4);
                        assert!(equal, "round {round}");
                    }
                });
            }
        });
        for engine in &engines {
            engine.check_invariants().unwrap();
            let report = engine.report();
            let (main, chunks) = (report.main.unwrap(), report.chunks.unwrap());
            assert_eq!((main.free + main.cached, chunks.shared), (main.total, 0), "nothing is held");
        }
    }
}

#[test]
fn a_model_of_other_extents_or_a_static_cache_is_not_shared() {
    let error = engine(model("llama", "llama")).sharing_memory(model("qwen3", "qwen3"), b"t").unwrap_err();
    assert!(error.to_string().contains("key dimension"), "{error}");
    let fixed = EngineConfig { cache: CacheKind::Static, ..EngineConfig::default() };
    let fixed = Engine::new(model("llama", "llama"), CpuBackend::new(), b"t", &fixed).unwrap();
    assert!(fixed.sharing_memory(model("llama", "llama"), b"t").unwrap_err().to_string().contains("paged"));
    let slept = EngineConfig { enable_sleep_mode: true, kv_memory: Some(4 << 20), ..EngineConfig::default() };
    let slept = Engine::new(model("llama", "llama"), CpuBackend::new(), b"t", &slept).unwrap();
    assert!(slept.sharing_memory(model("llama", "llama"), b"t").unwrap_err().to_string().contains("sleep"));
}

for_every! {
    /// Stores other contents under the same keys that the assembler looks up. If the hash resists collisions,
    /// the contents have other tokens, which only a fault can cause. Otherwise they have the same tokens but
    /// belong to another model or another system prompt, which anyone can cause.
    fn rule_8_a_collision_is_recomputed_through_the_assembler(
        #[values(HashAlgorithm::Blake3, HashAlgorithm::Sha256, HashAlgorithm::Xxh3)] hash: HashAlgorithm,
        cell: every cell,
        #[values(false, true)] under_way: bool,
    ) {
        let (golden, mut lab) = Lab::golden("llama", Setup { hash, ..Setup::default() });
        let (prompt, expected) = (&golden.prompt, golden.logits(golden_name(cell)));
        let plan = PositionPlan::new(prompt, cell, lab.model.config().max_positions).unwrap();
        let root = lab.regime(plan.question_position as usize + prompt.question().len()).1;
        let weak = hash == HashAlgorithm::Xxh3;
        let (mut stored, mut reserved) = (Vec::new(), Vec::new());
        for (tokens, place) in prompt.chunks().iter().zip(&plan.chunks) {
            let hasher = |root, system: &[u32]| {
                let context = ChunkContext::new(root, cell.mode, system);
                let absolute = cell.strategy == PositionStrategy::Absolute;
                let context = if absolute { context.at(place.stored_start) } else { context };
                ChunkHasher::new(hash, context, 4)
            };
            let asked = hasher(root, prompt.system());
            let asked = asked.pieces(tokens, 4096).next().unwrap().hash();
            let (other, tokens) = if !weak {
                (hasher(root, prompt.system()), vec![47; tokens.len()])
            } else if place.len == 4 {
                (hasher(root, &[1, 2, 3]), tokens.clone())
            } else {
                (hasher(KeyScope::new("mallory", b"").root(), prompt.system()), tokens.clone())
            };
            // A chunk that did not see the system prompt is the same with every system prompt.
            if asked == other.pieces(&tokens, 4096).next().unwrap().hash() {
                continue;
            }
            let forged = other.pieces(&tokens, 4096).next().unwrap().with_hash(asked);
            match lab.chunks.acquire(TenantId::default(), &forged, place.stored_start) {
                Acquired::Compute(reservation) if under_way => reserved.push(reservation),
                Acquired::Compute(reservation) => stored.push(reservation.store()),
                other => panic!("{other:?}"),
            }
        }
        let forged = stored.len() + reserved.len();
        assert!(forged >= 2);
        for round in 0..2 {
            let run = lab.run(prompt, cell, true);
            assert_eq!(
                run.reports.iter().filter(|report| !report.hit).count(),
                if round == 0 { 3 } else { forged }
            );
            let gap = distance(&run.logits, &expected);
            assert!(gap < 1e-4, "{gap}");
            let others = stored
                .iter()
                .map(kvchunk::PieceHold::block_ids)
                .chain(reserved.iter().map(kvchunk::ChunkReservation::block_ids));
            let read: Vec<_> = run.held.segments().iter().flat_map(|segment| segment.blocks.to_vec()).collect();
            assert!(others.flat_map(|ids| ids.iter()).all(|block| !read.contains(block)), "its blocks are read");
        }
        assert_eq!(lab.chunks.metrics().uncached as usize, 2 * forged, "computed, and not kept");
        drop((stored, reserved));
        lab.assert_nothing_held();
    }
}
