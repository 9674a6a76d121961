//! What commands print: tables for people, one object for programs.

use std::collections::BTreeMap;
use std::time::Duration;

use comfy_table::{ContentArrangement, LineStyle, Table, TableStyle};
use kvchunk::{ChunkReport, ReuseCell};
use kvcore::{PoolCounts, Profiler};
use kvmodel::{CacheReport, FinishReason, Generation};
use serde::Serialize;

/// An answer as JSON.
#[derive(Serialize)]
pub(crate) struct AnswerJson<'a> {
    text: String,
    tokens: &'a [u32],
    finish: FinishReason,
    prompt_tokens: usize,
    cached_tokens: usize,
    ttft_ms: f64,
    total_ms: f64,
    cell: ReuseCell,
    chunks: &'a [ChunkReport],
    blocks: BlocksJson,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<BTreeMap<&'static str, SpanJson>>,
}

/// Blocks of both pools together, then of each.
#[derive(Serialize)]
struct BlocksJson {
    #[serde(flatten)]
    all: PoolCounts,
    #[serde(flatten)]
    pools: CacheReport,
}

#[derive(Serialize)]
struct SpanJson {
    count: u64,
    total_ms: f64,
    min_ms: f64,
    max_ms: f64,
}

/// The object of one answer.
pub(crate) fn answer_json<'a>(
    text: String,
    generation: &'a Generation,
    cell: ReuseCell,
    caches: CacheReport,
    profiler: &Profiler,
) -> AnswerJson<'a> {
    let all = [caches.main, caches.chunks].into_iter().flatten().sum();
    let spans = profiler.summary().into_iter().map(|(name, s)| {
        let span = SpanJson { count: s.count, total_ms: ms(s.total), min_ms: ms(s.min), max_ms: ms(s.max) };
        (name, span)
    });
    AnswerJson {
        text,
        tokens: &generation.tokens,
        finish: generation.finish,
        prompt_tokens: generation.prompt_tokens,
        cached_tokens: generation.cached_tokens,
        ttft_ms: ms(generation.ttft),
        total_ms: ms(generation.total),
        cell,
        chunks: &generation.chunks,
        blocks: BlocksJson { all, pools: caches },
        profile: profiler.is_enabled().then(|| spans.collect()),
    }
}

/// Where time went, as a table.
pub(crate) fn profile_table(profiler: &Profiler) -> Table {
    let mut table = table(&["span", "count", "total ms", "min ms", "max ms"]);
    let mut spans: Vec<_> = profiler.summary().into_iter().collect();
    spans.sort_by_key(|(_, s)| std::cmp::Reverse(s.total));
    for (name, s) in spans {
        let cell = |d| format!("{:.3}", ms(d));
        table.add_row([name.to_owned(), s.count.to_string(), cell(s.total), cell(s.min), cell(s.max)]);
    }
    table
}

/// A line under the header and none elsewhere.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// An empty table with a header, in the style of all of them.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
    table
}

/// Milliseconds.
pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
