//! Conversations and the variables of chat templates, as Python's dictionaries and lists.

use kvengine::PromptTokens;
use kvmodel::{Message, TextCodec, Variable};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::CallError;

/// Returns the JSON of a Python value.
pub(crate) fn json_of(value: &Bound<'_, PyAny>) -> PyResult<String> {
    value.py().import("json")?.call_method1("dumps", (value,))?.extract()
}

/// Returns the codec with the variables in a dictionary.
pub(crate) fn with_variables(codec: &TextCodec, given: Option<&Bound<'_, PyDict>>) -> PyResult<TextCodec> {
    let Some(given) = given else { return Ok(codec.clone()) };
    let variable = |(name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let value = Variable::from_json(&json_of(&value)?).map_err(CallError::from)?;
        PyResult::Ok((name.extract::<String>()?, value))
    };
    let variables = given.iter().map(variable).collect::<PyResult<Vec<_>>>()?;
    Ok(codec.with_variables(variables).map_err(CallError::from)?)
}

/// Encodes a conversation, or each of several. Returns true with the prompts if there may be several.
pub(crate) fn conversations(
    codec: &TextCodec,
    given: &Bound<'_, PyAny>,
) -> PyResult<(Vec<PyResult<PromptTokens>>, bool)> {
    let wrong = || PyTypeError::new_err("messages must be a list of dictionaries, or a list of such lists");
    let list: Vec<Bound<'_, PyAny>> = given.extract().map_err(|_| wrong())?;
    let encoded = |messages: &Bound<'_, PyAny>| {
        let messages = Message::list(&json_of(messages)?).map_err(CallError::from)?;
        Ok(PromptTokens::from_conversation(codec, &messages, []).map_err(CallError::from)?)
    };
    match list.first() {
        Some(first) if !first.is_instance_of::<PyDict>() => Ok((list.iter().map(encoded).collect(), true)),
        _ => Ok((vec![encoded(given)], false)),
    }
}
