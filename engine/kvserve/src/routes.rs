//! The paths of the server, and what happens around each request.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post, put};
use futures_util::FutureExt as _;
use tracing::{Instrument as _, debug, error, info, info_span};

use crate::dialect::{anthropic, cohere, control, new_id, openai, registered, responses, tokens};
use crate::page;
use crate::refusal::{Refusal, SHOULD_RETRY};
use crate::service::Service;

/// The header with the name of a request in the log.
const REQUEST_ID: &str = "x-request-id";
/// The name of this header in Anthropic's API.
const ANTHROPIC_REQUEST_ID: &str = "request-id";

/// Returns the paths.
pub(crate) fn routes(service: Arc<Service>) -> Router {
    let exposed = [REQUEST_ID, ANTHROPIC_REQUEST_ID, SHOULD_RETRY].map(HeaderName::from_static);
    let cors = service.origins.layer(exposed);
    let routes = Router::new()
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
        .layer(from_fn(caught));
    // Pages that may use the server may also read its errors.
    let routes = match cors {
        Some(cors) => routes.layer(cors),
        None => routes,
    };
    routes
        .layer(from_fn_with_state(Arc::clone(&service), of_allowed_page))
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

/// Refuses requests of other sites' pages to a server without keys.
async fn of_allowed_page(State(service): State<Arc<Service>>, request: Request, next: Next) -> Response {
    if service.keys.is_none()
        && let Err(refusal) = service.origins.check(request.headers(), service.is_local)
    {
        return control::refused_at(request.uri().path(), &refusal);
    }
    next.run(request).await
}

/// Answers for a handler that panics, in the dialect of the path.
async fn caught(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    unless_it_panics(&path, next.run(request)).await
}

/// Returns an answer, or a refusal in the dialect of the path if computing the answer panics.
async fn unless_it_panics(path: &str, answer: impl Future<Output = Response>) -> Response {
    let answered = AssertUnwindSafe(answer).catch_unwind().await;
    answered.unwrap_or_else(|panic| {
        let reason = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let reason = reason.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        error!(reason, "a handler panicked");
        control::refused_at(path, &Refusal::failed())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_refused_in_the_dialect_of_its_path() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for (path, words) in [
            ("/v1/chat/completions", "\"type\":\"server_error\""),
            ("/v1/messages", "\"type\":\"api_error\""),
            ("/v2/chat", "\"id\":\"err-"),
        ] {
            let answer = runtime.block_on(async {
                let answer = unless_it_panics(path, async { panic!("on purpose") }).await;
                assert_eq!(answer.status(), 500);
                axum::body::to_bytes(answer.into_body(), 10_000).await.unwrap()
            });
            let text = String::from_utf8(answer.to_vec()).unwrap();
            assert!(text.contains(words) && !text.contains("on purpose"), "{path}: {text}");
        }
    }
}
