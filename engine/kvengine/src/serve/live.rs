//! A request that is being served, and its samples.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{BlockKey, PromptKeys, SequenceId, SequenceInput, SequenceStart, SwappedSequence};

use super::answer::{AnswerEvent, AnswerSender, RequestId};
use super::beams::Beams;
use super::bounds::PageBounds;
use crate::prompt::LivePrompt;
use crate::request::{FinishReason, Generation, Request, TokenLogprobs};
use crate::sampling::{Sampler, token_logprobs};

/// The place of a request in the order of service: smaller ranks are served first.
pub(super) type ServiceRank = (Reverse<i32>, RequestId);

/// A request, waiting or running.
#[derive(Debug)]
pub(super) struct LiveRequest {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) prompt: LivePrompt,
    pub(super) sender: AnswerSender,
    pub(super) submitted: Instant,
    /// The time of the engine's clock in milliseconds at which the request's time limit ends.
    pub(super) deadline: Option<u64>,
    pub(super) branches: Vec<Branch>,
    /// The state of a beam search, whose beams are the branches.
    pub(super) beams: Option<Box<Beams>>,
    /// The system prompt and the documents of a chunked prompt, in which drafts are looked up; empty if the
    /// request wants no drafts.
    pub(super) quotable: Vec<u32>,
    /// The number of available blocks in the main pool when the documents last found no room in it.
    pub(super) refused: Option<usize>,
}

/// One sample of a request: a sequence of its own after the request's context.
#[derive(Debug)]
pub(super) struct Branch {
    pub(super) sample: usize,
    /// The sequence, unless the request waits.
    pub(super) sequence: Option<SequenceId>,
    /// The logical index and the position of the first token.
    pub(super) start: SequenceStart,
    /// The tokens of the sequence: the prompt (of a chunked one the question), then the answer.
    pub(super) tokens: Vec<u32>,
    /// The keys of the tokens that a sequence was created with.
    pub(super) keys: Option<PromptKeys>,
    /// The number of prompt tokens among the tokens.
    pub(super) prompt: usize,
    /// The number of tokens whose keys and values are stored, or are in the pass that is being planned.
    pub(super) computed: usize,
    /// The sequence in host memory, one part for each group of layers, if the request was preempted and will
    /// be restored.
    pub(super) swapped: Option<Vec<SwappedSequence>>,
    /// Guesses for the next tokens, in the pass that is being planned.
    pub(super) draft: Vec<u32>,
    /// The number of guessed tokens.
    pub(super) drafted: usize,
    /// The number of correct guesses.
    pub(super) accepted: usize,
    /// The input of the last decode step, whose memory is used again.
    pub(super) input: Option<SequenceInput>,
    /// The bounds of the blocks that the sample sees, for sparse decoding.
    pub(super) bounds: PageBounds,
    pub(super) sampler: Sampler,
    /// The logits that tokens were chosen from, if the request keeps them.
    pub(super) logits: Vec<Vec<f32>>,
    /// The log-probabilities of the answer, if the request asks for them.
    pub(super) logprobs: Vec<TokenLogprobs>,
    /// A forced answer, once the prompt is computed.
    pub(super) forced: Option<Vec<u32>>,
    /// The score of a beam that has ended.
    pub(super) score: Option<f32>,
    /// The time to first token.
    pub(super) ttft: Option<Duration>,
    pub(super) over: bool,
}

impl Branch {
    /// Creates the first sample of a request, of whose sequence nothing is computed.
    pub(super) fn new(prompt: Vec<u32>, start: SequenceStart, sampler: Sampler) -> Self {
        Self {
            sample: 0,
            sequence: None,
            start,
            prompt: prompt.len(),
            tokens: prompt,
            keys: None,
            computed: 0,
            swapped: None,
            draft: Vec::new(),
            drafted: 0,
            accepted: 0,
            input: None,
            bounds: PageBounds::default(),
            sampler,
            logits: Vec::new(),
            logprobs: Vec::new(),
            forced: None,
            score: None,
            ttft: None,
            over: false,
        }
    }

    /// Returns a branch with the same tokens in another sequence.
    pub(super) fn twin(&self, sequence: Option<SequenceId>, sampler: Sampler) -> Self {
        Self {
            sequence,
            prompt: self.prompt,
            computed: self.computed,
            keys: self.keys.clone(),
            ttft: self.ttft,
            ..Self::new(self.tokens.clone(), self.start, sampler)
        }
    }

    /// Forgets the computed tokens of a sample whose sequence is freed.
    pub(super) fn forget(&mut self) {
        (self.computed, self.input, self.swapped) = (0, None, None);
        self.bounds = PageBounds::default();
        self.draft.clear();
        if self.forced.is_some() {
            // The logits after the prompt stay; the answer's are computed again.
            self.logits.truncate(1);
            self.logprobs.truncate(1);
        }
    }

    /// Returns the keys of the tokens. Only keys of new blocks are computed.
    pub(super) fn prompt_keys(&mut self, root: BlockKey, block_size: usize) -> &PromptKeys {
        // All logits of a forced answer are wanted, so none of its tokens may be found in the cache.
        let end = if self.forced.is_some() { self.prompt } else { self.tokens.len() };
        let keys = self.keys.get_or_insert_with(|| PromptKeys::new(root, &self.tokens[..end], block_size));
        keys.extend(self.tokens.get(keys.tokens().len()..end).unwrap_or_default());
        keys
    }

    /// Returns the number of tokens that are left to compute.
    pub(super) fn left(&self) -> usize {
        if self.over { 0 } else { self.tokens.len() - self.computed }
    }

    /// Returns the answer so far.
    pub(super) fn answer(&self) -> &[u32] {
        self.forced.as_deref().unwrap_or(&self.tokens[self.prompt..])
    }

    /// Returns the position after the last token.
    pub(super) fn end(&self) -> i64 {
        self.start.position + self.tokens.len() as i64
    }

    /// Returns whether the next token to compute is the last of the answer.
    pub(super) fn is_decoding(&self) -> bool {
        self.sequence.is_some() && self.left() == 1 && self.tokens.len() > self.prompt
    }
}

impl LiveRequest {
    /// Ends the samples that were declared complete. Beams have no samples before they end.
    pub(super) fn end_complete(&mut self) {
        // Before the first token, the first sample stands for all.
        let not_yet = self.branches.len() < self.request.samples && self.branches[0].ttft.is_none();
        if self.request.beams.is_some() || not_yet {
            return;
        }
        for branch in 0..self.branches.len() {
            let Branch { over, sample, .. } = self.branches[branch];
            if !over && self.sender.is_complete(sample) {
                self.end(branch, FinishReason::StopString);
            }
        }
    }

    /// Returns the first sample with tokens that are left to compute.
    pub(super) fn unfed(&self) -> Option<usize> {
        self.branches.iter().position(|branch| branch.left() > 0)
    }

    /// Records a branch's new sequence, with the number of its tokens that were cached.
    pub(super) fn begun(&mut self, branch: usize, sequence: SequenceId, cached: usize) {
        let first = branch == 0;
        let branch = &mut self.branches[branch];
        (branch.sequence, branch.computed) = (Some(sequence), cached);
        if first && !self.prompt.is_chunked() {
            self.prompt.costs_mut().cached_tokens = cached.min(branch.prompt);
        }
    }

    /// Ends a sample and sends its report.
    pub(super) fn end(&mut self, branch: usize, finish: FinishReason) {
        let (prompt_tokens, submitted) = (self.request.prompt.len(), self.submitted);
        let costs = self.prompt.costs().clone();
        let branch = &mut self.branches[branch];
        branch.over = true;
        let generation = Box::new(Generation {
            tokens: branch.answer().to_vec(),
            finish,
            prompt_tokens,
            cached_tokens: costs.cached_tokens,
            recomputed_tokens: costs.recomputed_tokens,
            drafted_tokens: branch.drafted,
            accepted_tokens: branch.accepted,
            prefill_flops: costs.flops,
            ttft: branch.ttft.unwrap_or_else(|| submitted.elapsed()),
            total: submitted.elapsed(),
            chunks: costs.chunks,
            score: branch.score,
            logprobs: std::mem::take(&mut branch.logprobs),
            logits: std::mem::take(&mut branch.logits),
        });
        self.sender.send(AnswerEvent::End { sample: branch.sample, generation });
    }

    /// Begins a forced answer: appends its tokens, so that their logits are computed. `longest` is the
    /// model's longest sequence, and `first` has the logits after the prompt. If the whole answer fits, its
    /// last token is computed as well, for the logits after it.
    pub(super) fn force(&mut self, longest: usize, first: &[f32]) {
        let (most, submitted) = (self.request.max_new_tokens, self.submitted);
        let answer = self.request.forced.clone().unwrap_or_default();
        let branch = &mut self.branches[0];
        let end = branch.start.position + branch.prompt as i64;
        let left = (longest as i64).saturating_sub(end).max(0) as usize;
        let wanted = answer.len().min(most);
        let fed = if answer.len() < most { wanted } else { wanted - 1 }.min(left);
        branch.ttft = Some(submitted.elapsed());
        let forced = &answer[..wanted.min(left.saturating_add(1))];
        branch.tokens.extend_from_slice(&answer[..fed]);
        branch.forced = Some(forced.to_vec());
        for &token in forced {
            self.sender.send(AnswerEvent::Token { sample: 0, token, logprobs: None });
        }
        self.record_forced(0, first);
        if fed == 0 {
            self.end_forced(0);
        }
    }

    /// Records the logits at the next place of a forced answer. The last place is after its last token.
    pub(super) fn record_forced(&mut self, branch: usize, logits: &[f32]) {
        let branch = &mut self.branches[branch];
        if self.request.keep_logits {
            branch.logits.push(logits.to_vec());
        }
        let token = branch.answer().get(branch.logprobs.len()).copied();
        if let Some((most, token)) = self.request.logprobs.zip(token) {
            branch.logprobs.push(token_logprobs(logits, token, most));
        }
    }

    /// Ends a sample with a forced answer. The reason is a stop of the model if the whole answer was
    /// computed.
    pub(super) fn end_forced(&mut self, branch: usize) {
        let computed = self.branches[branch].tokens.len() - self.branches[branch].prompt;
        let whole = self.request.forced.as_ref().is_some_and(|answer| computed == answer.len());
        self.end(branch, if whole { FinishReason::Stop } else { FinishReason::Length });
    }

    pub(super) fn is_over(&self) -> bool {
        self.branches.iter().all(|branch| branch.over)
    }

    /// Returns whether two requests may be in one pass.
    pub(super) fn same_regime(&self, other: &Self) -> bool {
        let (a, b) = (self.prompt.ropes().layers(), other.prompt.ropes().layers());
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// Returns the place of the request in the order of service.
    pub(super) fn rank(&self) -> ServiceRank {
        (Reverse(self.request.priority), self.id)
    }
}

/// Returns the index of a request among running ones, which are in the order of service.
pub(super) fn index_of(running: &[LiveRequest], rank: ServiceRank) -> Option<usize> {
    running.binary_search_by_key(&rank, LiveRequest::rank).ok()
}
