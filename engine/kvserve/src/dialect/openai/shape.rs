//! `response_format`, `tools` and `tool_choice`.

use kvengine::AnswerForm;
use kvmodel::Variable;

use crate::dialect::shape::{ToolForm, kind, schema, tool_name, unknown_kind};
use crate::refusal::Refusal;
use crate::shape::ToolChoice;

/// A tool of a chat.
pub(crate) const TOOL: ToolForm =
    ToolForm { within: Some("function"), schema: "parameters", kind: "function", kind_is_optional: false };

/// Returns the form that `field` asks for. Its schema stands in `within`, or beside the type.
///
/// # Errors
/// Refuses types that are not known, and a schema that is none.
pub(crate) fn text_form(
    field: &'static str,
    within: Option<&str>,
    given: Option<&Variable>,
) -> Result<Option<(&'static str, AnswerForm)>, Refusal> {
    let given = match given {
        None | Some(Variable::None) => return Ok(None),
        Some(given) => given,
    };
    match kind(field, given)? {
        "text" => Ok(None),
        "json_object" => Ok(Some((field, AnswerForm::JsonObject))),
        "json_schema" => match within {
            Some(within) => {
                let schema_of = |described: &Variable| described.field("schema").cloned();
                let given = given.field(within).and_then(schema_of);
                schema(field, &format!("{field}.{within}.schema"), given.as_ref())
            }
            None => schema(field, &format!("{field}.schema"), given.field("schema")),
        },
        other => Err(unknown_kind(field, other, "text, json_object or json_schema")),
    }
}

/// Returns the form that `response_format` asks for.
///
/// # Errors
/// Refuses types that are not known, and a schema that is none.
pub(crate) fn response_format(
    given: Option<&Variable>,
) -> Result<Option<(&'static str, AnswerForm)>, Refusal> {
    text_form("response_format", Some("json_schema"), given)
}

/// Returns the choice among tools. The name of a tool stands in `within`, or beside the type.
///
/// # Errors
/// Refuses choices that are not known.
pub(crate) fn tool_choice(given: Option<&Variable>, within: Option<&str>) -> Result<ToolChoice, Refusal> {
    const FIELD: &str = "tool_choice";
    match given {
        None | Some(Variable::None) => Ok(ToolChoice::Auto),
        Some(Variable::Text(choice)) => match choice.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            other => {
                let reason = format!(
                    "tool_choice is {other:?}; use none, auto, required or an object with a function"
                );
                Err(Refusal::field(FIELD, reason))
            }
        },
        Some(choice) => match kind(FIELD, choice)? {
            "function" => match within {
                Some(within) => {
                    let function = choice.field(within);
                    tool_name("tool_choice.function.name", function.and_then(|one| one.field("name")))
                }
                None => tool_name("tool_choice.name", choice.field("name")),
            },
            "allowed_tools" => {
                allowed(if within.is_some() { choice.field("allowed_tools") } else { Some(choice) }, within)
            }
            other => Err(unknown_kind(FIELD, other, "none, auto, required, a function or allowed_tools")),
        },
    }
}

/// Returns the choice among some of the tools. The name of each stands in `within`, or beside the type.
fn allowed(given: Option<&Variable>, within: Option<&str>) -> Result<ToolChoice, Refusal> {
    let wrong = |field: &str, reason: &str| {
        let place = format!("tool_choice.{field}");
        Err(Refusal::field(place.clone(), format!("{place} {reason}")))
    };
    let required = match given.and_then(|given| given.field("mode")) {
        Some(Variable::Text(mode)) if mode == "auto" => false,
        Some(Variable::Text(mode)) if mode == "required" => true,
        _ => return wrong("mode", "must be auto or required"),
    };
    let Some(Variable::List(tools)) = given.and_then(|given| given.field("tools")) else {
        return wrong("tools", "must be a list of functions");
    };
    let name = |tool: &Variable| {
        let named = match within {
            Some(within) => tool.field(within)?.field("name")?,
            None => tool.field("name")?,
        };
        match named {
            Variable::Text(name) => Some(name.clone()),
            _ => None,
        }
    };
    match tools.iter().map(name).collect::<Option<Vec<String>>>() {
        Some(names) if !names.is_empty() => Ok(ToolChoice::Allowed { names, required }),
        _ => wrong("tools", "must be a list of functions with names"),
    }
}
