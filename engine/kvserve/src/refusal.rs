//! The reason why a request gets no answer, before a dialect gives it a form.

use std::io::ErrorKind;

use axum::http::HeaderValue;
use axum::http::header::RETRY_AFTER;
use axum::response::Response;
use kvchunk::Error as ChunkError;
use kvcore::Error as CoreError;
use kvengine::Error as EngineError;
use kvmodel::Error as ModelError;
use tracing::error;

/// The header that tells clients whether to send a request again.
pub(crate) const SHOULD_RETRY: &str = "x-should-retry";

/// The kind of a refusal, which decides its HTTP status in every dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The request is malformed or asks for something impossible.
    Invalid,
    /// The prompt does not fit into the model's context.
    TooLong,
    /// The key is missing or unknown.
    Unauthorized,
    /// The key belongs to somebody who may not do this.
    Forbidden,
    /// The model or the path does not exist.
    NotFound,
    /// The path exists, but not with this method.
    Method,
    /// The body is larger than the limit.
    TooLarge,
    /// The client took longer than the limit.
    TimedOut,
    /// The answer took longer than the limit.
    AnswerTime,
    /// The server's state does not allow it at the moment.
    Conflict,
    /// There are too many requests. The client may try again later.
    Overloaded,
    /// The server sleeps or shuts down.
    Unavailable,
    /// The disk of the server is full.
    NoStorage,
    /// The server failed.
    Internal,
}

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) kind: Kind,
    /// A sentence that says what to do.
    pub(crate) message: String,
    /// The field that is wrong.
    pub(crate) param: Option<String>,
    /// A word for programs, if there is a better one than the kind's.
    pub(crate) code: Option<&'static str>,
}

impl Refusal {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, code: None }
    }

    /// Refuses a request because of one of its fields.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(Kind::Invalid, message) }
    }

    /// Refuses a field that this server knows but cannot obey.
    pub(crate) fn unsupported(param: &str, advice: &str) -> Self {
        let message = format!("{param} is not supported yet; {advice}");
        Self { code: Some("unsupported_parameter"), ..Self::field(param, message) }
    }

    /// Returns the HTTP status.
    pub(crate) fn status(&self) -> u16 {
        match self.kind {
            Kind::Invalid | Kind::TooLong => 400,
            Kind::Unauthorized => 401,
            Kind::Forbidden => 403,
            Kind::NotFound => 404,
            Kind::Method => 405,
            Kind::TimedOut | Kind::AnswerTime => 408,
            Kind::Conflict => 409,
            Kind::TooLarge => 413,
            Kind::Overloaded => 429,
            Kind::Internal => 500,
            Kind::Unavailable => 503,
            Kind::NoStorage => 507,
        }
    }

    /// Adds the headers that tell clients whether to send the request again.
    pub(crate) fn with_headers(&self, mut response: Response) -> Response {
        match self.kind {
            Kind::Overloaded => {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            // The clients of OpenAI and Anthropic repeat requests after these statuses, but the answer would be the same.
            Kind::AnswerTime | Kind::Conflict => {
                response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            }
            _ => {}
        }
        response
    }

    /// Returns the refusal of a request whose engine thread has ended.
    pub(crate) fn engine_gone() -> Self {
        Self::new(Kind::Unavailable, "the engine has stopped; restart the server")
    }

    /// Returns the refusal of a request at which the server panicked.
    pub(crate) fn failed() -> Self {
        Self::new(Kind::Internal, "the server failed to answer this request; see its log")
    }

    /// Returns the refusal of a change of the registered documents that could not be written to their file.
    pub(crate) fn not_written(error: &std::io::Error) -> Self {
        error!(%error, "cannot write a change of the registered documents, so it was refused");
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                let reason = "the disk for registered documents is full, so nothing was changed; ask the operator to free \
                              some space";
                Self::new(Kind::NoStorage, reason)
            }
            _ => {
                let reason = "the change could not be written to the disk, so nothing was changed; the log of the server says why";
                Self::new(Kind::Internal, reason)
            }
        }
    }

    /// Returns the refusal of a request whose client does not read its answer.
    pub(crate) fn slow_reader() -> Self {
        Self::new(Kind::TimedOut, "the answer was read too slowly, so it was given up; read it faster")
    }

    /// Returns the refusal of a request that the shutdown has ended.
    pub(crate) fn shutting_down() -> Self {
        Self::new(Kind::Unavailable, "the server is shutting down; send the request again to another one")
    }
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Self {
        let (kind, message) = (kind_of(&error), error.to_string());
        let code = (kind == Kind::TooLong).then_some("context_length_exceeded");
        let message = match error {
            EngineError::Cancelled => "the request was cancelled; send it again to get an answer".to_owned(),
            EngineError::Asleep(_) => "the server is asleep; wake it with POST /wake_up first".to_owned(),
            EngineError::Core(CoreError::OutOfBlocks { asked, total, .. })
            | EngineError::Chunk(ChunkError::Core(CoreError::OutOfBlocks { asked, total, .. })) => format!(
                "the request needs {asked} blocks of the cache, which has {total}; shorten the prompt or the answer"
            ),
            EngineError::TimeOut { limit } => {
                format!("the answer took longer than the server's limit of {limit:?}; ask for fewer tokens")
            }
            // Places of files and states of the machine are the operator's.
            EngineError::Model(ModelError::Template { reason, .. }) => {
                format!("the model's chat template cannot be applied: {reason}")
            }
            _ if kind == Kind::Internal => {
                error!(reason = message, "the engine failed");
                "the engine failed to answer this request; the log of the server says why".to_owned()
            }
            _ => message,
        };
        Self { code, ..Self::new(kind, message) }
    }
}

impl From<ModelError> for Refusal {
    fn from(error: ModelError) -> Self {
        EngineError::from(error).into()
    }
}

/// Returns the kind of an engine's error: what the client can change is the client's fault.
fn kind_of(error: &EngineError) -> Kind {
    match error {
        EngineError::Chunk(ChunkError::TooLong { .. })
        | EngineError::Model(ModelError::TextTooLong { .. }) => Kind::TooLong,
        EngineError::Sampling { .. }
        | EngineError::EmptyPrompt
        | EngineError::ShortDocument { .. }
        | EngineError::TooManyAnswers { .. }
        | EngineError::Samples { .. }
        | EngineError::Beams(_)
        | EngineError::Pages(_)
        | EngineError::Constraint(_)
        | EngineError::Core(CoreError::OutOfBlocks { .. })
        | EngineError::Chunk(
            ChunkError::EmptyPart { .. } | ChunkError::Core(CoreError::OutOfBlocks { .. }),
        )
        | EngineError::Model(
            ModelError::TokenOutOfVocabulary { .. }
            | ModelError::Messages(_)
            | ModelError::Template { .. }
            | ModelError::Variable(_)
            | ModelError::Tools(_)
            | ModelError::EmptyStop,
        ) => Kind::Invalid,
        EngineError::Asleep(_) | EngineError::Cancelled => Kind::Unavailable,
        EngineError::LibraryFull { .. }
        | EngineError::InUse { .. }
        | EngineError::Waiting { .. }
        | EngineError::NoSleepMode(_) => Kind::Conflict,
        EngineError::TimeOut { .. } => Kind::AnswerTime,
        _ => Kind::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_do_not_learn_where_files_are() {
        let template = |reason: &str| ModelError::Template {
            place: "/srv/m.gguf".to_owned(),
            reason: reason.to_owned(),
        };
        let source = || std::io::Error::other("/srv/m.gguf");
        let read = EngineError::Io { path: "/srv/reuse.json".into(), source: source() };
        for (error, kind, words) in [
            (template("it rejects the conversation").into(), Kind::Invalid, "it rejects the conversation"),
            (template("no template").into(), Kind::Invalid, "chat template cannot be applied: no template"),
            (read, Kind::Internal, "the log of the server says why"),
            // What others have in a pool is not this client's business.
            (
                CoreError::OutOfBlocks { asked: 9, free: 3, evictable: 4, total: 8 }.into(),
                Kind::Invalid,
                "needs 9 blocks of the cache, which has 8; shorten",
            ),
            (
                ModelError::Io { path: "/srv/m.gguf".into(), source: source() }.into(),
                Kind::Internal,
                "the log of the server says why",
            ),
        ] {
            let refusal = Refusal::from(error);
            assert_eq!(refusal.kind, kind);
            assert!(refusal.message.contains(words) && !refusal.message.contains("/srv"), "{refusal:?}");
        }
    }
}
