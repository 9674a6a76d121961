//! Helpers for tests with many requests at once: requests of all kinds, engines of any size, and partial
//! answers.

use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ChunkedPrompt, Recompute};
use kvcore::{Backend, ManualClock};
use kvengine::{
    Answer, AnswerEvent, DEFAULT_SWAP_MEMORY, Engine, EngineConfig, Error, Generation, PreemptionCosts,
    PromptTokens, Request, Sampling, Scheduling, Step,
};
use kvmodel::Model;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::common::{folder, load_model};
use crate::failure;

/// The size of the model's vocabulary, and the number of its positions.
pub(crate) const VOCABULARY: u32 = 48;
pub(crate) const MODEL: &str = "llama";
/// Two logits that differ by less than this may swap places in another batch.
pub(crate) const ROUNDING: f32 = 1e-4;

/// Returns an engine whose pools have `blocks` blocks of four tokens.
pub(crate) fn engine(blocks: usize, scheduling: Scheduling) -> Engine {
    engine_on(CpuBackend::new(), blocks, scheduling, DEFAULT_SWAP_MEMORY)
}

/// Returns an engine on `backend`, with `swap_memory` bytes of host memory for preempted requests.
pub(crate) fn engine_on(
    backend: Arc<dyn Backend>,
    blocks: usize,
    scheduling: Scheduling,
    swap_memory: usize,
) -> Engine {
    engine_of(load_model(MODEL), backend, blocks, scheduling, swap_memory, &ManualClock::default())
}

/// Returns such an engine for a model with the same extents, with a clock that only the test advances.
pub(crate) fn engine_of(
    model: Model,
    backend: Arc<dyn Backend>,
    blocks: usize,
    scheduling: Scheduling,
    swap_memory: usize,
    clock: &ManualClock,
) -> Engine {
    let chunks = ChunkCacheConfig { memory_share: 0.25, ..ChunkCacheConfig::default() };
    engine_keeping(chunks, model, backend, blocks, scheduling, swap_memory, clock)
}

/// Returns such an engine with other settings for chunks.
pub(crate) fn engine_keeping(
    chunks: ChunkCacheConfig,
    model: Model,
    backend: Arc<dyn Backend>,
    blocks: usize,
    scheduling: Scheduling,
    swap_memory: usize,
    clock: &ManualClock,
) -> Engine {
    let mut config =
        EngineConfig { block_size: 4, chunks, scheduling, swap_memory, ..EngineConfig::default() };
    config.kv_memory = Some(1 << 20);
    // An engine of any size shows the number of bytes per block.
    let probe = Engine::new(load_model(MODEL), CpuBackend::new(), b"t", &config).unwrap();
    let bytes = probe.cache().arena().layout().shape();
    let per_block = (1 << 20) / bytes.num_blocks;
    config.kv_memory = Some(per_block * blocks);
    let clock = Arc::new(clock.clone());
    let mut engine = Engine::with_clock(model, backend, b"t", &config, clock).unwrap();
    engine.set_preemption_costs(SWAP_LONG);
    engine
}

/// Copying a block costs as much as computing three of its four tokens, so only long sequences without shared
/// blocks are copied.
pub(crate) const SWAP_LONG: PreemptionCosts =
    PreemptionCosts { token: Duration::from_millis(4), block: Duration::from_millis(12) };

pub(crate) fn roomy() -> Engine {
    engine(4096, Scheduling::default())
}

/// Returns `count` requests of all kinds in turn.
pub(crate) fn mixed(count: usize, seed: u64) -> Vec<Request> {
    assert!(folder(MODEL).exists());
    let mut rng = StdRng::seed_from_u64(seed);
    let mut text = |least: usize, most: usize| -> Vec<u32> {
        let len = rng.random_range(least..=most);
        (0..len).map(|_| rng.random_range(3..VOCABULARY)).collect()
    };
    let documents: Vec<Vec<u32>> = (0..6).map(|_| text(3, 9)).collect();
    let systems: Vec<Vec<u32>> = (0..2).map(|_| text(4, 7)).collect();
    (0..count)
        .map(|i| {
            let chunked = || {
                let chunks = vec![documents[i % 6].clone(), documents[(i / 2 + 1) % 6].clone()];
                ChunkedPrompt::new(systems[i % 2].clone(), chunks, vec![3 + i as u32 % 40, 5, 9]).unwrap()
            };
            let prompt = match i % 4 {
                0 | 3 => PromptTokens::Plain(text(2, 24)),
                _ => PromptTokens::Chunked(chunked()),
            };
            let mut request = Request { max_new_tokens: 1 + i % 12, ..Request::new(prompt) };
            let strategies = ["none", "link:2", "question:0.4", "blend:0.5@1"];
            request.recompute = Arc::new(strategies[i / 4 % 4].parse::<Recompute>().unwrap());
            if i % 4 == 3 {
                request.samples = 4;
                request.sampling = Sampling { temperature: 0.9, seed: i as u64, ..Sampling::default() };
            }
            if i % 3 == 1 {
                request.lookup = 1 + i % 5;
            }
            if i % 16 == 4 {
                request.forced = Some((0..6).map(|j| 3 + (i as u32 * 7 + j) % 40).collect());
            }
            request.keep_logits = true;
            request.priority = i32::from(i % 16 == 5);
            request
        })
        .collect()
}

/// The part of an answer that has arrived so far.
#[derive(Debug, Default)]
pub(crate) struct Read {
    pub(crate) tokens: Vec<Vec<u32>>,
    pub(crate) ends: Vec<Option<Generation>>,
    pub(crate) error: Option<Error>,
}

impl Read {
    pub(crate) fn new(request: &Request) -> Self {
        Self { tokens: vec![vec![]; request.samples], ends: vec![None; request.samples], error: None }
    }

    /// Returns the samples of an answer that has ended.
    pub(crate) fn samples(&self) -> Vec<Generation> {
        assert!(self.error.is_none(), "{:?}", self.error);
        self.ends.iter().cloned().map(Option::unwrap).collect()
    }

    pub(crate) fn take(&mut self, answer: &mut Answer) {
        while let Some(event) = answer.try_next() {
            match event {
                Ok(AnswerEvent::Token { sample, token, .. }) => self.tokens[sample].push(token),
                Ok(AnswerEvent::End { sample, generation }) => self.ends[sample] = Some(*generation),
                Err(error) => self.error = Some(error),
            }
        }
    }
}

/// Runs an engine until no requests are left. Returns the last report and the number of steps.
pub(crate) fn run(engine: &mut Engine, answers: &mut [Answer], reads: &mut [Read]) -> (Step, usize) {
    let (mut steps, mut empty) = (0, 0);
    loop {
        let step = engine.step().unwrap();
        engine.check_invariants().unwrap();
        answers.iter_mut().zip(&mut *reads).for_each(|(answer, read)| read.take(answer));
        steps += 1;
        if step.is_idle() {
            return (step, steps);
        }
        empty = if step.tokens == 0 { empty + 1 } else { 0 };
        assert!(empty < 100, "no step computes anything: {step:?}");
    }
}

/// Submits `requests`.
pub(crate) fn submit_all(engine: &mut Engine, requests: &[Request]) -> (Vec<Answer>, Vec<Read>) {
    let answers = requests.iter().map(|request| engine.submit(request.clone()).unwrap());
    (answers.collect(), requests.iter().map(Read::new).collect())
}

/// Answers all requests at once. Returns the last report and the answers.
pub(crate) fn answer_all(engine: &mut Engine, requests: &[Request]) -> (Step, Vec<Read>) {
    let (mut answers, mut reads) = submit_all(engine, requests);
    (run(engine, &mut answers, &mut reads).0, reads)
}

/// Returns the samples of a request that is answered alone by an engine with plenty of memory.
pub(crate) fn alone(request: &Request) -> Vec<Generation> {
    answer_all(&mut roomy(), std::slice::from_ref(request)).1[0].samples()
}

/// Checks that each request has the same samples as if it were answered alone.
pub(crate) fn assert_each<'a>(
    reads: impl IntoIterator<Item = &'a Read>,
    requests: &[Request],
    alone: impl Fn(&Request) -> Vec<Generation>,
) {
    for (i, (read, request)) in reads.into_iter().zip(requests).enumerate() {
        assert!(read.error.is_none(), "request {i}: {:?}", read.error);
        for (sample, expected) in alone(request).iter().enumerate() {
            let got = read.ends[sample].as_ref().unwrap();
            assert_same(got, expected, &format!("request {i}, sample {sample}"));
        }
    }
}

/// Checks that two answers are equal, at least up to a token whose choice depends on rounding. Returns true
/// if they are equal to the end.
pub(crate) fn assert_same(got: &Generation, expected: &Generation, what: &str) -> bool {
    for (i, logits) in expected.logits.iter().enumerate() {
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        assert!(i < got.logits.len(), "{what}: {} tokens of {}", got.logits.len(), expected.logits.len());
        let apart = logits.iter().zip(&got.logits[i]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < ROUNDING, "{what}: logits of token {i} differ by {apart}");
        if sorted[0] - sorted[1] < 2.0 * ROUNDING || got.tokens.get(i) != expected.tokens.get(i) {
            assert!(sorted[0] - sorted[1] < 2.0 * ROUNDING, "{what}: token {i} differs");
            return false;
        }
    }
    assert_eq!((&got.tokens, got.finish), (&expected.tokens, expected.finish), "{what}");
    true
}

/// Answers all requests at once, except one that is cancelled midway, and checks that each answer is the same
/// as if the request were alone. Returns the last report.
pub(crate) fn assert_each_as_alone(engine: &mut Engine, requests: &[Request]) -> Step {
    const CANCELLED: usize = 9;
    let (mut answers, mut reads) = submit_all(engine, requests);
    engine.step().unwrap();
    answers[CANCELLED].cancel();
    let (last, _) = run(engine, &mut answers, &mut reads);
    assert!(matches!(reads[CANCELLED].error, Some(Error::Cancelled)), "{:?}", reads[CANCELLED].error);
    assert_each(&reads[..CANCELLED], &requests[..CANCELLED], alone);
    assert_each(&reads[CANCELLED + 1..], &requests[CANCELLED + 1..], alone);
    assert_nothing_held(engine);
    last
}

pub(crate) fn assert_nothing_held(engine: &Engine) {
    failure::assert_nothing_held(engine);
    assert!(engine.report().swapped.is_none_or(|counts| counts.free == counts.total), "host memory");
}
