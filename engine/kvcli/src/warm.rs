//! `kvc warm`: computes documents into a folder on a disk.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvchunk::{ChunkCacheConfig, ComputeMode, Recompute};
use kvengine::{Engine, EngineConfig, Request};
use kvmodel::{ModelDirectory, TextCodec};
use serde::Serialize;

use crate::args::WarmArgs;
use crate::backend::{HostSteps, OpenedBackend};
use crate::error::{Error, Result};
use crate::progress::{bar, counting};
use crate::report::json;
use crate::run::{RunPrompts, document};
use crate::way::ChosenWay;
use crate::{backend, folder, load};

/// The longest time in which the disk must take in what was computed.
const PATIENCE: Duration = Duration::from_secs(120);

/// The result of a run.
#[derive(Debug, Default, Serialize)]
struct WarmReport {
    documents: usize,
    /// The number of documents that were on the disk already.
    known: usize,
    /// The number of tokens in the documents that were computed.
    tokens: usize,
    seconds: f64,
    /// The number of records on the disk, and of their bytes.
    records: usize,
    bytes: u64,
    limit_bytes: u64,
    /// The number of records that have left the disk again, to make room.
    evicted: u64,
    /// The number of records that the disk did not take.
    dropped: u64,
}

pub(crate) fn warm(args: &WarmArgs) -> Result<()> {
    let documents = args.sources.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?.concat();
    let OpenedBackend { backend, dense } = backend::open(
        &args.engine.backend,
        HostSteps { compute: args.engine.compute, ..HostSteps::default() },
    )?;
    let ModelDirectory { model, codec, .. } = load::model(args.model.as_deref(), args.engine.weights, dense)?;
    let way = ChosenWay::new(&args.way, &model, &codec)?;
    let config = EngineConfig {
        kv_format: args.engine.dtype,
        keys: args.engine.keys,
        block_size: args.block_size,
        kv_memory: args.engine.kv_memory.map(|mib| mib.saturating_mul(1 << 20)),
        chunks: ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() },
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, backend, codec.digest(), &config)?;
    engine.open_disk(&args.disk, args.file.config(&args.disk))?;
    let report = compute(args, &mut engine, &codec, &way, &documents)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        return json(&mut out, &report);
    }
    let WarmReport { documents, known, tokens, seconds, .. } = report;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    writeln!(
        out,
        "{documents} documents: {} computed ({tokens} tokens in {seconds:.1} s), {known} were stored already\n\
         {} records in {:.1} of {:.1} MiB in {}",
        documents - known,
        report.records,
        mib(report.bytes),
        mib(report.limit_bytes),
        args.disk.display(),
    )?;
    if report.evicted + report.dropped > 0 {
        note!(
            "{} records had to leave the disk again, and {} did not fit; raise --disk-limit",
            report.evicted,
            report.dropped
        );
    }
    Ok(())
}

/// Computes the documents that are not on the disk.
fn compute(
    args: &WarmArgs,
    engine: &mut Engine,
    codec: &TextCodec,
    way: &ChosenWay,
    documents: &[String],
) -> Result<WarmReport> {
    // With slots, documents are stored in different slots, so that prompts find them together.
    let together = if let ComputeMode::Slots(slots) = way.reuse.cell.mode { slots as usize } else { 1 };
    let bar = bar("computed", "{pos}/{len} {eta}", !args.json);
    let mut count = counting(&bar);
    let begun = Instant::now();
    let mut report = WarmReport { documents: documents.len(), ..WarmReport::default() };
    let mut done = 0;
    for some in documents.chunks(together) {
        let prompt = RunPrompts::about(args.system.clone(), args.chat, some.to_vec()).asked(codec)?.tokens;
        let prompt = prompt.with_decoys(Arc::clone(&way.decoys))?;
        // Only the documents themselves are stored, so there is nothing to recompute.
        let request = engine.request(prompt).reusing(&way.reuse);
        let request = Request { max_new_tokens: 1, recompute: Arc::new(Recompute::None), ..request };
        if engine.is_saved(&request)? {
            report.known += some.len();
        } else {
            let answer = engine.generate(&request, &mut ())?;
            report.tokens +=
                answer.chunks.iter().filter(|chunk| !chunk.hit).map(|chunk| chunk.tokens).sum::<usize>();
            if !engine.disk().is_none_or(|disk| disk.flush(PATIENCE)) {
                return Err(Error::SlowDisk(args.disk.clone()));
            }
        }
        done += some.len();
        count(done, documents.len());
    }
    bar.finish_and_clear();
    let usage = engine.disk().map(kvtier::Slab::usage).unwrap_or_default();
    (report.records, report.bytes, report.limit_bytes) = (usage.records, usage.bytes, usage.limit_bytes);
    (report.evicted, report.dropped) = (usage.evicted, usage.stores_dropped);
    report.seconds = begun.elapsed().as_secs_f64();
    Ok(report)
}

/// Reads the documents that a path names.
fn read(path: &Path) -> Result<Vec<String>> {
    if path.is_dir() {
        let files = folder::documents(path)?;
        if files.is_empty() {
            return Err(Error::NoDocuments(path.to_owned()));
        }
        return Ok(files.into_iter().map(|(_, text)| text).collect());
    }
    if path.extension().is_some_and(|end| end == "jsonl") {
        return lines(path);
    }
    Ok(vec![document(path)?])
}

/// Reads the documents in a file of JSON lines.
fn lines(path: &Path) -> Result<Vec<String>> {
    let text =
        crate::text_file::read(path).map_err(|source| Error::Document { path: path.to_owned(), source })?;
    let each = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let documents = each.map(|(at, line)| {
        let wrong = |reason: String| Error::DocumentLine { path: path.to_owned(), line: at + 1, reason };
        let value: serde_json::Value =
            serde_json::from_str(line).map_err(|error| wrong(format!("it is not JSON ({error})")))?;
        let text = value.as_str().or_else(|| value.get("text")?.as_str());
        match text {
            Some(text) if text.trim().is_empty() => Err(wrong("the document is empty".to_owned())),
            Some(text) if text.ends_with('\n') => Ok(text.to_owned()),
            Some(text) => Ok(format!("{text}\n")),
            None => Err(wrong("it is neither a string nor an object with a string `text`".to_owned())),
        }
    });
    let documents = documents.collect::<Result<Vec<_>>>()?;
    if documents.is_empty() { Err(Error::NoDocuments(path.to_owned())) } else { Ok(documents) }
}
