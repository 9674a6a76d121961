//! The reasons why a template ends without a text.

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// The template called `raise_exception`.
    Refused,
    /// The template needs more steps, memory or nesting than it may have.
    Limit,
    /// The template is malformed, uses what is not supported, or fails as it would in Jinja2.
    Failed,
}

/// A failure of a template.
#[derive(Debug, Clone)]
pub(in crate::text) struct Fault {
    pub(super) kind: FaultKind,
    pub(super) words: String,
    /// The line of the template, counted from 1.
    pub(super) line: Option<u16>,
}

/// A result of a step of a template.
pub(super) type Run<T> = Result<T, Fault>;

impl Fault {
    fn new(kind: FaultKind, words: impl Into<String>) -> Self {
        Self { kind, words: words.into(), line: None }
    }

    /// Creates the failure of a template that called `raise_exception`.
    pub(super) fn refused(words: impl Into<String>) -> Self {
        Self::new(FaultKind::Refused, words)
    }

    /// Creates the failure of a template that exceeds a limit.
    pub(super) fn limit(words: impl Into<String>) -> Self {
        Self::new(FaultKind::Limit, words)
    }

    /// Creates any other failure.
    pub(super) fn failed(words: impl Into<String>) -> Self {
        Self::new(FaultKind::Failed, words)
    }

    /// Adds the line, unless a step inside this one has already added its own.
    pub(super) fn at(mut self, line: u16) -> Self {
        self.line.get_or_insert(line);
        self
    }
}

/// Returns a failure as an error.
pub(super) fn fail<T>(words: impl Into<String>) -> Run<T> {
    Err(Fault::failed(words))
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        match self.kind {
            FaultKind::Refused => write!(f, "it rejects the conversation: {}", self.words),
            FaultKind::Limit | FaultKind::Failed => f.write_str(&self.words),
        }
    }
}
