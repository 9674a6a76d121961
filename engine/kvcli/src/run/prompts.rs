//! Reads the prompts of a run, and converts them to tokens in the requested form.

use std::io::Read;
use std::path::{Path, PathBuf};

use kvchunk::DEFAULT_SEPARATOR;
use kvengine::{PromptTokens, document_text};
use kvmodel::{Message, Role, TextCodec, Variable};

use super::library::LibraryFolder;
use crate::args::PromptArgs;
use crate::error::{Error, Result};
use crate::text_file;

/// The prompt and the prompts to answer first, read from options and files.
#[derive(Debug)]
pub(crate) struct RunPrompts {
    form: Form,
    /// The prompt, or the text of the last message.
    text: String,
    /// The prompts to answer first, in this order.
    warm: Vec<String>,
    /// The documents to look for in the prompt.
    library: Option<LibraryFolder>,
}

/// A prompt as tokens.
#[derive(Debug)]
pub(crate) struct AskedPrompt {
    pub(crate) tokens: PromptTokens,
    /// For each chunk, the name of the document of the library that it is, or `None` for text between documents. Empty
    /// without a library.
    pub(crate) documents: Vec<Option<String>>,
}

impl From<PromptTokens> for AskedPrompt {
    fn from(tokens: PromptTokens) -> Self {
        Self { tokens, documents: Vec::new() }
    }
}

// Decision: docs/decisions/models.md#a-prompt-is-split-only-on-request
/// The form of a prompt, which determines how text is converted to tokens.
#[derive(Debug)]
enum Form {
    /// The text is split at a separator.
    Cut { separator: String, chat: bool },
    /// The text follows a system prompt and documents.
    Raw { system: Option<String>, documents: Vec<String> },
    /// The text is the last message of a conversation, after documents.
    Chat(ChatForm),
}

/// A conversation, without the question.
#[derive(Debug)]
struct ChatForm {
    earlier: Vec<Message>,
    /// The last message of the file, which may have more than a text, or be the model's.
    last: Option<Message>,
    documents: Vec<String>,
    file: Option<PathBuf>,
}

impl RunPrompts {
    /// Reads all files that the options name.
    pub(crate) fn read(args: &PromptArgs) -> Result<Self> {
        let documents = args.documents.iter().map(|path| document(path)).collect::<Result<Vec<_>>>()?;
        let system = args.system.clone();
        let (text, form) = if let Some(file) = &args.messages {
            let mut earlier = messages(file)?;
            let last = earlier.pop();
            let text = last.as_ref().map(|last| last.text().into_owned()).unwrap_or_default();
            (text, Form::Chat(ChatForm { earlier, last, documents, file: Some(file.clone()) }))
        } else {
            let form = match &args.separator {
                Some(separator) => Form::Cut { separator: separator.clone(), chat: args.chat },
                None => Self::about(system, args.chat, documents).form,
            };
            (prompt(args)?, form)
        };
        let files = args.warm_file.iter().map(|path| text_of(path));
        let warm = args.warm.iter().cloned().map(Ok).chain(files).collect::<Result<_>>()?;
        let library = args.library.as_deref().map(LibraryFolder::read).transpose()?;
        Ok(Self { form, text, warm, library })
    }

    /// Returns a prompt about documents, in the form that a run with this system prompt has.
    pub(crate) fn about(system: Option<String>, chat: bool, documents: Vec<String>) -> Self {
        let form = if chat {
            let earlier = system.map(|text| Message::new(Role::System, text)).into_iter().collect();
            Form::Chat(ChatForm { earlier, last: None, documents, file: None })
        } else {
            Form::Raw { system, documents }
        };
        Self { form, text: "?".to_owned(), warm: Vec::new(), library: None }
    }

    /// Returns the tokens of the prompt.
    pub(crate) fn asked(&self, codec: &TextCodec) -> Result<AskedPrompt> {
        match &self.form {
            Form::Chat(ChatForm { last: Some(last), .. }) => self.chat_tokens(codec, last.clone()),
            _ => self.tokens(codec, &self.text),
        }
    }

    /// Returns an iterator over the prompts to answer first, as tokens.
    pub(crate) fn warm<'a>(
        &'a self,
        codec: &'a TextCodec,
    ) -> impl Iterator<Item = Result<PromptTokens>> + 'a {
        self.warm.iter().map(|text| Ok(self.tokens(codec, text)?.tokens))
    }

    /// Says which documents of the library the prompt contains, or explains why the separator did not split the prompt:
    /// none was given, or it occurs fewer than two times.
    pub(crate) fn note(&self, asked: &AskedPrompt) -> Option<String> {
        if let Some(library) = &self.library {
            return Some(library.note(asked));
        }
        match &self.form {
            Form::Cut { separator, .. } => {
                let how_often = match self.text.matches(separator.as_str()).count() {
                    0 => format!("The prompt does not contain {separator:?}"),
                    1 => format!("The prompt contains {separator:?} only once"),
                    _ => return None,
                };
                Some(format!("{how_often}, so it is treated as an ordinary prompt without documents."))
            }
            Form::Raw { system: None, documents } | Form::Chat(ChatForm { documents, file: None, .. })
                if documents.is_empty() =>
            {
                let twice = |text: &String| text.matches(DEFAULT_SEPARATOR).count() >= 2;
                [&self.text].into_iter().chain(&self.warm).any(twice).then(|| {
                    format!(
                        "note: the text contains {DEFAULT_SEPARATOR}; give --separator '{DEFAULT_SEPARATOR}' to treat \
                         its parts as documents"
                    )
                })
            }
            Form::Raw { .. } | Form::Chat(_) => None,
        }
    }

    fn tokens(&self, codec: &TextCodec, text: &str) -> Result<AskedPrompt> {
        match &self.form {
            Form::Cut { separator, chat: true } => {
                Ok(PromptTokens::split_chat(codec, text, separator)?.into())
            }
            Form::Cut { separator, chat: false } => {
                Ok(PromptTokens::split(codec, text, separator, true)?.into())
            }
            Form::Raw { system, documents } if documents.is_empty() => {
                let system = system.as_deref().map(document_text).unwrap_or_default();
                let text = format!("{system}{text}");
                match &self.library {
                    Some(library) => library.cut(codec, &text, true),
                    None => Ok(PromptTokens::Plain(codec.encode(&text, true)?).into()),
                }
            }
            Form::Raw { system, documents } => {
                let system = system.as_deref().map(document_text).unwrap_or_default();
                let documents = documents.iter().map(String::as_str);
                Ok(PromptTokens::from_parts(codec, &system, documents, text, true)?.into())
            }
            Form::Chat(_) => self.chat_tokens(codec, Message::new(Role::User, text)),
        }
    }

    /// Returns the tokens of the conversation with this last message.
    fn chat_tokens(&self, codec: &TextCodec, last: Message) -> Result<AskedPrompt> {
        let Form::Chat(ChatForm { earlier, documents, file, .. }) = &self.form else {
            return self.tokens(codec, &last.text());
        };
        let messages: Vec<Message> = earlier.iter().cloned().chain([last]).collect();
        let wrong = |source| match file {
            Some(path) => Error::Messages { path: path.clone(), source },
            None => source.into(),
        };
        if let Some(library) = &self.library {
            let text = codec.conversation_text(&messages).map_err(|error| wrong(error.into()))?;
            return library.cut(codec, &text, false);
        }
        let documents = documents.iter().map(String::as_str);
        let tokens = PromptTokens::from_conversation(codec, &messages, documents).map_err(wrong)?;
        Ok(tokens.into())
    }
}

/// Returns the variables for the chat template. A value that starts with `@` names a file with JSON.
pub(crate) fn variables(args: &PromptArgs) -> Result<Vec<(String, Variable)>> {
    let variable = |(name, value): &(String, String)| {
        let value = match value.strip_prefix('@') {
            Some(path) => Variable::from_json(&text_of(Path::new(path))?)
                .map_err(|source| Error::Messages { path: path.into(), source: source.into() })?,
            None => Variable::from_argument(value),
        };
        Ok((name.clone(), value))
    };
    args.template_args.iter().map(variable).collect()
}

/// Reads the prompt.
fn prompt(args: &PromptArgs) -> Result<String> {
    if let Some(text) = args.prompt.as_ref().filter(|text| *text != "-") {
        return Ok(text.clone());
    }
    if let Some(path) = &args.prompt_file {
        return text_of(path);
    }
    let mut text = String::new();
    let from = "standard input".to_owned();
    std::io::stdin().read_to_string(&mut text).map_err(|source| Error::Prompt { from, source })?;
    Ok(text)
}

fn text_of(path: &Path) -> Result<String> {
    text_file::read(path).map_err(|source| Error::Prompt { from: path.display().to_string(), source })
}

/// Reads a document, which must not be empty.
pub(crate) fn document(path: &Path) -> Result<String> {
    let text = text_file::read(path).map_err(|source| Error::Document { path: path.to_owned(), source })?;
    if text.trim().is_empty() {
        return Err(Error::EmptyDocument(path.to_owned()));
    }
    Ok(document_text(&text).into_owned())
}

/// Reads a conversation that ends with a user's message.
fn messages(path: &Path) -> Result<Vec<Message>> {
    let wrong = |source: kvmodel::Error| Error::Messages { path: path.to_owned(), source: source.into() };
    let messages = Message::list(&text_of(path)?).map_err(wrong)?;
    Message::check_answerable(&messages).map_err(wrong)?;
    Ok(messages)
}
