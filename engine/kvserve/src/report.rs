//! What an answer says about its prompt: what was found in the caches, and what was computed.

use std::time::Duration;

use kvchunk::MissReason;
use kvengine::Generation;
use serde::Serialize;

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
    /// The documents, in the order of the prompt.
    pub(crate) parts: Vec<PartReport>,
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

/// What happened to a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct PartReport {
    /// The name that the request gave, or the field in which the document stands.
    pub(crate) id: String,
    pub(crate) tokens: usize,
    pub(crate) source: PartSource,
    /// Why the document was not found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<&'static str>,
}

/// Where the keys and values of a document come from.
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

/// What is known of a prompt before it is answered.
#[derive(Debug, Clone, Default)]
pub(crate) struct Described {
    /// The name and the length of each document.
    pub(crate) documents: Vec<(String, usize)>,
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
                .map(|((id, tokens), chunk)| PartReport {
                    id: id.clone(),
                    tokens: *tokens,
                    source: if chunk.hit { PartSource::Cache } else { PartSource::Computed },
                    reason: chunk.missed.filter(|_| !chunk.hit).map(MissReason::name),
                })
                .collect()
        };
        KvReport {
            prompt_tokens: generation.prompt_tokens,
            reused: generation.cached_tokens,
            recomputed: generation.recomputed_tokens,
            computed: generation.prompt_tokens.saturating_sub(generation.cached_tokens),
            parts,
            ttft_ms: 1e3 * first.as_secs_f64(),
            queue_ms: 1e3 * queued.as_secs_f64(),
            full_attention: self.full_attention,
            not_reused: self.not_reused,
        }
    }

    /// Returns the documents of a prompt of which the first `cached` tokens were found.
    fn of_prefix(&self, cached: usize) -> Vec<PartReport> {
        let mut start = self.before;
        let part = |(id, tokens): &(String, usize)| {
            let end = start + tokens;
            let source = match () {
                () if cached >= end => PartSource::Cache,
                () if cached > start => PartSource::Partly,
                () => PartSource::Computed,
            };
            start = end;
            PartReport { id: id.clone(), tokens: *tokens, source, reason: None }
        };
        self.documents.iter().map(part).collect()
    }
}
