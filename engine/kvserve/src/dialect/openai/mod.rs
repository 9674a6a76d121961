//! The dialect of `OpenAI`'s API, with the extensions that vLLM's clients use.

use axum::Json;
use axum::http::StatusCode;
use axum::response::sse::Event;
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use serde_json::{Value, json};

use crate::dialect::stream::data;
use crate::refusal::{Kind, Refusal};
use crate::reply::EndReason;
use crate::report::KvReport;

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod fields;
pub(crate) mod models;
pub(crate) mod shape;

/// Returns a refusal in this dialect.
pub(crate) fn refused(refusal: &Refusal) -> Response {
    let status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    refusal.with_headers((status, Json(error(refusal))).into_response())
}

/// Returns the body of a refusal.
pub(crate) fn error(refusal: &Refusal) -> Value {
    let kind = match refusal.kind {
        Kind::Unauthorized => "authentication_error",
        Kind::Forbidden => "permission_error",
        Kind::Overloaded => "rate_limit_error",
        Kind::TimedOut | Kind::AnswerTime => "timeout_error",
        Kind::Unavailable | Kind::Internal | Kind::NoStorage => "server_error",
        _ => "invalid_request_error",
    };
    json!({"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}})
}

/// Returns a handler's response.
pub(crate) fn respond(result: Result<Response, Refusal>) -> Response {
    result.unwrap_or_else(|refusal| refused(&refusal))
}

/// Returns the last events of a stream that ends with a refusal.
fn refused_stream(refusal: &Refusal) -> Vec<Event> {
    vec![data(&error(refusal)), done()]
}

/// Returns the event that ends a stream.
fn done() -> Event {
    Event::default().data("[DONE]")
}

/// A chunk of a streamed answer. It is written for each token, and therefore without a tree of JSON.
#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// The report of a sample that has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<&'a KvReport>,
    /// `null` if another chunk of the stream has the numbers of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

/// The numbers of tokens of a request.
#[derive(Debug, Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
}

#[derive(Debug, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

impl Usage {
    /// Returns the numbers of one request or several with `answer` tokens together.
    fn of<'a>(reports: impl IntoIterator<Item = &'a KvReport>, answer: usize) -> Self {
        let sum =
            |(prompt, cached), report: &KvReport| (prompt + report.prompt_tokens, cached + report.reused);
        let (prompt, cached) = reports.into_iter().fold((0, 0), sum);
        Self {
            prompt_tokens: prompt,
            completion_tokens: answer,
            total_tokens: prompt + answer,
            prompt_tokens_details: PromptDetails { cached_tokens: cached },
        }
    }
}

/// Returns the word for the end of a sample.
fn finish_reason(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::Stop | EndReason::StopString(_) => "stop",
        EndReason::Calls => "tool_calls",
        EndReason::Length => "length",
    }
}
