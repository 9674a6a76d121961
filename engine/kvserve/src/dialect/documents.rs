//! The documents of a request, in the forms that clients write: texts, or objects with a text.

use std::sync::Arc;

use kvmodel::Variable;

use crate::ask::Document;
use crate::refusal::Refusal;

/// The names under which clients write the text of a document.
const TEXT: [&str; 4] = ["text", "content", "contents", "snippet"];

/// The most bytes of a document's ID. It stands in the report of each answer.
const MAX_ID: usize = 256;

/// Reads the field `documents`: a list of strings, of objects with a text and perhaps a title (Hugging Face, vLLM), or of
/// objects with an `id` and such an object under `data` (Cohere). Other fields of an object are not part of the prompt.
///
/// # Errors
/// Refuses what is no list, and an element without a text, by its index.
pub(crate) fn documents(given: Option<&Variable>) -> Result<Arc<[Document]>, Refusal> {
    match given {
        None | Some(Variable::None) => Ok(Arc::default()),
        Some(Variable::List(list)) => {
            list.iter().enumerate().map(|(i, one)| document(&format!("documents[{i}]"), one)).collect()
        }
        Some(_) => {
            Err(Refusal::field("documents", "documents must be a list of strings or of objects with a text"))
        }
    }
}

/// Reads a document. Without an ID, `place` is its name.
///
/// # Errors
/// Refuses a document without a text, by its place.
pub(crate) fn document(place: &str, given: &Variable) -> Result<Document, Refusal> {
    let place = place.to_owned();
    let text = |value: Option<&Variable>| match value {
        Some(Variable::Text(text)) => Some(text.clone()),
        _ => None,
    };
    if let Variable::Text(text) = given {
        return Ok(Document { id: place, text: text.clone() });
    }
    let name = ["id", "doc_id"].iter().find_map(|name| text(given.field(name)));
    if let Some(name) = name.as_ref().filter(|name| name.len() > MAX_ID) {
        let reason = format!("the ID of {place} has {} bytes; it may have up to {MAX_ID}", name.len());
        return Err(Refusal::field(format!("{place}.id"), reason));
    }
    let fields = match given.field("data") {
        Some(data @ Variable::Map(_)) => data,
        Some(Variable::Text(text)) => {
            return Ok(Document { id: name.unwrap_or(place), text: text.clone() });
        }
        _ => given,
    };
    let Some(body) = TEXT.iter().find_map(|name| text(fields.field(name))) else {
        let reason =
            format!("{place} has no text; it must be a string, or an object with a string under \"text\"");
        return Err(Refusal::field(place, reason));
    };
    let title = text(fields.field("title"));
    Ok(Document::titled(name.unwrap_or(place), title.as_deref(), &body))
}
