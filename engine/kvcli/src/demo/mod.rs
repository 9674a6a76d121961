//! `kvc demo`: questions about a few documents, several times and in different orders.

use std::io::Write;

use kvchunk::ChunkReport;
use kvengine::{Engine, EngineConfig, Generation, PromptTokens, Request};
use kvmodel::{ModelDirectory, TextCodec, WeightFormat};
use serde::Serialize;

use crate::args::DemoArgs;
use crate::backend::{HostSteps, OpenedBackend};
use crate::error::{Error, Result};
use crate::report::{json, ms, table};
use crate::{backend, embedded};

/// A question of the demo, with the documents before it.
struct DemoQuestion {
    /// Indices into [`embedded::DOCUMENTS`].
    order: Vec<usize>,
    question: &'static str,
    expected: &'static str,
}

/// The outcome of one request, answered with and without the cache.
#[derive(Serialize)]
struct Answered {
    question: &'static str,
    documents: Vec<&'static str>,
    answer: String,
    expected: &'static str,
    prompt_tokens: usize,
    computed_tokens: usize,
    reused_tokens: usize,
    chunks: Vec<ChunkReport>,
    ttft_ms: f64,
    ttft_without_reuse_ms: f64,
    largest_logit_difference: f32,
    same_answer_without_cache: bool,
}

pub(crate) fn demo(args: &DemoArgs) -> Result<()> {
    let out = &mut std::io::stdout().lock();
    let OpenedBackend { backend, dense } = backend::open(&args.backend, HostSteps::default())?;
    let ModelDirectory { model, codec, .. } = embedded::load(WeightFormat::Stored, dense)?;
    let config = EngineConfig { kv_format: args.dtype, ..EngineConfig::default() };
    let mut engine = Engine::new(model, backend, codec.digest(), &config)?;
    let trials = trials()?;
    // A request that stores nothing warms up the threads and the memory.
    let first = trials[0].prompt(&codec)?;
    engine.generate(&Request { reuse: false, ..Request::new(first) }, &mut ())?;
    if !args.json {
        introduce(out, &engine)?;
    }
    let mut outcomes = Vec::new();
    for (i, trial) in trials.iter().enumerate() {
        let prompt = trial.prompt(&codec)?;
        let (outcome, with_cache) = ask(&mut engine, &codec, trial, &prompt)?;
        if i == 0 && !args.json {
            segments(out, trial, &prompt, &with_cache)?;
            writeln!(out, "Question: {}   Answer: {}\n", outcome.question, outcome.answer)?;
        }
        outcomes.push(outcome);
    }
    if args.json {
        json(out, &outcomes)?;
    } else {
        requests(out, &outcomes)?;
    }
    verdict(&outcomes)
}

/// Returns the demo's questions. The order of the documents differs from question to question.
fn trials() -> Result<Vec<DemoQuestion>> {
    let lines = embedded::QUESTIONS.lines().filter(|line| !line.trim().is_empty());
    let trials: Result<Vec<DemoQuestion>> = lines
        .enumerate()
        .map(|(i, line)| {
            let (question, expected) = line
                .split_once('=')
                .ok_or_else(|| Error::Demo(format!("examples/questions.txt: {line:?} has no answer")))?;
            let count = embedded::DOCUMENTS.len();
            let mut order: Vec<usize> = (0..count).collect();
            order.rotate_left(i % count);
            if i % 2 == 1 {
                order.reverse();
            }
            Ok(DemoQuestion { order, question: question.trim(), expected: expected.trim() })
        })
        .collect();
    let trials = trials?;
    if trials.is_empty() {
        return Err(Error::Demo("examples/questions.txt has no questions".to_owned()));
    }
    Ok(trials)
}

impl DemoQuestion {
    fn prompt(&self, codec: &TextCodec) -> Result<PromptTokens> {
        let documents = self.order.iter().map(|&i| embedded::DOCUMENTS[i].1);
        Ok(PromptTokens::from_parts(codec, embedded::SYSTEM, documents, self.question, true)?)
    }
}

/// Answers one question with the cache, then without any reuse under the same mask, and compares the two
/// answers.
fn ask(
    engine: &mut Engine,
    codec: &TextCodec,
    trial: &DemoQuestion,
    prompt: &PromptTokens,
) -> Result<(Answered, Generation)> {
    let request = Request { keep_logits: true, max_new_tokens: 8, ..Request::new(prompt.clone()) };
    let with = engine.generate(&request, &mut ())?;
    let without = engine.generate(&Request { reuse: false, ..request }, &mut ())?;
    let pairs = with.logits.iter().flatten().zip(without.logits.iter().flatten());
    let outcome = Answered {
        question: trial.question,
        documents: trial.order.iter().map(|&i| embedded::DOCUMENTS[i].0).collect(),
        answer: codec.decode(&with.tokens)?.trim().to_owned(),
        expected: trial.expected,
        prompt_tokens: with.prompt_tokens,
        computed_tokens: with.prompt_tokens - with.cached_tokens,
        reused_tokens: with.cached_tokens,
        chunks: with.chunks.clone(),
        ttft_ms: ms(with.ttft),
        ttft_without_reuse_ms: ms(without.ttft),
        largest_logit_difference: pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max),
        same_answer_without_cache: with.tokens == without.tokens,
    };
    Ok((outcome, with))
}

fn introduce(out: &mut dyn Write, engine: &Engine) -> Result<()> {
    let c = engine.model().config();
    let (layers, heads, kv_heads, dim) = (c.num_layers(), c.heads, c.kv_heads, c.head_dim);
    let backend = engine.backend().description();
    writeln!(
        out,
        "A model with {layers} layers, {heads} query heads and {kv_heads} key/value heads of {dim} elements, on \
         {backend}."
    )?;
    writeln!(out, "Its documents are computed once, then reused in any order without moving a byte.\n")?;
    Ok(())
}

/// Writes the parts of the first prompt, with their positions.
fn segments(
    out: &mut dyn Write,
    trial: &DemoQuestion,
    prompt: &PromptTokens,
    generation: &Generation,
) -> Result<()> {
    let PromptTokens::Chunked(prompt) = prompt else { return Ok(()) };
    writeln!(out, "The first prompt (documents start at the same position and do not see each other):\n")?;
    let mut table = table(&["part", "tokens", "positions", "text"]);
    let mut row = |part: &str, tokens: usize, start: i64, text: &str| {
        let end = start + tokens as i64;
        table.add_row([part.to_owned(), tokens.to_string(), format!("{start}..{end}"), shortened(text)]);
    };
    row("system", prompt.system().len(), 0, embedded::SYSTEM);
    for (&i, chunk) in trial.order.iter().zip(&generation.chunks) {
        row(embedded::DOCUMENTS[i].0, chunk.tokens, chunk.position, embedded::DOCUMENTS[i].1);
    }
    let longest = generation.chunks.iter().map(|c| c.position + c.tokens as i64).max().unwrap_or(0);
    row("question", prompt.question().len(), longest, trial.question);
    writeln!(out, "{table}\n")?;
    Ok(())
}

fn shortened(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(56) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text,
    }
}

/// Writes one row per request, and a summary.
fn requests(out: &mut dyn Write, outcomes: &[Answered]) -> Result<()> {
    writeln!(out, "Each request has the documents in a different order:\n")?;
    let mut table = table(&[
        "question",
        "answer",
        "chunks",
        "computed",
        "reused",
        "TTFT ms",
        "without reuse",
        "same answer",
    ]);
    for o in outcomes {
        let hits = o.chunks.iter().filter(|c| c.hit).count();
        let same = if o.same_answer_without_cache { "yes" } else { "NO" };
        table.add_row([
            o.question.to_owned(),
            if o.is_right() { o.answer.clone() } else { format!("{} (not {})", o.answer, o.expected) },
            format!("{hits} hit, {} missed", o.chunks.len() - hits),
            o.computed_tokens.to_string(),
            o.reused_tokens.to_string(),
            format!("{:.2}", o.ttft_ms),
            format!("{:.2}", o.ttft_without_reuse_ms),
            format!("{same} (logits differ by {:.0e})", o.largest_logit_difference),
        ]);
    }
    let right = outcomes.iter().filter(|o| o.is_right()).count();
    let same = outcomes.iter().filter(|o| o.is_unchanged()).count();
    writeln!(out, "{table}")?;
    writeln!(
        out,
        "{right} of {n} answers are right; {same} of {n} equal the answer computed without the cache under the same mask.",
        n = outcomes.len()
    )?;
    Ok(())
}

impl Answered {
    fn is_right(&self) -> bool {
        self.answer == self.expected
    }

    /// Returns true if the answers with and without the cache are the same up to rounding.
    fn is_unchanged(&self) -> bool {
        self.same_answer_without_cache && self.largest_logit_difference < 1e-3
    }
}

/// Checks that the demo's results match its claims.
fn verdict(outcomes: &[Answered]) -> Result<()> {
    let good = outcomes.iter().all(|o| o.is_right() && o.is_unchanged());
    let hits = outcomes.iter().skip(1).all(|o| o.chunks.iter().all(|c| c.hit));
    if good && hits {
        Ok(())
    } else {
        Err(Error::Demo(
            "an answer was wrong, the cache changed an answer, or a cached document was computed again"
                .to_owned(),
        ))
    }
}
