//! Tables and plots of `kvc bench serve`.

use std::io::Write;

use kvengine::ResultFile;
use kvlab::{ClientReport, Times, TrafficReport};

use super::http::Compared;
use crate::error::Result;
use crate::plot::{Frame, Legend, Series, draw};
use crate::report::table;

/// Says on standard error how many requests failed, and why the first one did.
pub(super) fn failures(report: &ClientReport) {
    if let Some(failure) = &report.first_failure {
        note!("{} of {} requests failed; the first: {failure}", report.failed, report.requests);
    }
}

/// A row of a table: its name and its values.
type Row = (&'static str, Vec<String>);

/// Writes the table of an engine alone.
pub(super) fn traffic(out: &mut impl Write, report: &TrafficReport) -> Result<()> {
    let mut rows = of_clients(&[&report.client]);
    rows.extend(of_engine(report).map(|(name, value)| (name, vec![value])));
    write(out, &["", "all requests"], rows)
}

/// Writes the table of a server of which nothing else is known.
pub(super) fn client(out: &mut impl Write, report: &ClientReport) -> Result<()> {
    write(out, &["", "all requests"], of_clients(&[report]))
}

/// Writes the table of an engine alone and of a server over the same engine, and the ratio of their times.
pub(super) fn compared(out: &mut impl Write, compared: &Compared) -> Result<()> {
    let mut rows = of_clients(&[&compared.engine.client, &compared.server]);
    let [engine, server] = [&compared.engine_seconds, &compared.server_seconds].map(|seconds| range(seconds));
    rows.push(("time, shortest to longest round", vec![engine, server]));
    rows.extend(of_engine(&compared.engine).map(|(name, value)| (name, vec![value, "–".to_owned()])));
    write(out, &["median round", "engine alone", "through the server"], rows)?;
    writeln!(
        out,
        "\nThe server takes {:.3} times as long as the engine alone ({:+.1} %), by the medians of {} rounds each.",
        compared.ratio,
        100.0 * (compared.ratio - 1.0),
        compared.engine_seconds.len(),
    )?;
    Ok(())
}

fn range(seconds: &[f64]) -> String {
    let least = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let most = seconds.iter().copied().fold(0.0, f64::max);
    format!("{least:.2} to {most:.2} s")
}

/// Returns the rows that every client knows, with one value for each report.
fn of_clients(reports: &[&ClientReport]) -> Vec<Row> {
    let times = |t: &Times| format!("{:.1} / {:.1} ms", t.p50, t.p95);
    let row = |name, of: &dyn Fn(&ClientReport) -> String| {
        (name, reports.iter().map(|report| of(report)).collect())
    };
    let mut rows = vec![
        row("requests", &|r| r.requests.to_string()),
        row("  failed", &|r| r.failed.to_string()),
        row("  cut short, because they outgrew the pool", &|r| r.shortened.to_string()),
        row("prompt / answer tokens", &|r| format!("{} / {}", r.prompt_tokens, r.answer_tokens)),
        row("prompt tokens found in the cache", &|r| r.cached_tokens.to_string()),
        row("time", &|r| format!("{:.2} s", r.seconds)),
    ];
    if reports.iter().any(|report| report.cpu_seconds.is_some()) {
        rows.push(row("processor time of this process", &|r| {
            r.cpu_seconds.map_or_else(|| "–".to_owned(), |cpu| format!("{cpu:.2} s"))
        }));
    }
    if reports.iter().any(|report| report.client_cpu_seconds.is_some()) {
        rows.push(row("processor time of the client", &|r| {
            r.client_cpu_seconds.map_or_else(|| "–".to_owned(), |cpu| format!("{cpu:.3} s"))
        }));
    }
    rows.extend([
        row("answer tokens per second", &|r| format!("{:.1}", r.answer_tokens_per_second)),
        row("tokens per second, including prompts", &|r| format!("{:.1}", r.tokens_per_second)),
        row("TTFT p50 / p95, from arrival", &|r| times(&r.ttft)),
        row("between tokens p50 / p95", &|r| times(&r.between_tokens)),
        row("whole answer p50 / p95", &|r| times(&r.whole)),
    ]);
    rows
}

/// Returns the rows that only the engine knows.
fn of_engine(report: &TrafficReport) -> [(&'static str, String); 5] {
    [
        ("passes", report.steps.to_string()),
        ("tokens per pass", format!("{:.1}", report.tokens_per_step)),
        ("time spent in the engine itself", format!("{:.2} %", 100.0 * report.engine_share)),
        ("preemptions", report.preemptions.to_string()),
        ("  swapped to host memory", report.swaps.to_string()),
    ]
}

fn write(out: &mut impl Write, header: &[&str], rows: Vec<Row>) -> Result<()> {
    let mut table = table(header);
    for (name, values) in rows {
        table.add_row([name.to_owned()].into_iter().chain(values));
    }
    writeln!(out, "{table}")?;
    Ok(())
}

/// Plots the time to first token of each request.
pub(super) fn plot(file: ResultFile, report: &ClientReport) -> Result<()> {
    let points: Vec<_> = report.ttft_ms.iter().enumerate().map(|(i, &ms)| (i as f64, ms, 0.0)).collect();
    let highest = report.ttft_ms.iter().copied().fold(0.0, f64::max);
    let frame = Frame {
        title: "Time to first token of each request, from its arrival",
        x: "request",
        y: "time to first token, ms",
        x_range: 0.0..points.len() as f64,
        y_range: 0.0..1.1 * highest.max(f64::MIN_POSITIVE),
        legend: Legend::Below,
    };
    draw(file, &[(frame, vec![Series { name: "time to first token".to_owned(), points }])])
}
