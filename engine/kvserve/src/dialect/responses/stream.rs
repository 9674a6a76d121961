//! The events of a streamed response.

use axum::response::sse::Event;
use serde_json::{Value, json};

use super::{Form, text_part};
use crate::dialect::openai::chat::logprobs;
use crate::dialect::stream::{Chunks, named};
use crate::refusal::Refusal;
use crate::reply::{ReplyEvent, WholeSample};
use crate::report::KvReport;

/// The events of a streamed response, which has one message.
pub(super) struct ResponseChunks {
    form: Form,
    sample: WholeSample,
    report: Option<KvReport>,
    /// The number of the next event.
    next: u64,
}

impl ResponseChunks {
    pub(super) fn new(form: Form) -> Self {
        Self { form, sample: WholeSample::default(), report: None, next: 0 }
    }

    /// Returns an event with the next number.
    fn numbered(&mut self, kind: &str, mut fields: Value) -> Event {
        fields["type"] = json!(kind);
        fields["sequence_number"] = json!(self.next);
        self.next += 1;
        named(&fields)
    }

    /// Returns the fields that say to which part of the output an event belongs.
    fn place(&self) -> Value {
        json!({"item_id": self.form.message, "output_index": 0, "content_index": 0})
    }
}

impl Chunks for ResponseChunks {
    fn begin(&mut self) -> Vec<Event> {
        let response = self.form.response("in_progress", &json!([]));
        let item = self.form.item("in_progress", &json!([]));
        let mut part = self.place();
        part["part"] = text_part("", &[]);
        vec![
            self.numbered("response.created", json!({"response": response})),
            self.numbered("response.in_progress", json!({"response": response})),
            self.numbered("response.output_item.added", json!({"output_index": 0, "item": item})),
            self.numbered("response.content_part.added", part),
        ]
    }

    fn event(&mut self, _prompt: usize, event: ReplyEvent) -> Vec<Event> {
        match event {
            ReplyEvent::Piece(piece) => {
                let mut fields = self.place();
                fields["delta"] = json!(piece.text);
                fields["logprobs"] = json!(logprobs(&piece.tokens));
                self.sample.text += &piece.text;
                self.sample.tokens.extend(piece.tokens);
                vec![self.numbered("response.output_text.delta", fields)]
            }
            ReplyEvent::Call(..) => Vec::new(),
            ReplyEvent::End(end) => {
                (self.sample.num_tokens, self.sample.reason) = (end.tokens, Some(end.reason));
                self.report = Some(end.report);
                Vec::new()
            }
        }
    }

    fn end(&mut self) -> Vec<Event> {
        let Some(report) = self.report.take() else { return self.refused(&Refusal::engine_gone()) };
        let response = self.form.finished(&self.sample, &report);
        let part = text_part(&self.sample.text, &self.sample.tokens);
        let (mut text, mut whole) = (self.place(), self.place());
        (text["text"], text["logprobs"]) = (part["text"].clone(), part["logprobs"].clone());
        whole["part"] = part;
        let item = json!({"output_index": 0, "item": response["output"][0]});
        let last = format!("response.{}", response["status"].as_str().unwrap_or("completed"));
        vec![
            self.numbered("response.output_text.done", text),
            self.numbered("response.content_part.done", whole),
            self.numbered("response.output_item.done", item),
            self.numbered(&last, json!({"response": response})),
        ]
    }

    fn refused(&mut self, refusal: &Refusal) -> Vec<Event> {
        let code = refusal.code.unwrap_or("server_error");
        let mut response = self.form.response("failed", &json!([]));
        response["error"] = json!({"code": code, "message": refusal.message});
        vec![self.numbered("response.failed", json!({"response": response}))]
    }
}
