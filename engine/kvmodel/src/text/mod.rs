//! Text to tokens and back, and chat templates.
//!
//! ```text
//! messages ── template ──► text ── codec ──► tokens ── engine ──► tokens ── stream ──► text, up to a stop string
//! ```

mod clock;
mod generation;
mod json;
mod message;
mod stream;
mod template;

use std::path::Path;

use kvchunk::{ChunkedPrompt, SplitPrompt};
use serde_json::Value;
use tokenizers::Tokenizer;

pub use message::{Message, Role};
pub use stream::TextStream;

use crate::error::{Error, Result};
use crate::files::{Contents, SmallFile};
use template::ChatTemplate;

/// A tokenizer.json, with the chat template beside it.
#[derive(Debug)]
pub struct TextCodec {
    tokenizer: Tokenizer,
    digest: blake3::Hash,
    template: ChatTemplate,
}

/// The names of the files in the directory of a model.
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The stand-in for the message when a template is applied to parts: a private-use character that no template
/// writes and no prompt needs.
const MESSAGE: &str = "\u{F8FE}";

/// A prompt as tokens, ordinary or chunked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptTokens {
    /// An ordinary prompt, computed under full attention.
    Plain(Vec<u32>),
    /// A chunked prompt, whose chunks do not see each other.
    Chunked(ChunkedPrompt),
}

impl PromptTokens {
    /// Returns the number of tokens of the prompt.
    pub fn len(&self) -> usize {
        match self {
            Self::Plain(tokens) => tokens.len(),
            Self::Chunked(prompt) => prompt.total_tokens(),
        }
    }

    /// Returns true if the prompt has no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over all tokens in the prompt's order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let (plain, parts) = match self {
            Self::Plain(tokens) => (tokens.as_slice(), None),
            Self::Chunked(prompt) => (prompt.system(), Some(prompt)),
        };
        let rest =
            parts.into_iter().flat_map(|prompt| prompt.chunks().iter().flatten().chain(prompt.question()));
        plain.iter().chain(rest).copied()
    }
}

impl TextCodec {
    /// Reads `tokenizer.json`, and the chat template of `chat_template.jinja` or else of
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a file cannot be read, and [`Error::File`] if one is malformed, with its path.
    pub fn from_directory(dir: &Path) -> Result<Self> {
        let config_path = dir.join(TOKENIZER_CONFIG);
        let config = SmallFile::read_if_there(config_path.clone())?;
        let config = config_of(config.as_ref().map(SmallFile::contents))?;
        let tokenizer = SmallFile::read(dir.join(TOKENIZER))?;
        let codec = Self::of(tokenizer.contents(), &config, &config_path.display().to_string())?;
        let Some(template) = SmallFile::read_if_there(dir.join("chat_template.jinja"))? else {
            return Ok(codec);
        };
        let Contents { path, bytes } = template.contents();
        let text = String::from_utf8_lossy(bytes).into_owned();
        Ok(Self { template: codec.template.with_text(text, path.display().to_string()), ..codec })
    }

    /// Reads a codec from the bytes of `tokenizer.json` and `tokenizer_config.json`, which holds the chat
    /// template.
    ///
    /// # Errors
    /// Returns [`Error::File`], with the name of the file, if one is malformed.
    pub fn from_bytes(tokenizer: &[u8], config: Option<&[u8]>) -> Result<Self> {
        let contents = |name, bytes| Contents { path: Path::new(name), bytes };
        let config = config_of(config.map(|bytes| contents(TOKENIZER_CONFIG, bytes)))?;
        Self::of(contents(TOKENIZER, tokenizer), &config, TOKENIZER_CONFIG)
    }

    /// Reads a `tokenizer.json`, with the special tokens and the chat template of a `tokenizer_config.json`. `place` is the
    /// file, and the field if it is another one, that the chat template is from.
    pub(crate) fn of(tokenizer: Contents<'_>, config: &Value, place: &str) -> Result<Self> {
        let Contents { path, bytes } = tokenizer;
        let digest = blake3::hash(bytes);
        let bad = |e: tokenizers::Error| Error::Tokenizer(e.to_string()).in_file(path);
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(bad)?;
        // Some files carry limits that were set for training. A prompt is never cut silently.
        tokenizer.with_truncation(None).map_err(bad)?;
        tokenizer.with_padding(None);
        Ok(Self { tokenizer, digest, template: ChatTemplate::of(config, place) })
    }

    /// Returns the hash of tokenizer.json: the tokenizer's revision in keys.
    pub fn digest(&self) -> &[u8; 32] {
        self.digest.as_bytes()
    }

    /// Encodes a text. If `special` is true, special tokens that the tokenizer puts *before* a text are kept.
    /// Special tokens that it appends are always removed, since the prompt goes on.
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

    /// Cuts a text at every `separator`, and encodes each part on its own. Special tokens stand only before
    /// the system prompt. Fewer than two separators make an ordinary prompt.
    pub fn prompt(&self, text: &str, separator: &str, special: bool) -> Result<PromptTokens> {
        match SplitPrompt::new(text, separator)? {
            SplitPrompt::Plain(text) => Ok(PromptTokens::Plain(self.encode(text, special)?)),
            SplitPrompt::Chunked { system, chunks, question } => {
                self.prompt_of(system, chunks, question, special)
            }
        }
    }

    /// Encodes the parts of a chunked prompt, each on its own. Special tokens stand only before the system
    /// prompt.
    pub fn prompt_of<'a>(
        &self,
        system: &str,
        documents: impl IntoIterator<Item = &'a str>,
        question: &str,
        special: bool,
    ) -> Result<PromptTokens> {
        let chunks = documents.into_iter().map(|part| self.encode(part, false)).collect::<Result<_>>()?;
        let (system, question) = (self.encode(system, special)?, self.encode(question, false)?);
        Ok(PromptTokens::Chunked(ChunkedPrompt::new(system, chunks, question)?))
    }

    /// Encodes `text` as the single message of a conversation, in the model's chat template. Otherwise like
    /// [`prompt`](Self::prompt).
    ///
    /// The text is cut before the template is applied, so a separator in the template's own text separates
    /// nothing. Template text before the message belongs to the system prompt, template text after it to the
    /// question. The template writes its own special tokens; none are added.
    pub fn chat_prompt(&self, text: &str, separator: &str) -> Result<PromptTokens> {
        let SplitPrompt::Chunked { system, chunks, question } = SplitPrompt::new(text, separator)? else {
            return self.conversation(&[Message::new(Role::User, text)], []);
        };
        self.chat_prompt_of(system, chunks, question)
    }

    /// Encodes the parts of a chunked prompt as the single message of a conversation, as
    /// [`chat_prompt`](Self::chat_prompt) does.
    pub fn chat_prompt_of<'a>(
        &self,
        system: &str,
        documents: impl IntoIterator<Item = &'a str>,
        question: &str,
    ) -> Result<PromptTokens> {
        let (before, after) = self.frame(&[])?;
        self.prompt_of(&format!("{before}{system}"), documents, &format!("{question}{after}"), false)
    }

    /// Encodes a conversation in the model's chat template, up to where the answer begins. Documents stand before the text of
    /// the last message, which is the question; everything before the documents is the system prompt. Without documents the
    /// prompt is an ordinary one.
    ///
    /// # Errors
    /// Returns [`Error::Messages`] if the last message is not the user's. Returns [`Error::Template`] if the template fails
    /// or refuses the conversation, or if there are documents and it does not write the last message exactly once.
    pub fn conversation<'a>(
        &self,
        messages: &[Message],
        documents: impl IntoIterator<Item = &'a str>,
    ) -> Result<PromptTokens> {
        Message::check_answerable(messages)?;
        let mut documents = documents.into_iter().peekable();
        if documents.peek().is_none() {
            return Ok(PromptTokens::Plain(self.encode(&self.template.render(messages)?, false)?));
        }
        let (earlier, last) = messages.split_at(messages.len() - 1);
        let (before, after) = self.frame(earlier)?;
        let question: String =
            last.iter().map(|last| last.content.as_str()).chain([after.as_str()]).collect();
        self.prompt_of(&before, documents, &question, false)
    }

    /// Returns the text of the chat template before and after a message of the user that follows `earlier` ones.
    fn frame(&self, earlier: &[Message]) -> Result<(String, String)> {
        let mut messages = earlier.to_vec();
        messages.push(Message::new(Role::User, MESSAGE));
        let rendered = self.template.render(&messages)?;
        let (before, after) = rendered
            .split_once(MESSAGE)
            .filter(|(_, after)| !after.contains(MESSAGE))
            .ok_or_else(|| self.template.failure("it does not write the message exactly once"))?;
        Ok((before.to_owned(), after.to_owned()))
    }

    /// Returns the id of a text that is a special token.
    fn special_token(&self, text: &str) -> Option<u32> {
        let id = self.tokenizer.token_to_id(text)?;
        self.tokenizer.get_added_tokens_decoder().get(&id).filter(|token| token.special).map(|_| id)
    }
}

/// Reads a `tokenizer_config.json`, which a model need not have.
fn config_of(file: Option<Contents<'_>>) -> Result<Value> {
    let Some(Contents { path, bytes }) = file else { return Ok(Value::Null) };
    serde_json::from_slice(bytes).map_err(|e| Error::Tokenizer(e.to_string()).in_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole words as tokens. A begin token stands before and an end token after, as in `BERT`.
    const WORDS: &str = r#"{"version":"1.0","truncation":null,"padding":null,
        "added_tokens":[{"id":0,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
                        {"id":1,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
        "normalizer":null,"pre_tokenizer":{"type":"Whitespace"},
        "post_processor":{"type":"TemplateProcessing",
            "single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"</s>","type_id":0}}],
            "pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],
            "special_tokens":{"<s>":{"id":"<s>","ids":[0],"tokens":["<s>"]},"</s>":{"id":"</s>","ids":[1],"tokens":["</s>"]}}},
        "decoder":null,
        "model":{"type":"WordLevel","unk_token":"?","vocab":{"<s>":0,"</s>":1,"?":2,"a":3,"b":4,"c":5}}}"#;

    fn codec(config: Option<&str>) -> TextCodec {
        TextCodec::from_bytes(WORDS.as_bytes(), config.map(str::as_bytes)).unwrap()
    }

    #[test]
    fn specials_stand_before_the_system_part_only() {
        let prompt = codec(None).prompt("a##b##c", "##", true).unwrap();
        let expected = ChunkedPrompt::new(vec![0, 3], vec![vec![4]], vec![5]).unwrap();
        assert_eq!(prompt, PromptTokens::Chunked(expected));
        assert_eq!(codec(None).prompt("a b", "##", true).unwrap(), PromptTokens::Plain(vec![0, 3, 4]));
        assert_eq!(codec(None).prompt("a b", "##", false).unwrap(), PromptTokens::Plain(vec![3, 4]));
    }

    /// A vocabulary in which the separator is within tokens, as byte-pair merges make it.
    #[test]
    fn rule_1_a_separator_within_a_token_delimits() {
        let words = r###""a":3,"b":4,"c":5,"a##b":6,"##b":7,"##":8,"b##":9"###;
        let text = WORDS.replace(r#""a":3,"b":4,"c":5"#, words);
        let text = text.replace(r#"{"type":"Whitespace"}"#, r#"{"type":"WhitespaceSplit"}"#);
        let codec = TextCodec::from_bytes(text.as_bytes(), None).unwrap();
        assert_eq!(codec.encode("a##b ##b b## ##", false).unwrap(), [6, 7, 9, 8], "one token each");
        let cut = ChunkedPrompt::new(vec![3], vec![vec![4]], vec![5]).unwrap();
        assert_eq!(codec.prompt("a##b##c", "##", false).unwrap(), PromptTokens::Chunked(cut));
        // One separator is not enough: the text is unchanged, and a token again.
        assert_eq!(codec.prompt("a##b", "##", false).unwrap(), PromptTokens::Plain(vec![6]));
    }

    #[test]
    fn a_chat_is_in_the_template_and_a_missing_template_is_an_error() {
        let config = r#"{"bos_token":{"content":"<s>"},"chat_template":
            "{{ bos_token }}{% for m in messages %}{{ m.content.strip() }}{% endfor %}{% if add_generation_prompt %} c{% endif %}"}"#;
        let prompt = codec(Some(config)).chat_prompt(" a ", "##").unwrap();
        assert_eq!(prompt, PromptTokens::Plain(vec![0, 3, 5]));
        assert!(matches!(codec(None).chat_prompt("a", "##"), Err(Error::Template { .. })));
    }

    #[test]
    fn documents_of_a_conversation_stand_before_the_last_message() {
        let config = r#"{"chat_template":"{% for m in messages %}{{ m.content }} {% if m.role == 'user' %}b {% endif %}{% endfor %}"}"#;
        let codec = codec(Some(config));
        let messages = [Message::new(Role::System, "c"), Message::new(Role::User, "a")];
        let parts = codec.conversation(&messages, ["a b", "c"]).unwrap();
        let expected = ChunkedPrompt::new(vec![5], vec![vec![3, 4], vec![5]], vec![3, 4]).unwrap();
        assert_eq!(parts, PromptTokens::Chunked(expected));
        assert_eq!(parts.iter().collect::<Vec<_>>(), [5, 3, 4, 5, 3, 4]);
        assert_eq!(codec.conversation(&messages, []).unwrap(), PromptTokens::Plain(vec![5, 3, 4]));
    }

    #[test]
    fn a_conversation_that_nobody_asks_to_answer_is_refused() {
        let codec = codec(Some(r#"{"chat_template":"a"}"#));
        let error = codec.conversation(&[], []).unwrap_err().to_string();
        assert!(error.contains("the list is empty"), "{error}");
        let messages = [Message::new(Role::User, "a"), Message::new(Role::Assistant, "b")];
        let error = codec.conversation(&messages, []).unwrap_err().to_string();
        assert!(error.contains("the last message, 2, has the role assistant"), "{error}");
    }

    #[test]
    fn a_chunked_chat_is_cut_before_the_template_is_applied() {
        let config = r#"{"chat_template":"a ## b {{ messages[0].content }} c"}"#;
        let prompt = codec(Some(config)).chat_prompt("a##b##c", "##").unwrap();
        // The template's own "##" is an unknown word of the system part.
        let expected = ChunkedPrompt::new(vec![3, 2, 4, 3], vec![vec![4]], vec![5, 5]).unwrap();
        assert_eq!(prompt, PromptTokens::Chunked(expected));
        let twice = r#"{"chat_template":"{{ messages[0].content }}{{ messages[0].content }}"}"#;
        assert!(matches!(codec(Some(twice)).chat_prompt("a##b##c", "##"), Err(Error::Template { .. })));
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
    fn broken_files_are_errors() {
        let said = |result: Result<TextCodec>| result.map(drop).unwrap_err().to_string();
        let error = said(TextCodec::from_bytes(b"{}", None));
        assert!(error.starts_with("tokenizer.json: "), "{error}");
        let error = said(TextCodec::from_bytes(WORDS.as_bytes(), Some(b"[")));
        assert!(error.starts_with("tokenizer_config.json: "), "{error}");
    }
}
