//! `/v1/messages` and `/v1/messages/count_tokens`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use kvengine::Sampling;
use kvmodel::Variable;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::blocks::{Conversation, conversation};
use super::shape::{answer_shape, blocks};
use super::stream::MessageChunks;
use super::{respond, usage};
use crate::ask::{AnswerSettings, Ask, AskedPrompt, Documents, Owner};
use crate::dialect::openai::fields::{salt, stop, within};
use crate::dialect::{new_id, random, stream};
use crate::refusal::Refusal;
use crate::reply::EndReason;
use crate::service::Service;
use crate::shape::AnswerShape;

/// A request. Every other field is refused.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessagesRequest {
    model: Option<String>,
    messages: Variable,
    max_tokens: Option<u64>,
    system: Option<Variable>,
    stop_sequences: Option<Variable>,
    stream: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u64>,
    thinking: Option<Variable>,
    tools: Option<Variable>,
    tool_choice: Option<Variable>,
    output_format: Option<Variable>,
    cache_salt: Option<String>,
    registered_documents: Option<bool>,
    mcp_servers: Option<Variable>,
    container: Option<Variable>,
    context_management: Option<Variable>,
    output_config: Option<Variable>,
    #[allow(dead_code, reason = "labels change nothing")]
    diagnostics: Option<IgnoredAny>,
    #[allow(dead_code, reason = "labels change nothing")]
    user_profile_id: Option<IgnoredAny>,
    #[allow(dead_code, reason = "labels change nothing")]
    workspace_id: Option<IgnoredAny>,
    #[allow(dead_code, reason = "there is one place and one speed")]
    inference_geo: Option<IgnoredAny>,
    #[allow(dead_code, reason = "there is one place and one speed")]
    speed: Option<IgnoredAny>,
    #[allow(dead_code, reason = "labels change nothing")]
    metadata: Option<IgnoredAny>,
    #[allow(dead_code, reason = "there is one tier")]
    service_tier: Option<IgnoredAny>,
    #[allow(dead_code, reason = "everything is cached")]
    cache_control: Option<IgnoredAny>,
}

/// Answers a conversation.
pub(crate) async fn messages(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(answer(&service, request).await)
}

/// Counts the tokens of a conversation.
pub(crate) async fn count(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(counted(&service, request).await)
}

async fn answer(service: &Arc<Service>, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (_, MessagesRequest) = service.read(request).await?;
    let model = service.check_model(request.model.as_deref())?;
    request.check_supported()?;
    let settings = request.settings()?;
    let shape = request.shape()?;
    let (prompt, documents) = request.prompt(service, &shape)?;
    let owner = Owner { salt: salt(request.cache_salt.as_deref())?, ..owner };
    let reply =
        service.answer(Ask { prompt, documents, settings, shape, owner, priority: 0, label: None }).await?;
    let id = new_id("msg_");
    if request.stream.unwrap_or(false) {
        let chunks = MessageChunks::new(id, model, reply.prompt_tokens);
        return Ok(stream::respond(vec![reply], chunks));
    }
    let (samples, report) = reply.whole(1).await?;
    let Some(sample) = samples.into_iter().next() else { return Err(Refusal::engine_gone()) };
    let (reason, string) = stop_reason(sample.reason.as_ref());
    let all = json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks(&sample),
        "stop_reason": reason,
        "stop_sequence": string,
        "usage": usage(&report, sample.num_tokens),
        "kv": report,
    });
    Ok(Json(all).into_response())
}

async fn counted(service: &Arc<Service>, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (_, MessagesRequest) = service.read(request).await?;
    service.check_model(request.model.as_deref())?;
    request.check_supported()?;
    let (prompt, documents) = request.prompt(service, &request.shape()?)?;
    let tokens = service.count(&owner, prompt, documents).await?;
    Ok(Json(json!({"input_tokens": tokens.len()})).into_response())
}

impl MessagesRequest {
    /// Refuses fields that would change the answer in a way that this server does not know.
    fn check_supported(&self) -> Result<(), Refusal> {
        let is_empty = |list: &Variable| matches!(list, Variable::List(items) if items.is_empty());
        for (name, given, fits) in [
            ("mcp_servers", &self.mcp_servers, &is_empty as &dyn Fn(&Variable) -> bool),
            ("container", &self.container, &|_| false),
            ("context_management", &self.context_management, &|given| match given {
                Variable::Map(fields) => {
                    fields.iter().all(|(name, edits)| name == "edits" && is_empty(edits))
                }
                _ => false,
            }),
        ] {
            if given.as_ref().is_some_and(|given| *given != Variable::None && !fits(given)) {
                return Err(Refusal::unsupported(name, "send the request without it"));
            }
        }
        for (name, given) in [("thinking", &self.thinking), ("output_config", &self.output_config)] {
            if given.as_ref().is_some_and(|given| !matches!(given, Variable::Map(_) | Variable::None)) {
                return Err(Refusal::field(name, format!("{name} must be an object")));
            }
        }
        Ok(())
    }

    fn settings(&self) -> Result<AnswerSettings, Refusal> {
        let max_tokens = match self.max_tokens {
            None => {
                return Err(Refusal::field(
                    "max_tokens",
                    "max_tokens is missing; give the most tokens of the answer",
                ));
            }
            Some(0) => return Err(Refusal::field("max_tokens", "max_tokens is 0; it must be at least 1")),
            Some(most) => usize::try_from(most).unwrap_or(usize::MAX),
        };
        Ok(AnswerSettings {
            max_tokens: Some(max_tokens),
            samples: 1,
            sampling: Sampling {
                temperature: within("temperature", self.temperature, 1.0, 0.0..=1.0)?,
                top_p: within("top_p", self.top_p, 1.0, f32::MIN_POSITIVE..=1.0)?,
                top_k: usize::try_from(self.top_k.unwrap_or(0)).unwrap_or(usize::MAX),
                seed: random(),
                ..Sampling::default()
            },
            stop: stop("stop_sequences", self.stop_sequences.as_ref())?,
            logprobs: None,
            logit_bias: Arc::default(),
            ignore_end: false,
        })
    }

    /// Returns what an answer consists of.
    fn shape(&self) -> Result<AnswerShape, Refusal> {
        let config = self.output_config.as_ref().and_then(|config| config.field("format"));
        let formats = [("output_format", self.output_format.as_ref()), ("output_config.format", config)];
        answer_shape(self.tools.as_ref(), self.tool_choice.as_ref(), formats)
    }

    fn prompt(&self, service: &Service, shape: &AnswerShape) -> Result<(AskedPrompt, Documents), Refusal> {
        let reuse = service.reuse.is_some();
        let Conversation { messages, documents } = conversation(self.system.as_ref(), &self.messages, reuse)?;
        let thinks = self.thinking.as_ref().and_then(|thinking| match thinking.field("type") {
            Some(Variable::Text(kind)) => Some(kind != "disabled"),
            _ => None,
        });
        let thinks = thinks.map(|thinks| ("enable_thinking".to_owned(), thinks.into()));
        let effort = self.output_config.as_ref().and_then(|config| config.field("effort"));
        let effort = effort.filter(|effort| matches!(effort, Variable::Text(_)));
        let effort = effort.map(|effort| ("reasoning_effort".to_owned(), effort.clone()));
        let tools = shape.variable(&service.codec)?;
        let variables = thinks.into_iter().chain(effort).chain(tools).collect();
        let ignore_registered = self.registered_documents == Some(false);
        let documents = Documents { given: documents.into(), ignore_registered, ..Documents::default() };
        Ok((AskedPrompt::Conversation { messages, variables }, documents))
    }
}

/// Returns the word for the end of an answer, and the string that ended it.
pub(super) fn stop_reason(reason: Option<&EndReason>) -> (Option<&'static str>, Value) {
    match reason {
        None => (None, Value::Null),
        Some(EndReason::Stop) => (Some("end_turn"), Value::Null),
        Some(EndReason::StopString(string)) => (Some("stop_sequence"), json!(string)),
        Some(EndReason::Calls) => (Some("tool_use"), Value::Null),
        Some(EndReason::Length) => (Some("max_tokens"), Value::Null),
    }
}
