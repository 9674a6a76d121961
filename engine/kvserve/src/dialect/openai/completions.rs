//! `/v1/completions`: raw texts and tokens, without a chat template.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::sse::Event;
use axum::response::{IntoResponse as _, Response};
use futures_util::future::try_join_all;
use kvmodel::Variable;
use serde::Serialize;
use serde_json::{Value, json};

use super::fields::{MAX_LOGPROBS, openai_request};
use super::shape::response_format;
use super::{Chunk, Usage, done, finish_reason, refused_stream, respond};
use crate::ask::{Ask, AskedPrompt, Documents};
use crate::dialect::new_id;
use crate::dialect::stream::{self, Chunks, data};
use crate::refusal::Refusal;
use crate::reply::{EndReason, ReplyEvent, ReplyToken, WholeSample};
use crate::report::KvReport;
use crate::service::{Service, unix_time};
use crate::shape::AnswerShape;
use crate::token_texts;

/// The most prompts of a request.
const MAX_PROMPTS: usize = 64;
/// The number of tokens of an answer if the request does not say.
const DEFAULT_TOKENS: u64 = 16;

openai_request! {
    /// A request.
    struct CompletionRequest {
        prompt: Variable,
        logprobs: Option<u64>,
        echo: Option<bool>,
        best_of: Option<u64>,
        suffix: Option<String>,
        response_format: Option<Variable>,
    }
}

/// Continues a text.
pub(crate) async fn completions(State(service): State<Arc<Service>>, request: Request) -> Response {
    respond(answer(&service, request).await)
}

async fn answer(service: &Arc<Service>, request: Request) -> Result<Response, Refusal> {
    let (owner, mut request): (_, CompletionRequest) = service.read(request).await?;
    let model = service.check_model(request.model.as_deref())?;
    request.check_supported()?;
    let mut common = request.common();
    let logprobs = request.logprobs.map(|top| top as usize);
    let settings = common.settings(None, Some(DEFAULT_TOKENS), logprobs)?;
    let Documents { given, separator, ignore_registered, .. } = common.take_documents()?;
    let label = common.label();
    let (owner, priority, samples) = (common.owner(owner)?, common.priority(), settings.samples);
    let shape = AnswerShape::new(response_format(request.response_format.as_ref())?, None);
    let ask = |prompt| Ask {
        prompt,
        documents: Documents {
            given: Arc::clone(&given),
            separator: separator.clone(),
            from_parts: false,
            ignore_registered,
        },
        settings: settings.clone(),
        shape: shape.clone(),
        owner: owner.clone(),
        priority,
        label: label.clone(),
    };
    let prompts = prompts(&request.prompt)?;
    let form =
        Form { id: new_id("cmpl-"), created: unix_time(), model, logprobs: logprobs.is_some(), samples };
    if request.stream.unwrap_or(false) {
        let replies = try_join_all(prompts.into_iter().map(|prompt| service.answer(ask(prompt)))).await?;
        let usage = request.stream_options.and_then(|options| options.include_usage).unwrap_or(false);
        let offsets = vec![0; samples * replies.len()];
        let chunks = CompletionChunks { form, usage, offsets, tokens: 0, reports: vec![None; replies.len()] };
        return Ok(stream::respond(replies, chunks));
    }
    // Answers are read while other prompts are tokenised.
    let whole = async |prompt| service.answer(ask(prompt)).await?.whole(samples).await;
    let all = try_join_all(prompts.into_iter().map(whole)).await?;
    Ok(Json(form.whole(&all)).into_response())
}

impl CompletionRequest {
    fn check_supported(&self) -> Result<(), Refusal> {
        if self.logprobs.is_some_and(|top| top > MAX_LOGPROBS as u64) {
            return Err(Refusal::field("logprobs", format!("logprobs must be at most {MAX_LOGPROBS}")));
        }
        if self.echo == Some(true) {
            return Err(Refusal::unsupported("echo", "put the prompt in front of the answer yourself"));
        }
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(Refusal::unsupported(
                "suffix",
                "write the suffix into the prompt as the model expects it",
            ));
        }
        if self.best_of.is_some_and(|best| best != self.n.unwrap_or(1)) {
            return Err(Refusal::unsupported("best_of", "ask for n answers and choose the best one"));
        }
        Ok(())
    }
}

/// Returns the prompts of a request: a text, a list of texts, a list of tokens, or a list of lists of tokens.
fn prompts(given: &Variable) -> Result<Vec<AskedPrompt>, Refusal> {
    let wrong = |reason: &str| Refusal::field("prompt", reason);
    let prompts = match given {
        Variable::Text(text) => vec![AskedPrompt::Text(text.clone())],
        Variable::List(list) if matches!(list.first(), Some(Variable::Int(_))) => vec![tokens(list)?],
        Variable::List(list) => {
            let one = |prompt: &Variable| match prompt {
                Variable::Text(text) => Ok(AskedPrompt::Text(text.clone())),
                Variable::List(list) => tokens(list),
                _ => Err(wrong("each prompt must be a string or a list of tokens")),
            };
            list.iter().map(one).collect::<Result<Vec<_>, _>>()?
        }
        _ => return Err(wrong("prompt must be a string, a list of strings, or a list of tokens")),
    };
    match prompts.len() {
        0 => Err(wrong("prompt is an empty list; give it at least one prompt")),
        many if many > MAX_PROMPTS => {
            Err(wrong(&format!("{many} prompts are more than the limit of {MAX_PROMPTS}")))
        }
        _ => Ok(prompts),
    }
}

fn tokens(list: &[Variable]) -> Result<AskedPrompt, Refusal> {
    let token = |value: &Variable| match value {
        Variable::Int(token) => u32::try_from(*token).ok(),
        _ => None,
    };
    let tokens: Option<Vec<u32>> = list.iter().map(token).collect();
    tokens
        .map(AskedPrompt::Tokens)
        .ok_or_else(|| Refusal::field("prompt", "each token must be a whole number, 0 or more"))
}

/// The fields that all objects of an answer repeat.
struct Form {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    samples: usize,
}

impl Form {
    fn whole(&self, prompts: &[(Vec<WholeSample>, KvReport)]) -> Value {
        let samples = || prompts.iter().flat_map(|(samples, _)| samples);
        let choices = samples().enumerate().map(|(index, sample)| {
            self.choice(index, &sample.text, &sample.tokens, sample.reason.as_ref(), 0)
        });
        let choices: Vec<Choice<'_>> = choices.collect();
        let tokens = samples().map(|sample| sample.num_tokens).sum();
        let mut all = json!({
            "id": self.id,
            "object": OBJECT,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        all["usage"] = json!(Usage::of(prompts.iter().map(|(_, report)| report), tokens));
        all["kv"] = match prompts {
            [(_, report)] => json!(report),
            all => all.iter().map(|(_, report)| json!(report)).collect(),
        };
        all
    }

    fn choice<'a>(
        &self,
        index: usize,
        text: &'a str,
        tokens: &[ReplyToken],
        reason: Option<&EndReason>,
        offset: usize,
    ) -> Choice<'a> {
        let logprobs = self.logprobs.then(|| logprobs(tokens, offset));
        Choice { index, text, logprobs, finish_reason: reason.map(finish_reason) }
    }
}

/// The name of the objects of answers and of the chunks of streams.
const OBJECT: &str = "text_completion";

/// An answer, or its next piece.
#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
}

/// The chunks of streamed answers.
struct CompletionChunks {
    form: Form,
    usage: bool,
    /// The length of the text of each answer's tokens, in characters.
    offsets: Vec<usize>,
    tokens: usize,
    reports: Vec<Option<KvReport>>,
}

impl CompletionChunks {
    /// Returns an event. If the last chunk has the numbers of tokens, the others say that they have none.
    fn data(&self, choices: &[Choice<'_>], kv: Option<&KvReport>) -> Event {
        self.with_usage(choices, kv, self.usage.then_some(Value::Null))
    }

    fn with_usage(&self, choices: &[Choice<'_>], kv: Option<&KvReport>, usage: Option<Value>) -> Event {
        let Form { id, created, model, .. } = &self.form;
        data(&Chunk { id, object: OBJECT, created: *created, model, choices, kv, usage })
    }
}

impl Chunks for CompletionChunks {
    fn begin(&mut self) -> Vec<Event> {
        Vec::new()
    }

    fn event(&mut self, prompt: usize, event: ReplyEvent) -> Vec<Event> {
        match event {
            ReplyEvent::Piece(piece) => {
                let index = prompt * self.form.samples + piece.sample;
                let choice = self.form.choice(index, &piece.text, &piece.tokens, None, self.offsets[index]);
                self.offsets[index] += characters(&piece.tokens);
                vec![self.data(&[choice], None)]
            }
            // Texts are asked for without tools.
            ReplyEvent::Call(..) => Vec::new(),
            ReplyEvent::End(end) => {
                self.tokens += end.tokens;
                let index = prompt * self.form.samples + end.sample;
                let choice = Choice {
                    index,
                    text: "",
                    logprobs: None,
                    finish_reason: Some(finish_reason(&end.reason)),
                };
                let event = self.data(&[choice], Some(&end.report));
                self.reports[prompt] = Some(end.report);
                vec![event]
            }
        }
    }

    fn end(&mut self) -> Vec<Event> {
        if !self.usage {
            return vec![done()];
        }
        let usage = Usage::of(self.reports.iter().flatten(), self.tokens);
        vec![self.with_usage(&[], None, Some(json!(usage))), done()]
    }

    fn refused(&mut self, refusal: &Refusal) -> Vec<Event> {
        refused_stream(refusal)
    }
}

fn characters(tokens: &[ReplyToken]) -> usize {
    tokens.iter().map(|token| token_texts::characters(&token.chosen.bytes)).sum()
}

/// Returns the log-probabilities of tokens whose text begins `offset` characters after the beginning of the answer.
fn logprobs(tokens: &[ReplyToken], mut offset: usize) -> Value {
    let mut offsets = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(offset);
        offset += token_texts::characters(&token.chosen.bytes);
    }
    let top = |token: &ReplyToken| -> Value {
        token
            .top
            .iter()
            .map(|token| (token.text.clone(), json!(token.logprob)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    json!({
        "tokens": tokens.iter().map(|token| &token.chosen.text).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.chosen.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
