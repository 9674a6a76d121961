//! `kvc bench serve`: requests that arrive while others are running, answered by an engine alone or by a server.

use std::path::Path;

use kvengine::{Engine, EngineConfig, Scheduling};
use kvlab::{Arrival, SharedPrefix, Traffic, TrafficReport, play};
use kvmodel::TextCodec;

use super::open;
use crate::args::ServeArgs;
use crate::error::{Error, Result};
use crate::plot::result_file;
use crate::progress::{bar, counting};
use crate::report::json;

mod http;
mod show;

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
    let out = &mut std::io::stdout().lock();
    let report = if let Some(url) = &args.url {
        let report = http::other(args, url, &trace)?;
        if args.json {
            json(out, &report)?;
        } else {
            show::client(out, &report)?;
        }
        report
    } else if args.http {
        let compared = http::compare(args, &trace)?;
        if args.json {
            json(out, &compared)?;
        } else {
            show::compared(out, &compared)?;
        }
        compared.server
    } else {
        let report = alone(args, &trace)?;
        if args.json {
            json(out, &report)?;
        } else {
            show::traffic(out, &report)?;
        }
        report.client
    };
    file.map_or(Ok(()), |file| show::plot(file, &report))
}

/// Plays the trace on a fresh engine.
fn alone(args: &ServeArgs, trace: &[Arrival]) -> Result<TrafficReport> {
    let (mut engine, _) = engine(args)?;
    let bar = bar("requests", "{pos}/{len} {eta}", !args.json);
    let mut progress = counting(&bar);
    let shared = SharedPrefix { tokens: args.shared_prefix, pinned: args.pin };
    let report = play(&mut engine, trace, shared, args.seed, &mut progress)?;
    bar.finish_and_clear();
    show::failures(&report.client);
    Ok(report)
}

fn engine(args: &ServeArgs) -> Result<(Engine, TextCodec)> {
    let (model, codec, backend) = open(&args.on)?;
    let scheduling =
        Scheduling { step_tokens: args.step_tokens, running: args.running, ..Default::default() };
    let config = EngineConfig {
        kv_format: args.on.dtype,
        kv_memory: Some(args.on.kv_memory.saturating_mul(1 << 20)),
        scheduling,
        swap_memory: args.swap_memory.saturating_mul(1 << 20),
        ..EngineConfig::default()
    };
    Ok((Engine::new(model, backend, codec.digest(), &config)?, codec))
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
