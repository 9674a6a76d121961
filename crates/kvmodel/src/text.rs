//! Text to tokens and back, and chat templates.

use std::path::Path;

use kvchunk::{ChunkedPrompt, SplitPrompt};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, context};
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::error::{Error, Result};

/// A tokenizer.json, with the chat template beside it.
#[derive(Debug)]
pub struct TextCodec {
    tokenizer: Tokenizer,
    digest: blake3::Hash,
    template: Option<String>,
    bos: String,
    eos: String,
}

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
}

impl TextCodec {
    /// Reads `tokenizer.json`, and the chat template of `chat_template.jinja` or else of
    /// `tokenizer_config.json`.
    pub fn from_directory(dir: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|source| Error::Io { path, source })
        };
        let config = read("tokenizer_config.json").ok();
        let mut codec = Self::from_bytes(&read("tokenizer.json")?, config.as_deref())?;
        if let Ok(template) = read("chat_template.jinja") {
            codec.template = Some(String::from_utf8_lossy(&template).into_owned());
        }
        Ok(codec)
    }

    /// Reads a `tokenizer.json`, with the chat template and the special tokens of a `tokenizer_config.json`.
    pub(crate) fn beside(tokenizer: &Path, config: &Value) -> Result<Self> {
        let bytes =
            std::fs::read(tokenizer).map_err(|source| Error::Io { path: tokenizer.to_owned(), source })?;
        Self::from_bytes(&bytes, Some(config.to_string().as_bytes()))
    }

    /// Reads a codec from the bytes of `tokenizer.json` and `tokenizer_config.json`, which holds the chat
    /// template.
    pub fn from_bytes(tokenizer: &[u8], config: Option<&[u8]>) -> Result<Self> {
        let digest = blake3::hash(tokenizer);
        let bad = |e: tokenizers::Error| Error::Tokenizer(format!("tokenizer.json: {e}"));
        let mut tokenizer = Tokenizer::from_bytes(tokenizer).map_err(bad)?;
        // Some files carry limits that were set for training. A prompt is never cut silently.
        tokenizer.with_truncation(None).map_err(bad)?;
        tokenizer.with_padding(None);
        let config: Value = match config {
            Some(bytes) => serde_json::from_slice(bytes)
                .map_err(|e| Error::Tokenizer(format!("tokenizer_config.json: {e}")))?,
            None => Value::Null,
        };
        // A special token is a string, or an object with the string as its content.
        let special = |name: &str| {
            let value = config.get(name);
            let text = value.and_then(Value::as_str).or_else(|| value?.get("content")?.as_str());
            text.unwrap_or_default().to_owned()
        };
        let template = config.get("chat_template").and_then(Value::as_str).map(str::to_owned);
        Ok(Self { tokenizer, digest, template, bos: special("bos_token"), eos: special("eos_token") })
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
            return Ok(PromptTokens::Plain(self.encode(&self.chat(text)?, false)?));
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
        let frame = self.chat(MESSAGE)?;
        let (before, after) = frame
            .split_once(MESSAGE)
            .filter(|(_, after)| !after.contains(MESSAGE))
            .ok_or_else(|| Error::Template("it does not write the message exactly once".to_owned()))?;
        self.prompt_of(&format!("{before}{system}"), documents, &format!("{question}{after}"), false)
    }

    /// Renders the model's chat template with `user` as the single message of a conversation.
    fn chat(&self, user: &str) -> Result<String> {
        let Some(template) = &self.template else {
            return Err(Error::Template("this model has none; run without it".to_owned()));
        };
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        // transformers uses these settings for chat templates.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| Error::Template(e.to_string()))?);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
        });
        environment
            .render_str(
                template,
                context! {
                    messages => [context! { role => "user", content => user }],
                    add_generation_prompt => true,
                    bos_token => self.bos.as_str(),
                    eos_token => self.eos.as_str(),
                },
            )
            .map_err(|e| Error::Template(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole words as tokens. A begin token stands before and an end token after, as in `BERT`.
    const TOKENIZER: &str = r#"{"version":"1.0","truncation":null,"padding":null,
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
        TextCodec::from_bytes(TOKENIZER.as_bytes(), config.map(str::as_bytes)).unwrap()
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
        let text = TOKENIZER.replace(r#""a":3,"b":4,"c":5"#, words);
        let text = text.replace(r#"{"type":"Whitespace"}"#, r#"{"type":"WhitespaceSplit"}"#);
        let codec = TextCodec::from_bytes(text.as_bytes(), None).unwrap();
        assert_eq!(codec.encode("a##b ##b b## ##", false).unwrap(), [6, 7, 9, 8], "one token each");
        let cut = ChunkedPrompt::new(vec![3], vec![vec![4]], vec![5]).unwrap();
        assert_eq!(codec.prompt("a##b##c", "##", false).unwrap(), PromptTokens::Chunked(cut));
        // One separator is not enough: the text is unchanged, and a token again.
        assert_eq!(codec.prompt("a##b", "##", false).unwrap(), PromptTokens::Plain(vec![6]));
    }

    #[test]
    fn a_template_is_rendered_and_a_missing_one_is_an_error() {
        let config = r#"{"bos_token":{"content":"<s>"},"chat_template":
            "{{ bos_token }}{% for m in messages %}{{ m['role'].upper() }}: {{ m.content.strip() }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"}"#;
        assert_eq!(codec(Some(config)).chat(" hi ").unwrap(), "<s>USER: hi!");
        assert!(matches!(codec(None).chat("hi"), Err(Error::Template(_))));
        let raising = r#"{"chat_template":"{{ raise_exception('no system role') }}"}"#;
        assert!(codec(Some(raising)).chat("hi").unwrap_err().to_string().contains("no system role"));
    }

    #[test]
    fn a_chunked_chat_is_cut_before_the_template_is_applied() {
        let config = r#"{"chat_template":"a ## b {{ messages[0].content }} c"}"#;
        let prompt = codec(Some(config)).chat_prompt("a##b##c", "##").unwrap();
        // The template's own "##" is an unknown word of the system part.
        let expected = ChunkedPrompt::new(vec![3, 2, 4, 3], vec![vec![4]], vec![5, 5]).unwrap();
        assert_eq!(prompt, PromptTokens::Chunked(expected));
        let twice = r#"{"chat_template":"{{ messages[0].content }}{{ messages[0].content }}"}"#;
        assert!(matches!(codec(Some(twice)).chat_prompt("a##b##c", "##"), Err(Error::Template(_))));
    }

    #[test]
    fn prompts_are_never_cut_by_the_tokenizer() {
        let limit =
            r#""truncation":{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}"#;
        let text = TOKENIZER.replace(r#""truncation":null"#, limit);
        let codec = TextCodec::from_bytes(text.as_bytes(), None).unwrap();
        assert_eq!(codec.encode("a b c a b", false).unwrap(), [3, 4, 5, 3, 4]);
    }

    #[test]
    fn broken_files_are_errors() {
        assert!(matches!(TextCodec::from_bytes(b"{}", None), Err(Error::Tokenizer(_))));
        assert!(matches!(TextCodec::from_bytes(TOKENIZER.as_bytes(), Some(b"[")), Err(Error::Tokenizer(_))));
    }
}
