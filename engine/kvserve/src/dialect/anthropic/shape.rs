//! `tools`, `tool_choice`, and the format of an answer.

use kvmodel::{ToolCall, Variable};
use serde_json::{Value, json};

use crate::dialect::new_id;
use crate::dialect::shape::{ToolForm, kind, schema, shape, tool_name, unknown_kind};
use crate::refusal::Refusal;
use crate::reply::WholeSample;
use crate::shape::{AnswerShape, ToolChoice};

/// A tool of a request.
const TOOL: ToolForm =
    ToolForm { within: None, schema: "input_schema", kind: "custom", kind_is_optional: true };

/// Returns what an answer consists of. `formats` are the fields with a format of the answer; the first one counts.
///
/// # Errors
/// Refuses malformed tools, choices that are not known, and formats without a schema.
pub(super) fn answer_shape(
    tools: Option<&Variable>,
    choice: Option<&Variable>,
    formats: [(&'static str, Option<&Variable>); 2],
) -> Result<AnswerShape, Refusal> {
    let given = |(field, given): (&'static str, Option<&'_ Variable>)| match given {
        None | Some(Variable::None) => None,
        Some(format) => Some(match kind(field, format) {
            Ok("json_schema") => schema(field, &format!("{field}.schema"), format.field("schema")),
            Ok(other) => Err(unknown_kind(field, other, "json_schema")),
            Err(refusal) => Err(refusal),
        }),
    };
    let form = formats.into_iter().find_map(given).transpose()?.flatten();
    let (choice, several) = tool_choice(choice)?;
    shape(TOOL.read(tools)?, choice, several, form)
}

/// Returns the choice among tools, and whether an answer may call several.
fn tool_choice(given: Option<&Variable>) -> Result<(ToolChoice, bool), Refusal> {
    const FIELD: &str = "tool_choice";
    let given = match given {
        None | Some(Variable::None) => return Ok((ToolChoice::Auto, true)),
        Some(given) => given,
    };
    let choice = match kind(FIELD, given)? {
        "none" => ToolChoice::None,
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "tool" => tool_name("tool_choice.name", given.field("name"))?,
        other => return Err(unknown_kind(FIELD, other, "auto, any, tool or none")),
    };
    let several = match given.field("disable_parallel_tool_use") {
        None | Some(Variable::None) => true,
        Some(Variable::Bool(single)) => !single,
        Some(_) => {
            let place = "tool_choice.disable_parallel_tool_use";
            return Err(Refusal::field(place, format!("{place} must be true or false")));
        }
    };
    Ok((choice, several))
}

/// Returns the block for a call, with an ID of its own.
pub(super) fn tool_use(call: &ToolCall) -> Value {
    let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    json!({"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": input})
}

/// Returns the blocks of a whole answer. An answer of neither text nor calls is an empty text.
pub(super) fn blocks(sample: &WholeSample) -> Vec<Value> {
    let says = !sample.text.is_empty() || sample.calls.is_empty();
    let said = says.then(|| json!({"type": "text", "text": sample.text}));
    said.into_iter().chain(sample.calls.iter().map(tool_use)).collect()
}
