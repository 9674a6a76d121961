//! The beginning of a prompt, behind which documents were computed, with the settings that their keys depend on.

use std::sync::Arc;

use kvchunk::{ChunkedPrompt, PositionPlan};
use kvcore::{Regime, RopeConfig};
use kvengine::{PromptTokens, Request};
use kvmodel::ModelConfig;

/// The tokens and settings that the keys of a prompt's documents depend on, apart from their own tokens. All documents of the prompt share it.
#[derive(Debug)]
pub(crate) struct Beginning {
    tokens: Vec<u32>,
    decoys: Arc<[Vec<u32>]>,
    /// A token of the question, for prompts that need one.
    question: u32,
    /// The number of positions that the request and its answer may use, which the frequencies may depend on.
    longest: usize,
    /// The settings of the request, with an empty prompt.
    settings: Request,
}

impl Beginning {
    /// Returns the beginning of a request's prompt, if it is one in parts.
    pub(crate) fn of(request: &Request) -> Option<Self> {
        let prompt = chunked(request)?;
        Some(Self {
            tokens: prompt.system().to_vec(),
            decoys: Arc::clone(prompt.decoys()),
            question: *prompt.question().first()?,
            longest: longest(&plan(request)?, request.max_new_tokens),
            settings: only_keys(request, PromptTokens::Plain(Vec::new())),
        })
    }

    /// Returns the tokens in front of the first document.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the number of positions that the request and its answer may use.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Returns a request with documents behind this beginning, which may use as many positions.
    ///
    /// # Errors
    /// Returns an error if there are no documents, or if one is empty.
    pub(crate) fn request(&self, documents: Vec<Vec<u32>>) -> kvengine::Result<Request> {
        let prompt = ChunkedPrompt::new(self.tokens.clone(), documents, vec![self.question])?;
        let prompt = prompt.with_decoys(Arc::clone(&self.decoys))?;
        let end = PositionPlan::new(&prompt, self.settings.cell, usize::MAX)?.end;
        let max_new_tokens = (self.longest + 1).saturating_sub(end);
        Ok(Request { max_new_tokens, ..only_keys(&self.settings, PromptTokens::Chunked(prompt)) })
    }
}

/// Returns the positions of a request's prompt, if it is one in parts.
pub(crate) fn plan(request: &Request) -> Option<PositionPlan> {
    // The engine refuses a request that needs too many positions.
    PositionPlan::new(chunked(request)?, request.cell, usize::MAX).ok()
}

/// Returns the number of positions that a prompt and its answer may use. The last token of an answer is never fed back.
pub(crate) fn longest(plan: &PositionPlan, max_new_tokens: usize) -> usize {
    plan.end.saturating_add(max_new_tokens.saturating_sub(1))
}

/// The frequencies of a model's positions, which may depend on the length of a request. Requests with different ones do
/// not find each other's documents.
#[derive(Debug, Default)]
pub(crate) struct Frequencies {
    layers: Vec<RopeConfig>,
    max_positions: usize,
}

impl Frequencies {
    pub(crate) fn of(model: &ModelConfig) -> Self {
        // Most layers are alike.
        let mut layers: Vec<RopeConfig> = Vec::new();
        for layer in &model.layers {
            if !layers.contains(&layer.rope) {
                layers.push(layer.rope.clone());
            }
        }
        Self { layers, max_positions: model.max_positions }
    }

    /// Returns whether requests that may use so many positions have the same frequencies.
    pub(crate) fn are_same(&self, longest: usize, other: usize) -> bool {
        let regimes = |longest: usize| -> Vec<Regime> {
            self.layers.iter().map(|rope| rope.regime(longest.min(self.max_positions))).collect()
        };
        longest == other || regimes(longest) == regimes(other)
    }
}

/// Returns the prompt of a request if it is one in parts.
pub(crate) fn chunked(request: &Request) -> Option<&ChunkedPrompt> {
    match &*request.prompt {
        PromptTokens::Chunked(prompt) => Some(prompt),
        PromptTokens::Plain(_) => None,
    }
}

/// Returns a request for a prompt with those settings of another request that keys depend on. The others hold memory, such
/// as that of a compiled grammar.
pub(crate) fn only_keys(request: &Request, prompt: impl Into<Arc<PromptTokens>>) -> Request {
    Request {
        cell: request.cell,
        reuse: request.reuse,
        full_attention: request.full_attention,
        recompute: Arc::clone(&request.recompute),
        scaling: request.scaling,
        tenant: request.tenant.clone(),
        cache_salt: request.cache_salt.clone(),
        max_new_tokens: request.max_new_tokens,
        ..Request::new(prompt)
    }
}

#[cfg(test)]
mod tests {
    use kvengine::{AnswerConstraint, Sampling, TokenConstraint};

    use super::*;

    #[derive(Debug)]
    struct Grammar;

    impl AnswerConstraint for Grammar {
        fn start(&self) -> kvengine::Result<Box<dyn TokenConstraint>> {
            Err(kvengine::Error::NoChunks("no answer is computed"))
        }
    }

    #[test]
    fn only_what_keys_depend_on_is_kept_of_a_request() {
        let prompt = ChunkedPrompt::new(vec![1, 2], vec![vec![3], vec![4, 5]], vec![6, 7]).unwrap();
        let prompt = prompt.with_decoys([vec![8]].into()).unwrap();
        let grammar: Arc<dyn AnswerConstraint> = Arc::new(Grammar);
        let bias: Arc<[(u32, f32)]> = [(1, 2.0)].into();
        let request = Request {
            tenant: Some("alice".to_owned()),
            constraint: Some(Arc::clone(&grammar)),
            logit_bias: Arc::clone(&bias),
            logprobs: Some(3),
            samples: 4,
            sampling: Sampling { temperature: 0.5, ..Sampling::default() },
            max_new_tokens: 10,
            ..Request::new(PromptTokens::Chunked(prompt))
        };
        let beginning = Beginning::of(&request).unwrap();
        let kept = only_keys(&request, Arc::clone(&request.prompt));
        let built = beginning.request(vec![vec![4, 5]]).unwrap();
        drop(request);
        assert_eq!((Arc::strong_count(&grammar), Arc::strong_count(&bias)), (1, 1));
        let alone = ChunkedPrompt::new(vec![1, 2], vec![vec![4, 5]], vec![6]).unwrap();
        assert_eq!(*built.prompt, PromptTokens::Chunked(alone.with_decoys([vec![8]].into()).unwrap()));
        let positions = |request: &Request| longest(&plan(request).unwrap(), request.max_new_tokens);
        assert_eq!([&kept, &built].map(positions), [2 + 2 + 2 + 9; 2], "documents overlap");
        for request in [kept, built] {
            assert_eq!((request.tenant.as_deref(), request.samples), (Some("alice"), 1));
            assert_eq!((request.logprobs, request.sampling), (None, Sampling::default()));
        }
    }
}
