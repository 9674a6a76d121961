//! The events of a streamed answer.

use axum::response::sse::Event;
use kvmodel::ToolCall;
use serde_json::{Value, json};

use super::shape::tool_call;
use super::{finish_reason, message, usage};
use crate::dialect::stream::{Chunks, named};
use crate::refusal::Refusal;
use crate::reply::{ReplyEvent, SampleEnd};

/// The events of a streamed answer.
pub(super) struct CohereChunks {
    id: String,
    /// The number of blocks of text that are complete.
    texts: usize,
    /// True if there is a block of text that is not complete.
    open: bool,
    /// The number of calls.
    calls: usize,
    end: Option<SampleEnd>,
}

impl CohereChunks {
    pub(super) fn new(id: String) -> Self {
        Self { id, texts: 0, open: false, calls: 0, end: None }
    }

    /// Begins a block of text, unless there is one that is not complete.
    fn opened(&mut self) -> Option<Event> {
        let opens = !std::mem::replace(&mut self.open, true);
        let content = json!({"message": {"content": {"type": "text", "text": ""}}});
        opens.then(|| named(&json!({"type": "content-start", "index": self.texts, "delta": content})))
    }

    /// Ends the block of text that is not complete, if there is one.
    fn closed(&mut self) -> Option<Event> {
        let event = named(&json!({"type": "content-end", "index": self.texts}));
        let closes = std::mem::take(&mut self.open);
        self.texts += usize::from(closes);
        closes.then_some(event)
    }

    /// Returns the events of a call.
    fn call(&mut self, call: &ToolCall) -> Vec<Event> {
        let closed = self.closed();
        let mut begun = tool_call(call);
        begun["function"]["arguments"] = json!("");
        let event = |kind: &str, call: Value| {
            named(&json!({"type": kind, "index": self.calls, "delta": {"message": {"tool_calls": call}}}))
        };
        let arguments = json!({"function": {"arguments": call.arguments}});
        let events = [
            event("tool-call-start", begun),
            event("tool-call-delta", arguments),
            named(&json!({"type": "tool-call-end", "index": self.calls})),
        ];
        self.calls += 1;
        closed.into_iter().chain(events).collect()
    }
}

impl Chunks for CohereChunks {
    fn begin(&mut self) -> Vec<Event> {
        let start = json!({"message": {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}});
        vec![named(&json!({"type": "message-start", "id": self.id, "delta": start}))]
    }

    fn event(&mut self, _prompt: usize, event: ReplyEvent) -> Vec<Event> {
        match event {
            ReplyEvent::Piece(piece) if piece.text.is_empty() => Vec::new(),
            ReplyEvent::Piece(piece) => {
                let opened = self.opened();
                let delta = json!({"message": {"content": {"text": piece.text}}});
                let delta = named(&json!({"type": "content-delta", "index": self.texts, "delta": delta}));
                opened.into_iter().chain([delta]).collect()
            }
            ReplyEvent::Call(_, call) => self.call(&call),
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
        let last = named(&json!({"type": "message-end", "id": self.id, "delta": delta, "kv": kv}));
        // An answer of neither text nor calls is an empty text.
        let opened = if self.texts + self.calls == 0 { self.opened() } else { None };
        opened.into_iter().chain(self.closed()).chain([last]).collect()
    }

    fn refused(&mut self, refusal: &Refusal) -> Vec<Event> {
        let delta = json!({"finish_reason": "ERROR", "error": message(refusal)});
        vec![named(&json!({"type": "message-end", "id": self.id, "delta": delta}))]
    }
}
