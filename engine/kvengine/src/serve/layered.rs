//! Passes that run layer by layer, because they contain samples that select the blocks to attend to in each
//! layer, or questions whose attention is summed. All other rows are computed as usual.

use kvcore::{LayerRopes, SequenceInput, StepBatch};
use kvmodel::{AttentionMass, Forward, Observer, PassMemory};

use super::feed::Feed;
use super::live::{Branch, LiveRequest};
use super::pages::SparseSample;
use crate::error::Result;
use crate::runner::Runner;

/// The samples in a pass that select blocks, and the questions whose attention is summed.
pub(super) struct Layered<'a> {
    sparse: Vec<SparseSample<'a>>,
    /// The attention sums that requests keep between passes.
    asked: Vec<&'a mut AttentionMass>,
}

impl<'a> Layered<'a> {
    /// Finds the samples that see more blocks than they attend to, and the questions with rows in the pass.
    /// Returns `None` if the pass contains neither.
    pub(super) fn find(
        running: &'a mut [LiveRequest],
        feeds: &[Feed],
        inputs: &[SequenceInput],
        block_size: usize,
    ) -> Option<Self> {
        let (mut sparse, mut asked) = (Vec::new(), Vec::new());
        for live in running {
            let rank = live.rank();
            let entry = |branch| feeds.iter().position(|feed| feed.rank == rank && feed.branch == branch);
            if let Some(setting) = live.request.sparse {
                for (index, branch) in live.branches.iter_mut().enumerate() {
                    let Some(entry) = entry(Some(index)) else { continue };
                    if sees_more(branch, &inputs[entry], setting.pages, block_size) {
                        sparse.push(SparseSample { entry, setting, bounds: &mut branch.bounds });
                    }
                }
            }
            if let Some(mass) = live.prompt.mass_mut()
                && let Some(entry) = entry(None)
            {
                mass.sequence = entry;
                asked.push(mass);
            }
        }
        (!sparse.is_empty() || !asked.is_empty()).then_some(Self { sparse, asked })
    }

    /// Runs the pass. Before each layer, the samples' queries are used to select blocks.
    pub(super) fn run(
        mut self,
        runner: &Runner,
        ropes: &LayerRopes,
        batch: StepBatch<'_>,
        logits: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        let (device, mut memory) = (runner.device(), PassMemory::default());
        let (inputs, layers) = (batch.inputs, &runner.model.config().layers);
        let mut pass = runner.model.begin(&device, ropes, batch, &mut memory)?;
        pass.observe(self.asked)?;
        for (layer, config) in layers.iter().enumerate() {
            pass.run_to(layer, observer)?;
            let selects = |sample: &SparseSample| sample.selects(layer, config.window.is_some());
            if !self.sparse.iter().any(selects) {
                continue;
            }
            let queries = pass.queries()?;
            let mut selections = vec![None; inputs.len()];
            for sample in self.sparse.iter_mut().filter(|sample| selects(sample)) {
                let input = &inputs[sample.entry];
                let row = inputs[..sample.entry].iter().map(|input| input.tokens.len()).sum();
                let selection = sample.select((runner, ropes, layer), input, queries, row)?;
                selections[sample.entry] = Some(selection);
            }
            pass.select(selections)?;
        }
        Ok(pass.end_into(logits, observer)?)
    }
}

/// Returns true if `input` is a decode step of the sample and sees more than `pages` blocks.
fn sees_more(branch: &Branch, input: &SequenceInput, pages: usize, block_size: usize) -> bool {
    let seen: usize = input.segments.iter().map(|segment| segment.len.div_ceil(block_size)).sum();
    input.tokens.len() == 1 && seen > pages && !branch.answer().is_empty()
}
