//! Splits text into the parts of a prompt. Each part is tokenised separately.

use std::borrow::Cow;

use kvchunk::{ChunkedPrompt, SplitPrompt};
use kvmodel::{Message, Role, TextCodec};

use crate::error::Result;
use crate::request::PromptTokens;

impl PromptTokens {
    /// Splits `text` at every `separator`, and encodes each part separately. If `special` is true, special
    /// tokens are added, but only before the system prompt. A string with fewer than two separators becomes
    /// an ordinary prompt.
    ///
    /// # Errors
    /// Returns [`kvchunk::Error::EmptySeparator`] or [`kvchunk::Error::EmptyPart`] if the string cannot be
    /// split, and the errors of [`TextCodec::encode`].
    pub fn split(codec: &TextCodec, text: &str, separator: &str, special: bool) -> Result<Self> {
        match SplitPrompt::new(text, separator)? {
            SplitPrompt::Plain(text) => Ok(Self::Plain(codec.encode(text, special)?)),
            SplitPrompt::Chunked { system, chunks, question } => {
                Self::from_parts(codec, system, chunks, question, special)
            }
        }
    }

    /// Encodes each part of a chunked prompt separately. If `special` is true, special tokens are added, but
    /// only before the system prompt, which may be empty.
    ///
    /// # Errors
    /// Returns [`kvchunk::Error::EmptyPart`] if another part has no tokens, and the errors of
    /// [`TextCodec::encode`].
    pub fn from_parts<'a>(
        codec: &TextCodec,
        system: &str,
        documents: impl IntoIterator<Item = &'a str>,
        question: &str,
        special: bool,
    ) -> Result<Self> {
        let encode = |text: &str| codec.encode(text, false);
        let chunks = documents.into_iter().map(encode).collect::<kvmodel::Result<_>>()?;
        let (system, question) = (codec.encode(system, special)?, encode(question)?);
        Ok(Self::Chunked(ChunkedPrompt::new(system, chunks, question)?))
    }

    // Decision: docs/decisions/models.md#a-chat-is-split-before-its-template-is-applied
    /// Encodes `text` as the single message of a conversation, in the model's chat template, and splits it
    /// like [`split`](Self::split).
    ///
    /// The text is split before the template is applied, so separators in the template's own text have no
    /// effect. Template text before the message belongs to the system prompt, and template text after it to
    /// the question. The template writes its own special tokens, so none are added.
    ///
    /// # Errors
    /// Returns the errors of [`split`](Self::split) and of [`TextCodec::conversation`].
    pub fn split_chat(codec: &TextCodec, text: &str, separator: &str) -> Result<Self> {
        let SplitPrompt::Chunked { system, chunks, question } = SplitPrompt::new(text, separator)? else {
            return Self::from_conversation(codec, &[Message::new(Role::User, text)], []);
        };
        Self::from_chat_parts(codec, system, chunks, question)
    }

    /// Encodes the parts of a chunked prompt as the single message of a conversation, like
    /// [`split_chat`](Self::split_chat).
    ///
    /// # Errors
    /// Returns the errors of [`from_parts`](Self::from_parts) and of [`TextCodec::around_message`].
    pub fn from_chat_parts<'a>(
        codec: &TextCodec,
        system: &str,
        documents: impl IntoIterator<Item = &'a str>,
        question: &str,
    ) -> Result<Self> {
        let (before, after) = codec.around_message(&[])?;
        Self::from_parts(codec, &format!("{before}{system}"), documents, &format!("{question}{after}"), false)
    }

    /// Encodes a conversation in the model's chat template, up to the beginning of the answer. Documents are
    /// placed before the text of the last message, which is the question. Everything before the documents is
    /// the system prompt. If there are no documents, the result is an ordinary prompt.
    ///
    /// # Errors
    /// Returns [`kvmodel::Error::Messages`] if the last message cannot be answered, or is not the user's and
    /// there are documents. Returns [`kvmodel::Error::Template`] if the template fails or rejects the conversation, or if there are
    /// documents and the template does not write the last message exactly once.
    pub fn from_conversation<'a>(
        codec: &TextCodec,
        messages: &[Message],
        documents: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self> {
        let mut documents = documents.into_iter().peekable();
        if documents.peek().is_none() {
            return Ok(Self::Plain(codec.conversation(messages)?));
        }
        Message::check_answerable(messages)?;
        let Some((last, earlier)) = messages.split_last().filter(|(last, _)| last.role() == Role::User)
        else {
            return Err(kvmodel::Error::Messages(format!(
                "the last message, {}, is not the user's; documents stand before a question of the user",
                messages.len()
            ))
            .into());
        };
        let (before, after) = codec.around_message(earlier)?;
        let question = format!("{}{after}", last.text());
        Self::from_parts(codec, &before, documents, &question, false)
    }

    // Decision: docs/decisions/serve.md#documents-stand-in-front-of-the-conversation
    /// Encodes a conversation with documents in the middle: they stand at byte `at` of the text of the message with the
    /// zero-based index `message`. Everything before the documents is the system prompt, and everything after them is
    /// the question. If the documents stand before the text of the user's first message, they stay where they are while
    /// the conversation grows, unlike with [`from_conversation`](Self::from_conversation).
    ///
    /// # Errors
    /// Returns the errors of [`TextCodec::conversation_cut`], and [`kvchunk::Error::EmptyPart`] if a document has no
    /// tokens.
    pub fn conversation_around<'a>(
        codec: &TextCodec,
        messages: &[Message],
        (message, at): (usize, usize),
        documents: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self> {
        let (before, after) = codec.conversation_cut(messages, (message, at))?;
        Self::from_parts(codec, &before, documents, &after, false)
    }
}

// Decision: docs/decisions/models.md#a-document-file-ends-with-a-line-break
/// Returns a document's text with a line break at its end, so that the next part of the prompt does not continue its
/// last word.
pub fn document_text(text: &str) -> Cow<'_, str> {
    if text.ends_with('\n') { Cow::Borrowed(text) } else { Cow::Owned(format!("{text}\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// A tokenizer with whole words as tokens. It adds a begin token before the text and an end token after
    /// it, as in `BERT`.
    const WORDS: &str = include_str!("../../../kvmodel/tests/words.json");

    fn codec(config: Option<&str>) -> TextCodec {
        TextCodec::from_bytes(WORDS.as_bytes(), config.map(str::as_bytes)).unwrap()
    }

    #[test]
    fn specials_stand_before_the_system_part_only() {
        let prompt = PromptTokens::split(&codec(None), "a##b##c", "##", true).unwrap();
        let expected = ChunkedPrompt::new(vec![0, 3], vec![vec![4]], vec![5]).unwrap();
        assert_eq!(prompt, PromptTokens::Chunked(expected));
        assert_eq!(
            PromptTokens::split(&codec(None), "a b", "##", true).unwrap(),
            PromptTokens::Plain(vec![0, 3, 4])
        );
        assert_eq!(
            PromptTokens::split(&codec(None), "a b", "##", false).unwrap(),
            PromptTokens::Plain(vec![3, 4])
        );
    }

    /// Tests a vocabulary with tokens that contain the separator, as byte-pair merges can produce.
    #[test]
    fn rule_1_a_separator_within_a_token_delimits() {
        let words = r###""a":3,"b":4,"c":5,"a##b":6,"##b":7,"##":8,"b##":9"###;
        let text = WORDS.replace(r#""a":3,"b":4,"c":5"#, words);
        let text = text.replace(r#"{"type":"Whitespace"}"#, r#"{"type":"WhitespaceSplit"}"#);
        let codec = TextCodec::from_bytes(text.as_bytes(), None).unwrap();
        assert_eq!(codec.encode("a##b ##b b## ##", false).unwrap(), [6, 7, 9, 8], "one token each");
        let cut = ChunkedPrompt::new(vec![3], vec![vec![4]], vec![5]).unwrap();
        assert_eq!(PromptTokens::split(&codec, "a##b##c", "##", false).unwrap(), PromptTokens::Chunked(cut));
        // One separator is not enough, so the text stays unchanged and is a token again.
        assert_eq!(PromptTokens::split(&codec, "a##b", "##", false).unwrap(), PromptTokens::Plain(vec![6]));
    }

    #[test]
    fn a_chat_is_in_the_template_and_a_missing_template_is_an_error() {
        let config = r#"{"bos_token":{"content":"<s>"},"chat_template":
            "{{ bos_token }}{% for m in messages %}{{ m.content.strip() }}{% endfor %}{% if add_generation_prompt %} c{% endif %}"}"#;
        let prompt = PromptTokens::split_chat(&codec(Some(config)), " a ", "##").unwrap();
        assert_eq!(prompt, PromptTokens::Plain(vec![0, 3, 5]));
        let error = PromptTokens::split_chat(&codec(None), "a", "##");
        assert!(matches!(error, Err(Error::Model(kvmodel::Error::Template { .. }))));
    }

    #[test]
    fn documents_of_a_conversation_stand_before_the_last_message() {
        let config = r#"{"chat_template":"{% for m in messages %}{{ m.content }} {% if m.role == 'user' %}b {% endif %}{% endfor %}"}"#;
        let codec = codec(Some(config));
        let messages = [Message::new(Role::System, "c"), Message::new(Role::User, "a")];
        let parts = PromptTokens::from_conversation(&codec, &messages, ["a b", "c"]).unwrap();
        let expected = ChunkedPrompt::new(vec![5], vec![vec![3, 4], vec![5]], vec![3, 4]).unwrap();
        assert_eq!(parts, PromptTokens::Chunked(expected));
        assert_eq!(parts.iter().collect::<Vec<_>>(), [5, 3, 4, 5, 3, 4]);
        assert_eq!(
            PromptTokens::from_conversation(&codec, &messages, []).unwrap(),
            PromptTokens::Plain(vec![5, 3, 4])
        );
        let begun = [Message::new(Role::User, "a"), Message::new(Role::Assistant, "c")];
        let error = PromptTokens::from_conversation(&codec, &begun, ["a"]).unwrap_err().to_string();
        assert!(error.contains("the last message, 2, is not the user's"), "{error}");
    }

    #[test]
    fn a_conversation_grows_behind_its_documents() {
        let config = r#"{"chat_template":"{% for m in messages %}{{ m.content }} {% if m.role == 'user' %}b {% endif %}{% endfor %}"}"#;
        let codec = codec(Some(config));
        let begun = [Message::new(Role::System, "c"), Message::new(Role::User, "a")];
        let around = |codec: &TextCodec, messages: &[Message], place| {
            PromptTokens::conversation_around(codec, messages, place, ["a b", "c"])
        };
        let first = around(&codec, &begun, (1, 0)).unwrap();
        assert_eq!(first, PromptTokens::from_conversation(&codec, &begun, ["a b", "c"]).unwrap());
        let later =
            [&begun[..], &[Message::new(Role::Assistant, "c"), Message::new(Role::User, "b")]].concat();
        let chunks = vec![vec![3, 4], vec![5]];
        let expected = ChunkedPrompt::new(vec![5], chunks.clone(), vec![3, 4, 5, 4, 4]).unwrap();
        assert_eq!(around(&codec, &later, (1, 0)).unwrap(), PromptTokens::Chunked(expected));
        let inside = [Message::new(Role::User, "a b c")];
        let expected = ChunkedPrompt::new(vec![3], chunks, vec![4, 5, 4]).unwrap();
        assert_eq!(around(&codec, &inside, (0, 2)).unwrap(), PromptTokens::Chunked(expected));
        let parts =
            r#"[{"role":"system","content":"c"},{"role":"user","content":[{"type":"text","text":"a"}]}]"#;
        assert_eq!(around(&codec, &Message::list(parts).unwrap(), (1, 0)).unwrap(), first);
        let bare = around(&codec, &begun[1..], (0, 0)).unwrap();
        let expected = ChunkedPrompt::new(vec![], vec![vec![3, 4], vec![5]], vec![3, 4]).unwrap();
        assert_eq!(bare, PromptTokens::Chunked(expected), "the template writes nothing in front");
        for (messages, place, reason) in [
            (&begun[..], (2, 0), "message 3 has no text that can be cut at byte 0"),
            (&begun, (1, 9), "message 2 has no text that can be cut at byte 9"),
            (&[Message::new(Role::User, "é")], (0, 1), "message 1 has no text that can be cut at byte 1"),
        ] {
            let error = around(&codec, messages, place).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let twice = r#"{"chat_template":"a {{ messages[0].content }}{{ messages[0].content }}"}"#;
        let twice = TextCodec::from_bytes(WORDS.as_bytes(), Some(twice.as_bytes())).unwrap();
        let error = around(&twice, &begun[1..], (0, 0)).unwrap_err().to_string();
        assert!(error.contains("does not write message 1 exactly once"), "{error}");
    }

    #[test]
    fn a_chunked_chat_is_cut_before_the_template_is_applied() {
        let config = r#"{"chat_template":"a ## b {{ messages[0].content }} c"}"#;
        let prompt = PromptTokens::split_chat(&codec(Some(config)), "a##b##c", "##").unwrap();
        // The template's own "##" is an unknown word in the system part.
        let expected = ChunkedPrompt::new(vec![3, 2, 4, 3], vec![vec![4]], vec![5, 5]).unwrap();
        assert_eq!(prompt, PromptTokens::Chunked(expected));
        let twice = r#"{"chat_template":"{{ messages[0].content }}{{ messages[0].content }}"}"#;
        let error = PromptTokens::split_chat(&codec(Some(twice)), "a##b##c", "##");
        assert!(matches!(error, Err(Error::Model(kvmodel::Error::Template { .. }))));
    }
}
