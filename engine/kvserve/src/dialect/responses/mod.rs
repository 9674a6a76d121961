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
use self::output::{items, status};
use self::stream::ResponseChunks;
use crate::ask::{AnswerSettings, Ask, AskedPrompt, Documents, Owner};
use crate::dialect::documents::documents;
use crate::dialect::openai::fields::{MAX_LOGPROBS, salt, within};
use crate::dialect::openai::respond;
use crate::dialect::openai::shape::{text_form, tool_choice};
use crate::dialect::shape::{ToolForm, shape};
use crate::dialect::{new_id, random};
use crate::refusal::Refusal;
use crate::reply::EndReason;
use crate::report::KvReport;
use crate::service::{Service, unix_time};
use crate::shape::{AnswerShape, value};

mod input;
mod output;
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
    parallel_tool_calls: Option<bool>,
    #[allow(dead_code, reason = "a limit for tools that a server calls")]
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

async fn answer(service: &Arc<Service>, request: Request) -> Result<Response, Refusal> {
    let (owner, request): (_, ResponsesRequest) = service.read(request).await?;
    let model = service.check_model(request.model.as_deref())?;
    request.check_supported()?;
    let settings = request.settings()?;
    let messages = conversation(request.instructions.as_deref(), &request.input)?;
    let shape = request.shape()?;
    let variables = request.variables().into_iter().chain(shape.variable(&service.codec)?).collect();
    let prompt = AskedPrompt::Conversation { messages, variables };
    let given = documents(request.documents.as_ref())?;
    let documents = Documents {
        given,
        separator: request.separator.clone(),
        from_parts: false,
        ignore_registered: request.registered_documents == Some(false),
    };
    let owner = Owner { salt: salt(request.cache_salt.as_deref())?, ..owner };
    let label = request.prompt_cache_key.as_deref().map(Arc::from);
    let form = Form::new(&request, model, &settings)?;
    let reply = service.answer(Ask { prompt, documents, settings, shape, owner, priority: 0, label }).await?;
    if request.stream.unwrap_or(false) {
        return Ok(crate::dialect::stream::respond(vec![reply], ResponseChunks::new(form)));
    }
    let (samples, report) = reply.whole(1).await?;
    let Some(sample) = samples.into_iter().next() else { return Err(Refusal::engine_gone()) };
    let all = form.finished(items(&sample), sample.reason.as_ref(), sample.num_tokens, &report);
    Ok(Json(all).into_response())
}

/// The name by which a request asks for the log-probabilities of an answer.
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
        for (name, given, advice) in [
            ("conversation", &self.conversation, kept),
            ("prompt", &self.prompt, "this server keeps no prompts; write it into the input"),
            ("moderation", &self.moderation, "send the request without it"),
            ("context_management", &self.context_management, "prompts are never cut; shorten the input"),
        ] {
            if given.as_ref().is_some_and(|given| *given != Variable::None) {
                return Err(Refusal::unsupported(name, advice));
            }
        }
        if self.truncation.as_deref().is_some_and(|truncation| truncation != "disabled") {
            return Err(Refusal::unsupported("truncation", "prompts are never cut; send \"disabled\""));
        }
        for (name, given) in [("text", &self.text), ("reasoning", &self.reasoning)] {
            if given.as_ref().is_some_and(|given| !matches!(given, Variable::Map(_) | Variable::None)) {
                return Err(Refusal::field(name, format!("{name} must be an object")));
            }
        }
        // What files and encrypted reasoning would add is never there.
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

    /// Returns what an answer consists of.
    fn shape(&self) -> Result<AnswerShape, Refusal> {
        let choice = tool_choice(self.tool_choice.as_ref(), None)?;
        let format = self.text.as_ref().and_then(|text| text.field("format"));
        let form = text_form("text.format", None, format)?;
        shape(TOOL.read(self.tools.as_ref())?, choice, self.parallel_tool_calls.unwrap_or(true), form)
    }

    /// Returns the variables for the chat template.
    fn variables(&self) -> Vec<(String, Variable)> {
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.field("effort"));
        let effort = effort.filter(|effort| matches!(effort, Variable::Text(_))).cloned();
        effort.map(|effort| ("reasoning_effort".to_owned(), effort)).into_iter().collect()
    }
}

/// A tool of a response.
const TOOL: ToolForm =
    ToolForm { within: None, schema: "parameters", kind: "function", kind_is_optional: false };

/// The fields that all objects of an answer repeat.
struct Form {
    id: String,
    created: u64,
    model: String,
    instructions: Option<String>,
    max_output_tokens: Option<u64>,
    metadata: Value,
    temperature: f32,
    top_p: f32,
    tools: Value,
    tool_choice: Value,
    parallel_tool_calls: bool,
    format: Value,
}

impl Form {
    fn new(request: &ResponsesRequest, model: String, settings: &AnswerSettings) -> Result<Self, Refusal> {
        let repeated = |field, given: Option<&Variable>, default| match given {
            None | Some(Variable::None) => Ok(default),
            Some(given) => value(field, given),
        };
        let format = request.text.as_ref().and_then(|text| text.field("format"));
        Ok(Self {
            id: new_id("resp_"),
            created: unix_time(),
            model,
            instructions: request.instructions.clone(),
            max_output_tokens: request.max_output_tokens,
            metadata: request.metadata.clone().unwrap_or_else(|| json!({})),
            temperature: settings.sampling.temperature,
            top_p: settings.sampling.top_p,
            tools: repeated("tools", request.tools.as_ref(), json!([]))?,
            tool_choice: repeated("tool_choice", request.tool_choice.as_ref(), json!("auto"))?,
            parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
            format: repeated("text.format", format, json!({"type": "text"}))?,
        })
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
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": null,
            "store": false,
            "temperature": self.temperature,
            "text": {"format": self.format},
            "tool_choice": self.tool_choice,
            "tools": self.tools,
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": null,
        })
    }

    /// Returns the finished response.
    fn finished(
        &self,
        items: Vec<Value>,
        reason: Option<&EndReason>,
        answer_tokens: usize,
        report: &KvReport,
    ) -> Value {
        let mut response = self.response(status(reason), &Value::Array(items));
        if reason == Some(&EndReason::Length) {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["usage"] = json!({
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {"cached_tokens": report.reused},
            "output_tokens": answer_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": report.prompt_tokens + answer_tokens,
        });
        response["kv"] = json!(report);
        response
    }
}
