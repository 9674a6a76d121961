//! The form of prompts.

use kvengine::PromptTokens;
use kvmodel::TextCodec;

use super::Question;
use crate::error::Result;

/// The form in which a question is put to a model.
///
/// ```
/// # use kvlab::PromptStyle;
/// // An instruct model needs its chat template, and an empty line after each document.
/// let style = PromptStyle { chat: true, separator: "\n\n".to_owned(), ..PromptStyle::default() };
/// assert_ne!(style, PromptStyle::default());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptStyle {
    /// True to put the prompt into the model's chat template, as a conversation's only message.
    pub chat: bool,
    /// The text after the system prompt and after each document. It counts as part of the text that it
    /// follows, so a document has the same tokens at any position.
    pub separator: String,
    /// Documents that the prompt's documents may see while their KV is computed, but that the question never
    /// sees; see [`kvchunk::ComputeMode::Behind`].
    pub decoys: Vec<String>,
}

impl PromptStyle {
    /// Returns the prompt for a question, with its documents in the given order.
    ///
    /// # Errors
    /// Returns the errors of the tokenizer and the chat template.
    pub fn prompt(&self, question: &Question, order: &[usize], codec: &TextCodec) -> Result<PromptTokens> {
        // Decision: docs/decisions/chunks.md#a-part-that-contains-the-separator-is-refused-never-split
        let ended = |text: &str| format!("{text}{}", self.separator);
        let documents: Vec<String> =
            order.iter().filter_map(|&i| question.documents.get(i)).map(|text| ended(text)).collect();
        let (system, documents) = (ended(&question.system), documents.iter().map(String::as_str));
        let prompt = if self.chat {
            PromptTokens::from_chat_parts(codec, &system, documents, &question.question)?
        } else {
            PromptTokens::from_parts(codec, &system, documents, &question.question, true)?
        };
        let decoys = self.decoys.iter().map(|text| codec.encode(&ended(text), false));
        Ok(prompt.with_decoys(decoys.collect::<kvmodel::Result<_>>()?)?)
    }
}
