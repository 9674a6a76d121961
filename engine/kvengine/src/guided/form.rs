//! The forms of answers: JSON, JSON that matches a schema, a regular expression, a grammar.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use super::levels::{Levels, MAX_NESTED, MAX_TOGETHER};
use crate::error::{Error, Result};

/// The maximum number of bytes of a schema, an expression or a grammar.
const MAX_BYTES: usize = 1 << 20;

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

    /// Checks the size of a JSON schema, and how far down its values and its references lead. Grammars in Lark's syntax
    /// may contain schemas, which must be checked before: compiling them takes stack for each level.
    ///
    /// # Errors
    /// Returns [`Error::Constraint`] if the schema is too large or too deep.
    pub fn check_schema(schema: &Value) -> Result<()> {
        check_levels(Levels::of(schema))?;
        check_size(schema.to_string().len())
    }

    /// Returns the form as a grammar of the library.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar> {
        match self {
            Self::JsonObject => Ok(schema(json!({ "type": "object" }))),
            Self::JsonSchema(value) => {
                Self::check_schema(value)?;
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

fn check_levels(levels: Levels) -> Result<()> {
    let Levels { nested, together } = levels;
    let reason = match () {
        () if nested > MAX_NESTED => format!(
            "it is nested {nested} levels deep, and the limit is {MAX_NESTED}; move parts to definitions of their own"
        ),
        () if together > MAX_TOGETHER => format!(
            "it and the parts that it refers to have {together} levels together, and the limit is {MAX_TOGETHER}; use \
             fewer references"
        ),
        () => return Ok(()),
    };
    Err(Error::Constraint(reason))
}
