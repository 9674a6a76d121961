//! `/v1/documents`: registered documents, which are found verbatim in later prompts of the same tenant.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::PathRejection;
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
use crate::journal::{Change, Journal, Registration};
use crate::leisure::LeisureJob;
use crate::pins::{Copied, Copies};
use crate::refusal::{Kind, Refusal};
use crate::service::{Service, unix_time_ms};
use crate::shape::AnswerShape;
use crate::tenants;
use crate::text_work;

/// The most bytes of an ID.
const MAX_ID: usize = 256;
/// The most bytes of a title.
const MAX_TITLE: usize = 1024;
/// The shortest time for which a document is kept.
const MIN_TTL: Duration = Duration::from_secs(1);

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

/// The ID in a path, if the path is UTF-8.
type PathId = Result<Path<String>, PathRejection>;

/// Registers a document under an ID, or replaces it.
pub(crate) async fn put(State(service): State<Arc<Service>>, id: PathId, request: Request) -> Response {
    respond(registered(&service, id, request).await)
}

/// Lists the documents of a tenant, without their texts.
pub(crate) async fn list(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(listed(&service, request).await)
}

/// Returns a document with its text.
pub(crate) async fn get(State(service): State<Arc<Service>>, id: PathId, request: Request) -> Response {
    respond(found(&service, id, request).await)
}

/// Forgets a document. From now on, its keys and values leave the caches like those of other documents.
pub(crate) async fn delete(State(service): State<Arc<Service>>, id: PathId, request: Request) -> Response {
    respond(removed(&service, id, request).await)
}

async fn registered(service: &Arc<Service>, id: PathId, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (Owner, PutRequest) = service.read(request).await?;
    let id = read_id(id)?;
    let PutRequest { text, title, ttl_seconds, system } = request;
    if let Some(title) = title.as_ref().filter(|title| title.len() > MAX_TITLE) {
        let reason = format!("the title has {} bytes; it may have up to {MAX_TITLE}", title.len());
        return Err(Refusal::field("title", reason));
    }
    let ttl = ttl_seconds.map(Duration::try_from_secs_f64).transpose().map_err(|error| {
        Refusal::field("ttl_seconds", format!("ttl_seconds must be a number of seconds from now: {error}"))
    })?;
    if ttl.is_some_and(|ttl| ttl < MIN_TTL) {
        return Err(Refusal::field("ttl_seconds", "ttl_seconds must be at least 1"));
    }
    // Without reuse, nothing that is computed now would be found at another position.
    if let Some(system) = system.as_ref().filter(|_| service.reuse.is_some()) {
        service.leisure.check(system)?;
    }
    let (seat, codec) = (service.seats.take(owner.tenant.as_ref())?, service.codec.clone());
    let counted = text_work::run(seat, move || Ok((codec.encode(&text, false)?.len(), text)));
    let ((tokens, text), seat) = counted.await?;
    let new = New { tenant: owner.tenant, document: NewDocument { id, title, text, ttl }, system, tokens };
    let handle = Arc::clone(service);
    let change = move |journal: &mut Option<Journal>| register(&handle, journal, new);
    let (status, document) = service.registrar.change((seat, owner.body), change).await?;
    Ok((status, Json(document)).into_response())
}

/// A document that is being registered.
struct New {
    tenant: Option<Arc<str>>,
    document: NewDocument,
    system: Option<String>,
    /// The number of tokens of the text.
    tokens: usize,
}

/// Registers a document, after it has been written to the journal. Returns the status and the document as it is shown.
fn register(
    service: &Arc<Service>,
    journal: &mut Option<Journal>,
    new: New,
) -> Result<(StatusCode, Value), Refusal> {
    let New { tenant, document: new, system, tokens } = new;
    let library = service.libraries.of(tenant.as_ref());
    library.lock().check(&new)?;
    if let Some(journal) = journal {
        write(service, journal, (&tenant, &new, system.as_deref()))?;
    }
    let mut library = library.lock();
    let id = new.id.clone();
    let status = match library.register(new)? {
        Some(_) => StatusCode::OK,
        None => StatusCode::CREATED,
    };
    let known = library.get(&id).and_then(|one| one.costs);
    let computed_in = known.map_or(Duration::ZERO, |costs| costs.computed_in);
    library.set_costs(&id, DocumentCosts { tokens, kv_bytes: service.kv_bytes(tokens), computed_in });
    let document = library.get(&id).ok_or_else(|| unknown(&id))?;
    // It is pinned again when it has been computed with its new text and system prompt.
    service.forget_copies(tenant.as_ref(), &id);
    let text = Arc::clone(&document.text);
    let document = shown(document, service.libraries.now(), false);
    let system = system.filter(|_| service.reuse.is_some());
    service.pin_at_leisure(system.map(|system| LeisureJob { tenant, id, system, text }));
    Ok((status, document))
}

/// Writes a document to the journal.
fn write(
    service: &Service,
    journal: &mut Journal,
    (tenant, new, system): (&Option<Arc<str>>, &NewDocument, Option<&str>),
) -> Result<(), Refusal> {
    let most = service.limits.document_bytes;
    let others = journal.system_bytes_beside(&(tenant.clone(), new.id.clone()));
    if system.is_some_and(|system| others + system.len() > most) {
        let reason = format!(
            "the system prompts of the registered documents would have more than {most} bytes, the limit of this server; \
             register without a system prompt, or remove documents"
        );
        return Err(Refusal::new(Kind::Conflict, reason));
    }
    let ms = |ttl: Duration| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    let change = Change::Registered(Registration {
        tenant: tenant.as_deref().map(Cow::Borrowed),
        id: Cow::Borrowed(&new.id),
        title: new.title.as_deref().map(Cow::Borrowed),
        text: Cow::Borrowed(&new.text),
        system: system.map(Cow::Borrowed),
        expires: new.ttl.map(|ttl| unix_time_ms().saturating_add(ms(ttl))),
        ttl: new.ttl.map(ms),
    });
    journal.append(&change).map_err(|error| Refusal::not_written(&error))
}

async fn listed(service: &Arc<Service>, request: Request) -> Result<Response, Refusal> {
    let tenant = tenants::tenant(service.keys.as_ref(), request.headers())?;
    let (handle, owner) = (Arc::clone(service), tenant.clone());
    let list = service.with_library(tenant.as_ref(), move |library| {
        let now = handle.libraries.now();
        let is_pinned = |id: &str| handle.pins.contains(owner.as_ref(), id);
        let data = library.documents().map(|document| shown(document, now, is_pinned(&document.id)));
        let data: Vec<Value> = data.collect();
        Ok(json!({"object": "list", "data": data, "bytes": library.bytes()}))
    });
    Ok(Json(list.await?).into_response())
}

async fn found(service: &Arc<Service>, id: PathId, request: Request) -> Result<Response, Refusal> {
    let tenant = tenants::tenant(service.keys.as_ref(), request.headers())?;
    let (id, handle) = (read_id(id)?, Arc::clone(service));
    let is_pinned = service.pins.contains(tenant.as_ref(), &id);
    let document = service.with_library(tenant.as_ref(), move |library| {
        let document = library.get(&id).ok_or_else(|| unknown(&id))?;
        let mut shown = shown(document, handle.libraries.now(), is_pinned);
        shown["text"] = json!(&*document.text);
        Ok(shown)
    });
    Ok(Json(document.await?).into_response())
}

async fn removed(service: &Arc<Service>, id: PathId, request: Request) -> Result<Response, Refusal> {
    let tenant = tenants::tenant(service.keys.as_ref(), request.headers())?;
    let (id, handle, owner) = (read_id(id)?, Arc::clone(service), tenant.clone());
    let seat = service.seats.take(tenant.as_ref())?;
    let removed = service.registrar.change(seat, move |journal| {
        let library = handle.libraries.of(owner.as_ref());
        let is_loaded = library.lock().get(&id).is_some();
        let is_kept = journal.as_ref().is_some_and(|journal| journal.has(&(owner.clone(), id.clone())));
        if !is_loaded && !is_kept {
            return Err(unknown(&id));
        }
        if let Some(journal) = journal {
            let removed =
                Change::Removed { tenant: owner.as_deref().map(Cow::Borrowed), id: Cow::Borrowed(&id) };
            journal.append(&removed).map_err(|error| Refusal::not_written(&error))?;
        }
        library.lock().remove(&id);
        handle.forget_copies(owner.as_ref(), &id);
        Ok(json!({"id": id, "object": "document", "deleted": true}))
    });
    Ok(Json(removed.await?).into_response())
}

fn read_id(id: PathId) -> Result<String, Refusal> {
    match id {
        Ok(Path(id)) if (1..=MAX_ID).contains(&id.len()) => Ok(id),
        Ok(_) => Err(Refusal::field("id", format!("the ID must have 1 to {MAX_ID} bytes"))),
        Err(_) => Err(Refusal::field("id", "the ID in the path must be UTF-8")),
    }
}

impl Service {
    /// Computes registered documents when nobody else wants the engine, and pins them.
    pub(crate) fn pin_at_leisure(self: &Arc<Self>, jobs: impl IntoIterator<Item = LeisureJob>) {
        for job in jobs {
            self.at_leisure(job, compute);
        }
    }

    /// Forgets what an earlier registration of a document has pinned or wants to be computed.
    fn forget_copies(&self, tenant: Option<&Arc<str>>, id: &str) {
        self.leisure.remove(&(tenant.cloned(), id.to_owned()));
        self.pins.remove(tenant, id);
    }
}

/// Computes a document behind a system prompt and pins it, unless it has been removed or registered again.
async fn compute(service: Arc<Service>, job: LeisureJob) {
    let LeisureJob { tenant, id, system, text } = job.clone();
    let library = service.libraries.of(tenant.as_ref());
    let is_current = || library.lock().get(&id).is_some_and(|document| Arc::ptr_eq(&document.text, &text));
    if !is_current() {
        return;
    }
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
        owner: Owner { tenant, ..Owner::default() },
        priority: i32::MIN,
        label: None,
    };
    // The same text may be registered under another ID before.
    let is_own = |span: Option<[usize; 2]>| span.is_some_and(|[start, end]| end - start == text.len());
    let answer = async {
        let (reply, request) = service.answer_quietly(ask).await?;
        Ok::<_, Refusal>((reply.whole(1).await?.1, request))
    };
    match answer.await {
        // A template may change the text, so that the document is not found in its prompt.
        Ok((report, _)) if !report.parts.iter().any(|part| is_own(part.span)) => {
            info!(id, "a registered document is not in the prompt as the chat template writes it");
        }
        Ok((report, request)) => {
            // Zero would mean that it is not computed.
            let seconds = (report.ttft_ms - report.queue_ms).max(1e-3) / 1e3;
            let computed_in = Duration::try_from_secs_f64(seconds).unwrap_or_default();
            {
                let mut library = library.lock();
                let document = library.get(&id).filter(|document| document.text == text);
                if let Some(costs) = document.and_then(|one| one.costs) {
                    library.set_costs(&id, DocumentCosts { computed_in, ..costs });
                }
            }
            debug!(id, ?computed_in, "computed a registered document");
            // The parts of the report are the chunks of the prompt.
            let chunk = report.parts.iter().position(|part| is_own(part.span));
            let (Some(request), Some(chunk), true) = (request, chunk, is_current()) else { return };
            let copied = Copied { place: (job.tenant, job.id), text: Arc::clone(&text), chunk };
            if let Err(refusal) = service.pin(Copies::new(&request, Some(job.system), vec![copied])).await {
                info!(id, reason = refusal.message, "a registered document is not pinned");
            }
        }
        Err(refusal) => info!(id, reason = refusal.message, "a registered document is computed later"),
    }
}

/// Returns a document as the API shows it.
pub(crate) fn shown(document: &RegisteredDocument, now: u64, is_pinned: bool) -> Value {
    let expires = document.expires.map(|at| at.saturating_sub(now) as f64 / 1e3);
    // After a restart, tokens are not counted at once.
    let costs = document.costs;
    let computed_in = costs.map_or(Duration::ZERO, |costs| costs.computed_in);
    json!({
        "id": &*document.id,
        "object": "document",
        "title": document.title,
        "bytes": document.text.len(),
        "tokens": costs.map(|costs| costs.tokens),
        "kv_bytes": costs.map(|costs| costs.kv_bytes),
        "computed_ms": (!computed_in.is_zero()).then_some(1e3 * computed_in.as_secs_f64()),
        "pinned": is_pinned,
        "expires_in_seconds": expires,
    })
}

fn unknown(id: &str) -> Refusal {
    let reason = format!("there is no document {id:?}; register it with PUT /v1/documents/ID");
    Refusal { code: Some("document_not_found"), ..Refusal::new(Kind::NotFound, reason) }
}
