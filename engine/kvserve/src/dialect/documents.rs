//! The documents of a request, in the forms that clients write: texts, or objects with a text.

use kvmodel::Variable;

use crate::ask::Document;
use crate::refusal::Refusal;

/// The names under which clients write the text of a document.
const TEXT: [&str; 4] = ["text", "content", "contents", "snippet"];

/// Reads the field `documents`: a list of strings, of objects with a text and perhaps a title (Hugging Face, vLLM), or of
/// objects with an `id` and such an object under `data` (Cohere). Other fields of an object are not part of the prompt.
///
/// # Errors
/// Refuses what is no list, and an element without a text, by its index.
pub(crate) fn documents(given: Option<&Variable>) -> Result<Vec<Document>, Refusal> {
    match given {
        None | Some(Variable::None) => Ok(Vec::new()),
        Some(Variable::List(list)) => list.iter().enumerate().map(|(i, one)| document(i, one)).collect(),
        Some(_) => {
            Err(Refusal::field("documents", "documents must be a list of strings or of objects with a text"))
        }
    }
}

fn document(i: usize, given: &Variable) -> Result<Document, Refusal> {
    let place = format!("documents[{i}]");
    let text = |value: Option<&Variable>| match value {
        Some(Variable::Text(text)) => Some(text.clone()),
        _ => None,
    };
    if let Variable::Text(text) = given {
        return Ok(Document { id: place, text: text.clone() });
    }
    let name = ["id", "doc_id"].iter().find_map(|name| text(given.field(name)));
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
