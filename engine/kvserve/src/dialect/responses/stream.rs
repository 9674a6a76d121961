//! The events of a streamed response.

use axum::response::sse::Event;
use kvmodel::ToolCall;
use serde_json::{Value, json};

use super::Form;
use super::output::{function_call, message, status, text_part};
use crate::dialect::new_id;
use crate::dialect::openai::chat::logprobs;
use crate::dialect::stream::{Chunks, named};
use crate::refusal::Refusal;
use crate::reply::{EndReason, Piece, ReplyEvent, ReplyToken, SampleEnd};

/// The events of a streamed response.
pub(super) struct ResponseChunks {
    form: Form,
    /// The items that are complete.
    items: Vec<Value>,
    /// The message that is not complete.
    open: Option<OpenMessage>,
    end: Option<SampleEnd>,
    /// The number of the next event.
    next: u64,
}

/// A message that is not complete.
#[derive(Default)]
struct OpenMessage {
    id: String,
    text: String,
    tokens: Vec<ReplyToken>,
}

impl ResponseChunks {
    pub(super) fn new(form: Form) -> Self {
        Self { form, items: Vec::new(), open: None, end: None, next: 0 }
    }

    /// Returns an event with the next number.
    fn numbered(&mut self, kind: &str, mut fields: Value) -> Event {
        fields["type"] = json!(kind);
        fields["sequence_number"] = json!(self.next);
        self.next += 1;
        named(&fields)
    }

    /// Returns the fields that say to which text of the output an event belongs.
    fn place(&self, id: &str) -> Value {
        json!({"item_id": id, "output_index": self.items.len(), "content_index": 0})
    }

    /// Begins a message, unless there is one that is not complete.
    fn opened(&mut self) -> Vec<Event> {
        if self.open.is_some() {
            return Vec::new();
        }
        let id = new_id("msg_");
        let item = message(&id, "in_progress", &json!([]));
        let added = json!({"output_index": self.items.len(), "item": item});
        let mut part = self.place(&id);
        part["part"] = text_part("", &[]);
        self.open = Some(OpenMessage { id, ..OpenMessage::default() });
        vec![
            self.numbered("response.output_item.added", added),
            self.numbered("response.content_part.added", part),
        ]
    }

    /// Ends the message that is not complete, if there is one.
    fn closed(&mut self, reason: Option<&EndReason>) -> Vec<Event> {
        let Some(open) = self.open.take() else { return Vec::new() };
        let part = text_part(&open.text, &open.tokens);
        let (mut text, mut whole) = (self.place(&open.id), self.place(&open.id));
        (text["text"], text["logprobs"]) = (part["text"].clone(), part["logprobs"].clone());
        let item = message(&open.id, status(reason), &json!([part]));
        whole["part"] = part;
        let done = json!({"output_index": self.items.len(), "item": item});
        let events = vec![
            self.numbered("response.output_text.done", text),
            self.numbered("response.content_part.done", whole),
            self.numbered("response.output_item.done", done),
        ];
        self.items.push(item);
        events
    }

    fn text(&mut self, piece: Piece) -> Vec<Event> {
        let mut events = self.opened();
        let Some(open) = &mut self.open else { return events };
        open.text += &piece.text;
        let id = open.id.clone();
        let mut fields = self.place(&id);
        fields["delta"] = json!(piece.text);
        fields["logprobs"] = json!(logprobs(&piece.tokens));
        if let Some(open) = &mut self.open {
            open.tokens.extend(piece.tokens);
        }
        events.push(self.numbered("response.output_text.delta", fields));
        events
    }

    fn call(&mut self, call: &ToolCall) -> Vec<Event> {
        let mut events = self.closed(None);
        let item = function_call(call);
        let mut begun = item.clone();
        (begun["arguments"], begun["status"]) = (json!(""), json!("in_progress"));
        let output_index = self.items.len();
        let place = json!({"item_id": item["id"], "output_index": output_index});
        let (mut delta, mut whole) = (place.clone(), place);
        delta["delta"] = json!(call.arguments);
        (whole["arguments"], whole["name"]) = (json!(call.arguments), json!(call.name));
        events.extend([
            self.numbered("response.output_item.added", json!({"output_index": output_index, "item": begun})),
            self.numbered("response.function_call_arguments.delta", delta),
            self.numbered("response.function_call_arguments.done", whole),
            self.numbered("response.output_item.done", json!({"output_index": output_index, "item": item})),
        ]);
        self.items.push(item);
        events
    }
}

impl Chunks for ResponseChunks {
    fn begin(&mut self) -> Vec<Event> {
        let response = self.form.response("in_progress", &json!([]));
        vec![
            self.numbered("response.created", json!({"response": response})),
            self.numbered("response.in_progress", json!({"response": response})),
        ]
    }

    fn event(&mut self, _prompt: usize, event: ReplyEvent) -> Vec<Event> {
        match event {
            // Only log-probabilities of calls are left, which have no place.
            ReplyEvent::Piece(piece) if piece.text.is_empty() && self.open.is_none() => Vec::new(),
            ReplyEvent::Piece(piece) => self.text(piece),
            ReplyEvent::Call(_, call) => self.call(&call),
            ReplyEvent::End(end) => {
                self.end = Some(end);
                Vec::new()
            }
        }
    }

    fn end(&mut self) -> Vec<Event> {
        let Some(end) = self.end.take() else { return self.refused(&Refusal::engine_gone()) };
        // An answer of neither text nor calls is an empty message.
        let mut events = if self.items.is_empty() { self.opened() } else { Vec::new() };
        events.extend(self.closed(Some(&end.reason)));
        let items = std::mem::take(&mut self.items);
        let response = self.form.finished(items, Some(&end.reason), end.tokens, &end.report);
        let last = format!("response.{}", response["status"].as_str().unwrap_or("completed"));
        events.push(self.numbered(&last, json!({"response": response})));
        events
    }

    fn refused(&mut self, refusal: &Refusal) -> Vec<Event> {
        let code = refusal.code.unwrap_or("server_error");
        let items = Value::Array(std::mem::take(&mut self.items));
        let mut response = self.form.response("failed", &items);
        response["error"] = json!({"code": code, "message": refusal.message});
        vec![self.numbered("response.failed", json!({"response": response}))]
    }
}
