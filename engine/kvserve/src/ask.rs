//! The request that every dialect is translated to.

use std::sync::Arc;

use kvengine::Sampling;
use kvmodel::{Message, Variable};

use crate::body_memory::BodyShare;
use crate::shape::AnswerShape;

/// A request in no dialect.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) prompt: AskedPrompt,
    pub(crate) documents: Documents,
    pub(crate) settings: AnswerSettings,
    /// The parts that an answer may have.
    pub(crate) shape: AnswerShape,
    pub(crate) owner: Owner,
    /// The priority. Requests with a higher one are served first.
    pub(crate) priority: i32,
    /// A label of the client for metrics and the log.
    pub(crate) label: Option<Arc<str>>,
}

/// The prompt of a request, without its documents.
#[derive(Debug)]
pub(crate) enum AskedPrompt {
    /// A conversation for the model's chat template, with more variables of the template.
    Conversation { messages: Vec<Message>, variables: Vec<(String, Variable)> },
    /// A text, to which the tokenizer adds its special tokens.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
}

/// The documents of a request, by the ways in which clients name them.
#[derive(Debug, Default)]
pub(crate) struct Documents {
    /// The documents that stand beside the prompt, or beside each prompt of a request with several.
    pub(crate) given: Arc<[Document]>,
    /// The string at which a text is cut into an introduction, documents and a question.
    pub(crate) separator: Option<String>,
    /// True if all text parts of the first message with several, except the last part, are documents.
    pub(crate) from_parts: bool,
    /// True if registered documents are not looked for.
    pub(crate) ignore_registered: bool,
}

/// A document of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Document {
    /// The name in the answer's report.
    pub(crate) id: String,
    /// The text, with the title in its first line if there is one.
    pub(crate) text: String,
}

impl Document {
    /// Joins a title with a text.
    pub(crate) fn titled(id: String, title: Option<&str>, text: &str) -> Self {
        let text = match title.map(str::trim).filter(|title| !title.is_empty()) {
            Some(title) => format!("{title}\n{text}"),
            None => text.to_owned(),
        };
        Self { id, text }
    }
}

/// The choice of an answer's tokens, and its end.
#[derive(Debug, Clone)]
pub(crate) struct AnswerSettings {
    /// The maximum number of tokens; `None` for as many as fit.
    pub(crate) max_tokens: Option<usize>,
    /// The number of answers.
    pub(crate) samples: usize,
    pub(crate) sampling: Sampling,
    /// The strings before which an answer ends.
    pub(crate) stop: Vec<String>,
    /// The number of likely tokens to report at each position, beside the chosen one.
    pub(crate) logprobs: Option<usize>,
    pub(crate) logit_bias: Arc<[(u32, f32)]>,
    /// True to go on after end tokens.
    pub(crate) ignore_end: bool,
}

/// Whose request it is.
#[derive(Debug, Clone, Default)]
pub(crate) struct Owner {
    /// The tag of the tenant, which follows from the key. `None` for the default tenant.
    pub(crate) tenant: Option<Arc<str>>,
    /// A salt of the client, which divides what the tenant has in the caches.
    pub(crate) salt: Option<Arc<[u8]>>,
    /// The memory of the request's body, which is given back when all of its prompts are tokens.
    pub(crate) body: Option<Arc<BodyShare>>,
}
