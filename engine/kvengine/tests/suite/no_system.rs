//! Documents at the beginning of a prompt: without a system prompt, they see nothing but themselves, and are found again.

use std::sync::Arc;

use kvchunk::{ChunkedPrompt, ComputeMode, ContextScaling, PositionStrategy, Recompute, ReuseCell};
use kvengine::{EngineConfig, Generation, PromptTokens, Request, SparseDecode};
use rstest::rstest;

use crate::asking::{engine_of, hits};
use crate::common::{for_every, load_model};
use crate::crowd::assert_same;
use crate::failure::assert_nothing_held;

/// The number of tokens per block.
const BLOCK: usize = 4;

fn documents() -> Vec<Vec<u32>> {
    [(3, 9), (17, 13), (5, 6)]
        .map(|(first, tokens)| (0..tokens).map(|i| 3 + (first * i + first) % 45).collect())
        .into()
}

fn question() -> Vec<u32> {
    (0..7).map(|i| 4 + 5 * i).collect()
}

fn prompt(system: &[u32], documents: Vec<Vec<u32>>) -> ChunkedPrompt {
    ChunkedPrompt::new(system.to_vec(), documents, question()).unwrap()
}

/// Returns a request for documents without a system prompt.
fn request(documents: Vec<Vec<u32>>, strategy: &str, cell: ReuseCell) -> Request {
    Request {
        cell,
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        max_new_tokens: 5,
        ignore_end: true,
        keep_logits: true,
        ..Request::new(PromptTokens::Chunked(prompt(&[], documents)))
    }
}

/// Answers requests in one engine, one after another.
fn answers<'a>(name: &str, requests: impl IntoIterator<Item = &'a Request>) -> Vec<Generation> {
    let mut engine = engine_of(load_model(name), EngineConfig::default());
    let ask = |request: &Request| {
        let answer = engine.generate(request, &mut ()).unwrap();
        assert_nothing_held(&engine);
        answer
    };
    requests.into_iter().map(ask).collect()
}

for_every! {
    fn documents_are_found_again_and_the_answer_stays_the_same(
        #[values("llama-deep", "qwen3", "deepseek-v3")] name: &str,
        cell: every cell,
        #[values("none", "link:2", "question:0.4", "blend:0.5@1", "joint:0.4@1", "full")] strategy: &str,
    ) {
        let first = request(documents(), strategy, cell);
        let alone = answers(name, [&first]);
        let [cold, warm] = answers(name, [&first, &first]).try_into().unwrap();
        let all = documents().concat().len();
        assert_eq!((alone[0].cached_tokens, cold.cached_tokens), (0, 0));
        // With a strategy without evidence, the blocks of the question are found, too.
        assert_eq!(warm.cached_tokens - warm.cached_question, all);
        assert_eq!((hits(&warm), warm.prompt_tokens, warm.prefix_missed), (3, all + question().len(), None));
        assert_same(&warm, &alone[0], "the same documents");
        // Positions belong to the keys of absolute documents.
        if cell.strategy != PositionStrategy::Absolute {
            let turned = request(documents().into_iter().rev().collect(), strategy, cell);
            let found = answers(name, [&first, &turned]).pop().unwrap();
            assert_eq!((hits(&found), found.cached_tokens), (3, all));
            assert_same(&found, &answers(name, [&turned])[0], "in another order");
        }
    }
}

/// The first document has seen all that is in front of it, and all others are recomputed.
#[rstest]
fn with_all_tokens_recomputed_the_answer_is_that_of_full_attention(
    #[values("llama", "llama-deep", "qwen3", "mistral", "deepseek-v3")] name: &str,
    #[values(ReuseCell::SEQUENTIAL_WITH_SYSTEM, ReuseCell::SEQUENTIAL_ALONE)] cell: ReuseCell,
) {
    let full = request(documents(), "full", cell);
    let whole = PromptTokens::Plain(prompt(&[], documents()).flatten());
    let plain = Request { prompt: Arc::new(whole), ..full.clone() };
    let [expected] = answers(name, [&plain]).try_into().unwrap();
    for got in answers(name, [&full, &full]) {
        assert_same(&got, &expected, "full attention");
    }
    let one = request(documents()[..1].to_vec(), "none", ReuseCell::SEQUENTIAL_WITH_SYSTEM);
    let whole = PromptTokens::Plain(prompt(&[], documents()[..1].to_vec()).flatten());
    let plain = Request { prompt: Arc::new(whole), ..one.clone() };
    let [expected] = answers(name, [&plain]).try_into().unwrap();
    for got in answers(name, [&one, &one]) {
        assert_same(&got, &expected, "a single document");
    }
}

#[test]
fn a_system_prompt_is_another_beginning() {
    let cell = ReuseCell::SEQUENTIAL_WITH_SYSTEM;
    let bare = request(documents(), "none", cell);
    let behind =
        Request { prompt: Arc::new(PromptTokens::Chunked(prompt(&[7, 8, 9], documents()))), ..bare.clone() };
    for (first, second) in [(&bare, &behind), (&behind, &bare)] {
        let found = answers("llama-deep", [first, second]).pop().unwrap();
        assert_eq!(found.cached_tokens, 0);
        assert_same(&found, &answers("llama-deep", [second])[0], "the other beginning");
    }
}

/// Settings that say something about what stands in front of documents.
#[rstest]
#[case::scaled(|request: &mut Request| request.scaling = ContextScaling { temperature: 0.8, scale: 0.9 })]
#[case::sparse(|request: &mut Request| request.sparse = Some(SparseDecode { pages: 4, dense_layers: 0 }))]
#[case::sink(|request: &mut Request| request.cell.mode = ComputeMode::Sink(4))]
#[case::behind_decoys(|request: &mut Request| {
    request.cell.mode = ComputeMode::Behind(1);
    let decoys = [vec![30, 31, 32, 33, 34]].into();
    let prompt = prompt(&[], documents()).with_decoys(decoys).unwrap();
    request.prompt = Arc::new(PromptTokens::Chunked(prompt));
})]
fn other_settings_need_no_system_prompt(
    #[case] change: fn(&mut Request),
    #[values("none", "question:0.4")] strategy: &str,
) {
    let mut request = request(documents(), strategy, ReuseCell::SEQUENTIAL_WITH_SYSTEM);
    change(&mut request);
    let [cold, warm] = answers("llama-deep", [&request, &request]).try_into().unwrap();
    assert_eq!((hits(&cold), hits(&warm)), (0, 3));
    assert_same(&warm, &cold, "the second answer");
}

#[test]
fn a_conversation_behind_them_is_found() {
    let first = request(documents(), "none", ReuseCell::SEQUENTIAL_WITH_SYSTEM);
    let answer = answers("llama-deep", [&first]).pop().unwrap();
    let history = [question(), answer.tokens.clone(), vec![40, 41]].concat();
    let turn = PromptTokens::Chunked(ChunkedPrompt::new(Vec::new(), documents(), history).unwrap());
    let second = Request { prompt: Arc::new(turn), ..first.clone() };
    let found = answers("llama-deep", [&first, &second]).pop().unwrap();
    assert_eq!(found.cached_question, (question().len() + answer.tokens.len() - 1) / BLOCK * BLOCK);
    assert_same(&found, &answers("llama-deep", [&second])[0], "the second turn");
}
