//! `kvc bench serve`: requests that arrive while others are running.

use std::io::Write;
use std::path::Path;

use kvengine::{Engine, EngineConfig, ResultFile, Scheduling};
use kvlab::{Arrival, SharedPrefix, Times, Traffic, TrafficReport, play};

use super::open;
use crate::args::ServeArgs;
use crate::error::{Error, Result};
use crate::plot::{Frame, Legend, Series, draw, result_file};
use crate::progress::{bar, counting};
use crate::report::{json, table};

pub(super) fn serve(args: &ServeArgs) -> Result<()> {
    let file = args.plot.as_deref().map(result_file).transpose()?;
    let trace = match &args.trace {
        Some(path) => read(path)?,
        None => Traffic {
            requests: args.requests,
            rate: args.rate,
            prompt_tokens: args.prompt_tokens,
            answer_tokens: args.answer_tokens,
            seed: args.seed,
        }
        .draw()?,
    };
    let mut engine = engine(args)?;
    let bar = bar("requests", "{pos}/{len} {eta}", !args.json);
    let mut progress = counting(&bar);
    let shared = SharedPrefix { tokens: args.shared_prefix, pinned: args.pin };
    let report = play(&mut engine, &trace, shared, args.seed, &mut progress)?;
    bar.finish_and_clear();
    if let Some(failure) = &report.first_failure {
        note!("{} of {} requests failed; the first: {failure}", report.failed, report.requests);
    }
    let out = &mut std::io::stdout().lock();
    if args.json {
        json(out, &report)?;
    } else {
        show(out, &report)?;
    }
    file.map_or(Ok(()), |file| plot(file, &report))
}

fn engine(args: &ServeArgs) -> Result<Engine> {
    let (model, tokenizer, backend) = open(&args.on)?;
    let scheduling =
        Scheduling { step_tokens: args.step_tokens, running: args.running, ..Default::default() };
    let config = EngineConfig {
        kv_format: args.on.dtype,
        kv_memory: Some(args.on.kv_memory.saturating_mul(1 << 20)),
        scheduling,
        swap_memory: args.swap_memory.saturating_mul(1 << 20),
        ..EngineConfig::default()
    };
    Ok(Engine::new(model, backend, &tokenizer, &config)?)
}

/// Reads a trace: one JSON object per line.
fn read(path: &Path) -> Result<Vec<Arrival>> {
    let text = crate::text_file::read(path).map_err(|source| Error::Trace { path: path.into(), source })?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let mut trace: Vec<Arrival> = lines
        .map(|(i, line)| {
            let wrong = |reason: String| Error::Arrival { path: path.into(), line: i + 1, reason };
            let arrival: Arrival = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
            if arrival.prompt_tokens == 0 || arrival.answer_tokens == 0 {
                return Err(wrong("a prompt and its answer need at least one token".to_owned()));
            }
            if !(arrival.at.is_finite() && arrival.at >= 0.0) {
                return Err(wrong("at must be a number of seconds, 0 or more".to_owned()));
            }
            Ok(arrival)
        })
        .collect::<Result<_>>()?;
    trace.sort_by(|a, b| a.at.total_cmp(&b.at));
    Ok(trace)
}

fn show(out: &mut impl Write, report: &TrafficReport) -> Result<()> {
    let times = |t: &Times| format!("{:.1} / {:.1} ms", t.p50, t.p95);
    let mut rows = vec![
        ("requests", report.requests.to_string()),
        ("  failed", report.failed.to_string()),
        ("  cut short, because they outgrew the pool", report.shortened.to_string()),
        ("prompt / answer tokens", format!("{} / {}", report.prompt_tokens, report.answer_tokens)),
        ("prompt tokens found in the cache", report.cached_tokens.to_string()),
        ("time", format!("{:.2} s", report.seconds)),
    ];
    if let Some(cpu) = report.cpu_seconds {
        rows.push(("processor time", format!("{cpu:.2} s")));
    }
    rows.extend([
        ("answer tokens per second", format!("{:.1}", report.answer_tokens_per_second)),
        ("tokens per second, including prompts", format!("{:.1}", report.tokens_per_second)),
        ("TTFT p50 / p95, from arrival", times(&report.ttft)),
        ("between tokens p50 / p95", times(&report.between_tokens)),
        ("whole answer p50 / p95", times(&report.whole)),
        ("passes", report.steps.to_string()),
        ("tokens per pass", format!("{:.1}", report.tokens_per_step)),
        ("time spent in the engine itself", format!("{:.2} %", 100.0 * report.engine_share)),
        ("preemptions", report.preemptions.to_string()),
        ("  swapped to host memory", report.swaps.to_string()),
    ]);
    let mut table = table(&["", "all requests"]);
    for (name, value) in rows {
        table.add_row([name.to_owned(), value]);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

fn plot(file: ResultFile, report: &TrafficReport) -> Result<()> {
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
