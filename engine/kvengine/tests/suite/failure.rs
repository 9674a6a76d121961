//! Rule 8 inside the engine: whichever operation of a request fails, the request holds nothing afterwards.
//! The next request can compute the pieces that were reserved, and gets the correct answer.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvchunk::{ColdRule, MissReason, Recompute, ReuseCell, SleepForm};
use kvengine::{ChunkSleep, Engine, EngineConfig, Generation, PromptTokens, Request};
use kvmanager::TierThresholds;
use rstest::rstest;

use crate::common::{Golden, distance, load_model, reordered};
use crate::faulty::Faulty;

/// The kind of request under test.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Case {
    /// An ordinary prompt.
    Plain,
    /// A chunked prompt without any cached chunk.
    Cold,
    /// A chunked prompt whose chunks are cached, except the first one.
    Warm,
    /// A chunked prompt as in [`Warm`](Self::Warm), but the chunks are asleep, so that hits are copied back.
    Asleep,
}

fn engine(name: &str, case: Case, backend: Arc<Faulty>) -> Engine {
    let sleep =
        ChunkSleep { form: SleepForm::Compressed, memory: None, thresholds: TierThresholds::default() };
    let config = EngineConfig {
        block_size: 4,
        kv_memory: Some(1 << 20),
        chunk_sleep: (case == Case::Asleep).then_some(sleep),
        ..EngineConfig::default()
    };
    Engine::new(load_model(name), backend, b"t", &config).unwrap()
}

/// Checks that every block is free or cached, and that no piece has a holder.
pub(crate) fn assert_nothing_held(engine: &Engine) {
    engine.check_invariants().unwrap();
    assert_eq!(engine.cache().num_sequences(), 0);
    let report = engine.report();
    for counts in [report.main, report.chunks].into_iter().flatten() {
        assert_eq!((counts.mutable, counts.shared), (0, 0), "{counts:?}");
    }
    let chunks = engine.chunks().map(kvchunk::ChunkCacheManager::chunks).unwrap_or_default();
    assert!(chunks.iter().all(|chunk| chunk.ref_count == 0));
}

/// Makes the n-th operation of a request fail, for every n, in a new engine each time. Returns the names of
/// the refused operations.
fn refuse_everything(name: &str, case: Case, strategy: &str) -> BTreeSet<&'static str> {
    let prompt = Golden::load(name).prompt;
    let request = Request {
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        cell: ReuseCell::OVERLAPPED_WITH_SYSTEM,
        max_new_tokens: 5,
        keep_logits: true,
        ..Request::new(match case {
            Case::Plain => PromptTokens::Plain(prompt.flatten()),
            _ => PromptTokens::Chunked(prompt.clone()),
        })
    };
    let known = kvchunk::ChunkedPrompt::new(
        prompt.system().to_vec(),
        prompt.chunks()[1..].to_vec(),
        reordered(&prompt).question().to_vec(),
    );
    let known = Request::new(PromptTokens::Chunked(known.unwrap()));
    let prepared = |backend: &Arc<Faulty>| {
        let mut engine = engine(name, case, Arc::clone(backend));
        if matches!(case, Case::Warm | Case::Asleep) {
            engine.generate(&known, &mut ()).unwrap();
        }
        if case == Case::Asleep {
            assert_eq!(engine.chunks().unwrap().sleep_cold_chunks(ColdRule::EVERYTHING), Ok(2));
        }
        engine
    };
    let ask = |engine: &mut Engine| -> Generation {
        let answer = engine.generate(&request, &mut ()).unwrap();
        assert_nothing_held(engine);
        answer
    };
    let backend = Faulty::new();
    let expected = ask(&mut prepared(&backend));
    for n in 0.. {
        let mut engine = prepared(&backend);
        let before = engine.report();
        backend.refuse_after(n);
        let failed = engine.generate(&request, &mut ());
        if backend.disarm() {
            failed.unwrap();
            assert!(n > 20, "only {n} operations");
            break;
        }
        assert_nothing_held(&engine);
        let (before, after) = (before.chunk_cache.unwrap(), engine.report().chunk_cache.unwrap());
        let (stored, error) = match failed {
            // All chunks are stored together when the prefill is done.
            Err(error) => (after.cached_chunks, error.to_string()),
            // A sleeping chunk that cannot be read back is recomputed, so the request does not fail.
            Ok(answer) => {
                assert_eq!((case, after.lost), (Case::Asleep, 1), "{n}");
                let reasons = answer.chunks.iter().filter_map(|chunk| chunk.missed);
                assert_eq!(reasons.collect::<Vec<_>>(), [MissReason::New, MissReason::Damaged], "{n}");
                assert_eq!((after.cached_chunks, &answer.tokens), (prompt.chunks().len(), &expected.tokens));
                (after.cached_chunks, "faulty: one lost".to_owned())
            }
        };
        assert!(error.contains("faulty"), "{n}: {error}");
        let known = [before.cached_chunks, prompt.chunks().len()];
        assert!(known.contains(&stored), "{n}: {before:?}, then {after:?} by {error}");
        let answer = ask(&mut engine);
        assert_eq!(answer.tokens, expected.tokens, "{n}: {error}");
        for (got, expected) in answer.logits.iter().zip(&expected.logits) {
            let gap = distance(got, expected);
            assert!(gap < 1e-5, "{n}: {gap} after {error}");
            // The result is the same as if the failed request had never been made.
            assert!(
                stored > before.cached_chunks || case == Case::Plain || gap == 0.0,
                "{n}: {gap} by {error}"
            );
        }
    }
    backend.refused()
}

#[rstest]
fn rule_8_a_request_that_fails_anywhere_holds_nothing(
    #[values("llama", "deepseek-v3")] name: &str,
    #[values(
        (Case::Plain, "none"),
        (Case::Cold, "none"),
        (Case::Cold, "link:2"),
        (Case::Warm, "none"),
        (Case::Warm, "link:2"),
        (Case::Warm, "blend:0.5@1:both"),
        (Case::Warm, "question:0.4@0"),
        (Case::Asleep, "none")
    )]
    request: (Case, &str),
) {
    let (case, strategy) = request;
    let mut expected: BTreeSet<&str> = ["scatter", "synchronize"].into();
    expected.insert(if name == "deepseek-v3" { "attend_mla" } else { "attend" });
    match strategy {
        "none" if case == Case::Asleep => expected.extend(["swap_blocks"]),
        "none" => {}
        "link:2" => expected.extend(["copy_blocks"]),
        "question:0.4@0" => expected.extend(["attend_mass", "copy_blocks", "read"]),
        _ => expected.extend(["copy_blocks", "gather", "rope", "read"]),
    }
    let refused = refuse_everything(name, case, strategy);
    assert!(refused.is_superset(&expected), "{refused:?}");
    // Passes in host memory do not allocate memory from the backend.
    let allocates = case == Case::Asleep || strategy.starts_with("blend") || strategy.starts_with("question");
    assert_eq!(refused.contains("allocate"), allocates, "{refused:?}");
}
