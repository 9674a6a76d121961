//! Compares page-sparse decode with dense decode: the time per step, and the divergence of its tokens.
//!
//! Prints a table in Markdown. Contexts are excerpts from this project's documents. The divergence
//! (Kullback-Leibler, in nats) compares next-token distributions of sparse and dense decode, up to the first
//! token that differs. `--model DIR` names a Hugging Face directory, `--tokens N` sets the length of the
//! contexts, `--contexts N` their number. Without `--model`, a random model with 8 layers of width 512 is
//! used. Its attention is more spread out than a trained model's, so only its times are meaningful.

use std::path::PathBuf;
use std::time::Instant;

use kvbackend_cpu::CpuBackend;
use kvcore::DType;
use kvengine::{AnswerEvent, Engine, EngineConfig, Generation, PromptTokens, Request, SparseDecode};
use kvmodel::{Model, ModelConfig, ModelDirectory, WeightFormat, Weights};

/// The number of tokens per answer.
const ANSWER: usize = 24;
/// The number of steps at the start of an answer that are not timed. The first step reads the keys of all
/// blocks.
const WARM: usize = 4;

fn word(name: &str) -> Option<String> {
    let args: Vec<String> = std::env::args().collect();
    args.iter().position(|a| a == name).and_then(|i| args.get(i + 1).cloned())
}

fn number(name: &str, default: usize) -> usize {
    word(name).and_then(|word| word.parse().ok()).unwrap_or(default)
}

/// Returns the text of the project's documents.
fn text() -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    [
        "README.md",
        "ARCHITECTURE.md",
        "docs/quality.md",
        "docs/decisions/chunks.md",
        "docs/decisions/paging.md",
    ]
    .map(read)
    .concat()
}

/// Answers a request. Returns the answer and the shortest time of a step.
fn answer(engine: &mut Engine, request: Request) -> kvlab::Result<(Generation, f64)> {
    let mut answer = engine.submit(request)?;
    let (mut best, mut tokens) = (f64::INFINITY, 0);
    loop {
        let start = Instant::now();
        engine.step()?;
        let elapsed = start.elapsed().as_secs_f64();
        while let Some(event) = answer.try_next() {
            match event? {
                AnswerEvent::Token { .. } => tokens += 1,
                AnswerEvent::End { generation, .. } => return Ok((*generation, best)),
            }
        }
        if tokens > WARM {
            best = best.min(elapsed);
        }
    }
}

/// Returns the sum of the divergences over comparable positions, the number of positions where both
/// choose the same token, and the number of comparable positions.
fn compare(dense: &Generation, sparse: &Generation) -> (f64, usize, usize) {
    let (mut sum, mut same, mut places) = (0.0, 0, 0);
    // The first token comes from the prefill.
    for (i, (p, q)) in dense.logits.iter().zip(&sparse.logits).enumerate().skip(1) {
        sum += divergence(p, q);
        places += 1;
        if dense.tokens.get(i) != sparse.tokens.get(i) {
            break;
        }
        same += 1;
    }
    (sum, same, places)
}

fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |x: &[f32]| {
        let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(most) + x.iter().map(|x| f64::from(x - most).exp()).sum::<f64>().ln()
    };
    let (of_p, of_q) = (log_sum(p), log_sum(q));
    p.iter()
        .zip(q)
        .map(|(p, q)| (f64::from(*p) - of_p, f64::from(*q) - of_q))
        .map(|(p, q)| p.exp() * (p - q))
        .sum()
}

fn main() -> kvlab::Result<()> {
    let (length, contexts) = (number("--tokens", 4096), number("--contexts", 2));
    let (model, tokens) = if let Some(folder) = word("--model") {
        let loaded = ModelDirectory::load(folder.as_ref(), WeightFormat::Stored, &mut |_, _| ())?;
        let tokens = loaded.codec.encode(&text(), false)?;
        (loaded.model, tokens)
    } else {
        let model = Model::new(ModelConfig::benchmark(8, 512)?, Weights::random(1), WeightFormat::Stored)?;
        (model, (0..contexts * length).map(|i| (i * 7919 % 4001) as u32).collect())
    };
    let config = EngineConfig { kv_format: DType::F16.into(), ..EngineConfig::default() };
    let mut engine = Engine::new(model, CpuBackend::new(), b"none", &config)?;
    let blocks = length.div_ceil(config.block_size);
    println!("| tokens | blocks seen | of | step | all seen | times as fast | divergence | same token |");
    println!("|---|---|---|---|---|---|---|---|");
    let contexts = contexts.min(tokens.len() / length);
    let ask = |context: usize, sparse| Request {
        max_new_tokens: ANSWER,
        keep_logits: true,
        ignore_end: true,
        sparse,
        ..Request::new(PromptTokens::Plain(tokens[context * length..(context + 1) * length].to_vec()))
    };
    let all: Vec<_> = (0..contexts).map(|i| answer(&mut engine, ask(i, None))).collect::<Result<_, _>>()?;
    for pages in [blocks / 32, blocks / 16, blocks / 8, blocks / 4, blocks / 2] {
        let (mut sum, mut same, mut places) = (0.0, 0, 0);
        let (mut time, mut whole) = (f64::INFINITY, f64::INFINITY);
        for (i, (dense, seconds)) in all.iter().enumerate() {
            let (sparse, step) = answer(&mut engine, ask(i, Some(SparseDecode::new(pages.max(4)))))?;
            let of = compare(dense, &sparse);
            (sum, same, places) = (sum + of.0, same + of.1, places + of.2);
            (time, whole) = (time.min(step), whole.min(*seconds));
        }
        println!(
            "| {length} | {} | {blocks} | {:.2} ms | {:.2} ms | {:.2} | {:.4} | {same} of {places} |",
            pages.max(4),
            1e3 * time,
            1e3 * whole,
            whole / time,
            sum / places.max(1) as f64,
        );
    }
    Ok(())
}
