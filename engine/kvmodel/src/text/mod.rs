//! Converts text to tokens and back, and applies chat templates.
//!
//! ```text
//! messages ─ template ─► text ─ codec ─► tokens ─ engine ─► tokens ─ stream ─► text, up to a stop string
//! ```

mod bound;
mod clock;
mod decoding;
mod growth;
mod guard;
mod jinja;
mod message;
mod stream;
mod template;
mod token_bytes;
mod tools;
mod variable;

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

pub use message::{Message, Role};
pub use stream::TextStream;
pub use tools::{AnswerPart, ForcedCalls, ToolCall, ToolCallFormat, ToolCallParser};
pub use variable::Variable;

use crate::error::{Error, Result};
use crate::files::{FileContents, SmallFile};
use bound::TokenBound;
use guard::guarded;
use template::ChatTemplate;

/// A tokenizer, with the chat template that belongs to it.
///
/// A clone shares the tokenizer, so it is cheap.
#[derive(Debug, Clone)]
pub struct TextCodec {
    tokenizer: Arc<Tokenizer>,
    digest: blake3::Hash,
    template: ChatTemplate,
    /// Bounds the number of a text's tokens, if the tokenizer allows it.
    bound: Option<TokenBound>,
    /// The maximum number of tokens in a text.
    limit: Option<usize>,
}

/// The name of the tokenizer's file in a model's folder.
const TOKENIZER: &str = "tokenizer.json";
/// The name of the file with the special tokens and the chat template.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The name of the file with special tokens that the other file may lack.
const SPECIAL_TOKENS: &str = "special_tokens_map.json";

/// Placeholders for a message's content, used to find the text that a template writes around the content: private-use
/// characters that no template writes. The first one that no message contains is used.
const PLACEHOLDERS: std::ops::RangeInclusive<char> = '\u{F8D0}'..='\u{F8FE}';

/// Returns a placeholder that stands in none of the messages.
fn placeholder(messages: &[Message]) -> String {
    let is_free = |mark: &char| !messages.iter().any(|message| message.contains(*mark));
    PLACEHOLDERS.rev().find(is_free).unwrap_or(*PLACEHOLDERS.end()).to_string()
}

impl TextCodec {
    /// Reads `tokenizer.json`, the special tokens from `tokenizer_config.json` and, where it lacks them, from
    /// `special_tokens_map.json`, and the chat template from `chat_template.jinja` or, if there is none, from
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a file cannot be read, and [`Error::File`], with the path, if a file is
    /// malformed.
    pub fn from_directory(dir: &Path) -> Result<Self> {
        let config_path = dir.join(TOKENIZER_CONFIG);
        let config = SmallFile::read_if_there(config_path.clone())?;
        let mut config = config_of(config.as_ref().map(SmallFile::contents))?;
        let special = SmallFile::read_if_there(dir.join(SPECIAL_TOKENS))?;
        if let Value::Object(special) = config_of(special.as_ref().map(SmallFile::contents))? {
            add_special(&mut config, special);
        }
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
        growth::check(bytes).map_err(|error| error.in_file(path))?;
        let read = || {
            let mut tokenizer = Tokenizer::from_bytes(bytes)?;
            let known = tokenizer.get_added_tokens_decoder();
            let is_new = |token: &AddedToken| !known.values().any(|one| one.content == token.content);
            let added: Vec<AddedToken> = added_tokens(config).into_iter().filter(is_new).collect();
            tokenizer.add_tokens(added.iter().cloned())?;
            // Some files contain limits that were set for training, but prompts must not be cut silently.
            tokenizer.with_truncation(None)?;
            tokenizer.with_padding(None);
            Ok((tokenizer, added))
        };
        let (tokenizer, added) = guarded(read).map_err(|error| error.in_file(path))?;
        let mut digest = blake3::Hasher::new();
        digest.update(bytes);
        if !added.is_empty() {
            digest.update(format!("{added:?}").as_bytes());
        }
        let digest = digest.finalize();
        let bound = TokenBound::of(&tokenizer);
        let tokenizer = Arc::new(tokenizer);
        Ok(Self { tokenizer, digest, template: ChatTemplate::of(config, place), bound, limit: None })
    }

    /// Returns the hash of `tokenizer.json` and of the tokens that the config adds to it, which identifies the tokenizer in cache keys.
    pub fn digest(&self) -> &[u8; 32] {
        self.digest.as_bytes()
    }

    /// Encodes a string. If `special` is true, the result includes the special tokens that the tokenizer puts
    /// *before* the string. Special tokens after the string are always left out, because the prompt
    /// continues.
    ///
    /// # Errors
    /// Returns [`Error::TextTooLong`], before any memory is used, if the text surely has more tokens than the
    /// model has positions, and [`Error::Tokenizer`] if the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        if let (Some(limit), Some(bound)) = (self.limit, &self.bound) {
            let least = bound.least(text);
            if least > limit {
                return Err(Error::TextTooLong { bytes: text.len(), least, limit });
            }
        }
        let encoding = guarded(|| self.tokenizer.encode(text, special))?;
        let mut end = encoding.len();
        if special {
            let plain = guarded(|| self.tokenizer.encode(text, false))?.len();
            if plain == 0 {
                return self.tokens_before_text();
            }
            let added = encoding.get_special_tokens_mask();
            while end > plain && added[end - 1] == 1 {
                end -= 1;
            }
        }
        Ok(encoding.get_ids()[..end].to_vec())
    }

    /// Returns the special tokens that the tokenizer puts before a text. An empty text does not tell them from those after it.
    fn tokens_before_text(&self) -> Result<Vec<u32>> {
        let any = guarded(|| self.tokenizer.encode("a", true))?;
        let before = any.get_special_tokens_mask().iter().take_while(|&&added| added == 1).count();
        Ok(any.get_ids()[..before].to_vec())
    }

    /// Returns a codec that refuses texts of more than `tokens` tokens if it can tell without tokenising them.
    pub(crate) fn with_limit(self, tokens: usize) -> Self {
        Self { limit: Some(tokens), ..self }
    }

    /// Decodes tokens to text, without special tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        guarded(|| self.tokenizer.decode(tokens, true))
    }

    /// Decodes one token to text. The text of a special token is its name.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] if the token cannot be decoded.
    pub fn token_text(&self, token: u32) -> Result<String> {
        guarded(|| self.tokenizer.decode(&[token], false))
    }

    /// Returns the codec with more variables for its chat template, such as `tools`, `documents`,
    /// `enable_thinking` or `date_string`. A variable that is set again has the last value.
    ///
    /// ```
    /// # fn with_tools(codec: &kvmodel::TextCodec, tools: &str) -> kvmodel::Result<kvmodel::TextCodec> {
    /// use kvmodel::Variable;
    /// codec.with_variables([
    ///     ("enable_thinking".to_owned(), Variable::Bool(false)),
    ///     ("tools".to_owned(), Variable::from_json(tools)?),
    /// ])
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Variable`] if a name is no name or is `messages`, or if `tools` or `documents` is not
    /// a list of objects.
    pub fn with_variables(&self, variables: impl IntoIterator<Item = (String, Variable)>) -> Result<Self> {
        Ok(Self { template: self.template.clone().with_variables(variables)?, ..self.clone() })
    }

    /// Returns the form in which the model writes calls of tools, as its chat template shows it.
    pub fn tool_call_format(&self) -> ToolCallFormat {
        ToolCallFormat::of(self.template.source().unwrap_or_default())
    }

    /// Returns true if the chat template writes the tools that it gets as the variable `tools`.
    pub fn takes_tools(&self) -> bool {
        self.template.source().is_some_and(|template| template.contains("tools"))
    }

    /// Returns true if the chat template knows the role `developer`. Others leave such messages out, refuse them, or write
    /// a role that the model does not know.
    pub fn takes_developers(&self) -> bool {
        self.template.source().is_some_and(|template| template.contains(Role::Developer.word()))
    }

    /// Encodes a conversation in the model's chat template, up to the beginning of the answer, or, if the last
    /// message is the model's, up to the end of its text. The template writes its own special tokens, so none
    /// are added.
    ///
    /// # Errors
    /// Returns [`Error::Messages`] if the last message cannot be answered ([`Message::check_answerable`]), and
    /// [`Error::Template`] if the template fails, rejects the conversation, or exceeds its budget.
    pub fn conversation(&self, messages: &[Message]) -> Result<Vec<u32>> {
        self.encode(&self.conversation_text(messages)?, false)
    }

    /// Returns the text that [`conversation`](Self::conversation) encodes.
    ///
    /// # Errors
    /// Returns the errors of [`conversation`](Self::conversation) that do not concern the tokens.
    pub fn conversation_text(&self, messages: &[Message]) -> Result<String> {
        Message::check_answerable(messages)?;
        self.template.render(messages)
    }

    /// Returns the text that the chat template writes before and after the content of a user's message that
    /// follows the `earlier` messages.
    ///
    /// # Errors
    /// Returns [`Error::Template`] if the template fails or rejects the conversation, or does not write the
    /// message exactly once.
    pub fn around_message(&self, earlier: &[Message]) -> Result<(String, String)> {
        let mut messages = earlier.to_vec();
        let mark = placeholder(&messages);
        messages.push(Message::new(Role::User, mark.as_str()));
        let rendered = self.template.render(&messages)?;
        let (before, after) = rendered
            .split_once(&mark)
            .filter(|(_, after)| !after.contains(&mark))
            .ok_or_else(|| self.template.failure("it does not render the message exactly once"))?;
        Ok((before.to_owned(), after.to_owned()))
    }

    /// Returns the text that the chat template writes for a conversation, up to the beginning of the answer, cut at byte
    /// `at` in the text of the message with the zero-based index `message`. Of a message with several texts, this is the
    /// first one.
    ///
    /// # Errors
    /// Returns the errors of [`conversation`](Self::conversation), [`Error::Messages`] if there is no such message or
    /// byte, and [`Error::Template`] if the template does not write this message exactly once.
    pub fn conversation_cut(
        &self,
        messages: &[Message],
        (message, at): (usize, usize),
    ) -> Result<(String, String)> {
        Message::check_answerable(messages)?;
        let number = message + 1;
        let mut marked = messages.to_vec();
        let mark = placeholder(messages);
        let with_mark = messages.get(message).and_then(|message| message.with_mark(&mark, at));
        marked[message] = with_mark.ok_or_else(|| {
            Error::Messages(format!("message {number} has no text that can be cut at byte {at}"))
        })?;
        let rendered = self.template.render(&marked)?;
        let (before, after) =
            rendered.split_once(&mark).filter(|(_, after)| !after.contains(&mark)).ok_or_else(|| {
                self.template.failure(format!("it does not write message {number} exactly once"))
            })?;
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

/// Adds special tokens that a config lacks.
fn add_special(config: &mut Value, special: serde_json::Map<String, Value>) {
    if config.is_null() {
        *config = Value::Object(serde_json::Map::new());
    }
    let Value::Object(config) = config else { return };
    for (name, token) in special {
        let slot = config.entry(name).or_insert(Value::Null);
        if slot.is_null() {
            *slot = token;
        }
    }
}

/// Returns the tokens under `added_tokens_decoder` of a `tokenizer_config.json`, in the order of their IDs. As in
/// transformers, those that `tokenizer.json` lacks are added to it.
fn added_tokens(config: &Value) -> Vec<AddedToken> {
    let listed = config.get("added_tokens_decoder").and_then(Value::as_object);
    let mut tokens: Vec<(u32, AddedToken)> = listed
        .into_iter()
        .flatten()
        .filter_map(|(id, token)| {
            let is = |name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
            let added = AddedToken::from(token.get("content")?.as_str()?, is("special"));
            let added = added.lstrip(is("lstrip")).rstrip(is("rstrip"));
            let added = added.single_word(is("single_word")).normalized(is("normalized"));
            Some((id.parse().ok()?, added))
        })
        .collect();
    tokens.sort_by_key(|(id, _)| *id);
    tokens.into_iter().map(|(_, token)| token).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
    fn an_empty_text_has_the_special_tokens_that_stand_before_texts() {
        let codec = codec(None);
        assert_eq!(codec.encode("a", true).unwrap(), [0, 3]);
        assert_eq!(codec.encode("", true).unwrap(), [0]);
        assert!(codec.encode("", false).unwrap().is_empty());
    }

    #[test]
    fn a_conversation_without_a_question_is_refused() {
        let codec = codec(Some(r#"{"chat_template":"a"}"#));
        let error = codec.conversation(&[]).unwrap_err().to_string();
        assert!(error.contains("the list is empty"), "{error}");
        let messages = [Message::new(Role::User, "a"), Message::new(Role::System, "b")];
        let error = codec.conversation(&messages).unwrap_err().to_string();
        assert!(error.contains("the last message, 2, has the role system"), "{error}");
    }

    /// A template that writes `a` in front of each message, `b` behind it, and `c` in front of an answer.
    const TURNS: &str = r#"{"chat_template":"{% for m in messages %}a {{ m.content }} b {% endfor %}{% if add_generation_prompt %}c{% endif %}{% if tools %}{{ tools[0].name }}{% endif %}{{ more }}"}"#;

    #[test]
    fn the_beginning_of_an_answer_is_continued() {
        let codec = codec(Some(TURNS));
        let user = Message::new(Role::User, "c");
        assert_eq!(codec.conversation(std::slice::from_ref(&user)).unwrap(), [3, 5, 4, 5]);
        for (text, ends) in
            [("b c", vec![3, 5, 4, 3, 4, 5]), ("c ", vec![3, 5, 4, 3, 5]), ("a\n", vec![3, 5, 4, 3, 3])]
        {
            let begun = [user.clone(), Message::new(Role::Assistant, text)];
            assert_eq!(codec.conversation(&begun).unwrap(), ends, "{text:?}");
        }
        let silent = TextCodec::from_bytes(WORDS.as_bytes(), Some(br#"{"chat_template":"a"}"#)).unwrap();
        let error = silent.conversation(&[Message::new(Role::Assistant, "b")]).unwrap_err().to_string();
        assert!(error.contains("does not write the text of the last message"), "{error}");
        for template in [
            "{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}",
            "{% for m in messages %}a {{ m.content }}{% endfor %} b {{ messages[-1].content }} c",
        ] {
            let config = json!({"chat_template": template}).to_string();
            let twice = TextCodec::from_bytes(WORDS.as_bytes(), Some(config.as_bytes())).unwrap();
            let error = twice.conversation(&[user.clone(), Message::new(Role::Assistant, "b")]).unwrap_err();
            assert!(error.to_string().contains("more than once"), "{error}");
        }
    }

    #[test]
    fn variables_of_the_caller_reach_the_template() {
        let codec = codec(Some(TURNS));
        let with =
            |name: &str, json: &str| codec.with_variables([(name.to_owned(), Variable::from_argument(json))]);
        let asked = |codec: Result<TextCodec>| {
            codec.and_then(|codec| codec.conversation(&[Message::new(Role::User, "c")]))
        };
        assert_eq!(asked(with("more", " b")).unwrap(), [3, 5, 4, 5, 4]);
        assert_eq!(asked(with("add_generation_prompt", "false")).unwrap(), [3, 5, 4]);
        assert_eq!(asked(with("tools", r#"[{"name": " b"}]"#)).unwrap(), [3, 5, 4, 5, 4]);
        let twice = with("more", " b").unwrap().with_variables([("more".to_owned(), " a".into())]);
        assert_eq!(asked(twice).unwrap(), [3, 5, 4, 5, 3], "the last value counts");
        for (name, json, expected) in [
            ("messages", "[]", "the conversation itself"),
            ("no name", "1", "\"no name\" is not a name"),
            ("", "1", "is not a name"),
            ("tools", "\"a\"", "must be a list of objects"),
            ("documents", "[1]", "must be a list of objects"),
            ("add_generation_prompt", "1", "must be true or false"),
        ] {
            let error = asked(with(name, json)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
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
    fn tokens_that_only_the_config_lists_are_added() {
        let config = r#"{"added_tokens_decoder":{"7":{"content":"<y>","special":false},"6":{"content":"<x>","special":true},
            "0":{"content":"<s>","special":true},"8":5,"z":{"content":"no"}}}"#;
        let (plain, with) = (codec(None), codec(Some(config)));
        assert_eq!(with.encode("a<x>b <y>", false).unwrap(), [3, 6, 4, 7]);
        assert_eq!(with.decode(&[3, 6, 4, 7]).unwrap(), "a b <y>", "a special token has no text");
        assert!(with.special_token("<x>") == Some(6) && with.special_token("<y>").is_none());
        assert_ne!(plain.digest(), with.digest(), "other tokens, other keys");
        let same = r#"{"added_tokens_decoder":{"0":{"content":"<s>","special":true}}}"#;
        assert_eq!(plain.digest(), codec(Some(same)).digest());
    }

    #[test]
    fn special_tokens_of_their_own_file_fill_gaps() {
        let place = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(place.path().join(name), text).unwrap();
        let template = r#""chat_template":"{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ messages[0].content }}""#;
        write(TOKENIZER, WORDS);
        write(SPECIAL_TOKENS, r#"{"bos_token":{"content":"a"},"eos_token":"b","pad_token":null}"#);
        let shown = || {
            let codec = TextCodec::from_directory(place.path())?;
            codec.template.render(&[Message::new(Role::User, "c")])
        };
        write(TOKENIZER_CONFIG, &format!("{{{template}}}"));
        assert_eq!(shown().unwrap(), "a|b|False|c");
        write(TOKENIZER_CONFIG, &format!(r#"{{"bos_token":"c","eos_token":null,{template}}}"#));
        assert_eq!(shown().unwrap(), "c|b|False|c", "the config counts first");
        std::fs::remove_file(place.path().join(TOKENIZER_CONFIG)).unwrap();
        write("chat_template.jinja", "{{ eos_token }}");
        assert_eq!(shown().unwrap(), "b");
        write(SPECIAL_TOKENS, "[");
        let error = shown().unwrap_err().to_string();
        assert!(error.contains(SPECIAL_TOKENS), "{error}");
    }

    /// Files that make the tokenizer library panic or fail, cut off and contradicting themselves.
    #[test]
    fn damaged_tokenizers_are_errors_and_never_panics() {
        let said = |text: &str| {
            let loaded = TextCodec::from_bytes(text.as_bytes(), None);
            loaded.and_then(|codec| codec.encode("a b c", true)).map(drop).map_err(|error| error.to_string())
        };
        let mut failed = 0;
        for end in 0..WORDS.trim_end().len() {
            let error = said(&WORDS[..end]).expect_err("a file that is cut off");
            assert!(error.starts_with("tokenizer.json: "), "{error}");
            failed += 1;
        }
        for (from, to) in [
            (r#""type":"WordLevel""#, r#""type":"Unigram""#),
            (r#""special_tokens":{"#, r#""special_tokens":5,"x":{"#),
            (r#""Whitespace""#, r#""Nothing""#),
            (r#""vocab":{"#, r#""vocab":null,"x":{"#),
            (r#""unk_token":"?","#, ""),
        ] {
            let changed = WORDS.replace(from, to);
            assert_ne!(changed, WORDS);
            said(&changed).expect_err(to);
            failed += 1;
        }
        assert!(failed > 500);
        // A BPE model whose merges name no tokens, and a template that names none.
        for model in [
            r#"{"type":"BPE","vocab":{"a":0},"merges":["a b"]}"#,
            r#"{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}"#,
            r#"{"type":"Unigram","vocab":[["a",0.0]],"unk_id":7}"#,
            r#"{"type":"WordPiece","vocab":{},"unk_token":"?"}"#,
        ] {
            let text = format!(r#"{{"version":"1.0","added_tokens":[],"model":{model}}}"#);
            let error = said(&text).expect_err(model);
            assert!(error.contains("tokenizer"), "{error}");
        }
    }

    #[test]
    fn decoders_that_fail_are_errors_and_never_panic() {
        let strip =
            |start: u32, stop: u32| json!({"type": "Strip", "content": "a", "start": start, "stop": stop});
        let nothing = json!({"type": "Replace", "pattern": {"Regex": "."}, "content": ""});
        let all = |steps: &[Value]| json!({"type": "Sequence", "decoders": steps});
        let mut failed = 0;
        for decoder in [
            strip(1, 1),
            strip(0, 9),
            strip(9, 9),
            all(&[nothing.clone(), strip(0, 1)]),
            all(&[nothing, strip(1, 1), json!({"type": "Fuse"})]),
            all(&[json!({"type": "Fuse"}), strip(2, 2)]),
        ] {
            let mut file: Value = serde_json::from_str(WORDS).unwrap();
            file["decoder"] = decoder;
            let Ok(codec) = TextCodec::from_bytes(file.to_string().as_bytes(), None) else { continue };
            let tokens = codec.encode("a b c a", false).unwrap();
            failed += usize::from(codec.decode(&tokens).is_err());
            let stream = || -> Result<String> {
                let mut stream = crate::TextStream::new(&codec, ["b".to_owned()])?;
                tokens.iter().try_for_each(|&token| stream.push(token).map(drop))?;
                stream.finish()
            };
            let streamed = stream();
            assert!(streamed.is_ok() || codec.decode(&tokens).is_err() || failed > 0, "{streamed:?}");
        }
        assert!(failed > 0, "none of the decoders fails");
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
