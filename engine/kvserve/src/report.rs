//! The report of an answer on its prompt: the parts that were found in the caches, and those that were computed.

use std::time::Duration;

use kvchunk::MissReason;
use kvengine::Generation;
use serde::Serialize;

use crate::prompt::PartName;

/// The report of an answer: the extension `kv` of every dialect, and the numbers for `usage`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct KvReport {
    /// The number of prompt tokens.
    #[serde(skip)]
    pub(crate) prompt_tokens: usize,
    /// The number of prompt tokens whose keys and values were found.
    pub(crate) reused: usize,
    /// The number of document tokens that were computed a second time, so that they see everything before them.
    pub(crate) recomputed: usize,
    /// The number of prompt tokens that were not found, and therefore computed.
    pub(crate) computed: usize,
    /// Why the beginning of the prompt was not found: its first missing block, or that of the system prompt in front of
    /// documents that are reused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prefix_missed: Option<&'static str>,
    /// The documents, in the order of the prompt.
    pub(crate) parts: Vec<PartReport>,
    /// The conversation, which follows the documents. `None` for a prompt without documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) question: Option<QuestionReport>,
    /// The time to first token in milliseconds, from the arrival of the request.
    pub(crate) ttft_ms: f64,
    /// The time in milliseconds from the arrival of the request until the engine began with it.
    pub(crate) queue_ms: f64,
    /// True if documents attended to each other, as in an ordinary prompt.
    pub(crate) full_attention: bool,
    /// Why documents were not reused, if they were not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) not_reused: Option<&'static str>,
}

/// The report on a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct PartReport {
    /// The name that the request gave, or the field in which the document stands.
    pub(crate) id: String,
    pub(crate) tokens: usize,
    pub(crate) source: PartSource,
    /// The first byte of a registered document in the prompt's text, and the byte behind it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) span: Option<[usize; 2]>,
    /// Why the document was not found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<&'static str>,
}

/// The report on a conversation behind documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct QuestionReport {
    pub(crate) tokens: usize,
    /// The number of tokens whose keys and values were found.
    pub(crate) reused: usize,
}

/// A part of a prompt, as a page draws it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Segment {
    pub(crate) kind: SegmentKind,
    pub(crate) name: String,
    pub(crate) tokens: usize,
    /// The number of tokens whose keys and values were found.
    pub(crate) found: usize,
    /// Why not all of them were found, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<&'static str>,
}

/// The kind of a part of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SegmentKind {
    System,
    Document,
    Question,
}

/// The source of a document's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PartSource {
    /// All of them were found.
    Cache,
    /// Some were found: the beginning of the prompt ended inside the document.
    Partly,
    /// They were computed.
    Computed,
}

/// The description of a prompt before it is answered.
#[derive(Debug, Clone, Default)]
pub(crate) struct Described {
    /// The name and the length of each document.
    pub(crate) documents: Vec<(PartName, usize)>,
    /// The number of tokens in front of the documents.
    pub(crate) before: usize,
    /// True if documents attend to each other.
    pub(crate) full_attention: bool,
    pub(crate) not_reused: Option<&'static str>,
}

impl Described {
    /// Returns the report for a finished sample, with the times from the arrival of the request to its first token and to
    /// its admission.
    pub(crate) fn report(&self, generation: &Generation, first: Duration, queued: Duration) -> KvReport {
        let parts = if self.full_attention {
            self.of_prefix(generation.cached_tokens)
        } else {
            self.documents
                .iter()
                .zip(&generation.chunks)
                .map(|((name, tokens), chunk)| PartReport {
                    id: name.id.clone(),
                    tokens: *tokens,
                    span: name.bytes(),
                    source: if chunk.hit { PartSource::Cache } else { PartSource::Computed },
                    reason: chunk.missed.filter(|_| !chunk.hit).map(MissReason::name),
                })
                .collect()
        };
        KvReport {
            prompt_tokens: generation.prompt_tokens,
            reused: generation.cached_tokens,
            recomputed: generation.recomputed_tokens,
            prefix_missed: generation.prefix_missed.map(MissReason::name),
            computed: generation.prompt_tokens.saturating_sub(generation.cached_tokens),
            parts,
            question: self.question(generation),
            ttft_ms: 1e3 * first.as_secs_f64(),
            queue_ms: 1e3 * queued.as_secs_f64(),
            full_attention: self.full_attention,
            not_reused: self.not_reused,
        }
    }

    /// Returns all parts of a prompt, in their order: what is in front of the documents, the documents, and the rest.
    pub(crate) fn segments(&self, generation: &Generation) -> Vec<Segment> {
        let documents =
            self.documents.iter().map(|(name, tokens)| (SegmentKind::Document, name.id.clone(), *tokens));
        let rest = generation.prompt_tokens.saturating_sub(self.end_of_documents());
        let parts = std::iter::once((SegmentKind::System, "system prompt".to_owned(), self.before))
            .chain(documents)
            .chain([(SegmentKind::Question, "question".to_owned(), rest)]);
        let mut segments: Vec<Segment> = parts
            .map(|(kind, name, tokens)| Segment { kind, name, tokens, found: 0, reason: None })
            .collect();
        let mut left = generation.cached_tokens - generation.cached_question;
        if !self.full_attention {
            let of_documents = segments.iter_mut().filter(|segment| segment.kind == SegmentKind::Document);
            for (segment, chunk) in of_documents.zip(&generation.chunks) {
                segment.reason = chunk.missed.map(MissReason::name);
                if chunk.hit {
                    segment.found = segment.tokens.min(left);
                    left -= segment.found;
                }
            }
        }
        // What is left was found from the start.
        for segment in &mut segments {
            if !self.full_attention && segment.kind == SegmentKind::Question {
                segment.found = generation.cached_question;
            } else if self.full_attention || segment.kind == SegmentKind::System {
                segment.found = segment.tokens.min(left);
                left -= segment.found;
            }
        }
        let first = segments.iter_mut().find(|segment| segment.found < segment.tokens);
        if let Some(first) = first.filter(|first| self.full_attention || first.kind == SegmentKind::System) {
            first.reason = generation.prefix_missed.map(MissReason::name);
        }
        segments
    }

    /// Returns the number of tokens up to the end of the last document.
    fn end_of_documents(&self) -> usize {
        self.before + self.documents.iter().map(|(_, tokens)| tokens).sum::<usize>()
    }

    /// Returns the report on what follows the documents, if there are some.
    fn question(&self, generation: &Generation) -> Option<QuestionReport> {
        let end = self.end_of_documents();
        let of_question = generation.cached_question;
        let reused =
            if self.full_attention { generation.cached_tokens.saturating_sub(end) } else { of_question };
        let tokens = generation.prompt_tokens.saturating_sub(end);
        (!self.documents.is_empty()).then_some(QuestionReport { tokens, reused })
    }

    /// Returns the documents of a prompt of which the first `cached` tokens were found.
    fn of_prefix(&self, cached: usize) -> Vec<PartReport> {
        let mut start = self.before;
        let part = |(name, tokens): &(PartName, usize)| {
            let end = start + tokens;
            let source = match () {
                () if cached >= end => PartSource::Cache,
                () if cached > start => PartSource::Partly,
                () => PartSource::Computed,
            };
            start = end;
            PartReport { id: name.id.clone(), tokens: *tokens, source, span: name.bytes(), reason: None }
        };
        self.documents.iter().map(part).collect()
    }
}
