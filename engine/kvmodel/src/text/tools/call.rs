//! A call of a tool, and its JSON.

use serde_json::{Map, Value};

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The name of the tool.
    pub name: String,
    /// The arguments: a JSON object, as text.
    pub arguments: String,
}

impl ToolCall {
    /// Reads the calls in a JSON value: an object, or a list of objects. Returns `None` if it is anything else.
    pub(super) fn list(value: &Value) -> Option<Vec<Self>> {
        match value {
            Value::Object(fields) => Some(vec![Self::of(fields)?]),
            Value::Array(items) if !items.is_empty() => {
                items.iter().map(|item| Self::of(item.as_object()?)).collect()
            }
            _ => None,
        }
    }

    /// Reads an object with `name` and `arguments` or `parameters`, as clients of `OpenAI`'s interface write it, also
    /// within `function`.
    fn of(fields: &Map<String, Value>) -> Option<Self> {
        let fields = fields.get("function").and_then(Value::as_object).unwrap_or(fields);
        let name = fields.get("name")?.as_str()?;
        let arguments = match fields.get("arguments").or_else(|| fields.get("parameters")) {
            Some(Value::Object(arguments)) => serde_json::to_string(arguments).ok()?,
            // Some models write the arguments as text.
            Some(Value::String(text)) => Self::checked(text)?,
            // An object with a name alone is more likely an answer than a call.
            _ => return None,
        };
        Self::new(name, arguments)
    }

    /// Creates a call from a name and the text of a JSON object. Returns `None` if one of them is something else.
    pub(super) fn from_text(name: &str, arguments: &str) -> Option<Self> {
        Self::new(name.trim(), Self::checked(arguments)?)
    }

    fn new(name: &str, arguments: String) -> Option<Self> {
        (!name.is_empty()).then(|| Self { name: name.to_owned(), arguments })
    }

    /// Returns the text of a JSON object without the space around it.
    fn checked(text: &str) -> Option<String> {
        let object: Map<String, Value> = serde_json::from_str(text).ok()?;
        serde_json::to_string(&object).ok()
    }
}
