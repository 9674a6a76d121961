//! The requests of a trace through a server: one in this process, or any other.

use kvengine::Engine;
use kvlab::{Arrival, ClientReport, TrafficReport};
use kvload::{ServerUrl, Target};
use kvmodel::TextCodec;
use kvserve::{Limits, ServedModel, Server, ServerConfig};
use serde::Serialize;

use super::{alone, show};
use crate::args::ServeArgs;
use crate::error::{Error, Result};
use crate::progress::{bar, counting};

/// The name of the model in requests to the server of this process.
const NAME: &str = "measured";

/// The longest prompt for a server whose context is not known.
const MOST_TOKENS: usize = 1 << 20;

/// An engine alone, and the same engine behind a server.
#[derive(Debug, Serialize)]
pub(super) struct Compared {
    /// The median round of the engine alone.
    pub(super) engine: TrafficReport,
    /// The median round through the server.
    pub(super) server: ClientReport,
    /// The server's median time divided by the engine's.
    pub(super) ratio: f64,
    /// The seconds of each round of the engine alone.
    pub(super) engine_seconds: Vec<f64>,
    /// The seconds of each round through the server.
    pub(super) server_seconds: Vec<f64>,
}

/// Measures a fresh engine alone and a server over a fresh engine, in turn, as many times as the options say.
pub(super) fn compare(args: &ServeArgs, trace: &[Arrival]) -> Result<Compared> {
    let (mut engines, mut servers) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        // What comes second in a round may find the processors warmer or cooler.
        if round % 2 == 0 {
            engines.push(alone(args, trace)?);
            servers.push(through_server(args, trace)?);
        } else {
            servers.push(through_server(args, trace)?);
            engines.push(alone(args, trace)?);
        }
    }
    let engine_seconds = engines.iter().map(|report| report.client.seconds).collect();
    let server_seconds = servers.iter().map(|report| report.seconds).collect();
    let (engine, server) =
        (median(engines, |report| report.client.seconds), median(servers, |report| report.seconds));
    let ratio = server.seconds / engine.client.seconds;
    Ok(Compared { engine, server, ratio, engine_seconds, server_seconds })
}

/// Returns the report in the middle of all, by their times. There is at least one round.
fn median<R>(mut reports: Vec<R>, seconds: impl Fn(&R) -> f64) -> R {
    reports.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
    let middle = reports.len() / 2;
    reports.swap_remove(middle)
}

/// Starts a server at a free port, and plays the trace over HTTP.
fn through_server(args: &ServeArgs, trace: &[Arrival]) -> Result<ClientReport> {
    let (engine, codec) = super::engine(args)?;
    let config = engine.model().config();
    let (vocabulary, limit) = (config.vocab_size as u32, config.max_positions);
    let server = start(engine, codec, trace.len())?;
    let url = format!("http://{}", server.address()).parse()?;
    play(args, &Target { url, model: NAME.to_owned(), vocabulary, limit }, trace)
}

/// Starts a server at a free port of this machine that refuses no request for its number.
fn start(engine: Engine, codec: TextCodec, requests: usize) -> Result<Server> {
    let defaults = ServerConfig::default();
    let limits = Limits { requests: requests.max(defaults.limits.requests), ..defaults.limits };
    let config = ServerConfig { address: (defaults.address.ip(), 0).into(), limits, ..defaults };
    let names = vec![NAME.to_owned()];
    Ok(Server::start(ServedModel { engine, codec, names, reuse: None }, config)?)
}

/// Plays the trace on a server of another process.
pub(super) fn other(args: &ServeArgs, url: &ServerUrl, trace: &[Arrival]) -> Result<ClientReport> {
    let model = if let Some(name) = &args.model_name {
        name.clone()
    } else {
        let names = kvload::model_names(url)?;
        names.into_iter().next().ok_or_else(|| Error::NoModelName(url.clone()))?
    };
    let target = Target { url: url.clone(), model, vocabulary: args.vocabulary, limit: MOST_TOKENS };
    let report = play(args, &target, trace)?;
    // The work happens in another process.
    Ok(ClientReport { cpu_seconds: None, ..report })
}

fn play(args: &ServeArgs, target: &Target, trace: &[Arrival]) -> Result<ClientReport> {
    let bar = bar("requests", "{pos}/{len} {eta}", !args.json);
    let mut progress = counting(&bar);
    let report = kvload::play(target, trace, args.shared_prefix, args.seed, &mut progress)?;
    bar.finish_and_clear();
    show::failures(&report);
    Ok(report)
}
