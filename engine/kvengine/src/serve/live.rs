//! A request that is being served, and its samples.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{BlockKey, KeyScheme, PromptKeys, SequenceId, SequenceInput, SequenceStart, SwappedSequence};

use super::answer::{AnswerEvent, AnswerSender, RequestId};
use super::beams::Beams;
use super::bounds::PageBounds;
use super::disk::DiskFetch;
use crate::constraint::ConstraintState;
use crate::error::Error;
use crate::prompt::LivePrompt;
use crate::request::{FinishReason, Generation, Request, TokenLogprobs};
use crate::runner::Runner;
use crate::sampling::{Sampler, token_logprobs};

/// A request's rank in the order of service. Smaller ranks are served first.
pub(super) type ServiceRank = (Reverse<i32>, RequestId);

/// A request, waiting or running.
#[derive(Debug)]
pub(super) struct LiveRequest {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) prompt: LivePrompt,
    pub(super) sender: AnswerSender,
    pub(super) submitted: Instant,
    /// The time from the submission to the first admission, once the request was admitted.
    pub(super) queued: Option<Duration>,
    /// The time when the request's time limit ends, in milliseconds on the engine's clock.
    pub(super) deadline: Option<u64>,
    pub(super) branches: Vec<Branch>,
    /// The state of the request's beam search. The beams are the branches.
    pub(super) beams: Option<Box<Beams>>,
    /// The tokens of a chunked prompt's system prompt and documents, in which guesses are looked up. Empty if
    /// the request does not use guesses.
    pub(super) quotable: Vec<u32>,
    /// The number of blocks that were available in the main pool when the request was last refused for lack
    /// of room.
    pub(super) refused: Option<usize>,
    /// The loads from a disk that the request waits for before it is admitted.
    pub(super) fetch: DiskFetch,
}

/// One sample of a request: a sequence that follows the request's context.
#[derive(Debug)]
pub(super) struct Branch {
    pub(super) sample: usize,
    /// The sequence, unless the request is waiting.
    pub(super) sequence: Option<SequenceId>,
    /// The logical index and position of the first token.
    pub(super) start: SequenceStart,
    /// The sequence's tokens: the prompt (for a chunked prompt, only the question), then the answer.
    pub(super) tokens: Vec<u32>,
    /// The block keys of the tokens that were looked up when the sequence was created.
    pub(super) keys: Option<PromptKeys>,
    /// The number of the request if its answer is approximate, so that nobody else may find it.
    pub(super) owner: Option<RequestId>,
    /// The number of prompt tokens in [`tokens`](Self::tokens).
    pub(super) prompt: usize,
    /// The number of tokens whose keys and values are stored, or that are in the pass being planned.
    pub(super) computed: usize,
    /// The sequence in host memory, with one part per group of layers, if the request was preempted and will
    /// be restored.
    pub(super) swapped: Option<Vec<SwappedSequence>>,
    /// The guesses for the next tokens in the pass being planned.
    pub(super) draft: Vec<u32>,
    /// The number of tokens guessed so far.
    pub(super) drafted: usize,
    /// The number of correct guesses so far.
    pub(super) accepted: usize,
    /// The input of the last decode step. Its memory is reused.
    pub(super) input: Option<SequenceInput>,
    /// The key bounds of the blocks that the sample sees, for sparse decoding.
    pub(super) bounds: PageBounds,
    pub(super) sampler: Sampler,
    /// The logits that the tokens were chosen from, if the request keeps them.
    pub(super) logits: Vec<Vec<f32>>,
    /// The log-probabilities of the answer's tokens, if the request asks for them.
    pub(super) logprobs: Vec<TokenLogprobs>,
    /// The constraint that the answer obeys.
    pub(super) constraint: Option<ConstraintState>,
    /// The logits after the last token, while it is not known which tokens may follow.
    pub(super) late: Option<Vec<f32>>,
    /// The forced answer, once the prompt is computed.
    pub(super) forced: Option<Vec<u32>>,
    /// The score of the answer, if it was found by a beam search.
    pub(super) score: Option<f32>,
    /// The time to first token.
    pub(super) ttft: Option<Duration>,
    pub(super) over: bool,
}

impl Branch {
    /// Creates a request's first sample. No token of its sequence has been computed.
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
            constraint: None,
            late: None,
            forced: None,
            owner: None,
            score: None,
            ttft: None,
            over: false,
        }
    }

    /// Returns a copy of the branch with another sequence and another sampler.
    pub(super) fn twin(&self, sequence: Option<SequenceId>, sampler: Sampler) -> Self {
        Self {
            sequence,
            prompt: self.prompt,
            computed: self.computed,
            keys: self.keys.clone(),
            owner: self.owner,
            ttft: self.ttft,
            ..Self::new(self.tokens.clone(), self.start, sampler)
        }
    }

    /// Marks all of the sample's tokens as not computed. Must be called after the sample's sequence is freed.
    pub(super) fn forget(&mut self) {
        (self.computed, self.input, self.swapped) = (0, None, None);
        // The last token is computed again, and gives the same logits.
        self.late = None;
        self.bounds = PageBounds::default();
        self.draft.clear();
        if self.forced.is_some() {
            // The logits after the prompt are kept; the logits of the answer are computed again.
            self.logits.truncate(1);
            self.logprobs.truncate(1);
        }
    }

    /// Returns the block keys of the branch's tokens or, for a forced answer, only of its prompt. Computes
    /// only the keys of blocks added since the last call, unless the root has changed.
    pub(super) fn prompt_keys(&mut self, root: BlockKey, block_size: usize) -> &PromptKeys {
        // All logits of a forced answer are needed, so its tokens must not be found in the cache.
        let end = if self.forced.is_some() { self.prompt } else { self.tokens.len() };
        let keys = self.keys.take().filter(|keys| keys.scheme().root() == root);
        let scheme = match self.owner {
            Some(RequestId(id)) => {
                let own = root.derive("kvengine answer v1").child(&[id as u32, (id >> 32) as u32]);
                KeyScheme::Private(root, self.prompt, own)
            }
            None => root.into(),
        };
        let new = || PromptKeys::new(scheme, &self.tokens[..end], block_size);
        let keys = self.keys.insert(keys.unwrap_or_else(new));
        keys.extend(self.tokens.get(keys.tokens().len()..end).unwrap_or_default());
        keys
    }

    /// Returns the number of tokens left to compute.
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

    /// Returns true if the only token left to compute is the answer's last token so far.
    pub(super) fn is_decoding(&self) -> bool {
        self.sequence.is_some() && self.left() == 1 && self.tokens.len() > self.prompt
    }
}

impl LiveRequest {
    /// Ends the samples that were declared complete. Does nothing during a beam search.
    pub(super) fn end_complete(&mut self) {
        // Before the first token, the first sample represents all samples.
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

    /// Returns the first sample that has tokens left to compute.
    pub(super) fn unfed(&self) -> Option<usize> {
        self.branches.iter().position(|branch| branch.left() > 0)
    }

    /// Records a branch's new sequence, and that its first `cached` tokens were found in the cache.
    pub(super) fn begun(&mut self, branch: usize, sequence: SequenceId, cached: usize) {
        let first = branch == 0;
        let branch = &mut self.branches[branch];
        (branch.sequence, branch.computed) = (Some(sequence), cached);
        if first {
            let (cached, is_chunked) = (cached.min(branch.prompt), self.prompt.is_chunked());
            self.prompt.costs_mut().found_sequence(cached, is_chunked);
        }
    }

    /// Ends a sample and sends its [`Generation`].
    pub(super) fn end(&mut self, branch: usize, finish: FinishReason) {
        let (prompt_tokens, submitted) = (self.request.prompt.len(), self.submitted);
        let costs = self.prompt.costs().clone();
        let branch = &mut self.branches[branch];
        branch.over = true;
        let generation = Box::new(Generation {
            tokens: branch.answer().to_vec(),
            finish,
            prompt_tokens,
            cached_tokens: costs.cached_tokens + costs.cached_question,
            cached_question: costs.cached_question,
            recomputed_tokens: costs.recomputed_tokens,
            drafted_tokens: branch.drafted,
            accepted_tokens: branch.accepted,
            prefill_flops: costs.flops,
            ttft: branch.ttft.unwrap_or_else(|| submitted.elapsed()),
            queued: self.queued.unwrap_or_else(|| submitted.elapsed()),
            total: submitted.elapsed(),
            prefix_missed: costs.prefix_missed,
            chunks: costs.chunks,
            score: branch.score,
            logprobs: std::mem::take(&mut branch.logprobs),
            logits: std::mem::take(&mut branch.logits),
        });
        self.sender.send(AnswerEvent::End { sample: branch.sample, generation });
    }

    /// Starts a forced answer: sends its tokens to the reader, and appends them to the sequence, so that the
    /// logits after them are computed. The answer's last token is appended only if the answer is shorter than
    /// the token limit. `longest` is the model's maximum sequence length, and `first` contains the logits
    /// after the prompt.
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

    /// Records the logits, or the log-probabilities computed from them, at the next position of a forced
    /// answer, as the request asks. The last position is the one after the answer's last token.
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

    /// Ends a sample with a forced answer. The reason is [`FinishReason::Stop`] if all of the answer's tokens
    /// were computed, including the last, and [`FinishReason::Length`] otherwise.
    pub(super) fn end_forced(&mut self, branch: usize) {
        let computed = self.branches[branch].tokens.len() - self.branches[branch].prompt;
        let whole = self.request.forced.as_ref().is_some_and(|answer| computed == answer.len());
        self.end(branch, if whole { FinishReason::Stop } else { FinishReason::Length });
    }

    /// Ends an answer that has outgrown the pool, with the tokens so far. Returns false, and changes nothing, if
    /// `error` has another reason, if the answer has no token yet, or if the answer is forced, because a forced
    /// answer is needed as a whole. The caller must then withdraw the request.
    pub(super) fn end_outgrown(&mut self, runner: &mut Runner, error: &Error) -> bool {
        let begun = self.branches.iter().any(|branch| !branch.answer().is_empty());
        if !error.is_out_of_blocks() || !begun || self.request.forced.is_some() {
            return false;
        }
        if self.request.beams.is_some() {
            self.cut_beams(runner);
            return true;
        }
        for branch in 0..self.branches.len() {
            if !self.branches[branch].over {
                self.end(branch, FinishReason::Length);
            }
        }
        true
    }

    pub(super) fn is_over(&self) -> bool {
        self.branches.iter().all(|branch| branch.over)
    }

    /// Returns true if the two requests are in the same RoPE regime, so that they may share a pass.
    pub(super) fn same_regime(&self, other: &Self) -> bool {
        let (a, b) = (self.prompt.ropes().layers(), other.prompt.ropes().layers());
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// Returns the request's rank in the order of service.
    pub(super) fn rank(&self) -> ServiceRank {
        (Reverse(self.request.priority), self.id)
    }
}

/// Returns the index of a request in `running`, which must be in the order of service.
pub(super) fn index_of(running: &[LiveRequest], rank: ServiceRank) -> Option<usize> {
    running.binary_search_by_key(&rank, LiveRequest::rank).ok()
}
