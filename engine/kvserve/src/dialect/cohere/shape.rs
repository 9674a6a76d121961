//! `tools`, `tool_choice` and `response_format`.

use kvengine::AnswerForm;
use kvmodel::{ToolCall, Variable};
use serde_json::{Value, json};

use crate::dialect::new_id;
use crate::dialect::shape::{ToolForm, kind, schema, shape, unknown_kind};
use crate::refusal::Refusal;
use crate::reply::WholeSample;
use crate::shape::{AnswerShape, ToolChoice};

/// A tool of a request.
const TOOL: ToolForm =
    ToolForm { within: Some("function"), schema: "parameters", kind: "function", kind_is_optional: true };

/// Returns what an answer consists of.
///
/// # Errors
/// Refuses malformed tools, and choices and formats that are not known.
pub(super) fn answer_shape(
    tools: Option<&Variable>,
    choice: Option<&Variable>,
    format: Option<&Variable>,
) -> Result<AnswerShape, Refusal> {
    let choice = match choice {
        None | Some(Variable::None) => ToolChoice::Auto,
        Some(choice) if *choice == "NONE".into() => ToolChoice::None,
        Some(choice) if *choice == "REQUIRED".into() => ToolChoice::Required,
        Some(_) => return Err(Refusal::field("tool_choice", "tool_choice must be \"REQUIRED\" or \"NONE\"")),
    };
    shape(TOOL.read(tools)?, choice, true, response_format(format)?)
}

/// Returns the form that `response_format` asks for. Clients of both versions of the API name the schema differently.
fn response_format(given: Option<&Variable>) -> Result<Option<(&'static str, AnswerForm)>, Refusal> {
    const FIELD: &str = "response_format";
    let given = match given {
        None | Some(Variable::None) => return Ok(None),
        Some(given) => given,
    };
    let named = |name| given.field(name).filter(|schema| **schema != Variable::None);
    match kind(FIELD, given)? {
        "text" => Ok(None),
        "json_object" => match (named("json_schema"), named("schema")) {
            (None, None) => Ok(Some((FIELD, AnswerForm::JsonObject))),
            (Some(own), _) => schema(FIELD, "response_format.json_schema", Some(own)),
            (None, Some(own)) => schema(FIELD, "response_format.schema", Some(own)),
        },
        other => Err(unknown_kind(FIELD, other, "text or json_object")),
    }
}

/// Returns a call with an ID of its own.
pub(super) fn tool_call(call: &ToolCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": new_id("call_"), "type": "function", "function": function})
}

/// Returns the message of a whole answer. An answer of neither text nor calls is an empty text.
pub(super) fn message(sample: &WholeSample) -> Value {
    let mut message = json!({"role": "assistant"});
    if !sample.text.is_empty() || sample.calls.is_empty() {
        message["content"] = json!([{"type": "text", "text": sample.text}]);
    }
    if !sample.calls.is_empty() {
        message["tool_calls"] = sample.calls.iter().map(tool_call).collect();
    }
    message
}
