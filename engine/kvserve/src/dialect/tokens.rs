//! `/tokenize` and `/detokenize`, as vLLM has them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use kvmodel::Variable;
use serde::Deserialize;
use serde_json::json;

use super::documents::documents;
use super::openai::chat::conversation;
use super::openai::respond;
use crate::ask::{AskedPrompt, Documents};
use crate::refusal::Refusal;
use crate::service::Service;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Variable>,
    documents: Option<Variable>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

/// Encodes a text or a conversation.
pub(crate) async fn tokenize(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(encoded(&service, request).await)
}

async fn encoded(service: &Service, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (_, TokenizeRequest) = service.read(request).await?;
    service.check_model(request.model.as_deref())?;
    let special = request.add_special_tokens.unwrap_or(true);
    let documents = Documents { given: documents(request.documents.as_ref())?, ..Documents::default() };
    if !special && !documents.given.is_empty() {
        let reason = "documents stand behind special tokens; leave out the documents, or send true";
        return Err(Refusal::field("add_special_tokens", reason));
    }
    let tenant = owner.tenant.as_ref();
    let tokens = match (request.prompt, request.messages) {
        (Some(text), None) if !special => {
            service.with_codec(tenant, move |codec| Ok(codec.encode(&text, false)?)).await?
        }
        (Some(text), None) => service.count(&owner, AskedPrompt::Text(text), documents).await?,
        (None, Some(messages)) => {
            let messages = conversation(messages)?;
            let prompt = AskedPrompt::Conversation { messages, variables: Vec::new() };
            service.count(&owner, prompt, documents).await?
        }
        _ => return Err(Refusal::field("prompt", "give either a prompt or messages")),
    };
    let mut all = json!({"count": tokens.len(), "max_model_len": service.context, "tokens": tokens});
    if request.return_token_strs == Some(true) {
        let texts = service.token_texts.clone();
        let texts = move |codec: &kvmodel::TextCodec| -> Result<Vec<String>, Refusal> {
            tokens.iter().map(|&token| Ok(texts.of(codec, token)?.0)).collect()
        };
        all["token_strs"] = json!(service.with_codec(tenant, texts).await?);
    }
    Ok(Json(all).into_response())
}

/// Decodes tokens.
pub(crate) async fn detokenize(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(decoded(&service, request).await)
}

async fn decoded(service: &Service, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (_, DetokenizeRequest) = service.read(request).await?;
    service.check_model(request.model.as_deref())?;
    if let Some(token) = request.tokens.iter().find(|&&token| token as usize >= service.vocabulary) {
        let known = service.vocabulary;
        let reason = format!("token {token} is outside the vocabulary of {known} tokens");
        return Err(Refusal::field("tokens", reason));
    }
    let work = move |codec: &kvmodel::TextCodec| Ok(codec.decode(&request.tokens)?);
    let text = service.with_codec(owner.tenant.as_ref(), work).await?;
    Ok(Json(json!({"prompt": text})).into_response())
}
