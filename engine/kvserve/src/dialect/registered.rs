//! `/v1/documents`: registered documents, which are found verbatim in later prompts of the same tenant.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use kvengine::{DocumentCosts, NewDocument, RegisteredDocument, Sampling};
use kvmodel::{Message, Role};
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::{debug, info};

use super::openai::respond;
use crate::ask::{AnswerSettings, Ask, AskedPrompt, Documents, Owner};
use crate::refusal::{Kind, Refusal};
use crate::service::Service;
use crate::shape::AnswerShape;
use crate::tenants;

/// The most bytes of an ID.
const MAX_ID: usize = 256;

/// A document to register. Every other field is refused.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PutRequest {
    text: String,
    title: Option<String>,
    /// The time after which the document is forgotten.
    ttl_seconds: Option<f64>,
    /// The system prompt behind which the document is computed now. Without one, it is computed when a prompt contains it.
    system: Option<String>,
}

/// Registers a document under an ID, or replaces it.
pub(crate) async fn put(
    State(service): State<Arc<Service>>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    respond(registered(&service, id, request).await)
}

/// Lists the documents of a tenant, without their texts.
pub(crate) async fn list(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(listed(&service, &request.into_parts().0))
}

/// Returns a document with its text.
pub(crate) async fn get(
    State(service): State<Arc<Service>>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    let found = || {
        let tenant = tenants::tenant(service.keys.as_ref(), &request.into_parts().0.headers)?;
        let library = service.libraries.of(tenant.as_ref());
        let mut library = library.lock();
        let document = library.get(&id).ok_or_else(|| unknown(&id))?;
        let mut shown = shown(document, service.libraries.now());
        shown["text"] = json!(&*document.text);
        Ok(Json(shown).into_response())
    };
    respond(found())
}

/// Forgets a document. Its keys and values leave the caches like those of other documents.
pub(crate) async fn delete(
    State(service): State<Arc<Service>>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    let removed = || {
        let tenant = tenants::tenant(service.keys.as_ref(), &request.into_parts().0.headers)?;
        let removed = service.libraries.of(tenant.as_ref()).lock().remove(&id);
        removed.map(drop).ok_or_else(|| unknown(&id))?;
        Ok(Json(json!({"id": id, "object": "document", "deleted": true})).into_response())
    };
    respond(removed())
}

async fn registered(service: &Arc<Service>, id: String, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (Owner, PutRequest) = service.read(request).await?;
    if id.is_empty() || id.len() > MAX_ID {
        return Err(Refusal::field("id", format!("the ID must have 1 to {MAX_ID} bytes")));
    }
    let PutRequest { text, title, ttl_seconds, system } = request;
    let ttl = ttl_seconds.map(Duration::try_from_secs_f64).transpose().map_err(|error| {
        Refusal::field("ttl_seconds", format!("ttl_seconds must be a number of seconds from now: {error}"))
    })?;
    let counted = text.clone();
    let tokens = service.with_codec(move |codec| codec.encode(&counted, false)).await?.len();
    let library = service.libraries.of(owner.tenant.as_ref());
    let (status, document) = {
        let mut library = library.lock();
        let before = library.register(NewDocument { id: id.clone(), title, text: text.clone(), ttl })?;
        let costs = DocumentCosts {
            tokens,
            kv_bytes: service.kv_bytes(tokens),
            computed_in: library
                .get(&id)
                .and_then(|one| one.costs)
                .map_or(Duration::ZERO, |costs| costs.computed_in),
        };
        library.set_costs(&id, costs);
        let status = if before.is_some() { StatusCode::OK } else { StatusCode::CREATED };
        (status, library.get(&id).map(|document| shown(document, service.libraries.now())))
    };
    if let Some(system) = system {
        tokio::spawn(compute(Arc::clone(service), owner, id, text, system));
    }
    Ok((status, Json(document)).into_response())
}

fn listed(service: &Service, parts: &axum::http::request::Parts) -> Result<Response, Refusal> {
    let tenant = tenants::tenant(service.keys.as_ref(), &parts.headers)?;
    let library = service.libraries.of(tenant.as_ref());
    let mut library = library.lock();
    let now = service.libraries.now();
    let data: Vec<Value> = library.documents().map(|document| shown(document, now)).collect();
    Ok(Json(json!({"object": "list", "data": data, "bytes": library.bytes()})).into_response())
}

/// Computes a document behind a system prompt, when nobody else wants the engine.
async fn compute(service: Arc<Service>, owner: Owner, id: String, text: String, system: String) {
    let library = service.libraries.of(owner.tenant.as_ref());
    let messages = vec![Message::new(Role::System, system), Message::new(Role::User, format!("{text}\n?"))];
    let settings = AnswerSettings {
        max_tokens: Some(1),
        samples: 1,
        sampling: Sampling::default(),
        stop: Vec::new(),
        logprobs: None,
        logit_bias: Arc::default(),
        ignore_end: true,
    };
    let ask = Ask {
        shape: AnswerShape::default(),
        prompt: AskedPrompt::Conversation { messages, variables: Vec::new() },
        documents: Documents::default(),
        settings,
        owner,
        priority: i32::MIN,
        label: None,
    };
    let answer = async { service.answer(ask).await?.whole(1).await };
    match answer.await {
        Ok((_, report)) => {
            let computed_in = Duration::try_from_secs_f64(report.ttft_ms / 1e3).unwrap_or_default();
            let mut library = library.lock();
            let costs = library.get(&id).filter(|document| *document.text == text).and_then(|one| one.costs);
            if let Some(costs) = costs {
                library.set_costs(&id, DocumentCosts { computed_in, ..costs });
            }
            debug!(id, ?computed_in, "computed a registered document");
        }
        Err(refusal) => info!(id, reason = refusal.message, "a registered document is computed later"),
    }
}

/// Returns a document as the API shows it.
fn shown(document: &RegisteredDocument, now: u64) -> Value {
    let expires = document.expires.map(|at| at.saturating_sub(now) as f64 / 1e3);
    let costs = document.costs.unwrap_or_default();
    json!({
        "id": &*document.id,
        "object": "document",
        "title": document.title,
        "bytes": document.text.len(),
        "tokens": costs.tokens,
        "kv_bytes": costs.kv_bytes,
        "computed_ms": (!costs.computed_in.is_zero()).then_some(1e3 * costs.computed_in.as_secs_f64()),
        "expires_in_seconds": expires,
    })
}

fn unknown(id: &str) -> Refusal {
    let reason = format!("there is no document {id:?}; register it with PUT /v1/documents/ID");
    Refusal { code: Some("document_not_found"), ..Refusal::new(Kind::NotFound, reason) }
}
