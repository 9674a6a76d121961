//! `/v2/chat`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use kvengine::Sampling;
use kvmodel::Variable;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;

use super::messages::{Conversation, conversation};
use super::shape::{answer_shape, message};
use super::stream::CohereChunks;
use super::{finish_reason, respond, usage};
use crate::ask::{AnswerSettings, Ask, AskedPrompt, Documents, Owner};
use crate::dialect::openai::fields::{salt, stop, within};
use crate::dialect::{new_id, random, stream};
use crate::refusal::Refusal;
use crate::service::Service;

/// A request. Every other field is refused.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CohereRequest {
    model: Option<String>,
    messages: Variable,
    documents: Option<Variable>,
    stream: Option<bool>,
    max_tokens: Option<u64>,
    stop_sequences: Option<Variable>,
    temperature: Option<f32>,
    seed: Option<u64>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    k: Option<u64>,
    p: Option<f32>,
    priority: Option<i32>,
    cache_salt: Option<String>,
    registered_documents: Option<bool>,
    tools: Option<Variable>,
    tool_choice: Option<Variable>,
    response_format: Option<Variable>,
    logprobs: Option<bool>,
    #[allow(dead_code, reason = "forced calls match their schemas in any case")]
    strict_tools: Option<IgnoredAny>,
    #[allow(dead_code, reason = "answers have no citations")]
    citation_options: Option<IgnoredAny>,
    #[allow(dead_code, reason = "the model alone decides what it says")]
    safety_mode: Option<IgnoredAny>,
    #[allow(dead_code, reason = "the model alone decides whether it thinks")]
    thinking: Option<IgnoredAny>,
}

/// Answers a conversation.
pub(crate) async fn chat(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(answer(&service, request).await)
}

async fn answer(service: &Arc<Service>, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (_, CohereRequest) = service.read(request).await?;
    service.check_model(request.model.as_deref())?;
    request.check_supported()?;
    let settings = request.settings()?;
    let shape =
        answer_shape(request.tools.as_ref(), request.tool_choice.as_ref(), request.response_format.as_ref())?;
    let Conversation { messages, documents: given } =
        conversation(request.messages, request.documents.as_ref(), service.reuse.is_some())?;
    let prompt = AskedPrompt::Conversation {
        messages,
        variables: shape.variable(&service.codec)?.into_iter().collect(),
    };
    let ignore_registered = request.registered_documents == Some(false);
    let documents = Documents { given, ignore_registered, ..Documents::default() };
    let owner = Owner { salt: salt(request.cache_salt.as_deref())?, ..owner };
    // Smaller numbers are more urgent.
    let priority = request.priority.unwrap_or(0).saturating_neg();
    let reply =
        service.answer(Ask { prompt, documents, settings, shape, owner, priority, label: None }).await?;
    let id = new_id("");
    if request.stream.unwrap_or(false) {
        return Ok(stream::respond(vec![reply], CohereChunks::new(id)));
    }
    let (samples, report) = reply.whole(1).await?;
    let Some(sample) = samples.into_iter().next() else { return Err(Refusal::engine_gone()) };
    let all = json!({
        "id": id,
        "finish_reason": sample.reason.as_ref().map(finish_reason),
        "message": message(&sample),
        "usage": usage(&report, sample.num_tokens),
        "kv": report,
    });
    Ok(Json(all).into_response())
}

impl CohereRequest {
    /// Refuses fields that would change the answer in a way that this server does not know.
    fn check_supported(&self) -> Result<(), Refusal> {
        if self.logprobs == Some(true) {
            return Err(Refusal::unsupported("logprobs", "ask for them at /v1/chat/completions"));
        }
        Ok(())
    }

    /// Returns the settings, with the defaults of Cohere's API.
    fn settings(&self) -> Result<AnswerSettings, Refusal> {
        if self.max_tokens == Some(0) {
            return Err(Refusal::field("max_tokens", "max_tokens is 0; it must be at least 1"));
        }
        Ok(AnswerSettings {
            max_tokens: self.max_tokens.map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
            samples: 1,
            sampling: Sampling {
                temperature: within("temperature", self.temperature, 0.3, 0.0..=2.0)?,
                top_p: within("p", self.p, 0.75, f32::MIN_POSITIVE..=1.0)?,
                top_k: usize::try_from(self.k.unwrap_or(0)).unwrap_or(usize::MAX),
                frequency_penalty: within("frequency_penalty", self.frequency_penalty, 0.0, 0.0..=1.0)?,
                presence_penalty: within("presence_penalty", self.presence_penalty, 0.0, 0.0..=1.0)?,
                seed: self.seed.unwrap_or_else(random),
                ..Sampling::default()
            },
            stop: stop("stop_sequences", self.stop_sequences.as_ref())?,
            logprobs: None,
            logit_bias: Arc::default(),
            ignore_end: false,
        })
    }
}
