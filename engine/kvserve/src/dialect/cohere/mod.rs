//! The dialect of Cohere's API, version 2.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use crate::dialect::new_id;
use crate::refusal::Refusal;
use crate::reply::EndReason;
use crate::report::KvReport;

pub(crate) mod chat;
mod messages;
mod shape;
mod stream;

/// Returns a handler's response.
fn respond(result: Result<Response, Refusal>) -> Response {
    result.unwrap_or_else(|refusal| refused(&refusal))
}

/// Returns a refusal in this dialect.
pub(crate) fn refused(refusal: &Refusal) -> Response {
    let status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body = json!({"id": new_id("err-"), "message": message(refusal)});
    refusal.with_headers((status, Json(body)).into_response())
}

/// Returns the sentence of a refusal, with the field that is wrong.
fn message(refusal: &Refusal) -> String {
    match &refusal.param {
        Some(param) if !refusal.message.contains(param.as_str()) => format!("{param}: {}", refusal.message),
        _ => refusal.message.clone(),
    }
}

/// Returns the numbers of tokens.
fn usage(report: &KvReport, answer: usize) -> Value {
    let tokens = json!({"input_tokens": report.prompt_tokens, "output_tokens": answer});
    json!({"tokens": tokens, "billed_units": tokens, "cached_tokens": report.reused})
}

/// Returns the word for the end of an answer.
fn finish_reason(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::Stop => "COMPLETE",
        EndReason::StopString(_) => "STOP_SEQUENCE",
        EndReason::Calls => "TOOL_CALL",
        EndReason::Length => "MAX_TOKENS",
    }
}
