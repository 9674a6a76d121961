//! The input of a request: a text, or items such as messages, calls of tools and their outputs.

use kvmodel::{Message, Variable};

use crate::refusal::Refusal;

/// Reads the conversation. The instructions are its system prompt.
///
/// # Errors
/// Refuses items that are no text, by their place.
pub(super) fn conversation(instructions: Option<&str>, input: &Variable) -> Result<Vec<Message>, Refusal> {
    let mut messages = Vec::new();
    if let Some(text) = instructions {
        messages.push(message("system", [("content", text.into())]));
    }
    match input {
        Variable::Text(text) => messages.push(message("user", [("content", Variable::Text(text.clone()))])),
        Variable::List(items) if items.is_empty() => {
            return Err(Refusal::field("input", "input is an empty list; add a message with the role user"));
        }
        Variable::List(items) => {
            for (i, given) in items.iter().enumerate() {
                let place = format!("input[{i}]");
                match item(&place, given)? {
                    Some(Item::Message(message)) => messages.push(message),
                    Some(Item::Call(call)) => add_call(&mut messages, call),
                    None => {}
                }
            }
        }
        _ => return Err(Refusal::field("input", "input must be a string or a list of items")),
    }
    let named = |refusal| Refusal { param: Some("input".to_owned()), ..refusal };
    Message::from_variable(Variable::List(messages)).map_err(|error| named(error.into()))
}

/// The addition of an item to a conversation.
enum Item {
    Message(Variable),
    /// A call, which belongs to the model's message in front of it.
    Call(Variable),
}

/// Adds a call to the model's message at the end, or to a new one.
fn add_call(messages: &mut Vec<Variable>, call: Variable) {
    let is_models = |message: &Variable| message.field("role") == Some(&"assistant".into());
    let Some(Variable::Map(last)) = messages.last_mut().filter(|last| is_models(last)) else {
        messages.push(message("assistant", [("tool_calls", Variable::List(vec![call]))]));
        return;
    };
    match last.iter_mut().find(|(name, _)| name == "tool_calls") {
        Some((_, Variable::List(calls))) => calls.push(call),
        _ => last.push(("tool_calls".to_owned(), Variable::List(vec![call]))),
    }
}

/// Reads an item. Returns `None` for reasoning, which models do not read again.
fn item(place: &str, given: &Variable) -> Result<Option<Item>, Refusal> {
    let kind = match given.field("type") {
        Some(Variable::Text(kind)) => kind.as_str(),
        _ => "message",
    };
    match kind {
        "message" => {
            let role = string(place, given, "role")?;
            let content = content(&format!("{place}.content"), given.field("content"))?;
            Ok(Some(Item::Message(message(&role, [("content", content)]))))
        }
        "function_call" => {
            let function = fields([
                ("name", Variable::Text(string(place, given, "name")?)),
                ("arguments", Variable::Text(string(place, given, "arguments")?)),
            ]);
            let call = fields([
                ("id", Variable::Text(string(place, given, "call_id")?)),
                ("type", "function".into()),
                ("function", function),
            ]);
            Ok(Some(Item::Call(call)))
        }
        "function_call_output" => {
            let id = Variable::Text(string(place, given, "call_id")?);
            let output = content(&format!("{place}.output"), given.field("output"))?;
            Ok(Some(Item::Message(message("tool", [("tool_call_id", id), ("content", output)]))))
        }
        "reasoning" => Ok(None),
        other => Err(Refusal::field(
            format!("{place}.type"),
            format!(
                "items of the type {other:?} are not supported; send messages, calls of functions and their outputs"
            ),
        )),
    }
}

/// Returns a text or its parts.
fn content(place: &str, given: Option<&Variable>) -> Result<Variable, Refusal> {
    match given {
        Some(Variable::Text(text)) => Ok(Variable::Text(text.clone())),
        Some(Variable::List(parts)) => {
            let part = |(i, part): (usize, &Variable)| {
                let place = format!("{place}[{i}]");
                match part.field("type") {
                    Some(Variable::Text(kind))
                        if ["input_text", "output_text", "text"].contains(&kind.as_str()) =>
                    {
                        let text = Variable::Text(string(&place, part, "text")?);
                        Ok(fields([("type", "text".into()), ("text", text)]))
                    }
                    _ => Err(Refusal::field(
                        format!("{place}.type"),
                        "only parts of the types input_text and output_text are supported",
                    )),
                }
            };
            let parts: Vec<Variable> = parts.iter().enumerate().map(part).collect::<Result<_, _>>()?;
            match <[Variable; 1]>::try_from(parts) {
                Ok([one]) => Ok(one.field("text").cloned().unwrap_or_default()),
                Err(parts) => Ok(Variable::List(parts)),
            }
        }
        _ => Err(Refusal::field(place, "the content must be a string or a list of parts")),
    }
}

fn message<const N: usize>(role: &str, more: [(&str, Variable); N]) -> Variable {
    let Variable::Map(mut all) = fields([("role", role.into())]) else { return Variable::None };
    all.extend(more.map(|(name, value)| (name.to_owned(), value)));
    Variable::Map(all)
}

fn fields<const N: usize>(given: [(&str, Variable); N]) -> Variable {
    Variable::Map(given.map(|(name, value)| (name.to_owned(), value)).to_vec())
}

fn string(place: &str, given: &Variable, name: &str) -> Result<String, Refusal> {
    match given.field(name) {
        Some(Variable::Text(text)) => Ok(text.clone()),
        _ => Err(Refusal::field(format!("{place}.{name}"), format!("{name} must be a string"))),
    }
}
