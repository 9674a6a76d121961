//! The events of a streamed message.

use axum::response::sse::Event;
use serde_json::{Value, json};

use super::messages::stop_reason;
use super::{error, usage};
use crate::dialect::stream::{Chunks, named};
use crate::refusal::Refusal;
use crate::reply::{ReplyEvent, SampleEnd};

/// The events of a streamed message, which has one block of text.
pub(super) struct MessageChunks {
    id: String,
    model: String,
    prompt_tokens: usize,
    end: Option<SampleEnd>,
}

impl MessageChunks {
    pub(super) fn new(id: String, model: String, prompt_tokens: usize) -> Self {
        Self { id, model, prompt_tokens, end: None }
    }
}

impl Chunks for MessageChunks {
    fn begin(&mut self) -> Vec<Event> {
        let message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            // What was found is known at the end.
            "usage": {"input_tokens": self.prompt_tokens, "output_tokens": 0},
        });
        vec![
            named(&json!({"type": "message_start", "message": message})),
            named(
                &json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
            ),
            named(&json!({"type": "ping"})),
        ]
    }

    fn event(&mut self, _prompt: usize, event: ReplyEvent) -> Vec<Event> {
        match event {
            ReplyEvent::Piece(piece) if piece.text.is_empty() => Vec::new(),
            ReplyEvent::Piece(piece) => {
                let delta = json!({"type": "text_delta", "text": piece.text});
                vec![named(&json!({"type": "content_block_delta", "index": 0, "delta": delta}))]
            }
            ReplyEvent::Call(..) => Vec::new(),
            ReplyEvent::End(end) => {
                self.end = Some(end);
                Vec::new()
            }
        }
    }

    fn end(&mut self) -> Vec<Event> {
        let (reason, string) = stop_reason(self.end.as_ref().map(|end| &end.reason));
        let usage = self.end.as_ref().map(|end| usage(&end.report, end.tokens));
        let kv: Value = self.end.as_ref().map_or(Value::Null, |end| json!(end.report));
        let delta = json!({"stop_reason": reason, "stop_sequence": string});
        vec![
            named(&json!({"type": "content_block_stop", "index": 0})),
            named(&json!({"type": "message_delta", "delta": delta, "usage": usage, "kv": kv})),
            named(&json!({"type": "message_stop"})),
        ]
    }

    fn refused(&mut self, refusal: &Refusal) -> Vec<Event> {
        vec![named(&error(refusal))]
    }
}
