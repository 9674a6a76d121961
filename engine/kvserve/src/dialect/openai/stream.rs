//! Streams of server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, stream};
use serde_json::Value;

use crate::dialect::openai::error;
use crate::refusal::Refusal;
use crate::reply::{Reply, ReplyEvent};

/// The time after which a comment tells the client that the stream is alive, while a prompt is computed.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The replies to the prompts of one request, as one stream: each event with the index of its prompt.
pub(crate) fn events(replies: Vec<Reply>) -> impl Stream<Item = (usize, Result<ReplyEvent, Refusal>)> {
    let one = |(prompt, reply): (usize, Reply)| {
        stream::unfold(reply, |mut reply| async move { Some((reply.events.recv().await?, reply)) })
            .map(move |event| (prompt, event))
            .boxed()
    };
    stream::select_all(replies.into_iter().enumerate().map(one))
}

/// Translates events to the chunks of a dialect.
pub(crate) trait Chunks: Send + 'static {
    /// Returns the chunks before the first event.
    fn begin(&mut self) -> Vec<Value>;
    /// Returns the chunks for an event of a prompt.
    fn event(&mut self, prompt: usize, event: ReplyEvent) -> Vec<Value>;
    /// Returns the chunks after the last event.
    fn end(&mut self) -> Vec<Value>;
}

/// Returns a stream of chunks that ends with `[DONE]`. After a refusal, the stream says why it ends.
pub(crate) fn respond(replies: Vec<Reply>, chunks: impl Chunks) -> Response {
    enum State<S, C> {
        Begin(S, C),
        Running(S, C),
        End,
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
                Some((_, Err(refusal))) => Some((vec![error(&refusal)], State::End)),
                None => Some((chunks.end(), State::End)),
            },
            State::End => Some((vec![Value::String("[DONE]".to_owned())], State::Over)),
            State::Over => None,
        }
    });
    let event = |value: Value| {
        let text = match value {
            Value::String(text) => text,
            value => value.to_string(),
        };
        Ok::<_, Infallible>(Event::default().data(text))
    };
    let events = lists.flat_map(move |list| stream::iter(list.into_iter().map(event)));
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}
