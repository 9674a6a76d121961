//! `kvc bench`: prompts of a retrieval service with and without reuse (`rag`), and concurrent requests
//! (`serve`).

use std::sync::Arc;

use kvchunk::{ChunkCacheConfig, ReuseCell};
use kvcore::Backend;
use kvengine::{Engine, EngineConfig};
use kvlab::{Popularity, RagReport, RagWorkload, TtftRow, decoy_rows, disk_rows, ttft_rows};
use kvmodel::{Model, ModelConfig, ModelDirectory, TextCodec, WeightFormat, Weights};
use serde::Serialize;

use crate::args::{BenchArgs, BenchKind, MeasuredArgs, RagArgs};
use crate::backend::{HostSteps, OpenedBackend};
use crate::error::Result;
use crate::plot::result_file;
use crate::progress::{bar, counting};
use crate::{backend, load, memory, report};

mod found;
mod serve;
mod show;
mod words;

/// The object that `--json` prints.
#[derive(Serialize)]
struct BenchReport<'a> {
    workloads: &'a [RagReport],
    ttft: &'a [TtftRow],
}

pub(crate) fn bench(args: &BenchArgs) -> Result<()> {
    match &args.what {
        BenchKind::Rag(args) => rag(args),
        BenchKind::Serve(args) => serve::serve(args),
    }
}

fn rag(args: &RagArgs) -> Result<()> {
    let plot = args.plot.as_deref().map(result_file).transpose()?;
    if args.http {
        return found::found(args, plot);
    }
    let cell = ReuseCell { mode: args.chunks, strategy: args.positions.into() };
    let mut reports = Vec::new();
    for popularity in popularities(args) {
        let workload = workload(args, popularity);
        workload.check()?;
        let (mut engine, _) = engine(args)?;
        let bar = bar("requests", "{pos}/{len} {eta}", !args.json);
        let mut progress = counting(&bar);
        reports.push(kvlab::serve(&mut engine, &workload, cell, &mut progress)?);
        bar.finish_and_clear();
    }
    let (per_request, length) = (args.per_request, args.document_tokens);
    let mut ttft = ttft_rows(&mut engine(args)?.0, per_request, length, cell)?;
    ttft.extend(decoy_rows(&mut engine(args)?.0, args.chunks, per_request, length)?);
    if let Some(folder) = &args.disk {
        ttft.extend(disk_rows(&mut engine(args)?.0, folder, args.disk_limit, (per_request, length), cell)?);
    }
    let out = &mut std::io::stdout().lock();
    if args.json {
        report::json(out, &BenchReport { workloads: &reports, ttft: &ttft })?;
    } else {
        show::workloads(out, &reports)?;
        show::ttft(out, &ttft, args)?;
    }
    match (plot, reports.first()) {
        (Some(file), Some(first)) => show::plot(file, first),
        _ => Ok(()),
    }
}

/// Returns the requested workload or, by default, four workloads: Zipf's law with exponent 1, and repetition
/// with probabilities 0.8, 0.5 and 0.1.
fn popularities(args: &RagArgs) -> Vec<Popularity> {
    match (args.zipf, args.repetition) {
        (Some(s), _) => vec![Popularity::Zipf(s)],
        (_, Some(p)) => vec![Popularity::Repetition(p)],
        _ => [0.8, 0.5, 0.1].into_iter().fold(vec![Popularity::Zipf(1.0)], |mut all, p| {
            all.push(Popularity::Repetition(p));
            all
        }),
    }
}

fn workload(args: &RagArgs, popularity: Popularity) -> RagWorkload {
    RagWorkload {
        requests: args.requests,
        documents: args.documents,
        document_tokens: args.document_tokens,
        per_request: args.per_request,
        decoys: args.chunks.num_decoys(),
        system_changes: args.system_changes,
        popularity,
        seed: args.seed,
        ..RagWorkload::default()
    }
}

fn engine(args: &RagArgs) -> Result<(Engine, TextCodec)> {
    let (model, codec, backend) = open(&args.on)?;
    let chunks = ChunkCacheConfig { memory_share: args.memory_share, ..ChunkCacheConfig::default() };
    let config = EngineConfig {
        kv_format: args.on.dtype,
        kv_memory: Some(args.on.kv_memory.saturating_mul(1 << 20)),
        chunks,
        chunk_sleep: args.sleep.config(),
        ..EngineConfig::default()
    };
    Ok((Engine::new(model, backend, codec.digest(), &config)?, codec))
}

/// Returns the bytes of the weights of a model for benchmarks. While the model is built, its largest weight exists
/// three times: as random numbers, as the bytes of a tensor, and in the model.
fn weight_bytes(config: &ModelConfig, format: WeightFormat) -> u64 {
    let [hidden, inner, vocabulary] =
        [config.hidden_size, config.intermediate_size, config.vocab_size].map(|n| n as u64);
    let attention = 2 * hidden * (config.heads + config.kv_heads) as u64 * config.head_dim as u64;
    let layer = attention + 3 * hidden * inner + 2 * hidden;
    let (table, largest) = (vocabulary * hidden, hidden * inner.max(vocabulary));
    let all = config.num_layers() as u64 * layer + table + hidden;
    // 32 numbers of q8 have a scale of two bytes.
    let stored = if format == WeightFormat::Q8 { all / 32 * 34 } else { 4 * all };
    stored + 8 * largest
}

/// Opens a backend, and loads a model on it or creates a model of the given size with random weights.
/// Also returns its tokenizer.
fn open(args: &MeasuredArgs) -> Result<(Model, TextCodec, Arc<dyn Backend>)> {
    let OpenedBackend { backend, dense } =
        backend::open(&args.backend, HostSteps { compute: args.compute, ..HostSteps::default() })?;
    if let Some((layers, width)) = args.size {
        let (config, format) = (ModelConfig::benchmark(layers, width)?, load::format(args.weights).0);
        memory::check_room((layers, width), weight_bytes(&config, format))?;
        let vocabulary = config.vocab_size;
        let model = Model::with_dense(config, Weights::random(1), format, dense)?;
        return Ok((model, words::codec(vocabulary)?, backend));
    }
    let ModelDirectory { model, codec, .. } = load::model(args.model.as_deref(), args.weights, dense)?;
    Ok((model, codec, backend))
}
