//! Grammars of answers that consist of calls alone.

use serde_json::{Map, Value};

use super::format::{TAG, ToolCallFormat};
use crate::error::{Error, Result};

/// The maximum number of calls in an answer. Without a limit, some models never stop calling.
const MOST_CALLS: usize = 16;

/// JSON as Python's `json.dumps` and chat templates write it.
const LAYOUT: &str = r#"{"whitespace_flexible":false,"item_separator":", ","key_separator":": "}"#;

/// A grammar of answers that consist of calls of tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForcedCalls {
    /// The grammar, in the syntax of `llguidance` (Lark with JSON schemas).
    pub grammar: String,
    /// The form in which the calls are written, for a [`ToolCallParser`](super::ToolCallParser).
    pub format: ToolCallFormat,
}

impl ForcedCalls {
    /// Returns the grammar of answers that call tools: each of `tools`, or the one with the name `only`; one of them,
    /// or `several`.
    ///
    /// A tool is an object with `name` and `parameters` (a JSON schema), also within `function`, as in `OpenAI`'s
    /// interface. Where a form of calls begins with a special token, the answer is JSON instead.
    ///
    /// # Errors
    /// Returns [`Error::Tools`] if a tool is malformed, or none has the name.
    pub fn new(format: ToolCallFormat, tools: &[Value], only: Option<&str>, several: bool) -> Result<Self> {
        let arguments = if format == ToolCallFormat::Json { "parameters" } else { "arguments" };
        let (mut calls, mut schemas) = (Vec::new(), Map::new());
        for (number, tool) in (1..).zip(tools) {
            let function = tool.get("function").unwrap_or(tool);
            let Some(name) = function.get("name").and_then(Value::as_str) else {
                return Err(Error::Tools(format!("tool {number} has no name")));
            };
            if only.is_some_and(|only| only != name) {
                continue;
            }
            let mut schema = match function.get("parameters") {
                Some(schema @ Value::Object(_)) => schema.clone(),
                None | Some(Value::Null) => serde_json::json!({"type": "object", "properties": {}}),
                Some(_) => {
                    return Err(Error::Tools(format!(
                        "the parameters of the tool {name} are no JSON schema; a schema is an object"
                    )));
                }
            };
            let place = format!("tool{number}");
            point_into(&mut schema, &format!("#/$defs/{place}"), MOST_DEPTH)?;
            schemas.insert(place.clone(), schema);
            // The order of the fields is the order in which the model writes them.
            calls.push(format!(
                r##"{{"type":"object","properties":{{"name":{{"const":{}}},"{arguments}":{{"$ref":"#/$defs/{place}"}}}},"required":["name","{arguments}"],"additionalProperties":false}}"##,
                Value::from(name)
            ));
        }
        if calls.is_empty() {
            return Err(Error::Tools(match only {
                Some(name) => format!("there is no tool named {name:?}"),
                None => "there are no tools to call".to_owned(),
            }));
        }
        let (calls, schemas) = (calls.join(","), Value::Object(schemas));
        let json = |schema: String| format!(r#"{{"x-guidance":{LAYOUT},"$defs":{schemas},{schema}}}"#);
        let one = format!(r#""anyOf":[{calls}]"#);
        let [open, close] = TAG;
        if format == ToolCallFormat::Tagged {
            let call = format!(r#""{open}\n" call "\n{close}""#);
            let more = format!(r#" ("\n" {call}){{0,{}}}"#, MOST_CALLS - 1);
            let more = if several { more.as_str() } else { "" };
            return Ok(Self { grammar: format!("start: {call}{more}\ncall: %json {}\n", json(one)), format });
        }
        let list = format!(r#""type":"array","items":{{{one}}},"minItems":1,"maxItems":{MOST_CALLS}"#);
        let grammar = format!("start: %json {}\n", json(if several { list } else { one }));
        Ok(Self { grammar, format: ToolCallFormat::Json })
    }
}

/// The maximum depth of a tool's schema.
const MOST_DEPTH: usize = 100;

/// Changes references within a schema to the schema's new place.
fn point_into(schema: &mut Value, place: &str, depth: usize) -> Result<()> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(Error::Tools(format!("a schema is nested more than {MOST_DEPTH} levels deep")));
    };
    match schema {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field {
                    Value::String(target)
                        if name == "$ref" && (target == "#" || target.starts_with("#/")) =>
                    {
                        *target = format!("{place}{}", &target[1..]);
                    }
                    field => point_into(field, place, depth)?,
                }
            }
        }
        Value::Array(items) => items.iter_mut().try_for_each(|item| point_into(item, place, depth))?,
        _ => {}
    }
    Ok(())
}
