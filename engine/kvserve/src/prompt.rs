//! Turns the prompt of a request into tokens: finds its documents, and puts them where they are found again.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use kvengine::{CutPrompt, Error as EngineError, FoundDocument, PromptTokens, document_text};
use kvmodel::{Error as ModelError, Message, Role, TextCodec};

use crate::ask::{AskedPrompt, Document, Documents};
use crate::library::SharedLibrary;
use crate::refusal::{Kind, Refusal};

/// A prompt as tokens.
#[derive(Debug)]
pub(crate) struct BuiltPrompt {
    pub(crate) tokens: PromptTokens,
    /// The documents, in the order of the prompt's chunks.
    pub(crate) parts: Vec<PartName>,
    /// Why documents cannot be reused, although the prompt has some.
    pub(crate) not_reusable: Option<&'static str>,
}

/// The name of a document in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartName {
    pub(crate) id: String,
    /// The bytes of the prompt's text in which a registered document was found.
    pub(crate) span: Option<Range<usize>>,
    /// The text of the registered document, if it is still registered.
    pub(crate) registered: Option<Arc<str>>,
}

impl PartName {
    /// Returns the first byte of the document in the prompt's text, and the byte behind it.
    pub(crate) fn bytes(&self) -> Option<[usize; 2]> {
        self.span.as_ref().map(|span| [span.start, span.end])
    }
}

/// The places and texts of a prompt's documents.
struct Cut {
    documents: Vec<Document>,
    /// The index of the message, and the byte in its text, in front of which the documents stand.
    place: (usize, usize),
}

/// Tokenises a prompt for a model with so many positions. May take long for long texts.
///
/// # Errors
/// Refuses empty documents, documents of a prompt that cannot have any, and what the tokenizer or the template refuses.
pub(crate) fn build(
    codec: &TextCodec,
    prompt: AskedPrompt,
    documents: &Documents,
    library: Option<&SharedLibrary>,
    context: usize,
) -> Result<BuiltPrompt, Refusal> {
    if documents.separator.is_some() && !documents.given.is_empty() {
        return Err(Refusal::field("separator", "give documents or a separator, not both"));
    }
    match prompt {
        AskedPrompt::Tokens(tokens) => {
            if !documents.given.is_empty() || documents.separator.is_some() {
                let reason = "a prompt of tokens has no documents; give the prompt as a text";
                return Err(Refusal::field("documents", reason));
            }
            Ok(BuiltPrompt::plain(tokens))
        }
        AskedPrompt::Text(text) => of_text(codec, text, documents, library, context),
        AskedPrompt::Conversation { messages, variables } => {
            let codec = codec.with_variables(variables)?;
            of_conversation(&codec, messages, documents, library, context)
        }
    }
}

impl BuiltPrompt {
    fn plain(tokens: Vec<u32>) -> Self {
        Self { tokens: PromptTokens::Plain(tokens), parts: Vec::new(), not_reusable: None }
    }

    /// Returns a prompt that is cut at the registered documents in its text. `special` is true for a text that is not the
    /// template's.
    fn around(
        codec: &TextCodec,
        text: &str,
        special: bool,
        library: Option<&SharedLibrary>,
    ) -> Result<Self, Refusal> {
        let found = library.map(|library| {
            let mut library = library.lock();
            let found = library.find(text).into_iter();
            let with_text =
                |one: FoundDocument| (library.get(&one.id).map(|known| Arc::clone(&known.text)), one);
            found.map(with_text).collect::<Vec<_>>()
        });
        let found = found.unwrap_or_default();
        let places: Vec<Range<usize>> = found.iter().map(|(_, found)| found.range.clone()).collect();
        let CutPrompt { tokens, chunks } = PromptTokens::around(codec, text, &places, special)?;
        let part = |(number, document): (usize, Option<usize>)| match document.and_then(|at| found.get(at)) {
            Some((text, found)) => PartName {
                id: found.id.to_string(),
                span: Some(found.range.clone()),
                registered: text.clone(),
            },
            None => PartName { id: format!("text {}", number + 1), span: None, registered: None },
        };
        let parts = chunks.into_iter().enumerate().map(part).collect();
        Ok(Self { tokens, parts, not_reusable: None })
    }
}

fn of_text(
    codec: &TextCodec,
    text: String,
    documents: &Documents,
    library: Option<&SharedLibrary>,
    context: usize,
) -> Result<BuiltPrompt, Refusal> {
    let (system, documents, question) = match documents.separator.as_deref() {
        Some(separator) => match pieces(&text, separator)? {
            Some((lead, documents, question)) => (lead.to_owned(), documents, question.to_owned()),
            None => (text, Vec::new(), String::new()),
        },
        None if documents.given.is_empty() => (text, Vec::new(), String::new()),
        None => (String::new(), written(documents.given.to_vec()), text),
    };
    if documents.is_empty() {
        return BuiltPrompt::around(codec, &format!("{system}{question}"), true, library);
    }
    check_documents(&documents, context)?;
    let texts: Vec<&str> = documents.iter().map(|document| document.text.as_str()).collect();
    let tokens = PromptTokens::from_parts(codec, &system, texts, &question, true).map_err(refused)?;
    Ok(BuiltPrompt { tokens, parts: names(documents), not_reusable: None })
}

// Decision: docs/decisions/serve.md#documents-stand-in-front-of-the-conversation
fn of_conversation(
    codec: &TextCodec,
    mut messages: Vec<Message>,
    documents: &Documents,
    library: Option<&SharedLibrary>,
    context: usize,
) -> Result<BuiltPrompt, Refusal> {
    Message::check_answerable(&messages).map_err(wrong_messages)?;
    if !codec.takes_developers() {
        for message in messages.iter_mut().filter(|message| message.role() == Role::Developer) {
            *message = message.with_role(Role::System);
        }
    }
    let Cut { documents, place } = cut(&mut messages, documents)?;
    if documents.is_empty() {
        let text = codec.conversation_text(&messages).map_err(wrong_messages)?;
        return BuiltPrompt::around(codec, &text, false, library);
    }
    check_documents(&documents, context)?;
    let texts: Vec<&str> = documents.iter().map(|document| document.text.as_str()).collect();
    let around = PromptTokens::conversation_around(codec, &messages, place, texts.iter().copied());
    match around {
        Ok(tokens) => return Ok(BuiltPrompt { tokens, parts: names(documents), not_reusable: None }),
        // The template may refuse the conversation itself. In that case, it does so again below.
        Err(EngineError::Model(ModelError::Template { .. })) => {}
        Err(error) => return Err(refused(error)),
    }
    let (message, at) = place;
    let text = messages[message].text().into_owned();
    let joined = format!("{}{}{}", &text[..at], texts.concat(), &text[at..]);
    messages[message] = messages[message].with_text(joined);
    let tokens = codec.conversation(&messages).map_err(wrong_messages)?;
    Ok(BuiltPrompt { not_reusable: Some(TEMPLATE), ..BuiltPrompt::plain(tokens) })
}

/// The chat template does not write the message with the documents exactly once.
const TEMPLATE: &str = "template";

/// Takes the documents out of a conversation.
fn cut(messages: &mut [Message], documents: &Documents) -> Result<Cut, Refusal> {
    let is_users = |message: &Message| message.role() == Role::User;
    if let Some(separator) = &documents.separator {
        for (number, message) in messages.iter_mut().enumerate().filter(|(_, message)| is_users(message)) {
            let text = message.text().into_owned();
            if let Some((lead, documents, question)) = pieces(&text, separator)? {
                *message = message.with_text(format!("{lead}{question}"));
                return Ok(Cut { documents, place: (number, lead.len()) });
            }
        }
        return Ok(Cut { documents: Vec::new(), place: (0, 0) });
    }
    let first = messages.iter().position(is_users);
    let mut all = documents.given.to_vec();
    let mut place = (first.unwrap_or(0), 0);
    if documents.from_parts {
        let several =
            |message: &Message| is_users(message) && message.part_texts().is_some_and(|p| p.len() > 1);
        if let Some(number) = messages.iter().position(several) {
            let texts = messages[number].part_texts().unwrap_or_default();
            if let Some((question, parts)) = texts.split_last() {
                let document = |(i, text): (usize, &&str)| {
                    Document::titled(format!("messages[{number}].content[{i}]"), None, text)
                };
                all.extend(parts.iter().enumerate().map(document));
                messages[number] = messages[number].with_text(*question);
                place = (number, 0);
            }
        }
    }
    if !all.is_empty() && first.is_none() {
        let reason = "documents stand in front of the user's first message, and no message is the user's";
        return Err(Refusal::field("documents", reason));
    }
    Ok(Cut { documents: written(all), place })
}

/// Returns documents as they are written into a prompt: each ends with a line break, so that the next one does not continue
/// its last word. Pieces of a text at a separator stay as they are.
fn written(mut documents: Vec<Document>) -> Vec<Document> {
    for document in &mut documents {
        if let Cow::Owned(text) = document_text(&document.text) {
            document.text = text;
        }
    }
    documents
}

/// Splits a text into what stands before its documents, the documents, and what stands after them. `None` if the
/// separator occurs fewer than two times.
#[allow(clippy::type_complexity, reason = "three parts of a text")]
fn pieces<'a>(text: &'a str, separator: &str) -> Result<Option<(&'a str, Vec<Document>, &'a str)>, Refusal> {
    if separator.is_empty() {
        let reason =
            "the separator is empty and would split the text everywhere; give it at least one character";
        return Err(Refusal::field("separator", reason));
    }
    let Some((lead, rest)) = text.split_once(separator) else { return Ok(None) };
    let Some((documents, question)) = rest.rsplit_once(separator) else { return Ok(None) };
    let document = |(i, text): (usize, &str)| Document::titled(format!("part {}", i + 1), None, text);
    Ok(Some((lead, documents.split(separator).enumerate().map(document).collect(), question)))
}

/// Checks documents before they are tokenised.
fn check_documents(documents: &[Document], context: usize) -> Result<(), Refusal> {
    // Each has a token at least.
    if documents.len() >= context {
        let reason = format!(
            "the prompt has {} documents, but the context of this model has {context} tokens; give fewer",
            documents.len()
        );
        return Err(Refusal { code: Some("context_length_exceeded"), ..Refusal::new(Kind::TooLong, reason) });
    }
    match documents.iter().find(|document| document.text.trim().is_empty()) {
        Some(document) => Err(Refusal::field(
            document.id.clone(),
            format!("the document {:?} is empty; remove it, or add some text", document.id),
        )),
        None => Ok(()),
    }
}

fn names(documents: Vec<Document>) -> Vec<PartName> {
    let name = |document: Document| PartName { id: document.id, span: None, registered: None };
    documents.into_iter().map(name).collect()
}

fn refused(error: EngineError) -> Refusal {
    match error {
        EngineError::Model(error) => wrong_messages(error),
        error => error.into(),
    }
}

fn wrong_messages(error: ModelError) -> Refusal {
    let param = matches!(error, ModelError::Messages(_)).then(|| "messages".to_owned());
    Refusal { param, ..error.into() }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    /// Returns a codec with a token for each byte, also for line breaks, and a template that writes the messages.
    fn codec() -> TextCodec {
        let letters = "abq#SĊ".chars();
        let vocabulary: serde_json::Map<String, serde_json::Value> =
            letters.zip(0..).map(|(letter, id)| (letter.to_string(), json!(id))).collect();
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "post_processor": null, "pre_tokenizer": bytes, "decoder": bytes,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        });
        let template = json!({"chat_template": "{% for m in messages %}S{{ m.content }}{% endfor %}"});
        TextCodec::from_bytes(tokenizer.to_string().as_bytes(), Some(template.to_string().as_bytes()))
            .unwrap()
    }

    fn conversation(text: &str) -> AskedPrompt {
        AskedPrompt::Conversation { messages: vec![Message::new(Role::User, text)], variables: Vec::new() }
    }

    #[rstest]
    #[case("S#a#bb#q")]
    #[case("S#a\n#b\n#q")]
    fn a_separator_adds_nothing_to_its_pieces(#[case] text: &str) {
        let codec = codec();
        let separated = || Documents { separator: Some("#".to_owned()), ..Documents::default() };
        let built = build(&codec, AskedPrompt::Text(text.to_owned()), &separated(), None, 100).unwrap();
        assert_eq!(built.tokens, PromptTokens::split(&codec, text, "#", true).unwrap());
        let built = build(&codec, conversation(text), &separated(), None, 100).unwrap();
        assert_eq!(built.tokens, PromptTokens::split_chat(&codec, text, "#").unwrap());
    }

    #[test]
    fn documents_may_be_the_beginning_of_a_prompt() {
        let codec = codec();
        let given = [Document { id: "a".to_owned(), text: "a".to_owned() }].into();
        let documents = Documents { given, ..Documents::default() };
        let built = build(&codec, AskedPrompt::Text("q".to_owned()), &documents, None, 100).unwrap();
        assert_eq!(built.tokens, PromptTokens::from_parts(&codec, "", ["a\n"], "q", true).unwrap());
        assert_eq!((built.parts.len(), built.not_reusable), (1, None));
    }

    #[test]
    fn documents_end_with_a_line_break() {
        let codec = codec();
        let document = |text: &str| Document { id: text.to_owned(), text: text.to_owned() };
        let documents = Documents { given: [document("a"), document("b\n")].into(), ..Documents::default() };
        let built = build(&codec, conversation("q"), &documents, None, 100).unwrap();
        let expected = PromptTokens::from_parts(&codec, "S", ["a\n", "b\n"], "q", false).unwrap();
        assert_eq!(built.tokens, expected);
    }
}
