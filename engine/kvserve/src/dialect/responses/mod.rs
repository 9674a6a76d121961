//! `/v1/responses`: the newer dialect of `OpenAI`'s API. The server keeps no answers, so each request has its whole
//! conversation.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use kvengine::Sampling;
use kvmodel::Variable;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use self::input::conversation;
use self::stream::ResponseChunks;
use crate::ask::{AnswerSettings, Ask, AskedPrompt, Documents, Owner};
use crate::dialect::documents::documents;
use crate::dialect::openai::fields::{MAX_LOGPROBS, salt, within};
use crate::dialect::openai::respond;
use crate::dialect::{new_id, random};
use crate::refusal::Refusal;
use crate::reply::{EndReason, ReplyToken, WholeSample};
use crate::report::KvReport;
use crate::service::{Service, unix_time};
use crate::shape::AnswerShape;

mod input;
mod stream;

/// A request. Every other field is refused.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResponsesRequest {
    model: Option<String>,
    input: Variable,
    instructions: Option<String>,
    max_output_tokens: Option<u64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_logprobs: Option<u64>,
    stream: Option<bool>,
    include: Option<Vec<String>>,
    reasoning: Option<Variable>,
    text: Option<Variable>,
    tools: Option<Variable>,
    tool_choice: Option<Variable>,
    previous_response_id: Option<String>,
    conversation: Option<Variable>,
    background: Option<bool>,
    prompt: Option<Variable>,
    moderation: Option<Variable>,
    context_management: Option<Variable>,
    truncation: Option<String>,
    documents: Option<Variable>,
    registered_documents: Option<bool>,
    separator: Option<String>,
    cache_salt: Option<String>,
    prompt_cache_key: Option<String>,
    /// Returned as it is.
    metadata: Option<Value>,
    #[allow(dead_code, reason = "no answer is kept, whether asked or not")]
    store: Option<bool>,
    #[allow(dead_code, reason = "there are no calls of tools yet")]
    parallel_tool_calls: Option<IgnoredAny>,
    #[allow(dead_code, reason = "there are no calls of tools yet")]
    max_tool_calls: Option<IgnoredAny>,
    #[allow(dead_code, reason = "a proxy may pad the stream")]
    stream_options: Option<IgnoredAny>,
    #[allow(dead_code, reason = "labels change nothing")]
    user: Option<IgnoredAny>,
    #[allow(dead_code, reason = "labels change nothing")]
    safety_identifier: Option<IgnoredAny>,
    #[allow(dead_code, reason = "there is one tier")]
    service_tier: Option<IgnoredAny>,
    #[allow(dead_code, reason = "the operator decides how long caches last")]
    prompt_cache_retention: Option<IgnoredAny>,
    #[allow(dead_code, reason = "everything is cached")]
    prompt_cache_options: Option<IgnoredAny>,
}

/// Answers a conversation.
pub(crate) async fn responses(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(answer(&service, request).await)
}

async fn answer(service: &Service, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (_, ResponsesRequest) = service.read(request).await?;
    let model = service.check_model(request.model.as_deref())?;
    request.check_supported()?;
    let settings = request.settings()?;
    let messages = conversation(request.instructions.as_deref(), &request.input)?;
    let prompt = AskedPrompt::Conversation { messages, variables: request.variables() };
    let given = documents(request.documents.as_ref())?;
    let documents = Documents {
        given,
        separator: request.separator.clone(),
        from_parts: false,
        ignore_registered: request.registered_documents == Some(false),
    };
    let owner = Owner { salt: salt(request.cache_salt.as_deref())?, ..owner };
    let label = request.prompt_cache_key.clone();
    let form = Form::new(&request, model, &settings);
    let reply = service
        .answer(Ask { prompt, documents, settings, shape: AnswerShape::default(), owner, priority: 0, label })
        .await?;
    if request.stream.unwrap_or(false) {
        return Ok(crate::dialect::stream::respond(vec![reply], ResponseChunks::new(form)));
    }
    let (samples, report) = reply.whole(1).await?;
    let Some(sample) = samples.into_iter().next() else { return Err(Refusal::engine_gone()) };
    Ok(Json(form.finished(&sample, &report)).into_response())
}

/// What asks for the log-probabilities of an answer.
const LOGPROBS: &str = "message.output_text.logprobs";

impl ResponsesRequest {
    /// Refuses fields that would change the answer in a way that this server does not know.
    fn check_supported(&self) -> Result<(), Refusal> {
        let kept = "this server keeps no answers; send the whole conversation as input";
        if self.previous_response_id.is_some() {
            return Err(Refusal::unsupported("previous_response_id", kept));
        }
        if self.background == Some(true) {
            return Err(Refusal::unsupported(
                "background",
                "this server keeps no answers; wait for the answer, or stream it",
            ));
        }
        let is_empty = |list: &Variable| matches!(list, Variable::List(items) if items.is_empty());
        let is_idle = |choice: &Variable| [Variable::from("none"), "auto".into()].contains(choice);
        let is_text = |text: &Variable| match text.field("format") {
            None | Some(Variable::None) => true,
            Some(format) => format.field("type") == Some(&"text".into()),
        };
        for (name, given, fits, advice) in [
            ("conversation", &self.conversation, &(|_: &Variable| false) as &dyn Fn(&Variable) -> bool, kept),
            ("prompt", &self.prompt, &|_| false, "this server keeps no prompts; write it into the input"),
            ("moderation", &self.moderation, &|_| false, "send the request without it"),
            (
                "context_management",
                &self.context_management,
                &|_| false,
                "prompts are never cut; shorten the input",
            ),
            ("tools", &self.tools, &is_empty, "send the request without it"),
            ("tool_choice", &self.tool_choice, &is_idle, "send the request without it"),
            ("text.format", &self.text, &is_text, "send the request without it"),
        ] {
            if given.as_ref().is_some_and(|given| *given != Variable::None && !fits(given)) {
                return Err(Refusal::unsupported(name, advice));
            }
        }
        if self.truncation.as_deref().is_some_and(|truncation| truncation != "disabled") {
            return Err(Refusal::unsupported("truncation", "prompts are never cut; send \"disabled\""));
        }
        // What tools, files and encrypted reasoning would add is never there.
        if self.top_logprobs.unwrap_or(0) > MAX_LOGPROBS as u64 {
            return Err(Refusal::field(
                "top_logprobs",
                format!("top_logprobs must be at most {MAX_LOGPROBS}"),
            ));
        }
        Ok(())
    }

    fn settings(&self) -> Result<AnswerSettings, Refusal> {
        if self.max_output_tokens == Some(0) {
            return Err(Refusal::field("max_output_tokens", "max_output_tokens is 0; it must be at least 1"));
        }
        let asks = self.top_logprobs.is_some_and(|top| top > 0)
            || self.include.iter().flatten().any(|one| one == LOGPROBS);
        Ok(AnswerSettings {
            max_tokens: self.max_output_tokens.map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
            samples: 1,
            sampling: Sampling {
                temperature: within("temperature", self.temperature, 1.0, 0.0..=2.0)?,
                top_p: within("top_p", self.top_p, 1.0, f32::MIN_POSITIVE..=1.0)?,
                seed: random(),
                ..Sampling::default()
            },
            stop: Vec::new(),
            logprobs: asks.then(|| self.top_logprobs.unwrap_or(0) as usize),
            logit_bias: Arc::default(),
            ignore_end: false,
        })
    }

    /// Returns the variables for the chat template.
    fn variables(&self) -> Vec<(String, Variable)> {
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.field("effort"));
        let effort = effort.filter(|effort| matches!(effort, Variable::Text(_))).cloned();
        effort.map(|effort| ("reasoning_effort".to_owned(), effort)).into_iter().collect()
    }
}

/// What all objects of an answer repeat.
struct Form {
    id: String,
    message: String,
    created: u64,
    model: String,
    instructions: Option<String>,
    max_output_tokens: Option<u64>,
    metadata: Value,
    temperature: f32,
    top_p: f32,
}

impl Form {
    fn new(request: &ResponsesRequest, model: String, settings: &AnswerSettings) -> Self {
        Self {
            id: new_id("resp_"),
            message: new_id("msg_"),
            created: unix_time(),
            model,
            instructions: request.instructions.clone(),
            max_output_tokens: request.max_output_tokens,
            metadata: request.metadata.clone().unwrap_or_else(|| json!({})),
            temperature: settings.sampling.temperature,
            top_p: settings.sampling.top_p,
        }
    }

    /// Returns the response with a status and its output so far.
    fn response(&self, status: &str, output: &Value) -> Value {
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": true,
            "previous_response_id": null,
            "store": false,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": null,
        })
    }

    /// Returns the message with a status and its content.
    fn item(&self, status: &str, content: &Value) -> Value {
        json!({"type": "message", "id": self.message, "status": status, "role": "assistant", "content": content})
    }

    /// Returns the finished response.
    fn finished(&self, sample: &WholeSample, report: &KvReport) -> Value {
        let cut = sample.reason == Some(EndReason::Length);
        let status = if cut { "incomplete" } else { "completed" };
        let item = self.item(status, &json!([text_part(&sample.text, &sample.tokens)]));
        let mut response = self.response(status, &json!([item]));
        if cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["usage"] = json!({
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {"cached_tokens": report.reused},
            "output_tokens": sample.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": report.prompt_tokens + sample.num_tokens,
        });
        response["kv"] = json!(report);
        response
    }
}

/// Returns the content of an answer.
fn text_part(text: &str, tokens: &[ReplyToken]) -> Value {
    let tokens: Vec<Value> = crate::dialect::openai::chat::logprobs(tokens);
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": tokens})
}
