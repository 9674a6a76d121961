//! How questions are put to a model.

use kvmodel::{PromptTokens, TextCodec};

use super::Question;
use crate::error::Result;

/// How questions are put to a model.
///
/// ```
/// # use kvlab::PromptStyle;
/// // What an instruct model wants: its chat template, and an empty line behind each document.
/// let style = PromptStyle { chat: true, separator: "\n\n".to_owned() };
/// assert_ne!(style, PromptStyle::default());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptStyle {
    /// Puts the prompt into the model's chat template, as the single message of a conversation.
    pub chat: bool,
    /// The text behind the system prompt and behind each document. It belongs to what it follows, so that a document has the
    /// same tokens wherever it stands.
    pub separator: String,
}

impl PromptStyle {
    /// Returns the prompt of a question, with its documents in the given order.
    ///
    /// # Errors
    /// Returns the errors of the tokenizer and of the chat template.
    pub fn prompt(&self, question: &Question, order: &[usize], codec: &TextCodec) -> Result<PromptTokens> {
        let ended = |text: &str| format!("{text}{}", self.separator);
        let documents: Vec<String> =
            order.iter().filter_map(|&i| question.documents.get(i)).map(|text| ended(text)).collect();
        let (system, documents) = (ended(&question.system), documents.iter().map(String::as_str));
        Ok(if self.chat {
            codec.chat_prompt_of(&system, documents, &question.question)?
        } else {
            codec.prompt_of(&system, documents, &question.question, true)?
        })
    }
}
