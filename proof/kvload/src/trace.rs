//! Plays a trace over HTTP: each request at its time, on a connection of its own.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kvlab::{Arrival, ClientReport, ClientTally, TrafficPrompts, cpu_seconds, thread_cpu_seconds};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::client::Client;
use crate::error::{Error, Result};
use crate::url::ServerUrl;

/// The most connections that are opened before the first request.
const MOST_OPENED: usize = 1024;

/// A server that completes prompts.
#[derive(Debug, Clone)]
pub struct Target {
    /// The address.
    pub url: ServerUrl,
    /// The name of the model in requests.
    pub model: String,
    /// The number of tokens to draw prompts from: those with smaller numbers.
    pub vocabulary: u32,
    /// The maximum number of tokens per prompt. Longer ones are counted as failed.
    pub limit: usize,
}

/// Returns the names of the models that a server says it has.
///
/// # Errors
/// Returns an error if the server cannot be reached, or has no list of models.
pub fn model_names(url: &ServerUrl) -> Result<Vec<String>> {
    let client = Client::new(url.clone());
    runtime()?.block_on(async {
        let list = client.get("/v1/models").await?.ok().await?.json().await?;
        let models = list["data"].as_array().into_iter().flatten();
        Ok(models.filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
    })
}

/// Gets paths of a server one after another, with a key if one is given, and returns their texts.
///
/// # Errors
/// Returns an error if the server cannot be reached, or refuses one of the paths.
pub fn get_all(url: &ServerUrl, key: Option<&str>, paths: &[&str]) -> Result<Vec<String>> {
    let client = Client::new(url.clone());
    let client = key.map_or(client.clone(), |key| client.with_key(key));
    runtime()?.block_on(async {
        let mut texts = Vec::with_capacity(paths.len());
        for path in paths {
            texts.push(client.get(path).await?.ok().await?.text().await?);
        }
        Ok(texts)
    })
}

/// Sends the requests of a trace to `/v1/completions`, each at its time: its prompt as tokens, streamed, to be answered
/// greedily with the number of tokens that the trace says. The prompts are those that [`kvlab::play`] draws from the same
/// seed. Connections for the requests at the start are open before the clock starts. Calls `progress` with the number of
/// requests answered so far and the total.
///
/// A request that fails is counted, and the others go on.
///
/// # Errors
/// Returns the first request's error if all requests fail.
pub fn play(
    target: &Target,
    trace: &[Arrival],
    prefix_tokens: usize,
    seed: u64,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<ClientReport> {
    let mut prompts = TrafficPrompts::new(target.vocabulary, prefix_tokens.min(target.limit), seed);
    let bodies: Vec<Result<Bytes>> =
        trace.iter().map(|arrival| body(target, arrival, &mut prompts, prefix_tokens)).collect();
    let client = Client::new(target.url.clone());
    runtime()?.block_on(async {
        let at_once =
            bodies.iter().zip(trace).filter(|(body, arrival)| body.is_ok() && arrival.at <= 0.0).count();
        client.open(at_once.min(MOST_OPENED)).await?;
        let (cpu, own, started) = (cpu_seconds(), thread_cpu_seconds(), Instant::now());
        let mut running = JoinSet::new();
        let mut ended: Vec<Option<Result<Answered>>> = trace.iter().map(|_| None).collect();
        for (at, (body, arrival)) in bodies.into_iter().zip(trace).enumerate() {
            let due = Duration::try_from_secs_f64(arrival.at).unwrap_or_default();
            let request = ask(client.clone(), body, started, due);
            running.spawn(async move { (at, request.await) });
        }
        let mut done = 0;
        while let Some(Ok((at, answered))) = running.join_next().await {
            ended[at] = Some(answered);
            done += 1;
            progress(done, trace.len());
        }
        let seconds = started.elapsed().as_secs_f64();
        let grown =
            |before: Option<f64>, after: Option<f64>| before.zip(after).map(|(before, after)| after - before);
        // The client has no thread but this one.
        let (cpu, own) = (grown(cpu, cpu_seconds()), grown(own, thread_cpu_seconds()));
        let mut tally = ClientTally::new(trace, prefix_tokens);
        let mut failure = None;
        for (answered, arrival) in ended.into_iter().flatten().zip(trace) {
            match answered {
                Ok(answered) => answered.count(arrival, &mut tally),
                Err(error) => {
                    tally.failed += 1;
                    failure.get_or_insert(error);
                }
            }
        }
        match failure {
            Some(error) if tally.whole.is_empty() => return Err(error),
            failure => tally.first_failure = failure.map(|error| error.to_string()),
        }
        Ok(ClientReport { client_cpu_seconds: own, ..tally.report(seconds, cpu) })
    })
}

/// Starts the client's only thread: the caller's.
pub(crate) fn runtime() -> Result<Runtime> {
    Builder::new_current_thread().enable_all().build().map_err(Error::Start)
}

fn body(target: &Target, arrival: &Arrival, prompts: &mut TrafficPrompts, prefix: usize) -> Result<Bytes> {
    let tokens = prefix.saturating_add(arrival.prompt_tokens);
    // A prompt that cannot be answered is not drawn, because it may not fit into memory.
    if tokens > target.limit {
        return Err(Error::TooLong { tokens, limit: target.limit });
    }
    let body = json!({
        "model": target.model,
        "prompt": prompts.draw(arrival),
        "max_tokens": arrival.answer_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    Ok(Bytes::from(body.to_string()))
}

/// An answer that has ended.
struct Answered {
    first: Option<Duration>,
    between: Vec<Duration>,
    whole: Duration,
    tokens: usize,
    cached: usize,
}

impl Answered {
    fn count(self, arrival: &Arrival, tally: &mut ClientTally) {
        tally.ttft.extend(self.first);
        tally.between.extend(self.between);
        tally.whole.push(self.whole);
        tally.answer_tokens += self.tokens;
        tally.cached_tokens += self.cached;
        tally.shortened += usize::from(self.tokens < arrival.answer_tokens);
    }
}

/// A chunk of a streamed completion.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: usize,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<usize>,
}

/// Sends a request once it is due, and reads its answer.
async fn ask(client: Client, body: Result<Bytes>, started: Instant, due: Duration) -> Result<Answered> {
    let body = body?;
    tokio::time::sleep_until((started + due).into()).await;
    let mut events = client.send("POST", "/v1/completions", body).await?.ok().await?.events();
    let (mut first, mut last, mut between, mut whole) = (None, due, Vec::new(), None);
    let (mut pieces, mut tokens, mut cached) = (0, None, 0);
    while let Some(event) = events.next().await? {
        if event.as_ref() == b"[DONE]" {
            continue;
        }
        let now = started.elapsed();
        let chunk: Chunk = serde_json::from_slice(&event)
            .map_err(|source| Error::Json { text: String::from_utf8_lossy(&event).into_owned(), source })?;
        if let Some(error) = chunk.error {
            return Err(Error::Stream(error.to_string()));
        }
        if let Some(usage) = chunk.usage {
            tokens = Some(usage.completion_tokens);
            cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0);
        }
        for choice in chunk.choices {
            if choice.text.is_some_and(|text| !text.is_empty()) {
                pieces += 1;
                match first {
                    None => first = Some(now.saturating_sub(due)),
                    Some(_) => between.push(now.saturating_sub(last)),
                }
                last = now;
            }
            if choice.finish_reason.is_some() {
                whole = Some(now.saturating_sub(due));
            }
        }
    }
    let whole = whole.ok_or_else(|| Error::Stream("it ended without a finish_reason".to_owned()))?;
    Ok(Answered { first, between, whole, tokens: tokens.unwrap_or(pieces), cached })
}
