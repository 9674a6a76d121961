//! `kvc bench rag --http`: the time to first token of one prompt through a server, with its documents
//! found or not.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use kvchunk::{Reuse, ReuseCell};
use kvengine::ResultFile;
use kvlab::{Arrival, TrafficPrompts};
use kvload::{FirstToken, first_tokens};
use kvmodel::TextCodec;
use kvserve::{DocumentReuse, ServedModel, Server, ServerConfig};
use serde::Serialize;
use serde_json::{Value, json};

use super::engine;
use crate::args::RagArgs;
use crate::error::Result;
use crate::plot::{Frame, Legend, Series, draw};
use crate::progress::{bar, counting};
use crate::report::{json as write_json, ms, table};

/// The numbers of requests with the documents in the same order and in others, after the one that computes them.
const SAME: usize = 4;
const OTHERS: usize = 8;

/// The lengths of the system prompt and of a question, in tokens.
const SYSTEM_TOKENS: usize = 64;
const QUESTION_TOKENS: usize = 32;

/// The times of a server, in milliseconds, each with the share of the prompt's tokens that were found.
#[derive(Debug, Serialize)]
struct ServerTimes {
    name: &'static str,
    /// The prompt that computes the documents.
    cold: (f64, f64),
    /// The median with the documents in the same order, behind another question.
    same_order: (f64, f64),
    /// The median with the documents in other orders.
    other_orders: (f64, f64),
    /// The times of all requests in their order.
    ttft_ms: Vec<f64>,
}

pub(super) fn found(args: &RagArgs, plot: Option<ResultFile>) -> Result<()> {
    let mut all = Vec::new();
    let mut tokens = 0;
    let cell = ReuseCell { mode: args.chunks, strategy: args.positions.into() };
    for (name, reuse) in [
        ("documents reused as they are", Some(Reuse::plain(cell))),
        ("documents reused, half recomputed", Some(Reuse::default())),
        ("prefix caching alone", None),
    ] {
        let firsts = measured(args, reuse)?;
        tokens = firsts.first().map_or(0, |first| first.prompt_tokens);
        let (cold, rest) = firsts.split_at(1);
        let (same, others) = rest.split_at(SAME);
        let ttft_ms = firsts.iter().map(|first| ms(first.after)).collect();
        let [cold, same_order, other_orders] = [cold, same, others].map(median);
        all.push(ServerTimes { name, cold, same_order, other_orders, ttft_ms });
    }
    let out = &mut std::io::stdout().lock();
    if args.json {
        write_json(out, &json!({"prompt_tokens": tokens, "servers": all}))?;
    } else {
        show(out, args, tokens, &all)?;
    }
    plot.map_or(Ok(()), |file| plotted(file, &all))
}

/// Returns the median time in milliseconds, and the share of tokens that were found in all prompts.
fn median(firsts: &[FirstToken]) -> (f64, f64) {
    let mut times: Vec<Duration> = firsts.iter().map(|first| first.after).collect();
    times.sort_unstable();
    let sum = |of: fn(&FirstToken) -> usize| firsts.iter().map(of).sum::<usize>() as f64;
    let share = sum(|first| first.cached_tokens) / sum(|first| first.prompt_tokens).max(1.0);
    (times.get(times.len() / 2).copied().map_or(0.0, ms), share)
}

/// Asks a fresh server for the cold prompt, and for the same documents in the same order and in others.
fn measured(args: &RagArgs, reuse: Option<Reuse>) -> Result<Vec<FirstToken>> {
    let (engine, codec) = engine(args)?;
    let bodies = requests(args, &codec, engine.model().config().vocab_size as u32)?;
    let reuse = reuse.map(|settings| DocumentReuse { settings, decoys: Arc::default() });
    let defaults = ServerConfig::default();
    let config = ServerConfig { address: (defaults.address.ip(), 0).into(), ..defaults };
    let server =
        Server::start(ServedModel { engine, codec, names: vec!["measured".to_owned()], reuse }, config)?;
    let url = format!("http://{}", server.address()).parse()?;
    let bar = bar("requests", "{pos}/{len} {eta}", !args.json);
    // The first request warms up the threads, the memory and the connection.
    let mut firsts = first_tokens(&url, bodies, &mut counting(&bar))?;
    bar.finish_and_clear();
    firsts.remove(0);
    Ok(firsts)
}

/// Returns the requests: one to warm up with other documents, and those that are measured.
fn requests(args: &RagArgs, codec: &TextCodec, vocabulary: u32) -> Result<Vec<Value>> {
    let mut prompts = TrafficPrompts::new(vocabulary, 0, args.seed);
    let mut text = |prompt_tokens| -> Result<String> {
        let arrival = Arrival { at: 0.0, prompt_tokens, answer_tokens: 1 };
        Ok(codec.decode(&prompts.draw(&arrival))?)
    };
    let system = text(SYSTEM_TOKENS)?;
    let others = [text(args.document_tokens)?];
    let documents = (0..args.per_request).map(|_| text(args.document_tokens)).collect::<Result<Vec<_>>>()?;
    let mut request = |documents: &[String], turned: usize| -> Result<Value> {
        let mut order = documents.to_vec();
        // Every other order is also reversed, so that no two neighbours stay neighbours.
        if turned % 2 == 1 {
            order.reverse();
        }
        let count = order.len().max(1);
        order.rotate_left(turned % count);
        Ok(json!({
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": text(QUESTION_TOKENS)?}],
            "documents": order,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": true,
        }))
    };
    let warm_up = request(&others, 0)?;
    let measured = (0..=SAME).map(|_| 0).chain(1..=OTHERS).map(|turned| request(&documents, turned));
    [Ok(warm_up)].into_iter().chain(measured).collect()
}

fn show(out: &mut impl Write, args: &RagArgs, tokens: usize, all: &[ServerTimes]) -> Result<()> {
    let mut table = table(&["TTFT at the client (tokens found)", "cold", "same order", "other orders"]);
    for ServerTimes { name, cold, same_order, other_orders, .. } in all {
        let cell = |(ms, share): &(f64, f64)| format!("{ms:.1} ms ({:.0} %)", 100.0 * share);
        table.add_row([(*name).to_owned(), cell(cold), cell(same_order), cell(other_orders)]);
    }
    writeln!(out, "{table}")?;
    writeln!(
        out,
        "\n{} documents of {} tokens, {tokens} tokens in total; medians of {SAME} requests in the same order and of {OTHERS} in \
         other orders, each with another question.",
        args.per_request, args.document_tokens
    )?;
    Ok(())
}

fn plotted(file: ResultFile, all: &[ServerTimes]) -> Result<()> {
    let point = |(request, &ms): (usize, &f64)| (request as f64, ms, 0.0);
    let series = |times: &ServerTimes| Series {
        name: times.name.to_owned(),
        points: times.ttft_ms.iter().enumerate().map(point).collect(),
    };
    let highest = all.iter().flat_map(|times| &times.ttft_ms).copied().fold(0.0, f64::max);
    let frame = Frame {
        title: &format!("Time to first token: cold, {SAME} in the same order, {OTHERS} in other orders"),
        x: "request",
        y: "time to first token at the client, ms",
        x_range: 0.0..(1 + SAME + OTHERS) as f64,
        y_range: 0.0..1.15 * highest.max(f64::MIN_POSITIVE),
        legend: Legend::Middle,
    };
    draw(file, &[(frame, all.iter().map(series).collect())])
}
