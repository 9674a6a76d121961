//! Conversations behind documents: a later turn computes only what is new, unless anything in front of it differs.

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ChunkedPrompt, ContextScaling, Recompute, ReuseCell, Tenant};
use kvcore::ManualClock;
use kvengine::{
    DEFAULT_SWAP_MEMORY, Engine, EngineConfig, Generation, PromptTokens, Request, Sampling, Scheduling,
    SparseDecode,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rstest::rstest;

use crate::asking::engine_of;
use crate::common::{for_every, load_model};
use crate::crowd::{self, VOCABULARY, answer_all, assert_each, assert_same, engine_keeping};
use crate::failure::assert_nothing_held;

/// The number of tokens per block.
const BLOCK: usize = 4;
/// The number of tokens of an answer.
const ANSWER: usize = 6;

fn text(seed: u64, tokens: usize) -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..tokens).map(|_| rng.random_range(3..VOCABULARY)).collect()
}

/// The documents of all conversations. None of them fills its last block.
fn documents() -> Vec<Vec<u32>> {
    vec![text(1, 9), text(2, 13), text(3, 6)]
}

/// A conversation behind documents, with everything that its request says.
#[derive(Clone)]
struct Chat {
    system: Vec<u32>,
    documents: Vec<Vec<u32>>,
    history: Vec<u32>,
    request: Request,
}

impl Chat {
    fn new(cell: ReuseCell, strategy: &str) -> Self {
        let request = Request::new(PromptTokens::Plain(vec![3]));
        let recompute = Arc::new(strategy.parse::<Recompute>().unwrap());
        let request = Request {
            cell,
            recompute,
            max_new_tokens: ANSWER,
            ignore_end: true,
            keep_logits: true,
            ..request
        };
        Self { system: text(4, 7), documents: documents(), history: text(5, 11), request }
    }

    fn request(&self) -> Request {
        let (system, documents) = (self.system.clone(), self.documents.clone());
        let prompt = ChunkedPrompt::new(system, documents, self.history.clone()).unwrap();
        Request { prompt: Arc::new(PromptTokens::Chunked(prompt)), ..self.request.clone() }
    }

    fn ask(&self, engine: &mut Engine) -> Generation {
        let answer = engine.generate(&self.request(), &mut ()).unwrap();
        assert_nothing_held(engine);
        answer
    }

    /// Returns the next turn: the conversation with an answer and another question.
    fn next(&self, answer: &Generation) -> Self {
        let history = [&self.history[..], &answer.tokens, &text(6, 5)].concat();
        Self { history, ..self.clone() }
    }
}

/// Returns the number of tokens in the full blocks of a turn that has been answered. The last token of an answer is
/// never computed.
fn kept(turn: &Chat) -> usize {
    (turn.history.len() + ANSWER - 1) / BLOCK * BLOCK
}

fn engine(name: &str) -> Engine {
    engine_of(load_model(name), EngineConfig::default())
}

/// Counts the tokens that an engine computes for a request.
fn computed(engine: &mut Engine, request: Request) -> usize {
    let _answer = engine.submit(request).unwrap();
    let mut tokens = 0;
    loop {
        let step = engine.step().unwrap();
        tokens += step.tokens;
        if step.is_idle() {
            return tokens;
        }
    }
}

for_every! {
    fn the_next_turn_computes_what_is_new_and_has_the_same_answer(
        #[values("llama", "llama-deep", "qwen3", "mistral", "deepseek-v3", "llama-partial")] name: &str,
        cell: every cell,
        #[values("none", "link:2", "full", "random:0.5@3")] strategy: &str,
    ) {
        let first = Chat::new(cell, strategy);
        let mut warm = engine(name);
        let answer = first.ask(&mut warm);
        assert_eq!((answer.cached_tokens, answer.cached_question), (0, 0));
        let second = first.next(&answer);
        let found = second.ask(&mut warm);
        let expected = second.ask(&mut engine(name));
        let before = first.system.len() + documents().concat().len();
        assert_eq!(found.cached_question, kept(&first), "whole blocks of the first turn, with its answer");
        assert_eq!(found.cached_tokens, before + found.cached_question);
        assert_eq!(expected.cached_tokens, 0);
        assert_same(&found, &expected, "the second turn");
        // The third turn finds the second one, and the engine's own count says so.
        let third = second.next(&found);
        let fresh = third.history.len() - kept(&second) + found.recomputed_tokens + ANSWER - 1;
        assert_eq!(computed(&mut warm, third.request()), fresh);
        assert_nothing_held(&warm);
        // Without the caches, nothing is found, and nothing is left behind.
        let mut apart = engine(name);
        let none = Chat { request: Request { reuse: false, ..third.request.clone() }, ..third.clone() };
        none.ask(&mut apart);
        assert_eq!(third.ask(&mut apart).cached_tokens, 0);
    }
}

/// Logits depend on the number of rows of each pass, by rounding. Here, all engines divide their work in the same way, so
/// that what is found must be what the other engine computes in its place, bit by bit.
#[rstest]
fn in_passes_of_the_same_rows_the_logits_are_the_same_to_the_bit(
    #[values("llama", "llama-deep", "qwen3", "mistral", "deepseek-v3")] name: &str,
    #[values(ReuseCell::OVERLAPPED_ALONE, ReuseCell::SEQUENTIAL_ALONE, ReuseCell::ABSOLUTE_ALONE)]
    cell: ReuseCell,
    #[values("none", "link:4")] strategy: &str,
    #[values("f32", "bf16", "int8:8")] format: &str,
) {
    // Four tokens of each of three documents fill a pass, and so does the first turn.
    const ROWS: usize = 12;
    let scheduling = Scheduling { step_tokens: ROWS, ..Scheduling::default() };
    let kv_format = format.parse().unwrap();
    let config = || EngineConfig { kv_format, scheduling, ..EngineConfig::default() };
    let mut first = Chat::new(cell, strategy);
    (first.history, first.request.max_new_tokens) = (text(5, ROWS), 1);
    let second = Chat { history: [&first.history[..], &text(6, 7)].concat(), ..first.clone() };
    let [mut warm, mut cold] = [config(), config()].map(|config| {
        let mut engine = engine_of(load_model(name), config);
        Chat { history: text(7, 3), ..first.clone() }.ask(&mut engine);
        engine
    });
    first.ask(&mut warm);
    let (found, expected) = (second.ask(&mut warm), second.ask(&mut cold));
    assert_eq!((found.cached_question, expected.cached_question), (ROWS, 0));
    assert_eq!((found.tokens, found.logits), (expected.tokens, expected.logits));
}

/// Changes one thing in front of the conversation.
type Change = fn(&mut Chat);

#[rstest]
#[case::order(|chat: &mut Chat| chat.documents.reverse())]
#[case::edited(|chat: &mut Chat| chat.documents[1][12] ^= 1)]
#[case::one_more(|chat: &mut Chat| chat.documents.push(text(9, 5)))]
#[case::one_less(|chat: &mut Chat| drop(chat.documents.pop()))]
#[case::cut_elsewhere(|chat: &mut Chat| {
    let last = chat.documents[0].pop().unwrap();
    chat.documents[1].insert(0, last);
})]
#[case::system(|chat: &mut Chat| chat.system[6] ^= 1)]
#[case::salt(|chat: &mut Chat| chat.request.cache_salt = Some(b"salt".as_slice().into()))]
#[case::tenant(|chat: &mut Chat| chat.request.tenant = Some("bob".to_owned()))]
#[case::strategy(|chat: &mut Chat| chat.request.recompute = Arc::new(Recompute::Link { tokens: 3 }))]
#[case::no_strategy(|chat: &mut Chat| chat.request.recompute = Arc::new(Recompute::None))]
#[case::mode(|chat: &mut Chat| chat.request.cell = ReuseCell::SEQUENTIAL_ALONE)]
#[case::positions(|chat: &mut Chat| chat.request.cell = ReuseCell::OVERLAPPED_WITH_SYSTEM)]
#[case::temperature(|chat: &mut Chat| chat.request.scaling = ContextScaling { temperature: 0.9, scale: 1.0 })]
#[case::scale(|chat: &mut Chat| chat.request.scaling = ContextScaling { temperature: 1.0, scale: 0.9 })]
#[case::ordinary(|chat: &mut Chat| chat.request.full_attention = true)]
#[case::first_token(|chat: &mut Chat| chat.history[0] ^= 1)]
fn a_conversation_is_found_only_behind_the_same_beginning(
    #[values("llama", "llama-deep")] name: &str,
    #[case] change: Change,
) {
    let fresh = || {
        let engine = engine(name);
        for tag in ["alice", "bob"] {
            engine.chunks().unwrap().add_tenant(Tenant::new(tag)).unwrap();
        }
        engine
    };
    let mut engine = fresh();
    let mut first = Chat::new(ReuseCell::SEQUENTIAL_WITH_SYSTEM, "link:2");
    first.request.tenant = Some("alice".to_owned());
    let answer = first.ask(&mut engine);
    let second = first.next(&answer);
    let mut other = second.clone();
    change(&mut other);
    let got = other.ask(&mut engine);
    // In deeper layers, keys and values depend on everything in front of them.
    assert_same(&got, &other.ask(&mut fresh()), "the other conversation");
    if other.request.full_attention {
        // All tokens of an ordinary prompt are counted here. It shares whole blocks of the system prompt.
        assert_eq!(got.cached_tokens, other.system.len() / BLOCK * BLOCK);
    }
    assert_eq!(got.cached_question, 0, "{} cached tokens", got.cached_tokens);
    // What the other conversation has left is its own as well.
    let found = second.ask(&mut engine);
    assert_eq!(found.cached_question, kept(&first));
    assert_same(&found, &second.ask(&mut fresh()), "the same conversation");
}

/// With absolute positions, documents that saw the system prompt are at the same positions as those that did not.
#[rstest]
#[case::sequential(ReuseCell::SEQUENTIAL_WITH_SYSTEM, ReuseCell::SEQUENTIAL_ALONE)]
#[case::absolute(ReuseCell::ABSOLUTE_WITH_SYSTEM, ReuseCell::ABSOLUTE_ALONE)]
fn the_same_documents_that_saw_other_tokens_are_another_beginning(
    #[case] with_system: ReuseCell,
    #[case] alone: ReuseCell,
    #[values("llama", "llama-deep")] name: &str,
    #[values("none", "link:2")] strategy: &str,
) {
    for (cell, other) in [(with_system, alone), (alone, with_system)] {
        let mut engine = engine(name);
        let first = Chat::new(cell, strategy);
        let answer = first.ask(&mut engine);
        let mut second = first.next(&answer);
        for (cell, reused) in [(other, 0), (cell, kept(&first))] {
            second.request.cell = cell;
            let found = second.ask(&mut engine);
            assert_eq!(found.cached_question, reused);
            assert_same(&found, &second.ask(&mut self::engine(name)), "a model of its own");
        }
    }
}

/// With a strategy that needs evidence, a later turn chooses other tokens, or its whole question is computed in a blend.
#[rstest]
fn a_question_that_takes_part_in_the_choice_leaves_nothing_in_the_pool(
    #[values("question:0.4", "question:0.4@0", "joint:0.4@1", "blend:0.5@1")] strategy: &str,
    #[values("llama", "llama-deep")] name: &str,
) {
    let cached = |engine: &Engine| engine.report().main.unwrap().cached;
    let mut warm = engine(name);
    let first = Chat::new(ReuseCell::SEQUENTIAL_ALONE, strategy);
    // Only the system prompt stays.
    let system = first.system.len().div_ceil(BLOCK);
    let answer = first.ask(&mut warm);
    assert_eq!(cached(&warm), system);
    let second = first.next(&answer);
    for (turn, expected) in [(&first, answer), (&second, second.ask(&mut engine(name)))] {
        let got = turn.ask(&mut warm);
        assert_eq!((got.cached_question, cached(&warm)), (0, system));
        assert_eq!(got.cached_tokens, turn.system.len() + documents().concat().len());
        assert_same(&got, &expected, "what is computed again");
    }
    // Nor does it leave anything to requests with the strategy `none`, which keep their conversations.
    let none = Chat { request: Chat::new(first.request.cell, "none").request, ..second };
    assert_eq!(none.ask(&mut warm).cached_question, 0);
    assert_eq!(cached(&warm), system + kept(&none) / BLOCK);
}

/// If the share leaves no choice, the question takes no part in it.
#[rstest]
fn a_share_of_all_or_nothing_keeps_the_conversation(
    #[values("question:0", "question:1", "blend:1")] strategy: &str,
) {
    let first = Chat::new(ReuseCell::SEQUENTIAL_ALONE, strategy);
    let mut warm = engine("llama-deep");
    let second = first.next(&first.ask(&mut warm));
    let found = second.ask(&mut warm);
    assert_eq!(found.cached_question, kept(&first));
    assert_same(&found, &second.ask(&mut engine("llama-deep")), "the second turn");
}

/// Returns an engine for the crowd's model with a pool of so many blocks.
fn small_engine(blocks: usize, swap_memory: usize) -> Engine {
    let chunks = ChunkCacheConfig { memory_share: 0.25, ..ChunkCacheConfig::default() };
    let (model, scheduling) = (load_model(crowd::MODEL), Scheduling::default());
    let clock = ManualClock::default();
    engine_keeping(chunks, model, CpuBackend::new(), blocks, scheduling, swap_memory, &clock)
}

/// After a preemption, the samples compute the question again, each in a sequence of its own.
#[rstest]
fn preempted_samples_of_a_choosing_question_leave_nothing_to_the_same_documents_as_they_are_stored(
    #[values("blend:0.5@1", "question:0.4")] strategy: &str,
) {
    let mut blend = Chat::new(ReuseCell::SEQUENTIAL_ALONE, strategy);
    let none = Chat { request: Chat::new(blend.request.cell, "none").request, ..blend.clone() };
    (blend.request.samples, blend.request.max_new_tokens) = (3, 24);
    let requests: Vec<Request> = (0..6)
        .map(|seed| {
            let sampling = Sampling { temperature: 0.9, seed, ..Sampling::default() };
            Request { sampling, ..blend.request() }
        })
        .collect();
    // Without host memory, what is preempted is computed again.
    let mut small = small_engine(120, 0);
    let (step, reads) = answer_all(&mut small, &requests);
    assert!(step.preemptions > 0, "the pool is too large for this test");
    assert_each(&reads, &requests, crowd::alone);
    assert_eq!(none.ask(&mut small).cached_question, 0);
}

#[test]
fn nothing_is_kept_behind_an_approximate_document() {
    let chunks =
        ChunkCacheConfig { memory_share: 0.3, cross_system_reuse: true, ..ChunkCacheConfig::default() };
    let config =
        EngineConfig { block_size: BLOCK, kv_memory: Some(8 << 20), chunks, ..EngineConfig::default() };
    let mut engine = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
    let chat = Chat::new(ReuseCell::SEQUENTIAL_WITH_SYSTEM, "none");
    chat.ask(&mut engine);
    let other = Chat { system: text(8, 7), ..chat };
    for turn in ["first", "second"] {
        let got = other.ask(&mut engine);
        assert!(got.chunks.iter().all(|chunk| chunk.hit && !chunk.exact), "{turn}");
        assert_eq!(got.cached_question, 0, "{turn}");
    }
}

#[test]
fn the_approximate_answers_of_sparse_decoding_are_found_by_nobody() {
    let mut engine = engine("llama");
    let mut sparse = Chat::new(ReuseCell::SEQUENTIAL_ALONE, "none");
    sparse.request.sparse = Some(SparseDecode { pages: 4, dense_layers: 0 });
    let answer = sparse.ask(&mut engine);
    let next =
        Chat { request: Chat::new(ReuseCell::SEQUENTIAL_ALONE, "none").request, ..sparse.next(&answer) };
    assert_eq!(next.ask(&mut engine).cached_question, 0);
}

#[test]
fn a_conversation_is_forgotten_with_the_other_prefixes() {
    let mut engine = engine("llama");
    let chat = Chat::new(ReuseCell::SEQUENTIAL_ALONE, "none");
    let answer = chat.ask(&mut engine);
    assert_eq!(chat.next(&answer).ask(&mut engine).cached_question, kept(&chat));
    engine.cache().as_paged().unwrap().pool().clear_cached();
    assert_eq!(chat.ask(&mut engine).cached_question, 0);
}

/// Returns the turns of many conversations over a few sets of documents, each turn with all turns before it, in an order
/// in which a turn comes behind the one that it continues.
fn traffic(seed: u64, turns: usize) -> Vec<Request> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut chats: Vec<Chat> = (0..8)
        .map(|i| {
            let strategy =
                ["none", "link:2", "none", "question:0.4", "none", "blend:0.5@1", "full", "link:2"][i];
            let cells = [ReuseCell::SEQUENTIAL_ALONE, ReuseCell::OVERLAPPED_WITH_SYSTEM];
            let mut chat = Chat::new(cells[i % 2], strategy);
            chat.documents.rotate_left(i / 2 % 3);
            chat.documents.truncate(1 + i % 3);
            chat.history = text(20 + i as u64 / 2, 5);
            chat
        })
        .collect();
    (0..turns)
        .map(|_| {
            let chat = &mut chats[rng.random_range(0..8)];
            if chat.history.len() > 40 {
                chat.history.truncate(rng.random_range(4..9));
            }
            chat.history.extend(text(rng.random_range(30..34), rng.random_range(1..9)));
            let mut request = chat.request();
            request.ignore_end = false;
            request.max_new_tokens = rng.random_range(1..8);
            request.lookup = rng.random_range(0..3);
            match rng.random_range(0..8) {
                0 | 1 => {
                    request.samples = 3;
                    request.sampling = Sampling { temperature: 0.9, seed: 7, ..Sampling::default() };
                }
                2 => request.forced = Some(text(40, 5).into()),
                _ => {}
            }
            request
        })
        .collect()
}

#[rstest]
fn many_conversations_in_a_small_pool_have_the_answers_of_one_alone(#[values(1, 2, 3, 4)] seed: u64) {
    let requests = traffic(seed, 96);
    let mut small = small_engine(120, DEFAULT_SWAP_MEMORY);
    let (mut found, mut preempted) = (0, 0);
    for requests in requests.chunks(24) {
        let (step, reads) = answer_all(&mut small, requests);
        assert_each(&reads, requests, crowd::alone);
        assert_nothing_held(&small);
        found += reads.iter().map(|read| read.samples()[0].cached_question).sum::<usize>();
        preempted = step.preemptions;
    }
    assert!(found > 100, "{found} tokens of questions were found");
    assert!(preempted > 0, "the pool is too large for this test");
    let counts = small.report().main.unwrap();
    assert_eq!(counts.free + counts.evictable, counts.total, "{counts:?}");
}
