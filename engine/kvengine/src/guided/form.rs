//! The forms of answers: JSON, JSON that matches a schema, a regular expression, a grammar.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// The maximum number of bytes of a schema, an expression or a grammar.
const MAX_BYTES: usize = 1 << 20;

/// The maximum depth of nested objects and lists in a schema. The library limits the depth of expressions and grammars
/// itself.
const MAX_DEPTH: usize = 100;

/// White space in JSON. It is limited, because some models write it without end.
const WHITE_SPACE: &str = r"[ \n\r\t]{1,40}";

/// The form that an answer must have.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerForm {
    /// A JSON object.
    JsonObject,
    /// JSON that matches a JSON schema. Keywords that only describe are ignored, and keywords that cannot be obeyed while
    /// an answer is written are refused.
    JsonSchema(Value),
    /// Text that matches a regular expression as a whole, in the syntax of Rust's `regex`.
    Regex(String),
    /// Text of a context-free grammar, in Lark's syntax.
    Lark(String),
}

impl AnswerForm {
    /// Parses a JSON schema.
    ///
    /// # Errors
    /// Returns [`Error::Constraint`] if the text is not JSON.
    pub fn json_schema(text: &str) -> Result<Self> {
        check_size(text.len())?;
        serde_json::from_str(text)
            .map(Self::JsonSchema)
            .map_err(|error| Error::Constraint(format!("the schema is not JSON ({error})")))
    }

    /// Returns the form as a grammar of the library.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar> {
        match self {
            Self::JsonObject => Ok(schema(json!({ "type": "object" }))),
            Self::JsonSchema(value) => {
                check_depth(depth(value))?;
                check_size(value.to_string().len())?;
                match value {
                    Value::Object(_) | Value::Bool(_) => Ok(schema(value.clone())),
                    _ => Err(Error::Constraint("a schema is a JSON object, or true".to_owned())),
                }
            }
            Self::Regex(text) => {
                check_size(text.len())?;
                Ok(TopLevelGrammar::from_regex(text))
            }
            Self::Lark(text) => {
                check_size(text.len())?;
                Ok(TopLevelGrammar::from_lark(text.clone()))
            }
        }
    }
}

fn schema(mut value: Value) -> TopLevelGrammar {
    if let Value::Object(fields) = &mut value {
        fields.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    TopLevelGrammar::from_json_schema(value)
}

fn check_size(bytes: usize) -> Result<()> {
    if bytes <= MAX_BYTES {
        return Ok(());
    }
    Err(Error::Constraint(format!("it has {bytes} bytes, and the limit is {MAX_BYTES}; shorten it")))
}

fn check_depth(depth: usize) -> Result<()> {
    if depth <= MAX_DEPTH {
        return Ok(());
    }
    Err(Error::Constraint(format!(
        "it is nested {depth} levels deep, and the limit is {MAX_DEPTH}; move parts to definitions of their own"
    )))
}

/// Returns the depth of nested objects and lists.
fn depth(value: &Value) -> usize {
    let (mut deepest, mut open) = (0, vec![(value, 1)]);
    while let Some((value, depth)) = open.pop() {
        match value {
            Value::Array(items) => open.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(fields) => open.extend(fields.values().map(|field| (field, depth + 1))),
            _ => continue,
        }
        deepest = deepest.max(depth);
    }
    deepest
}
