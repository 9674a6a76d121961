//! The messages of a request: texts, documents, thoughts and plans.

use std::sync::Arc;

use kvmodel::{Message, Variable};

use crate::ask::Document;
use crate::dialect::documents;
use crate::refusal::Refusal;

/// The least number of bytes of a tool's result that stands in front of the conversation. Computing a shorter one again
/// costs little.
const LONG: usize = 256;

/// A conversation without its documents.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Message>,
    /// The documents that stand in front of the conversation: those of the request, and those of messages.
    pub(super) documents: Arc<[Document]>,
}

// Decision: docs/decisions/serve.md#documents-stand-in-front-of-the-conversation
/// Reads a conversation. Documents in messages of the user, and long results of tools, stand in front of the conversation if
/// `reuse` is true. Where they were stands their name. Otherwise, they stay where they are.
///
/// # Errors
/// Refuses what is no list of messages, and parts that are no text, by their place.
pub(super) fn conversation(
    messages: Variable,
    given: Option<&Variable>,
    reuse: bool,
) -> Result<Conversation, Refusal> {
    let given = documents::documents(given)?;
    let mut moved: Vec<Document> = Vec::new();
    let messages = match messages {
        Variable::List(list) => {
            let mut read = Vec::with_capacity(list.len());
            for (i, message) in list.into_iter().enumerate() {
                let mut reader = Reader { reuse, before: given.len(), moved: &mut moved };
                read.push(reader.message(&format!("messages[{i}]"), message)?);
            }
            Variable::List(read)
        }
        other => other,
    };
    let messages = Message::from_variable(messages)
        .map_err(|error| Refusal { param: Some("messages".to_owned()), ..Refusal::from(error) })?;
    let documents = if moved.is_empty() { given } else { given.iter().cloned().chain(moved).collect() };
    Ok(Conversation { messages, documents })
}

struct Reader<'a> {
    reuse: bool,
    /// The number of documents of the request.
    before: usize,
    moved: &'a mut Vec<Document>,
}

impl Reader<'_> {
    fn message(&mut self, place: &str, message: Variable) -> Result<Variable, Refusal> {
        let Variable::Map(mut fields) = message else { return Ok(message) };
        let is_tools = fields.iter().any(|(name, value)| name == "role" && *value == "tool".into());
        let mut thoughts = Vec::new();
        for (name, content) in &mut fields {
            let Variable::List(parts) = content else { continue };
            if name != "content" {
                continue;
            }
            let mut read = Vec::with_capacity(parts.len());
            for (i, part) in std::mem::take(parts).into_iter().enumerate() {
                let place = format!("{place}.content[{i}]");
                match part.field("type") {
                    Some(Variable::Text(kind)) if kind == "document" => {
                        read.push(text_part(self.document(&place, &part, is_tools)?));
                    }
                    Some(Variable::Text(kind)) if kind == "thinking" => match part.field("thinking") {
                        Some(Variable::Text(thought)) => thoughts.push(thought.clone()),
                        _ => {
                            return Err(Refusal::field(
                                place,
                                "the part must have a string under \"thinking\"",
                            ));
                        }
                    },
                    _ => read.push(part),
                }
            }
            *parts = read;
        }
        let plan = fields.iter().position(|(name, _)| name == "tool_plan").map(|at| fields.remove(at).1);
        // A plan is what the model said before it called tools.
        if let Some(plan @ Variable::Text(_)) = plan {
            match fields.iter_mut().find(|(name, _)| name == "content") {
                None => fields.push(("content".to_owned(), plan)),
                Some((_, content @ Variable::None)) => *content = plan,
                Some(_) => thoughts.extend(text(&plan)),
            }
        }
        if !thoughts.is_empty() {
            fields.push(("reasoning_content".to_owned(), Variable::Text(thoughts.join("\n"))));
        }
        Ok(Variable::Map(fields))
    }

    /// Returns the text that a document leaves in its message.
    fn document(&mut self, place: &str, part: &Variable, is_tools: bool) -> Result<String, Refusal> {
        let given = part.field("document").unwrap_or(&Variable::None);
        let document = documents::document(place, given)?;
        if !self.reuse || is_tools && document.text.len() < LONG {
            return Ok(document.text);
        }
        let title = given.field("data").and_then(|data| data.field("title")).and_then(text);
        let title = title.unwrap_or_else(|| format!("document {}", self.before + self.moved.len() + 1));
        self.moved.push(document);
        Ok(format!("(see {title:?} above)"))
    }
}

fn text(value: &Variable) -> Option<String> {
    match value {
        Variable::Text(text) => Some(text.clone()),
        _ => None,
    }
}

fn text_part(text: String) -> Variable {
    let fields = [("type", "text".into()), ("text", Variable::Text(text))];
    Variable::Map(fields.map(|(name, value): (&str, Variable)| (name.to_owned(), value)).to_vec())
}
