//! Requests: settings and prompts with values at the ends of their ranges, on the built-in model.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkedPrompt, ContextScaling, Recompute, ReuseCell};
use kvcore::Retention;
use kvengine::{BeamSearch, Engine, EngineConfig, PromptTokens, Request, Sampling, SparseDecode};
use kvmodel::{ModelDirectory, WeightFormat};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::{Note, Outcome};

const REALS: [f32; 15] = [
    0.0,
    0.5,
    1.0,
    0.9,
    1.5,
    -1.0,
    2.0,
    1e-40,
    1e-38,
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    -0.0,
];
const COUNTS: [usize; 9] = [0, 1, 2, 3, 7, 40, 1 << 20, usize::MAX - 1, usize::MAX];
const STRATEGIES: [&str; 12] = [
    "none",
    "full",
    "link:2",
    "link:0",
    "link:18446744073709551615",
    "blend:0.5",
    "blend:1@99:both",
    "question:0.3",
    "question:0.5@99",
    "joint:0.4",
    "random:0.5@7",
    "blend:0",
];

fn engine() -> Result<Engine, String> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let loaded =
        ModelDirectory::load(&place, WeightFormat::F32, &mut |_, _| ()).map_err(|error| said(&error))?;
    let config = EngineConfig { block_size: 4, kv_memory: Some(1 << 19), ..EngineConfig::default() };
    let digest = *loaded.codec.digest();
    Engine::new(loaded.model, CpuBackend::new(), &digest, &config).map_err(|error| said(&error))
}

fn real(rng: &mut StdRng) -> f32 {
    *REALS.choose(rng).unwrap_or(&1.0)
}

fn large(rng: &mut StdRng) -> usize {
    *COUNTS.choose(rng).unwrap_or(&1)
}

/// Returns a count that is mostly small, because large ones are refused at once.
fn number(rng: &mut StdRng) -> usize {
    if rng.random_bool(0.1) { large(rng) } else { rng.random_range(0..5) }
}

fn tokens(rng: &mut StdRng, vocabulary: u32) -> Vec<u32> {
    let length = if rng.random_bool(0.05) { rng.random_range(0..3000) } else { rng.random_range(0..30) };
    let most = if rng.random_bool(0.03) { u32::MAX } else { vocabulary };
    (0..length).map(|_| rng.random_range(0..most)).collect()
}

fn prompt(rng: &mut StdRng, vocabulary: u32) -> PromptTokens {
    if rng.random_bool(0.5) {
        return PromptTokens::Plain(tokens(rng, vocabulary));
    }
    let chunks = (0..rng.random_range(0..4)).map(|_| tokens(rng, vocabulary)).collect();
    let chunked = ChunkedPrompt::new(tokens(rng, vocabulary), chunks, tokens(rng, vocabulary));
    chunked.map_or_else(|_| PromptTokens::Plain(Vec::new()), PromptTokens::Chunked)
}

fn sampling(rng: &mut StdRng) -> Sampling {
    Sampling {
        temperature: real(rng),
        top_k: number(rng),
        top_p: real(rng),
        min_p: real(rng),
        repetition_penalty: real(rng),
        presence_penalty: real(rng),
        frequency_penalty: real(rng),
        seed: rng.random(),
    }
}

fn request(rng: &mut StdRng, vocabulary: u32) -> Request {
    let mut request = Request::new(prompt(rng, vocabulary));
    request.cell = *ReuseCell::ALL.choose(rng).unwrap_or(&ReuseCell::ALL[0]);
    request.max_new_tokens = number(rng);
    // Each setting keeps its usual value in most requests, so that many requests are answered.
    let mut rare = |share: f64| rng.random_bool(share);
    let [
        reuse,
        full,
        recompute,
        scaling,
        tenant,
        samples,
        beams,
        priority,
        time,
        retention,
        settings,
        lookup,
        sparse,
        forced,
        end,
        bias,
        probs,
    ] = [0.2, 0.1, 0.5, 0.1, 0.2, 0.3, 0.1, 0.3, 0.05, 0.1, 0.3, 0.2, 0.1, 0.1, 0.3, 0.2, 0.2].map(&mut rare);
    request.reuse = !reuse;
    request.full_attention = full;
    if let (true, Ok(strategy)) = (recompute, STRATEGIES.choose(rng).unwrap_or(&"none").parse::<Recompute>())
    {
        request.recompute = Arc::new(strategy);
    }
    if scaling {
        request.scaling = ContextScaling { temperature: real(rng), scale: real(rng) };
    }
    request.tenant = tenant.then(|| "t".repeat(rng.random_range(0..300)));
    if samples {
        request.samples = number(rng);
    }
    request.beams = beams.then(|| BeamSearch { width: number(rng), length_penalty: real(rng) });
    if priority {
        request.priority = *[i32::MIN, -1, 1, i32::MAX].choose(rng).unwrap_or(&0);
    }
    request.time_limit = time.then(|| *[Duration::ZERO, Duration::MAX].choose(rng).unwrap_or(&Duration::MAX));
    request.retention = retention
        .then(|| Retention { priority: rng.random(), lasts: rng.random_bool(0.5).then_some(Duration::MAX) });
    if settings {
        request.sampling = sampling(rng);
    }
    if lookup {
        request.lookup = number(rng);
    }
    request.sparse = sparse.then(|| SparseDecode { pages: number(rng), dense_layers: number(rng) });
    request.forced = forced.then(|| tokens(rng, vocabulary).into());
    request.ignore_end = end;
    if bias {
        request.logit_bias =
            (0..rng.random_range(0..4)).map(|_| (rng.random_range(0..vocabulary + 1), real(rng))).collect();
    }
    request.logprobs = probs.then(|| number(rng));
    request
}

/// Submits a few requests, cancels some, and runs the others to their ends. Nothing may then be held.
pub(crate) fn case(rng: &mut StdRng, note: &Note, kept: &mut Option<Engine>) -> Outcome {
    let mut engine = match kept.take() {
        Some(engine) => engine,
        None => engine()?,
    };
    let vocabulary = engine.model().config().vocab_size as u32;
    let requests: Vec<Request> = (0..rng.random_range(1..5)).map(|_| request(rng, vocabulary)).collect();
    note.write(format!("{requests:#?}").as_bytes());
    let mut answers: Vec<_> =
        requests.into_iter().filter_map(|request| engine.submit(request).ok()).collect();
    for steps in 0.. {
        match engine.step() {
            Ok(step) if step.is_idle() => break,
            Ok(_) if steps > 20_000 => return Err("the requests do not end after 20,000 steps".to_owned()),
            Ok(_) => {}
            Err(error) => return Err(format!("a step failed, not only a request: {error}")),
        }
        if !answers.is_empty() && rng.random_bool(0.02) {
            drop(answers.swap_remove(rng.random_range(0..answers.len())));
        }
    }
    drop(answers);
    engine.step().map_err(|error| error.to_string())?;
    engine.check_invariants()?;
    let report = engine.report();
    for counts in [report.main, report.chunks].into_iter().flatten() {
        if (counts.mutable, counts.shared) != (0, 0) {
            return Err(format!("blocks stay held: {counts:?}"));
        }
    }
    *kept = Some(engine);
    Ok(())
}
