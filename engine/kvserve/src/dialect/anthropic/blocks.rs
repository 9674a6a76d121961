//! The content of messages: blocks of text, documents, search results, and calls of tools with their results.

use kvmodel::{Message, Variable};

use crate::ask::Document;
use crate::refusal::Refusal;

/// A conversation without its documents.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Message>,
    /// The documents that stand in front of the conversation.
    pub(super) documents: Vec<Document>,
}

// Decision: docs/decisions/serve.md#documents-stand-in-front-of-the-conversation
/// Reads a conversation. Documents of the user's first message stand in front of its text. Documents of later messages,
/// such as results of a search, stand there as well if `reuse` is true, and where they were stands their title.
/// Otherwise, they stay where they are.
///
/// # Errors
/// Refuses blocks that are no text, by their place.
pub(super) fn conversation(
    system: Option<&Variable>,
    messages: &Variable,
    reuse: bool,
) -> Result<Conversation, Refusal> {
    let Variable::List(list) = messages else {
        return Err(Refusal::field("messages", "messages must be a list of objects with role and content"));
    };
    if list.is_empty() {
        return Err(Refusal::field(
            "messages",
            "messages is an empty list; add a message with the role user",
        ));
    }
    let mut reader = Reader { reuse, messages: Vec::new(), documents: Vec::new(), begun: false };
    if let Some(text) = system_text(system)? {
        reader.push("system", [("content", Variable::Text(text))]);
    }
    for (i, message) in list.iter().enumerate() {
        reader.message(&format!("messages[{i}]"), message)?;
    }
    let messages = Message::from_variable(Variable::List(joined(reader.messages)));
    let named = |refusal| Refusal { param: Some("messages".to_owned()), ..refusal };
    let messages = messages.map_err(|error| named(error.into()))?;
    Ok(Conversation { messages, documents: reader.documents })
}

struct Reader {
    reuse: bool,
    messages: Vec<Variable>,
    documents: Vec<Document>,
    /// True once a message of the user with a text is there.
    begun: bool,
}

impl Reader {
    fn push<const N: usize>(&mut self, role: &str, fields: [(&str, Variable); N]) {
        let fields = fields.map(|(name, value)| (name.to_owned(), value));
        let all = [("role".to_owned(), role.into())].into_iter().chain(fields);
        self.messages.push(Variable::Map(all.collect()));
    }

    fn message(&mut self, place: &str, message: &Variable) -> Result<(), Refusal> {
        let role = match message.field("role") {
            Some(Variable::Text(role)) if role == "user" || role == "assistant" => role.as_str(),
            _ => {
                let place = format!("{place}.role");
                return Err(Refusal::field(place, "the role must be user or assistant"));
            }
        };
        let place = format!("{place}.content");
        let blocks = match message.field("content") {
            Some(Variable::List(blocks)) if blocks.is_empty() => {
                return Err(Refusal::field(
                    place,
                    "the content is empty; add a block, or remove the message",
                ));
            }
            Some(Variable::Text(text)) => {
                self.begun |= role == "user";
                self.push(role, [("content", Variable::Text(text.clone()))]);
                return Ok(());
            }
            Some(Variable::List(blocks)) => blocks,
            _ => return Err(Refusal::field(place, "the content must be a string or a list of blocks")),
        };
        if role == "user" { self.user(&place, blocks) } else { self.assistant(&place, blocks) }
    }

    /// Reads the blocks of a user: results of tools become messages of their own.
    fn user(&mut self, place: &str, blocks: &[Variable]) -> Result<(), Refusal> {
        let mut texts = Vec::new();
        // Documents of the message with the user's first text are not named where they stood.
        let first = !self.begun;
        let mut is_users = false;
        for (i, block) in blocks.iter().enumerate() {
            let place = format!("{place}[{i}]");
            if kind(block) == "tool_result" {
                self.flush(&mut texts);
                self.tool_result(&place, block)?;
                continue;
            }
            is_users = true;
            texts.extend(self.text_of(&place, block, first)?);
        }
        if is_users && texts.is_empty() {
            texts.push(String::new());
        }
        self.flush(&mut texts);
        Ok(())
    }

    /// Adds a message of the user with the texts, if there are some.
    fn flush(&mut self, texts: &mut Vec<String>) {
        let content = match texts.len() {
            0 => return,
            1 => Variable::Text(texts.remove(0)),
            _ => Variable::List(texts.drain(..).map(|text| text_part(Variable::Text(text))).collect()),
        };
        self.begun = true;
        self.push("user", [("content", content)]);
    }

    /// Returns the text that a block leaves in its message. `first` is true in the user's first message.
    fn text_of(&mut self, place: &str, block: &Variable, first: bool) -> Result<Option<String>, Refusal> {
        match kind(block) {
            "text" => Ok(Some(string(place, block, "text")?)),
            "document" | "search_result" => {
                let (title, document) = document(place, block)?;
                if !first && !self.reuse {
                    return Ok(Some(document.text));
                }
                let title = title.unwrap_or_else(|| format!("document {}", self.documents.len() + 1));
                self.documents.push(document);
                Ok((!first).then(|| format!("(see {title:?} above)")))
            }
            other => Err(Refusal::field(
                format!("{place}.type"),
                format!(
                    "blocks of the type {other:?} are not supported; send text, documents or search results"
                ),
            )),
        }
    }

    fn tool_result(&mut self, place: &str, block: &Variable) -> Result<(), Refusal> {
        let id = string(place, block, "tool_use_id")?;
        let place = format!("{place}.content");
        let text = match block.field("content") {
            None | Some(Variable::None) => String::new(),
            Some(Variable::Text(text)) => text.clone(),
            Some(Variable::List(blocks)) => {
                let text = |(i, block)| self.text_of(&format!("{place}[{i}]"), block, false);
                let texts: Vec<_> = blocks.iter().enumerate().map(text).collect::<Result<_, _>>()?;
                texts.into_iter().flatten().collect::<Vec<_>>().join("\n")
            }
            Some(_) => return Err(Refusal::field(place, "the content must be a string or a list of blocks")),
        };
        let text = match block.field("is_error") {
            Some(Variable::Bool(true)) => format!("The tool failed:\n{text}"),
            _ => text,
        };
        self.push("tool", [("tool_call_id", Variable::Text(id)), ("content", Variable::Text(text))]);
        Ok(())
    }

    fn assistant(&mut self, place: &str, blocks: &[Variable]) -> Result<(), Refusal> {
        let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        for (i, block) in blocks.iter().enumerate() {
            let place = format!("{place}[{i}]");
            match kind(block) {
                "text" => texts.push(string(&place, block, "text")?),
                "thinking" => thoughts.push(string(&place, block, "thinking")?),
                "redacted_thinking" => {}
                "tool_use" => calls.push(call(&place, block)?),
                other => {
                    let reason = format!("blocks of the type {other:?} are not supported in an answer");
                    return Err(Refusal::field(format!("{place}.type"), reason));
                }
            }
        }
        let list =
            |items: Vec<Variable>| if items.is_empty() { Variable::None } else { Variable::List(items) };
        let thoughts = if thoughts.is_empty() { Variable::None } else { Variable::Text(thoughts.join("\n")) };
        self.push(
            "assistant",
            [
                ("content", Variable::Text(texts.concat())),
                ("reasoning_content", thoughts),
                ("tool_calls", list(calls)),
            ],
        );
        Ok(())
    }
}

/// Joins texts of the user that follow each other, as this API does. Many chat templates refuse them.
fn joined(messages: Vec<Variable>) -> Vec<Variable> {
    let is_users = |message: &Variable| message.field("role") == Some(&"user".into());
    let mut all: Vec<Variable> = Vec::with_capacity(messages.len());
    for message in messages {
        match all.last_mut() {
            Some(last) if is_users(last) && is_users(&message) => {
                let parts = [&*last, &message].into_iter().flat_map(parts).collect();
                *last = Variable::Map(vec![
                    ("role".to_owned(), "user".into()),
                    ("content".to_owned(), Variable::List(parts)),
                ]);
            }
            _ => all.push(message),
        }
    }
    all
}

/// Returns the content of a message as parts.
fn parts(message: &Variable) -> Vec<Variable> {
    match message.field("content") {
        Some(Variable::List(parts)) => parts.clone(),
        Some(text) => vec![text_part(text.clone())],
        None => Vec::new(),
    }
}

fn text_part(text: Variable) -> Variable {
    Variable::Map(vec![("type".to_owned(), "text".into()), ("text".to_owned(), text)])
}

/// Returns the text of the field `system`: a string, or blocks of text.
fn system_text(system: Option<&Variable>) -> Result<Option<String>, Refusal> {
    match system {
        None | Some(Variable::None) => Ok(None),
        Some(Variable::Text(text)) => Ok(Some(text.clone())),
        Some(list) => Ok(Some(texts("system", list)?.join("\n"))),
    }
}

/// Returns the texts of a list of text blocks.
fn texts(place: &str, list: &Variable) -> Result<Vec<String>, Refusal> {
    let Variable::List(blocks) = list else {
        return Err(Refusal::field(place, format!("{place} must be a string or a list of text blocks")));
    };
    let text = |(i, block): (usize, &Variable)| {
        let place = format!("{place}[{i}]");
        if kind(block) == "text" {
            return string(&place, block, "text");
        }
        Err(Refusal::field(format!("{place}.type"), "only blocks of the type text may stand here"))
    };
    blocks.iter().enumerate().map(text).collect()
}

/// Returns the title and the text of a block of the type `document` or `search_result`.
fn document(place: &str, block: &Variable) -> Result<(Option<String>, Document), Refusal> {
    let text = if kind(block) == "search_result" {
        let content = block.field("content").unwrap_or(&Variable::None);
        texts(&format!("{place}.content"), content)?.join("\n")
    } else {
        let source = block.field("source").unwrap_or(&Variable::None);
        let place = format!("{place}.source");
        match (kind(source), source.field("content")) {
            ("text", _) => string(&place, source, "data")?,
            ("content", Some(Variable::Text(text))) => text.clone(),
            ("content", Some(list)) => texts(&format!("{place}.content"), list)?.join("\n"),
            (other, _) => {
                let reason = format!("documents of the type {other:?} are not supported; send their text");
                return Err(Refusal::field(format!("{place}.type"), reason));
            }
        }
    };
    let title = |name| match block.field(name) {
        Some(Variable::Text(title)) if !title.trim().is_empty() => Some(title.trim().to_owned()),
        _ => None,
    };
    let context = title("context").map(|context| format!("{context}\n")).unwrap_or_default();
    let shown = title("title");
    let document = Document::titled(place.to_owned(), shown.as_deref(), &format!("{context}{text}"));
    Ok((shown, document))
}

/// Returns the call of a tool in the form that chat templates know.
fn call(place: &str, block: &Variable) -> Result<Variable, Refusal> {
    let map = |fields: Vec<(&str, Variable)>| {
        Variable::Map(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    };
    let arguments = match block.field("input") {
        Some(input @ Variable::Map(_)) => input.clone(),
        _ => return Err(Refusal::field(format!("{place}.input"), "the input must be an object")),
    };
    let name = Variable::Text(string(place, block, "name")?);
    Ok(map(vec![
        ("id", Variable::Text(string(place, block, "id")?)),
        ("type", "function".into()),
        ("function", map(vec![("name", name), ("arguments", arguments)])),
    ]))
}

fn kind(block: &Variable) -> &str {
    match block.field("type") {
        Some(Variable::Text(kind)) => kind,
        _ => "",
    }
}

fn string(place: &str, block: &Variable, name: &str) -> Result<String, Refusal> {
    match block.field(name) {
        Some(Variable::Text(text)) => Ok(text.clone()),
        _ => Err(Refusal::field(format!("{place}.{name}"), format!("{name} must be a string"))),
    }
}
