//! The items of an answer: messages, and calls of functions.

use kvmodel::ToolCall;
use serde_json::{Value, json};

use crate::dialect::new_id;
use crate::dialect::openai::chat::logprobs;
use crate::reply::{EndReason, ReplyToken, WholeSample};

/// Returns a message with a status and its content.
pub(super) fn message(id: &str, status: &str, content: &Value) -> Value {
    json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": content})
}

/// Returns the content of a message.
pub(super) fn text_part(text: &str, tokens: &[ReplyToken]) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs(tokens)})
}

/// Returns a call of a function, with IDs of its own.
pub(super) fn function_call(call: &ToolCall) -> Value {
    json!({
        "type": "function_call",
        "id": new_id("fc_"),
        "call_id": new_id("call_"),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    })
}

/// Returns the word for what has ended.
pub(super) fn status(reason: Option<&EndReason>) -> &'static str {
    if reason == Some(&EndReason::Length) { "incomplete" } else { "completed" }
}

/// Returns the items of a whole answer. An answer of neither text nor calls is an empty message.
pub(super) fn items(sample: &WholeSample) -> Vec<Value> {
    let says = !sample.text.is_empty() || sample.calls.is_empty();
    let content = json!([text_part(&sample.text, &sample.tokens)]);
    let said = says.then(|| message(&new_id("msg_"), status(sample.reason.as_ref()), &content));
    said.into_iter().chain(sample.calls.iter().map(function_call)).collect()
}
