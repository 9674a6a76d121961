//! Chooses the tokens to recompute by the question's attention: the question is computed once over the stored
//! keys, and its attention to each token is summed.
//!
//! The model computes the sums in the passes that it runs for all requests. (`ProphetKV`, 2026.)

use kvchunk::Findings;
use kvcore::{SequenceInput, SequenceStart, WriteSlots};
use kvmodel::AttentionMass;

use super::context::{Context, behind};
use super::parts::{LivePrompt, PendingRows, PromptParts, Stage};
use crate::error::{Error, Result};
use crate::request::Request;
use crate::runner::Runner;

impl LivePrompt {
    /// Starts to measure the question's attention if the request's strategy needs it. Otherwise continues
    /// with [`choose_by`](Self::choose_by).
    pub(super) fn choose(&mut self, runner: &mut Runner, request: &Request) -> Result<()> {
        let Some(check) = request.recompute.evidence().attention else {
            return self.choose_by(runner, request, Findings::default());
        };
        let question = self.question(runner, request)?;
        let context = &question.segments[..question.segments.len().saturating_sub(1)];
        let tokens = context.iter().map(|segment| segment.len).sum();
        let first_layer = check.first_layer(runner.model.config().num_layers());
        let mass = AttentionMass::new(first_layer, tokens);
        let (_, _, stage) = self.stored(runner, request)?;
        *stage = Stage::Asking { question: PendingRows::new([question]), mass };
        Ok(())
    }

    /// Makes the strategy choose tokens by the question's attention, which must have been computed.
    pub(super) fn choose_asked(&mut self, runner: &mut Runner, request: &Request) -> Result<()> {
        let PromptParts::Stored { assembled, stage: Stage::Asking { mass, .. } } = &self.parts else {
            return Err(Error::EmptyPrompt);
        };
        let system = assembled.segments().first().map_or(0, |segment| segment.len);
        let sums = mass.read(runner.device().stream)?;
        let scores = assembled.by_chunk(&sums[system..]);
        let flops = mass.flops;
        self.free_question(runner)?;
        self.choose_by(runner, request, Findings { attention: Some(scores), ..Findings::default() })?;
        self.costs.flops += flops;
        Ok(())
    }

    /// Returns the whole question as an input in a new sequence. The question sees the documents' stored KV.
    pub(super) fn question(&mut self, runner: &mut Runner, request: &Request) -> Result<SequenceInput> {
        self.free_question(runner)?;
        let Some(prompt) = request.chunked() else { return Err(Error::EmptyPrompt) };
        let (_, assembled, _) = self.stored(runner, request)?;
        let context = Context::scaled(request.scaling, assembled.segments());
        let (start, caches) = (self.start(), &mut runner.caches);
        let sequence = caches.sequences.create(SequenceStart::default())?;
        self.question = Some(sequence);
        let slots = caches.sequences.grow(sequence, prompt.question().len())?;
        let segment = behind(start, caches.sequences.first().segment(sequence)?);
        let mut input = context.input(start, 0, prompt.question(), WriteSlots::default(), segment);
        input.set_slots(slots);
        self.context = context;
        Ok(input)
    }

    /// Frees the question's sequence, if there is one, so that the question is computed again with the final
    /// context.
    pub(super) fn free_question(&mut self, runner: &mut Runner) -> Result<()> {
        self.question.take().map_or(Ok(()), |sequence| runner.caches.sequences.free(sequence))
    }
}
