//! The commands' output: tables for people, one JSON object for programs.

use std::fmt;
use std::io::Write;
use std::time::Duration;

use comfy_table::{ContentArrangement, LineStyle, Table, TableStyle};
use kvchunk::{ChunkReport, MissReason, ReuseCell, SleepForm, SleepUsage};
use kvcore::{GraphCounts, PoolCounts};
use kvengine::{
    CacheReport, Engine, FinishReason, Generation, PromptTokens, Sampler, Sampling, TokenLogprobs,
};
use kvmodel::ProfileReport;
use kvtier::{Slab, SlabUsage};
use serde::Serialize;

use crate::error::Result;
use crate::memory::MemoryJson;
use crate::run::PromptCacheJson;

/// An answer, as written by `--json`.
#[derive(Serialize)]
pub(crate) struct AnswerJson<'a> {
    text: String,
    tokens: &'a [u32],
    finish: FinishReason,
    prompt_tokens: usize,
    cached_tokens: usize,
    recomputed_tokens: usize,
    drafted_tokens: usize,
    accepted_tokens: usize,
    prefill_flops: u64,
    ttft_ms: f64,
    total_ms: f64,
    cell: ReuseCell,
    prefix_missed: Option<MissReason>,
    chunks: &'a [ChunkReport],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    documents: Vec<Option<String>>,
    blocks: BlocksJson,
    memory: MemoryJson,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    logprobs: &'a [TokenLogprobs],
    #[serde(skip_serializing_if = "Option::is_none")]
    read_back: Option<ReadBackJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    graphs: Option<GraphsJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sleep: Option<SleepJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<SlabUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cache: Option<PromptCacheJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<ProfileReport>,
}

/// The parts of a report that are not in the answer itself.
pub(crate) struct AnswerParts {
    pub(crate) text: String,
    pub(crate) read_back: Option<ReadBackJson>,
    pub(crate) prompt_cache: Option<PromptCacheJson>,
    /// For each chunk, the document of a library that it is.
    pub(crate) documents: Vec<Option<String>>,
}

/// The number of blocks in both pools together, and in each pool.
#[derive(Serialize)]
struct BlocksJson {
    #[serde(flatten)]
    all: PoolCounts,
    #[serde(flatten)]
    pools: CacheReport,
}

/// The tokens that the model would choose at each position of a given answer.
#[derive(Serialize)]
pub(crate) struct ReadBackJson {
    /// The prompt's tokens.
    prompt: Vec<u32>,
    /// The most likely token at the position of each answer token and, if there was room, after the last one.
    likeliest: Vec<u32>,
}

impl ReadBackJson {
    /// Creates the report for an answer whose logits were kept.
    pub(crate) fn new(prompt: &PromptTokens, generation: &Generation) -> Self {
        let prompt = match prompt {
            PromptTokens::Plain(tokens) => tokens.clone(),
            PromptTokens::Chunked(prompt) => prompt.flatten(),
        };
        let mut greedy = Sampler::new(Sampling::default());
        Self { prompt, likeliest: generation.logits.iter().map(|row| greedy.sample(row)).collect() }
    }
}

/// A report on sleeping documents: counts as of the end of the request, and the sizes of the pieces that were
/// asleep before the request.
#[derive(Serialize)]
pub(crate) struct SleepJson {
    form: String,
    /// The number of pieces that have been put to sleep so far.
    slept: u64,
    /// The number of pieces that have been woken so far.
    woken: u64,
    /// The number of sleeping pieces that could not be read back and were lost.
    lost: u64,
    /// The size on the device of the pieces that were asleep before the prompt, in bytes.
    device_bytes: usize,
    /// The host memory that these pieces took while asleep, in bytes.
    host_bytes: usize,
    /// The difference between `device_bytes` and `host_bytes`.
    saved_bytes: usize,
}

impl SleepJson {
    /// Creates the report. `asleep` must describe the pieces that were asleep before the request, and
    /// `report` must have been created after it. Returns `None` if there is no chunk cache.
    pub(crate) fn new(form: SleepForm, asleep: SleepUsage, report: &CacheReport) -> Option<Self> {
        let counted = report.chunk_cache.as_ref()?;
        Some(Self {
            form: form.to_string(),
            slept: counted.slept,
            woken: counted.woken,
            lost: counted.lost,
            device_bytes: asleep.device_bytes,
            host_bytes: asleep.host_bytes,
            saved_bytes: asleep.saved_bytes(),
        })
    }
}

impl fmt::Display for SleepJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kib = |bytes: usize| bytes as f64 / 1024.0;
        write!(
            f,
            "{} chunks put to sleep ({}), {} woken by hits: {:.1} KiB of device memory freed, {:.1} KiB of host memory \
             used",
            self.slept,
            self.form,
            self.woken,
            kib(self.device_bytes),
            kib(self.host_bytes),
        )?;
        if self.lost > 0 { write!(f, "; {} could not be read back", self.lost) } else { Ok(()) }
    }
}

/// Counts of decode steps, by how they ran, and of rejected captures, for a backend that captures graphs.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(transparent)]
pub(crate) struct GraphsJson(GraphCounts);

impl GraphsJson {
    /// Returns the counts, or `None` if all of them are 0, for example because the backend cannot capture
    /// steps.
    pub(crate) fn of(engine: &Engine) -> Option<Self> {
        let counts = engine.graph_counts();
        (counts != GraphCounts::default()).then_some(Self(counts))
    }
}

impl fmt::Display for GraphsJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GraphCounts { eager, captured, replayed, refused } = self.0;
        let by_graphs = captured + replayed;
        let of = match captured {
            1 => "1 graph".to_owned(),
            n => format!("{n} graphs"),
        };
        write!(f, "decode steps: {by_graphs} with {of}, {eager} kernel by kernel")?;
        if refused > 0 { write!(f, " ({refused} captures rejected)") } else { Ok(()) }
    }
}

/// Returns the JSON object for one answer.
pub(crate) fn answer_json<'a>(
    AnswerParts { text, read_back, prompt_cache, documents }: AnswerParts,
    generation: &'a Generation,
    cell: ReuseCell,
    engine: &Engine,
    sleep: Option<SleepJson>,
) -> AnswerJson<'a> {
    let (caches, profiler) = (engine.report(), engine.profiler());
    let all = [caches.main, caches.chunks].into_iter().flatten().sum();
    AnswerJson {
        text,
        tokens: &generation.tokens,
        finish: generation.finish,
        prompt_tokens: generation.prompt_tokens,
        cached_tokens: generation.cached_tokens,
        recomputed_tokens: generation.recomputed_tokens,
        drafted_tokens: generation.drafted_tokens,
        accepted_tokens: generation.accepted_tokens,
        prefill_flops: generation.prefill_flops,
        ttft_ms: ms(generation.ttft),
        total_ms: ms(generation.total),
        cell,
        prefix_missed: generation.prefix_missed,
        chunks: &generation.chunks,
        documents,
        blocks: BlocksJson { all, pools: caches },
        memory: MemoryJson::of(engine),
        logprobs: generation.logprobs.as_slice(),
        read_back,
        graphs: GraphsJson::of(engine),
        sleep,
        disk: engine.disk().map(Slab::usage),
        prompt_cache,
        profile: profiler.is_enabled().then(|| profiler.report()),
    }
}

/// Describes a disk in one line.
pub(crate) fn disk_line(usage: &SlabUsage) -> String {
    let SlabUsage { hits, misses, records, bytes, limit_bytes, .. } = usage;
    let mib = |bytes: &u64| *bytes as f64 / f64::from(1 << 20);
    format!(
        "{hits} records loaded from the disk, {misses} not found there; {records} stored in {:.1} of {:.1} MiB",
        mib(bytes),
        mib(limit_bytes),
    )
}

/// The style of tables: the only line is below the header.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Creates an empty table with a header, in the style shared by all tables.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
    table
}

/// Returns a duration in milliseconds.
pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Prints a value as one line of JSON.
pub(crate) fn json(out: &mut impl Write, value: &impl Serialize) -> Result<()> {
    serde_json::to_writer(&mut *out, value).map_err(std::io::Error::from)?;
    Ok(writeln!(out)?)
}
