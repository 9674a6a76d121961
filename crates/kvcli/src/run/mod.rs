//! `kvc run`: one prompt, one answer.

use std::io::{Read, Write};
use std::sync::Arc;

use kvchunk::{ChunkCacheConfig, ColdRule, ContextScaling, ReuseCell, SleepUsage};
use kvmodel::{Engine, EngineConfig, FinishReason, Generation, ModelDirectory, Request, Sampling, TextCodec};

use crate::args::RunArgs;
use crate::backend::Opened;
use crate::error::{Error, Result};
use crate::memory::MemoryJson;
use crate::progress::Live;
use crate::report::{GraphsJson, SleepJson, answer_json, ms};
use crate::{backend, load};

/// Share of the KV memory in which documents are kept, without an option.
const DEFAULT_SHARE: f64 = 0.5;

pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let text = prompt_text(args)?;
    let Opened { backend, dense } = backend::open(&args.backend)?;
    let ModelDirectory { model, codec } = load::model(args.model.as_deref(), args.weights, dense)?;
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
            compute_mode: args.chunks.into(),
            position_strategy: args.positions.into(),
            memory_share: args.memory_share.unwrap_or(DEFAULT_SHARE),
            ..ChunkCacheConfig::default()
        },
        chunk_sleep: args.sleep.config(),
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, backend, codec.digest(), &config)?;
    for earlier in &args.warm {
        let request = request(args, &engine, &codec, earlier)?;
        engine.generate(&request, &mut Live::new(&codec, false))?;
        if let (Some(chunks), Some(_)) = (engine.chunks(), args.sleep.form()) {
            chunks.sleep_cold_chunks(ColdRule::EVERYTHING).map_err(kvmodel::Error::from)?;
        }
    }
    let asleep = engine.report().chunk_sleep;
    engine.profiler().reset();
    if !args.json && text.matches(args.separator.as_str()).count() == 1 {
        eprintln!("One {:?} only: taken as an ordinary prompt, which has no documents.", args.separator);
    }
    let request = request(args, &engine, &codec, &text)?;
    let mut live = Live::new(&codec, !args.json);
    let generation = engine.generate(&request, &mut live)?;
    live.finish()?;
    show(args, &engine, &codec, &generation, asleep)
}

fn prompt_text(args: &RunArgs) -> Result<String> {
    let failed = |from: String| move |source| Error::Prompt { from, source };
    if let Some(text) = args.prompt.as_ref().filter(|text| *text != "-") {
        return Ok(text.clone());
    }
    if let Some(path) = &args.prompt_file {
        return std::fs::read_to_string(path).map_err(failed(path.display().to_string()));
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(failed("standard input".to_owned()))?;
    Ok(text)
}

fn request(args: &RunArgs, engine: &Engine, codec: &TextCodec, text: &str) -> Result<Request> {
    let prompt = if args.chat {
        codec.chat_prompt(text, &args.separator)?
    } else {
        codec.prompt(text, &args.separator, true)?
    };
    Ok(Request {
        reuse: !args.no_chunk_cache,
        full_attention: args.full_attention,
        recompute: Arc::new(args.recompute),
        scaling: ContextScaling { temperature: args.context_temperature, scale: args.context_scale },
        max_new_tokens: args.max_new_tokens,
        sampling: Sampling { temperature: args.temperature, seed: args.seed, ..Sampling::default() },
        ..engine.request(prompt)
    })
}

fn cell(args: &RunArgs) -> ReuseCell {
    ReuseCell { mode: args.chunks.into(), strategy: args.positions.into() }
}

/// Prints the answer. `asleep` counts the documents that slept before the prompt was asked.
fn show(
    args: &RunArgs,
    engine: &Engine,
    codec: &TextCodec,
    generation: &Generation,
    asleep: Option<SleepUsage>,
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let report = engine.report();
    let sleep = args.sleep.form().and_then(|form| SleepJson::new(form, asleep?, &report));
    if args.json {
        let text = codec.decode(&generation.tokens)?;
        let json = answer_json(text, generation, cell(args), engine, sleep);
        serde_json::to_writer(&mut out, &json).map_err(std::io::Error::from)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(out)?;
    out.flush()?;
    let hits = generation.chunks.iter().filter(|c| c.hit).count();
    if generation.tokens.is_empty() && generation.finish == FinishReason::Stop {
        eprintln!("The model ended its answer at once: it has nothing to say to this prompt.");
    }
    let no_room = report.chunk_cache.as_ref().map_or(0, |cache| cache.uncached);
    if no_room > 0 {
        eprintln!(
            "{no_room} times a document found no room beside the others, and was not kept: raise --kv-memory or --memory-share"
        );
    }
    if generation.recomputed_tokens > 0 {
        eprintln!("{} document tokens computed anew ({})", generation.recomputed_tokens, args.recompute);
    }
    eprintln!(
        "{} prompt tokens, {} of them cached; {} of {} chunks hit; first token after {:.1} ms, {} new in {:.1} ms",
        generation.prompt_tokens,
        generation.cached_tokens,
        hits,
        generation.chunks.len(),
        ms(generation.ttft),
        generation.tokens.len(),
        ms(generation.total),
    );
    eprintln!("{}", MemoryJson::of(engine));
    if let Some(graphs) = GraphsJson::of(engine) {
        eprintln!("{graphs}");
    }
    if let Some(sleep) = sleep {
        eprintln!("{sleep}");
    }
    if args.profile {
        eprint!("{}", engine.profiler().report());
    }
    Ok(())
}
