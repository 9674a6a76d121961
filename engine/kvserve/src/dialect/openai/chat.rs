//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::sse::Event;
use axum::response::{IntoResponse as _, Response};
use kvmodel::{Message, ToolCall, Variable};
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::fields::{MAX_LOGPROBS, openai_request};
use super::shape::{TOOL, response_format, tool_choice};
use super::{Chunk, Usage, done, finish_reason, refused_stream, respond};
use crate::ask::{Ask, AskedPrompt};
use crate::dialect::new_id;
use crate::dialect::shape::shape;
use crate::dialect::stream::{self, Chunks, data};
use crate::refusal::Refusal;
use crate::reply::{LikelyToken, ReplyEvent, ReplyToken, WholeSample};
use crate::report::KvReport;
use crate::service::{Service, unix_time};
use crate::shape::AnswerShape;

openai_request! {
    /// A request.
    struct ChatRequest {
        messages: Variable,
        max_completion_tokens: Option<u64>,
        logprobs: Option<bool>,
        top_logprobs: Option<u64>,
        /// True to make documents of all texts but the last of the first message of the user with several.
        parts_as_documents: Option<bool>,
        chat_template_kwargs: Option<Variable>,
        reasoning_effort: Option<String>,
        add_generation_prompt: Option<bool>,
        continue_final_message: Option<bool>,
        tools: Option<Variable>,
        tool_choice: Option<Variable>,
        functions: Option<Variable>,
        function_call: Option<Variable>,
        response_format: Option<Variable>,
        modalities: Option<Variable>,
        audio: Option<Variable>,
        web_search_options: Option<Variable>,
        moderation: Option<Variable>,
        store: Option<bool>,
        parallel_tool_calls: Option<bool>,
        #[allow(dead_code, reason = "labels change nothing")]
        metadata: Option<IgnoredAny>,
        #[allow(dead_code, reason = "labels change nothing")]
        safety_identifier: Option<IgnoredAny>,
        #[allow(dead_code, reason = "there is one tier")]
        service_tier: Option<IgnoredAny>,
        #[allow(dead_code, reason = "an expected answer would only be faster")]
        prediction: Option<IgnoredAny>,
        #[allow(dead_code, reason = "a hint for one family of models")]
        verbosity: Option<IgnoredAny>,
        #[allow(dead_code, reason = "the operator decides how long caches last")]
        prompt_cache_retention: Option<IgnoredAny>,
        #[allow(dead_code, reason = "everything is cached")]
        prompt_cache_options: Option<IgnoredAny>,
    }
}

/// Answers a conversation.
pub(crate) async fn chat(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(answer(&service, request).await)
}

async fn answer(service: &Arc<Service>, request: Request) -> Result<Response, Refusal> {
    let (owner, mut request): (_, ChatRequest) = service.read(request).await?;
    let model = service.check_model(request.model.as_deref())?;
    request.check_supported()?;
    let mut common = request.common();
    let logprobs = request.logprobs()?;
    let settings = common.settings(request.max_completion_tokens, None, logprobs)?;
    let mut documents = common.take_documents()?;
    documents.from_parts = request.parts_as_documents.unwrap_or(false);
    let shape = request.shape()?;
    let mut variables = request.variables()?;
    variables.extend(shape.variable(&service.codec)?);
    let messages = conversation(std::mem::take(&mut request.messages))?;
    let prompt = AskedPrompt::Conversation { messages, variables };
    let (owner, priority) = (common.owner(owner)?, common.priority());
    let samples = settings.samples;
    let reply = service
        .answer(Ask { prompt, documents, settings, shape, owner, priority, label: common.label() })
        .await?;
    let form = Form { id: new_id("chatcmpl-"), created: unix_time(), model, logprobs: logprobs.is_some() };
    if request.stream.unwrap_or(false) {
        let usage = request.stream_options.and_then(|options| options.include_usage).unwrap_or(false);
        let chunks = ChatChunks { form, usage, calls: vec![0; samples], tokens: 0, report: None };
        return Ok(stream::respond(vec![reply], chunks));
    }
    let (all, report) = reply.whole(samples).await?;
    Ok(Json(form.whole(&all, &report)).into_response())
}

/// Reads the field `messages`.
///
/// # Errors
/// Refuses what is no list of messages, with the number of the message and its field.
pub(crate) fn conversation(messages: Variable) -> Result<Vec<Message>, Refusal> {
    let named = |refusal| Refusal { param: Some("messages".to_owned()), ..refusal };
    Message::from_variable(messages).map_err(|error| named(error.into()))
}

/// Variables of chat templates that requests have fields for, with checks of their own.
const TAKEN: [&str; 4] = ["add_generation_prompt", "continue_final_message", "documents", "tools"];

impl ChatRequest {
    /// Refuses fields that would change the answer in a way that this server does not know.
    fn check_supported(&self) -> Result<(), Refusal> {
        let is_empty = |list: &Variable| matches!(list, Variable::List(items) if items.is_empty());
        let is_none = |choice: &Variable| *choice == "none".into();
        let only_text = |kinds: &Variable| *kinds == Variable::List(vec!["text".into()]);
        let without = "send the request without it";
        for (name, given, fits, advice) in [
            ("functions", &self.functions, &is_empty as &dyn Fn(&Variable) -> bool, "send tools"),
            ("function_call", &self.function_call, &is_none, "send tools and tool_choice"),
            ("modalities", &self.modalities, &only_text, without),
            ("audio", &self.audio, &|_| false, without),
            ("web_search_options", &self.web_search_options, &|_| false, without),
            ("moderation", &self.moderation, &|_| false, without),
        ] {
            if given.as_ref().is_some_and(|given| *given != Variable::None && !fits(given)) {
                return Err(Refusal::unsupported(name, advice));
            }
        }
        if self.store == Some(true) {
            return Err(Refusal::unsupported("store", "this server keeps no answers; send false"));
        }
        if self.add_generation_prompt == Some(false) {
            return Err(Refusal::unsupported(
                "add_generation_prompt",
                "an answer begins after the prompt; send true",
            ));
        }
        Ok(())
    }

    /// Returns what an answer consists of.
    fn shape(&self) -> Result<AnswerShape, Refusal> {
        let choice = tool_choice(self.tool_choice.as_ref(), Some("function"))?;
        let form = response_format(self.response_format.as_ref())?;
        shape(TOOL.read(self.tools.as_ref())?, choice, self.parallel_tool_calls.unwrap_or(true), form)
    }

    /// Returns the number of likely tokens to report, if log-probabilities are asked for.
    fn logprobs(&self) -> Result<Option<usize>, Refusal> {
        let top = self.top_logprobs.unwrap_or(0);
        match (self.logprobs.unwrap_or(false), top) {
            (_, top) if top > MAX_LOGPROBS as u64 => Err(Refusal::field(
                "top_logprobs",
                format!("top_logprobs is {top}; it must be at most {MAX_LOGPROBS}"),
            )),
            (false, 1..) => Err(Refusal::field("top_logprobs", "top_logprobs needs logprobs: true")),
            (false, 0) => Ok(None),
            (true, top) => Ok(Some(top as usize)),
        }
    }

    /// Returns the variables for the chat template.
    fn variables(&mut self) -> Result<Vec<(String, Variable)>, Refusal> {
        let mut variables = match self.chat_template_kwargs.take() {
            None | Some(Variable::None) => Vec::new(),
            Some(Variable::Map(fields)) => {
                match fields.iter().find(|(name, _)| TAKEN.contains(&name.as_str())) {
                    None => fields,
                    Some((name, _)) => {
                        let reason = format!("{name} is a field of the request itself; give it there");
                        return Err(Refusal::field(format!("chat_template_kwargs.{name}"), reason));
                    }
                }
            }
            Some(_) => {
                let reason = "chat_template_kwargs must be an object";
                return Err(Refusal::field("chat_template_kwargs", reason));
            }
        };
        if let Some(effort) = self.reasoning_effort.take() {
            variables.push(("reasoning_effort".to_owned(), Variable::Text(effort)));
        }
        // The last message of the model is always continued.
        if self.continue_final_message == Some(false) && self.ends_with_answer() {
            let reason = "the last message is the assistant's, which this server continues; send true, or add a message";
            return Err(Refusal::field("continue_final_message", reason));
        }
        Ok(variables)
    }

    fn ends_with_answer(&self) -> bool {
        let Variable::List(messages) = &self.messages else { return false };
        messages.last().and_then(|last| last.field("role")) == Some(&"assistant".into())
    }
}

/// The fields that all objects of an answer repeat.
struct Form {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
}

impl Form {
    fn whole(&self, samples: &[WholeSample], report: &KvReport) -> Value {
        let choice = |(index, sample): (usize, &WholeSample)| {
            let calls = !sample.calls.is_empty();
            let content = (!calls || !sample.text.is_empty()).then_some(&sample.text);
            let mut message = json!({"role": "assistant", "content": content, "refusal": null});
            if calls {
                message["tool_calls"] = sample.calls.iter().map(called).collect();
            }
            json!({
                "index": index,
                "message": message,
                "logprobs": self.logprobs.then(|| json!({"content": logprobs(&sample.tokens), "refusal": null})),
                "finish_reason": sample.reason.as_ref().map(finish_reason),
            })
        };
        let tokens = samples.iter().map(|sample| sample.num_tokens).sum();
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": samples.iter().enumerate().map(choice).collect::<Vec<_>>(),
            "usage": Usage::of([report], tokens),
            "kv": report,
        })
    }

    fn delta<D>(
        &self,
        index: usize,
        delta: D,
        tokens: &[ReplyToken],
        finish_reason: Option<&'static str>,
    ) -> Choice<D> {
        let logprobs = (self.logprobs && !tokens.is_empty()).then(|| json!({"content": logprobs(tokens)}));
        Choice { index, delta, logprobs, finish_reason }
    }
}

/// The next piece of an answer.
#[derive(Serialize)]
struct Choice<D> {
    index: usize,
    delta: D,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
}

/// More text of an answer.
#[derive(Serialize)]
struct TextDelta<'a> {
    content: &'a str,
}

/// The chunks of a streamed answer.
struct ChatChunks {
    form: Form,
    /// True if the last chunk has the numbers of tokens.
    usage: bool,
    /// The number of calls so far, for each answer.
    calls: Vec<usize>,
    tokens: usize,
    report: Option<KvReport>,
}

impl ChatChunks {
    /// Returns an event. If the last chunk has the numbers of tokens, the others say that they have none.
    fn data(&self, choice: Choice<impl Serialize>, kv: Option<&KvReport>) -> Event {
        self.with_usage(&[choice], kv, self.usage.then_some(Value::Null))
    }

    fn with_usage(
        &self,
        choices: &[Choice<impl Serialize>],
        kv: Option<&KvReport>,
        usage: Option<Value>,
    ) -> Event {
        let Form { id, created, model, .. } = &self.form;
        let object = "chat.completion.chunk";
        data(&Chunk { id, object, created: *created, model, choices, kv, usage })
    }
}

impl Chunks for ChatChunks {
    fn begin(&mut self) -> Vec<Event> {
        let role = |index| self.form.delta(index, json!({"role": "assistant", "content": ""}), &[], None);
        (0..self.calls.len()).map(|index| self.data(role(index), None)).collect()
    }

    fn event(&mut self, _prompt: usize, event: ReplyEvent) -> Vec<Event> {
        match event {
            ReplyEvent::Piece(piece) => {
                let delta = TextDelta { content: &piece.text };
                vec![self.data(self.form.delta(piece.sample, delta, &piece.tokens, None), None)]
            }
            ReplyEvent::Call(sample, call) => {
                let mut call = called(&call);
                call["index"] = json!(self.calls[sample]);
                self.calls[sample] += 1;
                vec![self.data(self.form.delta(sample, json!({"tool_calls": [call]}), &[], None), None)]
            }
            ReplyEvent::End(end) => {
                self.tokens += end.tokens;
                let choice = self.form.delta(end.sample, json!({}), &[], Some(finish_reason(&end.reason)));
                let event = self.data(choice, Some(&end.report));
                self.report = Some(end.report);
                vec![event]
            }
        }
    }

    fn end(&mut self) -> Vec<Event> {
        if !self.usage {
            return vec![done()];
        }
        let usage = Usage::of(&self.report, self.tokens);
        vec![self.with_usage(&[] as &[Choice<Value>], None, Some(json!(usage))), done()]
    }

    fn refused(&mut self, refusal: &Refusal) -> Vec<Event> {
        refused_stream(refusal)
    }
}

/// Returns a call with an ID of its own.
fn called(call: &ToolCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": new_id("call_"), "type": "function", "function": function})
}

/// Returns the log-probabilities of tokens.
pub(crate) fn logprobs(tokens: &[ReplyToken]) -> Vec<Value> {
    let one =
        |token: &LikelyToken| json!({"token": token.text, "logprob": token.logprob, "bytes": token.bytes});
    let token = |token: &ReplyToken| {
        let mut all = one(&token.chosen);
        all["top_logprobs"] = token.top.iter().map(one).collect();
        all
    };
    tokens.iter().map(token).collect()
}
