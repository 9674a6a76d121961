//! The dialect of Anthropic's API.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use crate::refusal::{Kind, Refusal};
use crate::report::{KvReport, PartSource};

mod blocks;
pub(crate) mod messages;
mod shape;
mod stream;

/// Returns a handler's response.
fn respond(result: Result<Response, Refusal>) -> Response {
    result.unwrap_or_else(|refusal| refused(&refusal))
}

/// Returns a refusal in this dialect.
pub(crate) fn refused(refusal: &Refusal) -> Response {
    // This API has a status of its own for servers that cannot answer at the moment.
    let status = if refusal.kind == Kind::Unavailable { 529 } else { refusal.status() };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    refusal.with_headers((status, Json(error(refusal))).into_response())
}

/// Returns the body of a refusal.
fn error(refusal: &Refusal) -> Value {
    let kind = match refusal.kind {
        Kind::Unauthorized => "authentication_error",
        Kind::Forbidden => "permission_error",
        Kind::NotFound => "not_found_error",
        Kind::TooLarge => "request_too_large",
        Kind::Overloaded => "rate_limit_error",
        Kind::Unavailable => "overloaded_error",
        Kind::TimedOut | Kind::AnswerTime => "timeout_error",
        Kind::Internal | Kind::NoStorage => "api_error",
        Kind::Invalid | Kind::TooLong | Kind::Method | Kind::Conflict => "invalid_request_error",
    };
    let message = match &refusal.param {
        Some(param) if !refusal.message.starts_with(param.as_str()) => {
            format!("{param}: {}", refusal.message)
        }
        _ => refusal.message.clone(),
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// Returns the numbers of tokens: those that were found, those of documents that were computed and stored, and the others.
fn usage(report: &KvReport, answer: usize) -> Value {
    let stored =
        |part: &&crate::report::PartReport| part.source == PartSource::Computed && !report.full_attention;
    let created: usize = report.parts.iter().filter(stored).map(|part| part.tokens).sum();
    let created = created.min(report.computed);
    json!({
        "input_tokens": report.computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": report.reused,
        "output_tokens": answer,
    })
}
