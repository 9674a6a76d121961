//! Converts text to tokens and back, and applies chat templates.
//!
//! ```text
//! messages ─ template ─► text ─ codec ─► tokens ─ engine ─► tokens ─ stream ─► text, up to a stop string
//! ```

mod clock;
mod decoding;
mod generation;
mod json;
mod message;
mod stream;
mod template;

use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer;

pub use message::{Message, Role};
pub use stream::TextStream;

use crate::error::{Error, Result};
use crate::files::{FileContents, SmallFile};
use template::ChatTemplate;

/// A tokenizer, with the chat template that belongs to it.
#[derive(Debug)]
pub struct TextCodec {
    tokenizer: Tokenizer,
    digest: blake3::Hash,
    template: ChatTemplate,
}

/// The name of the tokenizer's file in a model's folder.
const TOKENIZER: &str = "tokenizer.json";
/// The name of the file with the special tokens and the chat template.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// A placeholder for a message's content, used to find the text that a template writes around the content.
/// It is a private-use character that no template writes and no prompt needs.
const MESSAGE: &str = "\u{F8FE}";

impl TextCodec {
    /// Reads `tokenizer.json`, and the chat template from `chat_template.jinja` or, if there is none, from
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a file cannot be read, and [`Error::File`], with the path, if a file is
    /// malformed.
    pub fn from_directory(dir: &Path) -> Result<Self> {
        let config_path = dir.join(TOKENIZER_CONFIG);
        let config = SmallFile::read_if_there(config_path.clone())?;
        let config = config_of(config.as_ref().map(SmallFile::contents))?;
        let tokenizer = SmallFile::read(dir.join(TOKENIZER))?;
        let codec = Self::of(tokenizer.contents(), &config, &config_path.display().to_string())?;
        let Some(template) = SmallFile::read_if_there(dir.join("chat_template.jinja"))? else {
            return Ok(codec);
        };
        let FileContents { path, bytes } = template.contents();
        let text = String::from_utf8_lossy(bytes).into_owned();
        Ok(Self { template: codec.template.with_text(text, path.display().to_string()), ..codec })
    }

    /// Parses a codec from the bytes of `tokenizer.json` and of `tokenizer_config.json`, which has the chat
    /// template.
    ///
    /// # Errors
    /// Returns [`Error::File`], with the name of the file, if a file is malformed.
    pub fn from_bytes(tokenizer: &[u8], config: Option<&[u8]>) -> Result<Self> {
        let contents = |name, bytes| FileContents { path: Path::new(name), bytes };
        let config = config_of(config.map(|bytes| contents(TOKENIZER_CONFIG, bytes)))?;
        Self::of(contents(TOKENIZER, tokenizer), &config, TOKENIZER_CONFIG)
    }

    /// Parses a `tokenizer.json`, with the special tokens and the chat template from a
    /// `tokenizer_config.json`. `place` names the source of the chat template: the file, and the field if
    /// it is not the usual one.
    pub(crate) fn of(tokenizer: FileContents<'_>, config: &Value, place: &str) -> Result<Self> {
        let FileContents { path, bytes } = tokenizer;
        let digest = blake3::hash(bytes);
        let bad = |e: tokenizers::Error| Error::Tokenizer(e.to_string()).in_file(path);
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(bad)?;
        // Some files contain limits that were set for training, but prompts must not be cut silently.
        tokenizer.with_truncation(None).map_err(bad)?;
        tokenizer.with_padding(None);
        Ok(Self { tokenizer, digest, template: ChatTemplate::of(config, place) })
    }

    /// Returns the hash of `tokenizer.json`, which identifies the tokenizer in cache keys.
    pub fn digest(&self) -> &[u8; 32] {
        self.digest.as_bytes()
    }

    /// Encodes a string. If `special` is true, the result includes the special tokens that the tokenizer puts
    /// *before* the string. Special tokens after the string are always left out, because the prompt
    /// continues.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, special).map_err(|e| Error::Tokenizer(e.to_string()))?;
        let mut end = encoding.len();
        if special {
            let plain =
                self.tokenizer.encode(text, false).map_err(|e| Error::Tokenizer(e.to_string()))?.len();
            let added = encoding.get_special_tokens_mask();
            while end > plain && added[end - 1] == 1 {
                end -= 1;
            }
        }
        Ok(encoding.get_ids()[..end].to_vec())
    }

    /// Decodes tokens to text, without special tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens, true).map_err(|e| Error::Tokenizer(e.to_string()))
    }

    /// Encodes a conversation in the model's chat template, up to the beginning of the answer. The template
    /// writes its own special tokens, so none are added.
    ///
    /// # Errors
    /// Returns [`Error::Messages`] if the last message is not the user's, and [`Error::Template`] if the
    /// template fails or rejects the conversation.
    pub fn conversation(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Message::check_answerable(messages)?;
        self.encode(&self.template.render(messages)?, false)
    }

    /// Returns the text that the chat template writes before and after the content of a user's message that
    /// follows the `earlier` messages.
    ///
    /// # Errors
    /// Returns [`Error::Template`] if the template fails or rejects the conversation, or does not write the
    /// message exactly once.
    pub fn around_message(&self, earlier: &[Message]) -> Result<(String, String)> {
        let mut messages = earlier.to_vec();
        messages.push(Message::new(Role::User, MESSAGE));
        let rendered = self.template.render(&messages)?;
        let (before, after) = rendered
            .split_once(MESSAGE)
            .filter(|(_, after)| !after.contains(MESSAGE))
            .ok_or_else(|| self.template.failure("it does not render the message exactly once"))?;
        Ok((before.to_owned(), after.to_owned()))
    }

    /// Returns the ID of a special token.
    fn special_token(&self, text: &str) -> Option<u32> {
        let id = self.tokenizer.token_to_id(text)?;
        self.tokenizer.get_added_tokens_decoder().get(&id).filter(|token| token.special).map(|_| id)
    }
}

/// Reads an optional `tokenizer_config.json`.
fn config_of(file: Option<FileContents<'_>>) -> Result<Value> {
    let Some(FileContents { path, bytes }) = file else { return Ok(Value::Null) };
    serde_json::from_slice(bytes).map_err(|e| Error::Tokenizer(e.to_string()).in_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer with whole words as tokens. It adds a begin token and an end token around the text, as
    /// in `BERT`.
    const WORDS: &str = include_str!("../../tests/words.json");

    fn codec(config: Option<&str>) -> TextCodec {
        TextCodec::from_bytes(WORDS.as_bytes(), config.map(str::as_bytes)).unwrap()
    }

    #[test]
    fn a_chat_is_in_the_template_and_a_missing_template_is_an_error() {
        let config = r#"{"bos_token":{"content":"<s>"},"chat_template":
            "{{ bos_token }}{% for m in messages %}{{ m.content.strip() }}{% endfor %}{% if add_generation_prompt %} c{% endif %}"}"#;
        let ask = |codec: TextCodec, text| codec.conversation(&[Message::new(Role::User, text)]);
        assert_eq!(ask(codec(Some(config)), " a ").unwrap(), [0, 3, 5]);
        assert!(matches!(ask(codec(None), "a"), Err(Error::Template { .. })));
    }

    #[test]
    fn a_conversation_without_a_question_is_refused() {
        let codec = codec(Some(r#"{"chat_template":"a"}"#));
        let error = codec.conversation(&[]).unwrap_err().to_string();
        assert!(error.contains("the list is empty"), "{error}");
        let messages = [Message::new(Role::User, "a"), Message::new(Role::Assistant, "b")];
        let error = codec.conversation(&messages).unwrap_err().to_string();
        assert!(error.contains("the last message, 2, has the role assistant"), "{error}");
    }

    #[test]
    fn prompts_are_never_cut_by_the_tokenizer() {
        let limit =
            r#""truncation":{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}"#;
        let text = WORDS.replace(r#""truncation":null"#, limit);
        let codec = TextCodec::from_bytes(text.as_bytes(), None).unwrap();
        assert_eq!(codec.encode("a b c a b", false).unwrap(), [3, 4, 5, 3, 4]);
    }

    #[test]
    fn special_tokens_stand_before_a_text_only() {
        assert_eq!(codec(None).encode("a b", true).unwrap(), [0, 3, 4]);
        assert_eq!(codec(None).encode("a b", false).unwrap(), [3, 4]);
    }

    #[test]
    fn the_text_around_a_message_is_known_only_if_it_stands_there_once() {
        let once = codec(Some(r#"{"chat_template":"a {{ messages[0].content }} c"}"#));
        assert_eq!(once.around_message(&[]).unwrap(), ("a ".to_owned(), " c".to_owned()));
        let twice = codec(Some(r#"{"chat_template":"{{ messages[0].content }}{{ messages[0].content }}"}"#));
        assert!(matches!(twice.around_message(&[]), Err(Error::Template { .. })));
    }

    #[test]
    fn broken_files_are_errors() {
        let said = |result: Result<TextCodec>| result.map(drop).unwrap_err().to_string();
        let error = said(TextCodec::from_bytes(b"{}", None));
        assert!(error.starts_with("tokenizer.json: "), "{error}");
        let error = said(TextCodec::from_bytes(WORDS.as_bytes(), Some(b"[")));
        assert!(error.starts_with("tokenizer_config.json: "), "{error}");
    }
}
