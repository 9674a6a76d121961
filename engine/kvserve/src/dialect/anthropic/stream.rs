//! The events of a streamed message.

use axum::response::sse::Event;
use serde_json::{Value, json};

use super::messages::stop_reason;
use super::shape::tool_use;
use super::{error, usage};
use crate::dialect::stream::{Chunks, named};
use crate::refusal::Refusal;
use crate::reply::{ReplyEvent, SampleEnd};

/// The events of a streamed message.
pub(super) struct MessageChunks {
    id: String,
    model: String,
    prompt_tokens: usize,
    /// The number of blocks that are complete.
    blocks: usize,
    /// True if there is a block of text that is not complete.
    open: bool,
    end: Option<SampleEnd>,
}

impl MessageChunks {
    pub(super) fn new(id: String, model: String, prompt_tokens: usize) -> Self {
        Self { id, model, prompt_tokens, blocks: 0, open: false, end: None }
    }

    /// Begins a block of text, unless there is one that is not complete.
    fn opened(&mut self) -> Option<Event> {
        let opens = !std::mem::replace(&mut self.open, true);
        opens.then(|| self.begun(&json!({"type": "text", "text": ""})))
    }

    /// Ends the block of text that is not complete, if there is one.
    fn closed(&mut self) -> Option<Event> {
        std::mem::take(&mut self.open).then(|| self.ended())
    }

    fn begun(&self, block: &Value) -> Event {
        named(&json!({"type": "content_block_start", "index": self.blocks, "content_block": block}))
    }

    fn delta(&self, delta: &Value) -> Event {
        named(&json!({"type": "content_block_delta", "index": self.blocks, "delta": delta}))
    }

    fn ended(&mut self) -> Event {
        let event = named(&json!({"type": "content_block_stop", "index": self.blocks}));
        self.blocks += 1;
        event
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
        vec![named(&json!({"type": "message_start", "message": message})), named(&json!({"type": "ping"}))]
    }

    fn event(&mut self, _prompt: usize, event: ReplyEvent) -> Vec<Event> {
        match event {
            ReplyEvent::Piece(piece) if piece.text.is_empty() => Vec::new(),
            ReplyEvent::Piece(piece) => {
                let opened = self.opened();
                let delta = self.delta(&json!({"type": "text_delta", "text": piece.text}));
                opened.into_iter().chain([delta]).collect()
            }
            ReplyEvent::Call(_, call) => {
                let closed = self.closed();
                let mut block = tool_use(&call);
                block["input"] = json!({});
                let begun = self.begun(&block);
                let delta = self.delta(&json!({"type": "input_json_delta", "partial_json": call.arguments}));
                closed.into_iter().chain([begun, delta, self.ended()]).collect()
            }
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
        // An answer of neither text nor calls is an empty text.
        let opened = if self.blocks == 0 { self.opened() } else { None };
        let last = [
            named(&json!({"type": "message_delta", "delta": delta, "usage": usage, "kv": kv})),
            named(&json!({"type": "message_stop"})),
        ];
        opened.into_iter().chain(self.closed()).chain(last).collect()
    }

    fn refused(&mut self, refusal: &Refusal) -> Vec<Event> {
        vec![named(&error(refusal))]
    }
}
