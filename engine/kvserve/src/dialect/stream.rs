//! Streams of server-sent events, which each dialect fills with its own chunks.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, stream};
use serde::Serialize;
use serde_json::Value;

use crate::refusal::Refusal;
use crate::reply::{Reply, ReplyEvent};

/// The time after which a comment tells the client that the stream is alive, while a prompt is computed.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Translates the events of replies to the events of a dialect.
pub(crate) trait Chunks: Send + 'static {
    /// Returns the events before the first one of a reply.
    fn begin(&mut self) -> Vec<Event>;
    /// Returns the events for an event of a prompt.
    fn event(&mut self, prompt: usize, event: ReplyEvent) -> Vec<Event>;
    /// Returns the events after the last one of all replies.
    fn end(&mut self) -> Vec<Event>;
    /// Returns the last events of a stream that ends with a refusal.
    fn refused(&mut self, refusal: &Refusal) -> Vec<Event>;
}

/// Returns an event with JSON.
pub(crate) fn data(value: &impl Serialize) -> Event {
    // What dialects write are objects with texts as keys, which are always JSON.
    Event::default().json_data(value).unwrap_or_default()
}

/// Returns an event with JSON whose field `type` is its name.
pub(crate) fn named(value: &Value) -> Event {
    let name = value["type"].as_str().unwrap_or_default().to_owned();
    data(value).event(name)
}

/// Returns the replies to the prompts of one request as a stream of events.
pub(crate) fn respond(replies: Vec<Reply>, chunks: impl Chunks) -> Response {
    enum State<S, C> {
        Begin(S, C),
        Running(S, C),
        Over,
    }
    let state = State::Begin(Box::pin(events(replies)), chunks);
    let lists = stream::unfold(state, |state| async move {
        match state {
            State::Begin(events, mut chunks) => Some((chunks.begin(), State::Running(events, chunks))),
            State::Running(mut events, mut chunks) => match events.next().await {
                Some((prompt, Ok(event))) => {
                    Some((chunks.event(prompt, event), State::Running(events, chunks)))
                }
                Some((_, Err(refusal))) => Some((chunks.refused(&refusal), State::Over)),
                None => Some((chunks.end(), State::Over)),
            },
            State::Over => None,
        }
    });
    let events = lists.flat_map(|list| stream::iter(list.into_iter().map(Ok::<_, Infallible>)));
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// Returns the events of all replies, each with the index of its prompt.
fn events(replies: Vec<Reply>) -> impl Stream<Item = (usize, Result<ReplyEvent, Refusal>)> {
    let one = |(prompt, reply): (usize, Reply)| {
        stream::unfold(reply, |mut reply| async move { Some((reply.next().await?, reply)) })
            .map(move |event| (prompt, event))
            .boxed()
    };
    stream::select_all(replies.into_iter().enumerate().map(one))
}
