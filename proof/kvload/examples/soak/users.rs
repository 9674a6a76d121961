//! Clients: each sends requests until the traffic pauses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvload::{Client, Error, Response, ServerUrl};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;

use crate::check::{FIXED, FixedAnswers};
use crate::kept::names;
use crate::requests::{Dialect, Drawn, Must, SYSTEM, asked, document, draw, fits_schema, malformed};
use crate::tally::Tally;

/// The longest time that a request may take.
const LONGEST: Duration = Duration::from_secs(60);
/// The number of clients in a storm.
const STORM: u64 = 100;

/// The end of a time of traffic.
#[derive(Debug, Clone)]
pub(crate) struct Stop(Instant);

impl Stop {
    pub(crate) fn at(end: Instant) -> Self {
        Self(end)
    }

    pub(crate) fn left(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// Waits, but not past the end.
    async fn pause(&self, time: Duration) {
        tokio::time::sleep(time.min(self.left())).await;
    }
}

/// The things that a client needs: connections with a key, the counts, and the answers to the fixed requests.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) client: Client,
    pub(crate) tally: Arc<Tally>,
    pub(crate) fixed: Arc<FixedAnswers>,
}

/// Why something is wrong.
type Wrong = String;

impl Place {
    pub(crate) fn new(url: ServerUrl, tally: Arc<Tally>) -> Self {
        Self { client: Client::new(url), tally, fixed: Arc::default() }
    }

    pub(crate) fn with_key(&self, key: &str) -> Self {
        Self { client: self.client.with_key(key), ..self.clone() }
    }

    /// Sends a request, and checks the status, which must be one of a few, and the answer.
    async fn checked<R>(
        &self,
        kind: &str,
        (method, path, body): (&str, &str, Bytes),
        statuses: &[u16],
        read: impl AsyncFnOnce(Response) -> Result<R, Wrong>,
    ) -> Option<R> {
        let (began, shown) =
            (Instant::now(), String::from_utf8_lossy(&body[..body.len().min(400)]).into_owned());
        let answered = async {
            let response = self.client.send(method, path, body).await.map_err(told)?;
            if !statuses.contains(&response.status()) {
                let (got, text) = (response.status(), response.text().await.map_err(told)?);
                return Err(format!("status {got} instead of {statuses:?}: {}", shortened(&text)));
            }
            read(response).await
        };
        let result = tokio::time::timeout(LONGEST, answered).await;
        match result.unwrap_or_else(|_| Err(format!("no answer after {LONGEST:?}"))) {
            Ok(read) => {
                self.tally.count(kind, began.elapsed());
                Some(read)
            }
            Err(wrong) => {
                self.tally.violation(format!("{kind}: {method} {path}: {wrong}; the request: {shown}"));
                None
            }
        }
    }

    /// Sends a request whose answer is JSON. A body of `null` is none.
    pub(crate) async fn json(&self, kind: &str, request: (&str, &str, Value), status: u16) -> Option<Value> {
        self.json_with(kind, request, &[status]).await
    }

    /// Sends a request whose answer is JSON, with one of a few statuses. A body of `null` is none.
    pub(crate) async fn json_with(
        &self,
        kind: &str,
        (method, path, body): (&str, &str, Value),
        statuses: &[u16],
    ) -> Option<Value> {
        let body = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
        let read = async |response: Response| response.json().await.map_err(told);
        self.checked(kind, (method, path, body), statuses, read).await
    }

    /// Sends a drawn request, and checks its answer.
    async fn drawn(&self, drawn: &Drawn) {
        let body = Bytes::from(drawn.body.to_string());
        let read = async |response: Response| {
            if drawn.streamed {
                return streamed(drawn.dialect, response).await;
            }
            whole(drawn, &response.json().await.map_err(told)?)
        };
        self.checked(drawn.kind, ("POST", drawn.dialect.path(), body), &[200], read).await;
    }
}

#[allow(clippy::needless_pass_by_value, reason = "errors are mapped by value")]
fn told(error: Error) -> Wrong {
    error.to_string()
}

fn shortened(text: &str) -> String {
    text.chars().take(400).collect()
}

/// Reads a stream, which must end as its dialect says.
async fn streamed(dialect: Dialect, response: Response) -> Result<(), Wrong> {
    let (mut events, mut last) = (response.events(), Bytes::new());
    while let Some(event) = events.next().await.map_err(told)? {
        last = event;
    }
    if dialect.ends_with(&last) {
        return Ok(());
    }
    Err(format!("the stream ended with {:?}", shortened(&String::from_utf8_lossy(&last))))
}

/// Checks a whole answer.
fn whole(drawn: &Drawn, answer: &Value) -> Result<(), Wrong> {
    let text = answer.to_string();
    let was_cut = ["\"length\"", "\"max_tokens\"", "\"MAX_TOKENS\"", "\"max_output_tokens\""];
    let was_cut = was_cut.iter().any(|reason| text.contains(&format!("_reason\":{reason}")))
        || answer["status"] == "incomplete";
    let good = match drawn.must {
        Must::Answer => answer.get("usage").is_some(),
        _ if was_cut => true,
        Must::Schema => {
            let value = drawn.dialect.text(answer).and_then(|text| serde_json::from_str(text).ok());
            value.is_some_and(|value| fits_schema(&value))
        }
        Must::Calls => {
            ["tool_calls\":[{", "\"tool_use\"", "\"function_call\""].iter().any(|call| text.contains(call))
        }
    };
    if good { Ok(()) } else { Err(format!("the answer is {}", shortened(&text))) }
}

/// Asks for one answer after another, and sends malformed requests among them.
pub(crate) async fn ask(place: Place, mut rng: StdRng, stop: Stop) {
    while !stop.is_over() {
        match rng.random_range(0..12) {
            0 => {
                let (method, path, body, status) = malformed(&mut rng);
                let read = async |response: Response| response.text().await.map_err(told);
                place.checked("malformed", (method, path, body), &[status], read).await;
            }
            1 => counted(&place, &mut rng).await,
            _ => place.drawn(&draw(&mut rng)).await,
        }
    }
}

/// Asks for what is no answer of the model.
async fn counted(place: &Place, rng: &mut StdRng) {
    let text = document(rng.random_range(0..20));
    match rng.random_range(0..3) {
        0 => {
            let found = place.json("tokens", ("POST", "/tokenize", json!({"prompt": text})), 200).await;
            let Some(found) = found else { return };
            let again = json!({"tokens": found["tokens"]});
            place.json("tokens", ("POST", "/detokenize", again), 200).await;
        }
        1 => {
            let body = asked(Dialect::Messages, &text, 1);
            let body =
                json!({"model": body["model"], "system": body["system"], "messages": body["messages"]});
            place.json("tokens", ("POST", "/v1/messages/count_tokens", body), 200).await;
        }
        _ => {
            place.json("models", ("GET", "/v1/models", Value::Null), 200).await;
        }
    }
}

/// Repeats the fixed requests, whose answers must not change.
pub(crate) async fn repeat(place: Place, stop: Stop) {
    while !stop.is_over() {
        for fixed in 0..FIXED {
            place.ask_fixed(fixed).await;
        }
        stop.pause(Duration::from_millis(100)).await;
    }
}

impl Place {
    /// Sends one of the fixed requests, and compares its answer with the first one.
    pub(crate) async fn ask_fixed(&self, fixed: usize) {
        let (dialect, body) = FixedAnswers::request(fixed);
        let Some(answer) = self.json("the same again", ("POST", dialect.path(), body), 200).await else {
            return;
        };
        let text = dialect.text(&answer).unwrap_or_default();
        if let Some(first) = self.fixed.differs(fixed, text) {
            self.tally.violation(format!("fixed request {fixed} was answered {first:?}, and now {text:?}"));
        }
    }
}

/// Reads what monitors and the page read.
pub(crate) async fn watch(place: Place, stop: Stop) {
    let mut rounds = 0_u32;
    while !stop.is_over() {
        let read = async |response: Response| response.text().await.map_err(told);
        let metrics = place.checked("metrics", ("GET", "/metrics", Bytes::new()), &[200], read).await;
        if metrics.is_some_and(|text| !text.contains("vllm:num_requests_running")) {
            place.tally.violation("the metrics lack vllm:num_requests_running".to_owned());
        }
        place.json("overview", ("GET", "/overview", Value::Null), 200).await;
        rounds += 1;
        if rounds.is_multiple_of(50) {
            place.json("forget all", ("POST", "/reset_prefix_cache", json!({})), 200).await;
        }
        stop.pause(Duration::from_millis(50)).await;
    }
}

/// Registers documents, asks with their texts in the prompt, and deletes them.
pub(crate) async fn register(place: Place, user: u64, mut rng: StdRng, stop: Stop) {
    while !stop.is_over() {
        let id = format!("u{user}-{}", rng.random_range(0..1_000_000));
        let path = format!("/v1/documents/{id}");
        let text = format!("note {id} .\n{}", document(rng.random_range(0..60)));
        let mut body = json!({"text": text, "title": "a note", "ttl_seconds": 600});
        if rng.random_bool(0.5) {
            body["system"] = json!(SYSTEM);
        }
        if place.json("documents put", ("PUT", &path, body), 201).await.is_none() {
            continue;
        }
        let prompt = format!("{}{text}{}alba ?", document(1), document(2));
        let mut asks = asked(Dialect::Chat, &prompt, 4);
        asks["temperature"] = json!(0);
        for _ in 0..rng.random_range(1..4) {
            let answer =
                place.json("documents found", ("POST", Dialect::Chat.path(), asks.clone()), 200).await;
            if answer.is_some_and(|answer| !names(&answer, &id)) {
                place.tally.violation(format!(
                    "the registered document {id} was not found in a prompt with its text"
                ));
            }
        }
        place.json("documents read", ("GET", &path, Value::Null), 200).await;
        place.json("documents listed", ("GET", "/v1/documents", Value::Null), 200).await;
        place.json("documents deleted", ("DELETE", &path, Value::Null), 200).await;
        place.json("documents gone", ("GET", &path, Value::Null), 404).await;
        let answer = place.json("documents gone", ("POST", Dialect::Chat.path(), asks), 200).await;
        if answer.is_some_and(|answer| names(&answer, &id)) {
            place.tally.violation(format!("the deleted document {id} was found"));
        }
    }
}

/// Vanishes again and again: before, while and after an answer begins.
pub(crate) async fn vanish(place: Place, mut rng: StdRng, stop: Stop) {
    while !stop.is_over() {
        vanish_once(&place, &mut rng).await;
    }
}

/// Sends storms of requests whose clients vanish.
pub(crate) async fn storm(place: Place, mut rng: StdRng, stop: Stop) {
    while !stop.is_over() {
        let mut clients = JoinSet::new();
        for _ in 0..STORM {
            let (place, mut rng) = (place.clone(), StdRng::seed_from_u64(rng.random()));
            clients.spawn(async move { vanish_once(&place, &mut rng).await });
        }
        while clients.join_next().await.is_some() {}
        stop.pause(Duration::from_secs(2)).await;
    }
}

async fn vanish_once(place: &Place, rng: &mut StdRng) {
    let began = Instant::now();
    let drawn = draw(rng);
    let body = drawn.body.to_string();
    let patience = Duration::from_micros(rng.random_range(0..40_000));
    let vanished = match rng.random_range(0..3) {
        0 => raw(place, &drawn, &body, rng).await,
        1 => {
            // The request and its connection are dropped, wherever it is.
            let sent = place.client.send("POST", drawn.dialect.path(), Bytes::from(body));
            tokio::time::timeout(patience, sent).await.map_or(Ok(()), |sent| sent.map(drop))
        }
        _ => stream(place, &drawn, rng.random_range(0..8)).await,
    };
    match vanished {
        Ok(()) => place.tally.count("vanished", began.elapsed()),
        Err(error) => place.tally.violation(format!("before a client vanished: {error}")),
    }
}

/// Sends a part of a request, and closes the connection.
async fn raw(place: &Place, drawn: &Drawn, body: &str, rng: &mut StdRng) -> Result<(), Error> {
    let path = drawn.dialect.path();
    let key = crate::served::KEYS[0].0;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: soak\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let all = head + body;
    let end = rng.random_range(0..=all.len());
    let mut stream = place.client.stream().await?;
    // The server may close the connection first.
    let _ = stream.write_all(&all.as_bytes()[..end]).await;
    Ok(())
}

/// Reads some pieces of an answer, and closes the connection.
async fn stream(place: &Place, drawn: &Drawn, pieces: usize) -> Result<(), Error> {
    let mut response = place.client.post(drawn.dialect.path(), &drawn.body).await?.ok().await?;
    for _ in 0..pieces {
        if response.piece().await?.is_none() {
            break;
        }
    }
    Ok(())
}
