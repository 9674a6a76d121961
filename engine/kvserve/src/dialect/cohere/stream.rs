//! The events of a streamed answer.

use axum::response::sse::Event;
use serde_json::{Value, json};

use super::{finish_reason, message, usage};
use crate::dialect::stream::{Chunks, named};
use crate::refusal::Refusal;
use crate::reply::{ReplyEvent, SampleEnd};

/// The events of a streamed answer, which has one block of text.
pub(super) struct CohereChunks {
    id: String,
    end: Option<SampleEnd>,
}

impl CohereChunks {
    pub(super) fn new(id: String) -> Self {
        Self { id, end: None }
    }
}

impl Chunks for CohereChunks {
    fn begin(&mut self) -> Vec<Event> {
        let start = json!({"message": {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}});
        let content = json!({"message": {"content": {"type": "text", "text": ""}}});
        vec![
            named(&json!({"type": "message-start", "id": self.id, "delta": start})),
            named(&json!({"type": "content-start", "index": 0, "delta": content})),
        ]
    }

    fn event(&mut self, _prompt: usize, event: ReplyEvent) -> Vec<Event> {
        match event {
            ReplyEvent::Piece(piece) if piece.text.is_empty() => Vec::new(),
            ReplyEvent::Piece(piece) => {
                let delta = json!({"message": {"content": {"text": piece.text}}});
                vec![named(&json!({"type": "content-delta", "index": 0, "delta": delta}))]
            }
            ReplyEvent::Call(..) => Vec::new(),
            ReplyEvent::End(end) => {
                self.end = Some(end);
                Vec::new()
            }
        }
    }

    fn end(&mut self) -> Vec<Event> {
        let (reason, usage, kv) = match &self.end {
            Some(end) => (finish_reason(&end.reason), usage(&end.report, end.tokens), json!(end.report)),
            None => ("ERROR", Value::Null, Value::Null),
        };
        let delta = json!({"finish_reason": reason, "usage": usage});
        vec![
            named(&json!({"type": "content-end", "index": 0})),
            named(&json!({"type": "message-end", "id": self.id, "delta": delta, "kv": kv})),
        ]
    }

    fn refused(&mut self, refusal: &Refusal) -> Vec<Event> {
        let delta = json!({"finish_reason": "ERROR", "error": message(refusal)});
        vec![named(&json!({"type": "message-end", "id": self.id, "delta": delta}))]
    }
}
