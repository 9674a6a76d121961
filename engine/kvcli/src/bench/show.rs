//! Tables and plots of `kvc bench rag`.

use std::io::Write;

use kvchunk::metrics::{Goal, Target};
use kvengine::ResultFile;
use kvlab::{Popularity, RagReport, Times, TtftRow};

use crate::args::RagArgs;
use crate::error::Result;
use crate::plot::{Frame, Legend, Series, draw};
use crate::report::table;

fn name(popularity: Popularity) -> String {
    match popularity {
        Popularity::Zipf(s) => format!("Zipf, s = {s}"),
        Popularity::Repetition(p) => format!("{:.0} % repeated", 100.0 * p),
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A function that returns a row's cell for one workload.
type Cell<'a> = Box<dyn Fn(&RagReport) -> String + 'a>;

/// Writes a table of hits, times and the predicted speed-up, with one column per workload.
pub(super) fn workloads(out: &mut impl Write, reports: &[RagReport]) -> Result<()> {
    let names: Vec<String> = reports.iter().map(|report| name(report.workload.popularity)).collect();
    let header: Vec<&str> = [""].into_iter().chain(names.iter().map(String::as_str)).collect();
    let mut table = table(&header);
    let times = |t: &Times| format!("{:.1} / {:.1} ms", t.p50, t.p95);
    let mib = |bytes: usize| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let ms = |ms: f64| format!("{ms:.4} ms");
    let mut rows: Vec<(&str, Cell<'_>)> = vec![
        ("documents found in the cache", Box::new(|r| percent(r.document_hit_rate))),
        ("requests with at least one hit", Box::new(|r| percent(r.any_hit_rate))),
        (
            "  predicted: 1 − (1 − p)^k",
            Box::new(|r| r.predicted_any_hit_rate.map_or("–".to_owned(), percent)),
        ),
        ("TTFT p50 / p95, with reuse", Box::new(|r| times(&r.with_reuse))),
        ("  without reuse, same mask", Box::new(|r| times(&r.without_reuse))),
        ("  full attention", Box::new(|r| times(&r.full_attention))),
        ("α, time spent on documents", Box::new(|r| percent(r.alpha))),
        ("β, document tokens found in the cache", Box::new(|r| percent(r.beta))),
        ("speed-up, predicted: 1 / (1 − α β)", Box::new(|r| format!("{:.2}", r.predicted_speedup))),
        ("speed-up, measured", Box::new(|r| format!("{:.2}", r.measured_speedup))),
        ("lookup, on average", Box::new(|r| ms(r.chunk_cache.avg_lookup_time_ms()))),
        ("reindex, on average", Box::new(|r| ms(r.chunk_cache.avg_reindex_time_ms()))),
        ("compute, on average", Box::new(|r| ms(r.chunk_cache.avg_compute_time_ms()))),
        (
            "documents kept / evicted",
            Box::new(|r| format!("{} / {}", r.chunk_cache.cached_chunks, r.chunk_cache.evictions)),
        ),
        ("memory for documents, in use", Box::new(|r| mib(r.used_bytes))),
        ("  reserved", Box::new(|r| mib(r.chunk_pool_bytes))),
    ];
    if reports.iter().any(|report| report.chunk_sleep.is_some()) {
        let asleep = |r: &RagReport| r.chunk_sleep.unwrap_or_default();
        let counts = |r: &RagReport| format!("{} / {}", r.chunk_cache.slept, r.chunk_cache.woken);
        rows.push(("documents put to sleep / woken", Box::new(counts)));
        rows.push(("asleep at the end", Box::new(move |r| asleep(r).pieces.to_string())));
        rows.push(("  freed on the device", Box::new(move |r| mib(asleep(r).device_bytes))));
        rows.push(("  in host memory", Box::new(move |r| mib(asleep(r).host_bytes))));
    }
    for (what, cell) in &rows {
        table.add_row([(*what).to_owned()].into_iter().chain(reports.iter().map(cell)));
    }
    writeln!(out, "{table}\n")?;
    goals(out, reports, &header)?;
    if let Some(first) = reports.first() {
        let w = first.workload;
        writeln!(
            out,
            "\n{} requests of {} documents of {} tokens, {} of a system prompt, {} of a question; seed {}.",
            w.requests, w.per_request, w.document_tokens, w.system_tokens, w.question_tokens, w.seed
        )?;
        writeln!(
            out,
            "Times without reuse, α, β and the speed-ups are measured on a sample of the requests.\n"
        )?;
    }
    Ok(())
}

/// Writes the targets and alarms, with one column per workload.
fn goals(out: &mut impl Write, reports: &[RagReport], header: &[&str]) -> Result<()> {
    let mut table = table(header);
    let bound = |goal: &Goal| match goal.target {
        Target::Above(limit) => format!("> {}", limit_in(goal.unit, limit)),
        Target::Below(limit) => format!("< {}", limit_in(goal.unit, limit)),
    };
    let mut add = |what: &str, of: fn(&RagReport) -> &[Goal], words: [&str; 2]| {
        for (at, goal) in reports.first().map_or(&[][..], of).iter().enumerate() {
            let name = goal.name.replace('_', " ");
            let cell = |report: &RagReport| {
                let Some((goal, measured)) = of(report).get(at).and_then(|goal| Some((goal, goal.measured?)))
                else {
                    return "not measured".to_owned();
                };
                let word = words[usize::from(goal.met == Some(true))];
                format!("{}{word}", value(goal.unit, measured))
            };
            table.add_row(
                [format!("{what}: {name} {}", bound(goal))].into_iter().chain(reports.iter().map(cell)),
            );
        }
    };
    add("goal", |report| &report.goals, [", missed", ", met"]);
    add("alarm unless", |report| &report.alarms, [", ALARM", ""]);
    writeln!(out, "{table}")?;
    Ok(())
}

/// Formats a target's limit in a short form.
fn limit_in(unit: &str, limit: f64) -> String {
    if unit == "seconds" { format!("{:.0} ms", 1e3 * limit) } else { format!("{:.0} %", 100.0 * limit) }
}

/// Formats a number in the unit of a target.
fn value(unit: &str, number: f64) -> String {
    if unit == "seconds" { format!("{:.4} ms", 1e3 * number) } else { percent(number) }
}

/// Writes a table that compares the times to first token of one prompt, with and without cached parts.
pub(super) fn ttft(out: &mut impl Write, rows: &[TtftRow], args: &RagArgs) -> Result<()> {
    let mut table = table(&["one prompt", "TTFT", "compared with", "TTFT", "speed-up", "target"]);
    let ms = |took: std::time::Duration| format!("{:.2} ms", took.as_secs_f64() * 1e3);
    for row in rows {
        let against = row.limit.to_owned();
        let ratio = format!("{:.2}", row.ratio());
        let target = row.target.map_or_else(String::new, |target| {
            let word = if row.is_met() == Some(true) { "met" } else { "missed" };
            format!("{target}: {word}")
        });
        table.add_row([row.what.to_owned(), ms(row.took), against, ms(row.limit_took), ratio, target]);
    }
    let tokens = rows.first().map_or(0, |row| row.tokens);
    writeln!(out, "{table}")?;
    writeln!(
        out,
        "\n{} documents of {} tokens, {tokens} tokens in total. In rows with chunk hits, the system prompt is cached as \
         well; in the other rows, it is computed.",
        args.per_request, args.document_tokens
    )?;
    if args.on.size.is_none() && rows.iter().any(|row| row.target.is_some()) {
        writeln!(
            out,
            "The targets are set for a larger model (--size 8x1024 --document-tokens 512). With a small model, the fixed \
             cost of a request is a larger part of the time."
        )?;
    }
    Ok(())
}

/// Plots the time to first token of each request, in order of arrival.
pub(super) fn plot(file: ResultFile, report: &RagReport) -> Result<()> {
    let point = |request: usize, ms: f64| (request as f64, ms, 0.0);
    let with = report.arrivals.iter().map(|a| point(a.request, a.ttft_ms)).collect();
    let without =
        report.arrivals.iter().filter_map(|a| Some(point(a.request, a.without_reuse_ms?))).collect();
    let series = [
        Series { name: "with reuse".to_owned(), points: with },
        Series { name: "without reuse, same mask".to_owned(), points: without },
    ];
    let highest = series.iter().flat_map(|s| &s.points).map(|p| p.1).fold(0.0, f64::max);
    let frame = Frame {
        title: &format!("Time to first token as documents are cached ({})", name(report.workload.popularity)),
        x: "request",
        y: "time to first token, ms",
        x_range: 0.0..report.arrivals.len() as f64,
        y_range: 0.0..1.1 * highest.max(f64::MIN_POSITIVE),
        legend: Legend::Middle,
    };
    draw(file, &[(frame, series.into())])
}
