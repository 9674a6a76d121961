//! The paths for operators and monitors: health, version, metrics, sleep, and forgetting what is cached.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use kvengine::{Engine, PoolTag};
use serde_json::json;
use tracing::info;

use super::openai::respond;
use super::{anthropic, cohere, openai};
use crate::metrics::CacheText;
use crate::pins::Pins;
use crate::refusal::{Kind, Refusal};
use crate::service::Service;

/// Says whether the engine runs. Needs no key.
pub(crate) async fn health(State(service): State<Arc<Service>>) -> Response {
    if service.engine.is_running() {
        StatusCode::OK.into_response()
    } else {
        respond(Err(Refusal::engine_gone()))
    }
}

/// Returns the version of the program. Needs no key.
pub(crate) async fn version() -> Response {
    Json(json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

/// Returns the metrics for Prometheus.
pub(crate) async fn metrics(State(service): State<Arc<Service>>, request: Request) -> Response {
    let text = async {
        service.check_operator(&request.into_parts().0)?;
        let by_tenant = service.keys.is_some();
        let caches = service.engine.call(move |engine| CacheText::of(engine, by_tenant)).await?;
        let model = service.names.first().map(String::as_str).unwrap_or_default();
        let requests = service.seats.taken();
        let text = service.metrics.exposition(model, service.engine.last_step(), requests, &caches);
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        Ok(([(CONTENT_TYPE, kind)], text).into_response())
    };
    respond(text.await)
}

/// Puts the caches to sleep and releases their memory.
pub(crate) async fn sleep(State(service): State<Arc<Service>>, request: Request) -> Response {
    let slept = async {
        service.check_operator(&request.into_parts().0)?;
        let slept = service
            .undisturbed(|pins, engine| {
                (pins.fall_asleep(engine, |engine| engine.sleep(&PoolTag::ALL)), Vec::new())
            })
            .await??;
        info!(released_bytes = slept.released_bytes, "asleep");
        Ok(Json(json!({"released_bytes": slept.released_bytes, "saved_bytes": slept.saved_bytes}))
            .into_response())
    };
    respond(slept.await)
}

/// Wakes the caches.
pub(crate) async fn wake_up(State(service): State<Arc<Service>>, request: Request) -> Response {
    let woken = async {
        service.check_operator(&request.into_parts().0)?;
        let wake = |pins: &Pins, engine: &mut Engine| {
            let woken = engine.wake_up(&PoolTag::ALL);
            (woken, pins.woken(engine))
        };
        let woken = service.undisturbed(wake).await??;
        Ok(Json(json!({"was_asleep": woken})).into_response())
    };
    respond(woken.await)
}

/// Says whether the caches are asleep.
pub(crate) async fn is_sleeping(State(service): State<Arc<Service>>, request: Request) -> Response {
    let asleep = async {
        service.check_operator(&request.into_parts().0)?;
        let asleep = service.engine.call(|engine| engine.is_sleeping(PoolTag::KvCache)).await?;
        Ok(Json(json!({"is_sleeping": asleep})).into_response())
    };
    respond(asleep.await)
}

/// Forgets the prefixes and documents in the memory of the device and of the host. What running requests hold, and what a
/// disk has, stays.
pub(crate) async fn reset(State(service): State<Arc<Service>>, request: Request) -> Response {
    let reset = async {
        service.check_operator(&request.into_parts().0)?;
        let freed = service.undisturbed(|pins, engine| pins.emptied(|| forget(engine))).await?;
        info!(freed, "forgot what was cached");
        Ok(Json(json!({"freed_blocks": freed})).into_response())
    };
    respond(reset.await)
}

fn forget(engine: &Engine) -> usize {
    if let Some(disk) = engine.disk() {
        disk.clear_memory();
    }
    let prefixes = engine.cache().as_paged().map_or(0, |paged| paged.pool().clear_cached());
    let Some(chunks) = engine.chunks() else { return prefixes };
    let before = chunks.pool().blocks().counts().free;
    chunks.clear();
    prefixes + chunks.pool().blocks().counts().free.saturating_sub(before)
}

/// Answers a path that does not exist.
pub(crate) async fn no_path(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let reason = format!("there is no {method} {path} here; see docs/serve.md for the paths");
    let refusal = Refusal { code: Some("unknown_url"), ..Refusal::new(Kind::NotFound, reason) };
    refused_at(path, &refusal)
}

/// Answers a method that a path does not have.
pub(crate) async fn no_method(request: Request) -> Response {
    let path = request.uri().path();
    let reason = format!("{path} does not accept {}; see docs/serve.md for the paths", request.method());
    refused_at(path, &Refusal::new(Kind::Method, reason))
}

/// Returns a refusal in the dialect of a path.
pub(crate) fn refused_at(path: &str, refusal: &Refusal) -> Response {
    match path {
        _ if path.starts_with("/v1/messages") => anthropic::refused(refusal),
        _ if path.starts_with("/v2/") => cohere::refused(refusal),
        _ => openai::refused(refusal),
    }
}
