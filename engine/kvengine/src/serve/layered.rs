//! Passes that are run layer by layer, for those who look at queries before or after they attend: samples that choose what they
//! attend to, and questions that are asked what they attend to. Everybody else's rows are in the pass as always.

use kvcore::{LayerRopes, SequenceInput, StepBatch};
use kvmodel::{Forward, Observer, PassMemory};

use super::live::Parts;
use super::pages::Sparse;
use super::plan::Feed;
use super::{Rank, Scheduler};
use crate::engine::Engine;
use crate::error::Result;
use crate::inquire::Inquiry;

/// Rows of a question in a pass.
struct Asking {
    /// The place of the rows' input in the batch.
    entry: usize,
    rank: Rank,
    /// The first layer that counts.
    first_layer: usize,
    /// The weight of each token before the question.
    sums: Vec<f32>,
    /// The operations for them.
    flops: u64,
}

impl Scheduler {
    /// Runs a pass layer by layer. Returns `None` if nobody looks at queries.
    pub(super) fn layered_pass(
        &mut self,
        engine: &Engine,
        ropes: &LayerRopes,
        feeds: &[Feed],
        batch: StepBatch<'_>,
        observer: &mut dyn Observer,
    ) -> Option<Result<Forward>> {
        let mut sparse = self.sparse_of(engine, feeds, batch.inputs);
        let mut asking = self.asking_of(engine, feeds);
        if sparse.is_empty() && asking.is_empty() {
            return None;
        }
        let logits = std::mem::take(&mut self.logits);
        let result = engine.run_layers((ropes, batch), &mut sparse, &mut asking, logits, observer);
        for one in sparse {
            one.put_back(self);
        }
        for one in asking {
            let Some(at) = self.place(one.rank) else { continue };
            let live = &mut self.running[at];
            live.costs.flops += one.flops;
            if let Parts::Asking { sums, .. } = &mut live.parts {
                *sums = one.sums;
            }
        }
        Some(result)
    }

    /// Takes the sums of all questions of which the pass has rows.
    fn asking_of(&mut self, engine: &Engine, feeds: &[Feed]) -> Vec<Asking> {
        let (layers, mut asking) = (engine.model.config().num_layers(), Vec::new());
        for (entry, feed) in feeds.iter().enumerate().filter(|(_, feed)| feed.branch.is_none()) {
            let Some(at) = self.place(feed.rank) else { continue };
            let live = &mut self.running[at];
            let check = live.request.recompute.evidence().attention;
            if let (Parts::Asking { sums, .. }, Some(check)) = (&mut live.parts, check) {
                let (sums, first_layer) = (std::mem::take(sums), check.first_layer(layers));
                asking.push(Asking { entry, rank: feed.rank, first_layer, sums, flops: 0 });
            }
        }
        asking
    }
}

impl Engine {
    /// Runs a pass layer by layer: takes the queries, lets samples select, attends, and sums what questions attend to.
    fn run_layers(
        &self,
        (ropes, batch): (&LayerRopes, StepBatch<'_>),
        sparse: &mut [Sparse],
        asking: &mut [Asking],
        logits: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        let (device, mut memory) = (self.device(), PassMemory::default());
        let (inputs, layers) = (batch.inputs, &self.model.config().layers);
        let rows_before = |entry: usize| inputs[..entry].iter().map(|input| input.tokens.len()).sum();
        let rows = rows_before(inputs.len());
        let (mut pass, mut logits) =
            (Some(self.model.begin(&device, ropes, batch, &mut memory)?), Some(logits));
        let mut forward = Forward { logits: None, flops: 0 };
        for (layer, of_layer) in layers.iter().enumerate() {
            let Some(mut running) = pass.take() else { break };
            let selects = |one: &Sparse| one.wants(layer, of_layer.window.is_some());
            let asks = |one: &Asking| layer >= one.first_layer;
            let looked_at = sparse.iter().any(selects) || asking.iter().any(asks);
            let queries = looked_at.then(|| running.queries()).transpose()?;
            if let Some(queries) = queries.as_ref().filter(|_| sparse.iter().any(selects)) {
                let mut selections = vec![None; inputs.len()];
                for one in sparse.iter_mut().filter(|one| selects(one)) {
                    let (entry, at) = (one.entry, (self, ropes, layer));
                    selections[entry] = Some(one.select(at, &inputs[entry], queries, rows_before(entry))?);
                }
                running.select(selections)?;
            }
            // The layer's own keys are stored when it has run.
            if layer + 1 < layers.len() {
                running.run_to(layer + 1, observer)?;
                pass = Some(running);
            } else {
                forward = running.end_into(logits.take().unwrap_or_default(), observer)?;
            }
            let Some(queries) = queries else { continue };
            for one in asking.iter_mut().filter(|one| asks(one)) {
                let question: &SequenceInput = &inputs[one.entry];
                let asked = Inquiry { engine: self, ropes, question, first_row: rows_before(one.entry) };
                let add = || asked.add(layer, (&queries, rows), &mut one.sums);
                one.flops += self.profiler.span("attention of the question", add)?;
            }
        }
        Ok(forward)
    }
}
