//! The paths of the server, and what happens around each request.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::HeaderValue;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{get, post, put};
use tower_http::catch_panic::CatchPanicLayer;
use tracing::{Instrument as _, debug, error, info, info_span};

use crate::dialect::{anthropic, cohere, control, new_id, openai, registered, responses, tokens};
use crate::page;
use crate::refusal::{Kind, Refusal};
use crate::service::Service;

/// The header with the name of a request in the log.
const REQUEST_ID: &str = "x-request-id";
/// The name of this header in Anthropic's API.
const ANTHROPIC_REQUEST_ID: &str = "request-id";

/// Returns the paths.
pub(crate) fn routes(service: Arc<Service>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(openai::chat::chat))
        .route("/v1/completions", post(openai::completions::completions))
        .route("/v1/messages", post(anthropic::messages::messages))
        .route("/v1/messages/count_tokens", post(anthropic::messages::count))
        .route("/v1/responses", post(responses::responses))
        .route("/v2/chat", post(cohere::chat::chat))
        .route("/v1/documents", get(registered::list))
        .route("/v1/documents/{*id}", put(registered::put).get(registered::get).delete(registered::delete))
        .route("/v1/models", get(openai::models::models))
        .route("/v1/models/{*name}", get(openai::models::model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/", get(page::page))
        .route("/overview", get(page::overview))
        .route("/health", get(control::health))
        .route("/version", get(control::version))
        .route("/metrics", get(control::metrics))
        .route("/sleep", post(control::sleep))
        .route("/wake_up", post(control::wake_up))
        .route("/is_sleeping", get(control::is_sleeping))
        .route("/reset_prefix_cache", post(control::reset))
        .fallback(control::no_path)
        .method_not_allowed_fallback(control::no_method)
        // Bodies are limited where they are read, so that each dialect says it in its own form.
        .layer(DefaultBodyLimit::disable())
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn(named))
        .with_state(service)
}

/// Gives a request a name, by which the log and the client know it.
async fn named(request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| is_name(id)).cloned();
    let id = given.or_else(|| HeaderValue::try_from(new_id("req-")).ok());
    let shown = id.as_ref().and_then(|id| id.to_str().ok()).unwrap_or_default().to_owned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let span = info_span!("request", id = shown, %method, path);
    let started = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let (status, ms) = (response.status().as_u16(), started.elapsed().as_millis() as u64);
    // Monitors ask every few seconds.
    if ["/health", "/metrics", "/overview"].contains(&path.as_str()) {
        span.in_scope(|| debug!(status, ms, "answered"));
    } else {
        span.in_scope(|| info!(status, ms, "answered"));
    }
    if let Some(id) = id {
        if path.starts_with("/v1/messages") {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Returns true for a name that a log can contain.
fn is_name(id: &HeaderValue) -> bool {
    let good = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    (1..=128).contains(&id.len()) && id.as_bytes().iter().all(good)
}

#[allow(clippy::needless_pass_by_value, reason = "the layer passes the panic by value")]
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let reason = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let reason = reason.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    error!(reason, "a handler panicked");
    openai::refused(&Refusal::new(Kind::Internal, "the server failed to answer this request; see its log"))
}
