//! `kvc run`: one prompt, one answer.

use std::io::Write;
use std::sync::Arc;

use kvchunk::{ChunkCacheConfig, ColdRule, Reuse, SleepUsage};
use kvengine::{DefaultReuse, Engine, EngineConfig, FinishReason, Generation, PromptTokens, Request};
use kvmodel::ModelDirectory;

use crate::args::RunArgs;
use crate::backend::{HostSteps, OpenedBackend};
use crate::error::Result;
use crate::memory::MemoryJson;
use crate::progress::LiveAnswer;
use crate::report::{AnswerParts, GraphsJson, ReadBackJson, SleepJson, answer_json, disk_line, json, ms};
use crate::way::ChosenWay;
use crate::{backend, load};
use prompt_cache::PromptCache;
pub(crate) use prompt_cache::PromptCacheJson;
pub(crate) use prompts::{RunPrompts, document, variables};

mod form;
mod library;
mod prompt_cache;
mod prompts;

/// The default share of the KV memory for documents.
const DEFAULT_SHARE: f64 = 0.5;

pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let prompts = RunPrompts::read(&args.asked)?;
    let variables = variables(&args.asked)?;
    let OpenedBackend { backend, dense } =
        backend::open(&args.backend, HostSteps { threads: args.threads, compute: args.compute })?;
    let ModelDirectory { model, codec, .. } = load::model(args.model.as_deref(), args.weights, dense)?;
    let codec = codec.with_variables(variables)?;
    let constraint = form::constraint(&args.sampling.form, &codec, model.config())?;
    let ChosenWay { reuse: way, decoys, usual } = ChosenWay::new(&args.way, &model, &codec)?;
    let config = EngineConfig {
        kv_format: args.dtype,
        keys: args.keys,
        block_size: args.block_size,
        cache: args.cache.into(),
        max_len: args.max_len.unwrap_or_default(),
        kv_memory: args.kv_memory.map(|mib| mib.saturating_mul(1 << 20)),
        graphs: args.graphs,
        profile: args.profile,
        chunks: ChunkCacheConfig {
            hash_algorithm: args.hash.into(),
            cross_system_reuse: args.cross_system_reuse,
            compute_mode: way.cell.mode,
            position_strategy: way.cell.strategy,
            memory_share: args.memory_share.unwrap_or(DEFAULT_SHARE),
            ..ChunkCacheConfig::default()
        },
        chunk_sleep: args.sleep.config(),
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, backend, codec.digest(), &config)?;
    args.disk.open(&mut engine)?;
    let kept = args.prompt_cache.as_deref();
    let kept = kept.map(|path| PromptCache::restore(path, &mut engine)).transpose()?;
    for earlier in prompts.warm(&codec) {
        let request = request(args, &way, &engine, earlier?.with_decoys(Arc::clone(&decoys))?);
        engine.generate(&request, &mut LiveAnswer::new(&codec, &[], false)?)?;
        if let (Some(chunks), Some(_)) = (engine.chunks(), args.sleep.form()) {
            chunks.sleep_cold_chunks(ColdRule::EVERYTHING).map_err(kvengine::Error::from)?;
        }
    }
    let asleep = engine.report().chunk_sleep;
    engine.profiler().reset();
    let asked = prompts.asked(&codec)?;
    if let Some(note) = prompts.note(&asked) {
        note!("{note}");
    }
    let in_parts = matches!(asked.tokens, PromptTokens::Chunked(_));
    if args.way.is_usual() && !args.no_chunk_cache && !args.full_attention && in_parts {
        note!("{}", explained(&usual));
    }
    let forced = args.sampling.answer();
    let request = Request {
        keep_logits: forced.is_some(),
        forced,
        constraint,
        ..request(args, &way, &engine, asked.tokens.with_decoys(decoys)?)
    };
    let mut live = LiveAnswer::new(&codec, &args.sampling.stop, !args.json)?;
    let mut generation = engine.generate(&request, &mut live)?;
    let text = live.finish(&mut generation)?;
    let read_back = request.forced.is_some().then(|| ReadBackJson::new(&request.prompt, &generation));
    let kept = kept.and_then(|kept| kept.save(&engine, &request, &generation));
    let found = AnswerParts { text, read_back, prompt_cache: kept, documents: asked.documents };
    show(args, &way, &engine, found, &generation, asleep)
}

/// Explains the default reuse settings in one line.
fn explained(usual: &DefaultReuse) -> String {
    let Reuse { cell, recompute, .. } = &usual.reuse;
    let how = match cell.mode.num_decoys() {
        0 => format!(
            "Half of the document tokens are recomputed ({recompute}), which lost the fewest answers of all settings without decoys"
        ),
        _ => format!("Documents are computed behind decoys ({}), and nothing is recomputed", cell.mode),
    };
    match usual.measured_on {
        Some(name) => format!("{how}. Measured on {name}: docs/quality.md."),
        None => format!("{how}. This model was not measured; measure it with kvc tune."),
    }
}

fn request(args: &RunArgs, way: &Reuse, engine: &Engine, prompt: PromptTokens) -> Request {
    Request {
        reuse: !args.no_chunk_cache,
        full_attention: args.full_attention,
        max_new_tokens: args.sampling.max_new_tokens,
        sampling: args.sampling.settings(),
        logit_bias: args.sampling.logit_bias.as_slice().into(),
        logprobs: args.sampling.logprobs,
        lookup: args.sampling.lookup,
        sparse: args.sampling.sparse(),
        beams: args.sampling.beams(),
        ..engine.request(prompt).reusing(way)
    }
}

/// Explains why an answer was cut off.
fn cut(args: &RunArgs, generation: &Generation) -> String {
    let count = generation.tokens.len();
    let tokens = if count == 1 { "1 token".to_owned() } else { format!("{count} tokens") };
    if count == args.sampling.max_new_tokens {
        return format!("The answer was cut off after {tokens}; raise --max-new-tokens for a longer answer.");
    }
    format!(
        "The answer was cut off after {tokens}, at the last position of the model or of a static cache; a shorter prompt \
         leaves more room."
    )
}

/// Prints the report on an answer. The text itself was already printed, unless it goes into a JSON object.
/// `asleep` describes the pieces of documents that were asleep before the prompt was asked.
fn show(
    args: &RunArgs,
    way: &Reuse,
    engine: &Engine,
    parts: AnswerParts,
    generation: &Generation,
    asleep: Option<SleepUsage>,
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let report = engine.report();
    let sleep = args.sleep.form().and_then(|form| SleepJson::new(form, asleep?, &report));
    if args.json {
        let answer = answer_json(parts, generation, way.cell, engine, sleep);
        return json(&mut out, &answer);
    }
    writeln!(out)?;
    out.flush()?;
    let hits = generation.chunks.iter().filter(|c| c.hit).count();
    if generation.tokens.is_empty() && generation.finish == FinishReason::Stop {
        note!("The model ended its answer immediately, without any text.");
    }
    if generation.finish == FinishReason::Length {
        note!("{}", cut(args, generation));
    }
    let no_room = report.chunk_cache.as_ref().map_or(0, |cache| cache.uncached);
    if no_room > 0 {
        note!("{no_room} times, there was no room to keep a document; raise --kv-memory or --memory-share");
    }
    if generation.recomputed_tokens > 0 {
        note!("{} document tokens recomputed ({})", generation.recomputed_tokens, way.recompute);
    }
    note!(
        "{} prompt tokens, {} of them cached; {} of {} chunks hit; first token after {:.1} ms, {} new in {:.1} ms",
        generation.prompt_tokens,
        generation.cached_tokens,
        hits,
        generation.chunks.len(),
        ms(generation.ttft),
        generation.tokens.len(),
        ms(generation.total),
    );
    note!("{}", MemoryJson::of(engine));
    if let Some(graphs) = GraphsJson::of(engine) {
        note!("{graphs}");
    }
    if let Some(sleep) = sleep {
        note!("{sleep}");
    }
    if let Some(disk) = engine.disk() {
        eprintln!("{}", disk_line(&disk.usage()));
    }
    if let Some(kept) = parts.prompt_cache {
        note!("{kept}");
    }
    if args.profile {
        note!("{}", engine.profiler().report().to_string().trim_end());
    }
    Ok(())
}
