//! Decode steps: passes whose rows all have logits, captured as graphs where backend and dense steps allow it.

use std::sync::Arc;

use kvcore::{GraphCache, GraphCounts, GraphKey, LayerRopes, SequenceInput};

use super::pass::{Pass, PassMemory};
use super::rows::Rows;
use super::{ComputeDevice, Forward, LogitRows, Model};
use crate::dense::Activation;
use crate::error::{Error, Result};

/// The memory of decode steps: that of their passes, and their graphs. Steps of one model over one arena on one stream
/// use it one after the other, whichever request they belong to.
#[derive(Debug)]
pub struct DecodeMemory {
    pass: PassMemory,
    /// The graphs, each with the place of its logits.
    graphs: GraphCache<Activation>,
    /// The embeddings that the graphs read.
    ropes: Option<LayerRopes>,
}

impl DecodeMemory {
    /// Creates memory for at most `graphs` graphs. With none, every step runs operation by operation.
    pub fn new(graphs: usize) -> Self {
        Self { pass: PassMemory::default(), graphs: GraphCache::new(graphs), ropes: None }
    }

    /// Returns the largest number of graphs.
    pub fn most(&self) -> usize {
        self.graphs.most()
    }

    /// Returns the numbers of steps that went through the cache of graphs, by the way in which they ran.
    pub fn counts(&self) -> GraphCounts {
        self.graphs.counts()
    }

    /// Forgets the graphs if they read other embeddings.
    fn turn_to(&mut self, ropes: &LayerRopes) {
        let same = |known: &LayerRopes| {
            let pairs = known.layers().iter().zip(ropes.layers());
            known.layers().len() == ropes.layers().len() && pairs.into_iter().all(|(a, b)| Arc::ptr_eq(a, b))
        };
        if !self.ropes.as_ref().is_some_and(same) {
            self.graphs.clear();
            self.ropes = Some(ropes.clone());
        }
    }
}

impl Default for DecodeMemory {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Model {
    /// Runs a decode step: a pass over sequences that want the logits of all their tokens, as
    /// [`forward`](Self::forward) runs it, bit for bit. Reads the logits into the memory of `logits`.
    ///
    /// Where the [dense steps](crate::dense::Dense::joins_captures) and the stream can be captured, a step that comes
    /// again with other tokens, positions, slots and segments is a replay of one graph. Other steps run operation by
    /// operation: a first one, one that reads results on the host in its middle (routed experts), one without logits
    /// for some tokens.
    ///
    /// # Errors
    /// Returns the errors of [`begin`](Self::begin) and of the backend.
    pub fn decode(
        &self,
        device: &ComputeDevice,
        ropes: &LayerRopes,
        batch: &[SequenceInput],
        memory: &mut DecodeMemory,
        mut logits: Vec<f32>,
    ) -> Result<Forward> {
        let captures = memory.most() > 0 && self.dense.joins_captures();
        if captures {
            memory.pass.rows.fill(batch, self.config.vocab_size)?;
        }
        if !captures || !memory.pass.rows.all_wanted() {
            return self.begin(device, ropes, batch, &mut memory.pass)?.end_into(logits, &mut ());
        }
        memory.turn_to(ropes);
        let (count, inputs) = (memory.pass.rows.tokens.len(), memory.pass.rows.padded());
        let DecodeMemory { pass, graphs, .. } = memory;
        let (rows, border) = pass.ready(self, device)?;
        let (dense, key) = (self.dense.as_ref(), GraphKey::of(&inputs, device.arena.layout().shape().format));
        let mut record = || -> kvcore::Result<Activation> {
            let mut step = || {
                border.follow(device.stream)?;
                let mut pass = Pass::new(self, device, ropes, rows, border)?;
                pass.run_all(&mut ())?;
                let logits = pass.head()?;
                border.precede(device.stream)?;
                Ok(logits)
            };
            step().map_err(|error: Error| match error {
                Error::Core(error) => error,
                other => kvcore::Error::Device { backend: dense.name(), reason: other.to_string() },
            })
        };
        let run = || graphs.run(device.stream, key, &inputs, &mut record);
        let (_, of_rows) = device.profiler.span("decode step", run)?;
        border.follow(device.stream)?;
        device.profiler.span("read logits", || dense.read(&of_rows, &mut logits))?;
        rows.release();
        logits.truncate(count * self.config.vocab_size);
        let flops = self.step_flops(count, Rows::visible(&inputs.work));
        Ok(Forward { flops, logits: Some(LogitRows::new(logits, self.config.vocab_size)) })
    }
}
