//! The shape of an answer: text, text of a form, or calls of tools.

use std::sync::{Arc, OnceLock};

use kvengine::{AnswerConstraint, AnswerForm, AnswerGuide};
use kvmodel::{ForcedCalls, TextCodec, ToolCallFormat, Variable};
use serde_json::Value;

use crate::refusal::{Kind, Refusal};

/// The shape of an answer. By default, it is text.
#[derive(Debug, Clone, Default)]
pub(crate) struct AnswerShape {
    /// The form of the text, with the field of the request that asks for it.
    form: Option<(&'static str, AnswerForm)>,
    /// The tools that may be called.
    tools: Option<Tools>,
    /// The shape as compiled for the first prompt of the request, for all of them.
    compiled: Arc<OnceLock<Result<CompiledShape, Refusal>>>,
}

/// Tools that may be called.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    /// The tools as in `OpenAI`'s chats, for the chat template.
    pub(crate) list: Vec<Variable>,
    pub(crate) choice: ToolChoice,
    /// True if an answer may have several calls.
    pub(crate) several: bool,
}

/// The tools that an answer calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// None, as if there were no tools.
    None,
    /// Those that the model wants to call.
    Auto,
    /// At least one.
    Required,
    /// The tool with this name.
    Named(String),
    /// Some of the tools, as if there were no others.
    Allowed {
        /// The names of these tools.
        names: Vec<String>,
        /// True if at least one must be called.
        required: bool,
    },
}

/// The reading of calls from an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallReading {
    pub(crate) format: ToolCallFormat,
    /// True if an answer may have several calls.
    pub(crate) several: bool,
    /// True if an answer is calls alone.
    pub(crate) forced: bool,
}

/// A shape, compiled for one model.
#[derive(Debug, Clone, Default)]
pub(crate) struct CompiledShape {
    pub(crate) constraint: Option<Arc<dyn AnswerConstraint>>,
    pub(crate) calls: Option<CallReading>,
}

impl AnswerShape {
    pub(crate) fn new(form: Option<(&'static str, AnswerForm)>, tools: Option<Tools>) -> Self {
        Self { form, tools, compiled: Arc::default() }
    }

    /// Returns the tools as a variable of the chat template.
    ///
    /// # Errors
    /// Refuses tools for a model whose chat template does not write them.
    // Decision: docs/decisions/serve.md#tools-need-a-template-that-writes-them
    pub(crate) fn variable(&self, codec: &TextCodec) -> Result<Option<(String, Variable)>, Refusal> {
        let Some(tools) = &self.tools else { return Ok(None) };
        if !codec.takes_tools() {
            let reason = "the chat template of this model does not write tools, so the model would not know them; send the \
                          request without tools, or serve a model whose template writes them";
            return Err(Refusal::field("tools", reason));
        }
        Ok(Some(("tools".to_owned(), Variable::List(tools.list.clone()))))
    }

    /// Compiles the shape once, for all prompts of a request. This takes processor time: `guide` is called if the answer is
    /// constrained.
    ///
    /// # Errors
    /// Refuses forms and schemas that are malformed, too large, not supported, or that no answer can have.
    pub(crate) fn compile(
        &self,
        codec: &TextCodec,
        guide: impl FnOnce() -> Result<Arc<AnswerGuide>, Refusal>,
    ) -> Result<CompiledShape, Refusal> {
        self.compiled.get_or_init(|| self.compile_now(codec, guide)).clone()
    }

    fn compile_now(
        &self,
        codec: &TextCodec,
        guide: impl FnOnce() -> Result<Arc<AnswerGuide>, Refusal>,
    ) -> Result<CompiledShape, Refusal> {
        let (field, form, calls) = match (&self.tools, &self.form) {
            (None, None) => return Ok(CompiledShape::default()),
            (None, Some((field, form))) => (*field, form.clone(), None),
            (Some(tools), form) => {
                let calls = tools.forced(codec)?;
                match (tools.only_calls(), form) {
                    (false, None) => {
                        let calls = tools.reading(codec.tool_call_format());
                        return Ok(CompiledShape { constraint: None, calls: Some(calls) });
                    }
                    (true, _) => ("tools", AnswerForm::Lark(calls.grammar), Some(calls.format)),
                    (false, Some((field, form))) => {
                        (*field, AnswerForm::Lark(either(&calls.grammar, form)), Some(calls.format))
                    }
                }
            }
        };
        if let Some((field, AnswerForm::JsonSchema(schema))) = &self.form {
            AnswerForm::check_schema(schema).map_err(|error| in_field(field, error))?;
        }
        let constraint = guide()?.constraint(&form).map_err(|error| in_field(field, error))?;
        let calls = calls.and_then(|format| Some(self.tools.as_ref()?.reading(format)));
        Ok(CompiledShape { constraint: Some(constraint), calls })
    }
}

impl Tools {
    /// Returns true if an answer is calls alone.
    fn only_calls(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    fn reading(&self, format: ToolCallFormat) -> CallReading {
        CallReading { format, several: self.several, forced: self.only_calls() }
    }

    fn forced(&self, codec: &TextCodec) -> Result<ForcedCalls, Refusal> {
        let only = match &self.choice {
            ToolChoice::Named(name) => Some(name.as_str()),
            _ => None,
        };
        let tools: Vec<Value> =
            self.list.iter().map(|tool| value("tools", tool)).collect::<Result<_, _>>()?;
        let mut schemas = tools.iter().filter_map(|tool| tool.get("function")?.get("parameters"));
        schemas.try_for_each(AnswerForm::check_schema).map_err(|error| in_field("tools", error))?;
        let forced = ForcedCalls::new(codec.tool_call_format(), &tools, only, self.several);
        forced.map_err(|error| Refusal { param: Some("tools".to_owned()), ..Refusal::from(error) })
    }
}

/// Returns the refusal of a form, with its field if the client can change it.
fn in_field(field: &str, error: kvengine::Error) -> Refusal {
    let refusal = Refusal::from(error);
    let is_invalid = refusal.kind == Kind::Invalid;
    if is_invalid { Refusal { param: Some(field.to_owned()), ..refusal } } else { refusal }
}

/// Returns a grammar of answers that are calls or have a form.
fn either(calls: &str, form: &AnswerForm) -> String {
    let schema = match form {
        AnswerForm::JsonSchema(schema) => schema.to_string(),
        _ => r#"{"type":"object"}"#.to_owned(),
    };
    let calls = calls.strip_prefix("start:").unwrap_or(calls);
    format!("start: text | calls\ncalls:{calls}text: %json {schema}\n")
}

/// Converts a value of a request to JSON.
///
/// # Errors
/// Refuses numbers that JSON libraries cannot hold, by the field.
pub(crate) fn value(field: &str, given: &Variable) -> Result<Value, Refusal> {
    serde_json::to_value(given).map_err(|error| Refusal::field(field, format!("{field}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: &[u8] = include_bytes!("../../../models/tiny-rag/tokenizer.json");

    #[test]
    fn a_schema_is_compiled_once_for_all_prompts_of_a_request() {
        let codec = TextCodec::from_bytes(TOKENIZER, None).unwrap();
        let shape = AnswerShape::new(Some(("response_format", AnswerForm::JsonObject)), None);
        let mut asked = 0;
        for _ in 0..64 {
            // Each prompt has a copy of the shape.
            let refused = shape.clone().compile(&codec, || {
                asked += 1;
                Err(Refusal::engine_gone())
            });
            assert_eq!(refused.unwrap_err(), Refusal::engine_gone());
        }
        assert_eq!(asked, 1);
    }
}
