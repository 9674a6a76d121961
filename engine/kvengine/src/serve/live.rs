//! A request under way, and its samples.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvchunk::{AssembledPrompt, Assembly, ChunkReport, PositionReindexer, TenantKeys};
use kvcore::{BlockKey, LayerRopes, PromptKeys, SequenceId, SequenceInput, SequenceStart, SwappedSequence};

use super::Rank;
use super::answer::{AnswerEvent, RequestId, Sender};
use super::beams::Beams;
use super::pages::PageBounds;
use super::parts::chunked;
use crate::blend::Blend;
use crate::generate::Context;
use crate::logprobs::TokenLogprobs;
use crate::request::{FinishReason, Generation, Request};
use crate::sample::Sampler;

/// A request, waiting or running.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) id: RequestId,
    pub(super) request: Request,
    /// The rotary embeddings of the request's regime.
    pub(super) ropes: LayerRopes,
    pub(super) keys: TenantKeys,
    pub(super) sender: Sender,
    pub(super) submitted: Instant,
    /// Milliseconds of the engine's clock after which the request is too late.
    pub(super) deadline: Option<u64>,
    pub(super) parts: Parts,
    pub(super) context: Context,
    pub(super) branches: Vec<Branch>,
    /// The beams that the branches are, if the request asks for some.
    pub(super) beams: Option<Box<Beams>>,
    /// The system prompt and the documents of a chunked prompt, in which drafts are looked up, if the request asks for some.
    pub(super) text: Vec<u32>,
    /// The costs of the prefill, for each sample's report.
    pub(super) costs: Costs,
    /// The blocks that the main pool had to give when the documents last found no room in it.
    pub(super) refused: Option<usize>,
}

/// The costs of a request's prefill.
#[derive(Debug, Default, Clone)]
pub(super) struct Costs {
    pub(super) cached_tokens: usize,
    pub(super) recomputed_tokens: usize,
    pub(super) flops: u64,
    pub(super) chunks: Vec<ChunkReport>,
}

/// The documents of a request, and its system prompt.
#[derive(Debug)]
pub(super) enum Parts {
    /// Not looked up: the request waits, or its prompt has none.
    None,
    /// Being computed. The first `done` rows of the inputs are there.
    Missing { assembly: Box<Assembly>, reindexer: PositionReindexer, done: usize, since: u64 },
    /// There and stored. What is computed anew is not chosen yet.
    Computed { assembled: Box<AssembledPrompt> },
    /// There and stored. The question is computed once to see what it attends to: its first `done` rows are there, and `sums` has the weight
    /// of each token before it.
    Asking { assembled: Box<AssembledPrompt>, question: Box<[SequenceInput; 1]>, done: usize, sums: Vec<f32> },
    /// There and stored. Their tokens are computed up to a checkpoint, where those are chosen that go on.
    Blending { assembled: Box<AssembledPrompt>, blend: Box<Blend> },
    /// There, but for the tokens that are recomputed, of which the first `done` rows are there.
    Anew { assembled: Box<AssembledPrompt>, inputs: Vec<SequenceInput>, done: usize },
    /// Held until the answer is complete.
    Held { _assembled: Box<AssembledPrompt> },
}

impl Parts {
    /// Returns the inputs that are to be computed, and the number of their rows that are there.
    pub(super) fn inputs(&self) -> (&[SequenceInput], usize) {
        match self {
            Self::Missing { assembly, done, .. } => (assembly.inputs(), *done),
            Self::Asking { question, done, .. } => (question.as_slice(), *done),
            Self::Anew { inputs, done, .. } => (inputs, *done),
            Self::None | Self::Computed { .. } | Self::Blending { .. } | Self::Held { .. } => (&[], 0),
        }
    }

    /// Returns the number of rows that are to be computed now.
    pub(super) fn left(&self) -> usize {
        if let Self::Blending { blend, .. } = self {
            return blend.left();
        }
        let (inputs, done) = self.inputs();
        inputs.iter().map(|input| input.tokens.len()).sum::<usize>().saturating_sub(done)
    }

    pub(super) fn add_done(&mut self, rows: usize) {
        if let Self::Missing { done, .. } | Self::Asking { done, .. } | Self::Anew { done, .. } = self {
            *done += rows;
        }
    }
}

/// One sample of a request: a sequence of its own behind the request's context.
#[derive(Debug)]
pub(super) struct Branch {
    pub(super) sample: usize,
    /// The sequence, unless the request waits.
    pub(super) own: Option<SequenceId>,
    /// The logical index and the position of the first token.
    pub(super) start: SequenceStart,
    /// The tokens of the sequence: the prompt (of a chunked one the question), then the answer.
    pub(super) tokens: Vec<u32>,
    /// The keys of those tokens, as far as a sequence has been begun with them.
    pub(super) keys: Option<PromptKeys>,
    /// The number of prompt tokens among them.
    pub(super) prompt: usize,
    /// The number of tokens whose keys and values are stored, or are in the pass that is being planned.
    pub(super) computed: usize,
    /// The sequence in host memory, one part for each group of layers, if the request gave way and comes back.
    pub(super) swapped: Option<Vec<SwappedSequence>>,
    /// Tokens that are guessed to follow, in the pass that is being planned.
    pub(super) draft: Vec<u32>,
    /// The number of tokens that were guessed, and of those that were right.
    pub(super) drafted: usize,
    pub(super) accepted: usize,
    /// The input of the last decode step, whose memory is used again.
    pub(super) input: Option<SequenceInput>,
    /// The bounds of the blocks that the sample sees, if it attends to a part of them.
    pub(super) pages: Option<PageBounds>,
    pub(super) sampler: Sampler,
    /// The logits that tokens were chosen from, if the request keeps them.
    pub(super) logits: Vec<Vec<f32>>,
    /// The log-probabilities of the answer, if the request asks for them.
    pub(super) logprobs: Vec<TokenLogprobs>,
    /// The answer that is given, instead of sampled, from the prompt's end on.
    pub(super) given: Option<Vec<u32>>,
    /// The score of a beam that has ended.
    pub(super) score: Option<f32>,
    /// The time to first token.
    pub(super) ttft: Option<Duration>,
    pub(super) over: bool,
}

impl Branch {
    /// Creates the first sample of a request, of whose sequence nothing is computed.
    pub(super) fn new(prompt: Vec<u32>, sampler: Sampler) -> Self {
        Self {
            sample: 0,
            own: None,
            start: SequenceStart::default(),
            prompt: prompt.len(),
            tokens: prompt,
            keys: None,
            computed: 0,
            swapped: None,
            draft: Vec::new(),
            drafted: 0,
            accepted: 0,
            input: None,
            pages: None,
            sampler,
            logits: Vec::new(),
            logprobs: Vec::new(),
            given: None,
            score: None,
            ttft: None,
            over: false,
        }
    }

    /// Forgets what is computed of a sample, whose sequence is gone.
    pub(super) fn forget(&mut self) {
        (self.computed, self.input, self.swapped, self.pages) = (0, None, None, None);
        self.draft.clear();
        if self.given.is_some() {
            // The logits behind the prompt stay; those of the answer come again.
            self.logits.truncate(1);
            self.logprobs.truncate(1);
        }
    }

    /// Returns the keys of the tokens, of which only those of new blocks are made.
    pub(super) fn prompt_keys(&mut self, root: BlockKey, block_size: usize) -> &PromptKeys {
        // The logits of an answer that is given are all wanted, so that none of it is to be found.
        let end = if self.given.is_some() { self.prompt } else { self.tokens.len() };
        let keys = self.keys.get_or_insert_with(|| PromptKeys::new(root, &self.tokens[..end], block_size));
        keys.extend(self.tokens.get(keys.tokens().len()..end).unwrap_or_default());
        keys
    }

    /// Returns the number of tokens that are still to be computed.
    pub(super) fn left(&self) -> usize {
        if self.over { 0 } else { self.tokens.len() - self.computed }
    }

    /// Returns the answer so far.
    pub(super) fn answer(&self) -> &[u32] {
        self.given.as_deref().unwrap_or(&self.tokens[self.prompt..])
    }

    /// Returns whether the next token to compute is the last of the answer.
    pub(super) fn is_decoding(&self) -> bool {
        self.own.is_some() && self.left() == 1 && self.tokens.len() > self.prompt
    }
}

impl Live {
    /// Ends the samples that were declared complete. Beams have no samples before they end.
    pub(super) fn end_complete(&mut self) {
        // Before the first token, the first sample stands for all.
        let not_yet = self.branches.len() < self.request.samples && self.branches[0].ttft.is_none();
        if self.request.beams.is_some() || not_yet {
            return;
        }
        for branch in 0..self.branches.len() {
            let it = &self.branches[branch];
            if !it.over && self.sender.is_complete(it.sample) {
                self.end(branch, FinishReason::StopString);
            }
        }
    }

    /// Returns the first sample of which something is still to be computed.
    pub(super) fn unfed(&self) -> Option<usize> {
        self.branches.iter().position(|branch| branch.left() > 0)
    }

    /// Takes note of a branch's new sequence, with the number of its tokens that were cached.
    pub(super) fn begun(&mut self, branch: usize, own: SequenceId, cached: usize) {
        let plain = chunked(self).is_none();
        let it = &mut self.branches[branch];
        (it.own, it.computed) = (Some(own), cached);
        if plain && branch == 0 {
            self.costs.cached_tokens = cached.min(it.prompt);
        }
    }

    /// Ends a sample. Its report is sent.
    pub(super) fn end(&mut self, branch: usize, finish: FinishReason) {
        let (prompt_tokens, submitted) = (self.request.prompt.len(), self.submitted);
        let costs = self.costs.clone();
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

    /// Appends the answer that is given, as far as the request and the model's `longest` sequence have room for it, for its logits to be
    /// computed. `first` are those behind the prompt. The last token of a whole answer is computed, too, for the logits behind it.
    pub(super) fn give(&mut self, longest: usize, first: &[f32]) {
        let (most, submitted) = (self.request.max_new_tokens, self.submitted);
        let answer = self.request.forced.clone().unwrap_or_default();
        let it = &mut self.branches[0];
        let end = it.start.position + it.prompt as i64;
        let left = (longest as i64).saturating_sub(end).max(0) as usize;
        let wanted = answer.len().min(most);
        let fed = if answer.len() < most { wanted } else { wanted - 1 }.min(left);
        it.ttft = Some(submitted.elapsed());
        let given = &answer[..wanted.min(left.saturating_add(1))];
        it.tokens.extend_from_slice(&answer[..fed]);
        it.given = Some(given.to_vec());
        for &token in given {
            self.sender.send(AnswerEvent::Token { sample: 0, token, logprobs: None });
        }
        self.note_given(0, first);
        if fed == 0 {
            self.end_given(0);
        }
    }

    /// Takes note of the logits of the next place of an answer that is given, the last of which lies behind it.
    pub(super) fn note_given(&mut self, branch: usize, logits: &[f32]) {
        let it = &mut self.branches[branch];
        if self.request.keep_logits {
            it.logits.push(logits.to_vec());
        }
        let token = it.answer().get(it.logprobs.len()).copied();
        if let Some((most, token)) = self.request.logprobs.zip(token) {
            it.logprobs.push(TokenLogprobs::of(logits, token, most));
        }
    }

    /// Ends a sample whose answer is given. The model is taken to have stopped if the whole answer was computed.
    pub(super) fn end_given(&mut self, branch: usize) {
        let it = &self.branches[branch];
        let whole = self.request.forced.as_ref().is_some_and(|all| it.tokens.len() - it.prompt == all.len());
        self.end(branch, if whole { FinishReason::Stop } else { FinishReason::Length });
    }

    pub(super) fn is_over(&self) -> bool {
        self.branches.iter().all(|branch| branch.over)
    }

    /// Returns whether two requests may be in one pass.
    pub(super) fn same_regime(&self, other: &Self) -> bool {
        let (a, b) = (self.ropes.layers(), other.ropes.layers());
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// Returns the place of a request in the order of service: the smaller, the earlier.
    pub(super) fn rank(&self) -> Rank {
        (Reverse(self.request.priority), self.id)
    }
}
