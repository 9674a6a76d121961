//! Decode steps: passes that compute logits for all rows. They are captured as graphs if the backend and the
//! dense steps support this.

use std::sync::Arc;

use kvcore::{GraphCache, GraphCounts, GraphKey, KeyForm, KvArena, LayerRopes, StepBatch};

use super::pass::{Pass, PassMemory};
use super::rows::{check_vocabulary, visible};
use super::{ComputeDevice, Forward, LogitRows, Model};
use crate::dense::Activation;
use crate::error::{Error, Result};

/// The memory that decode steps reuse for their passes and graphs. Only one step at a time can use it. A
/// step with another model, arena, key form or rotary embedding drops the graphs. All steps must use the
/// same stream.
#[derive(Debug)]
pub struct DecodeMemory {
    pass: PassMemory,
    /// The graphs, each with its logits.
    graphs: GraphCache<Activation>,
    /// The objects that the graphs refer to; `None` before the first step that may use a graph.
    scene: Option<Scene>,
}

/// The model, rotary embeddings, arena and key form that graphs refer to. A step that uses different ones
/// cannot replay these graphs.
#[derive(Debug)]
struct Scene {
    revision: [u8; 32],
    ropes: LayerRopes,
    arena: KvArena,
    keys: KeyForm,
}

impl Scene {
    fn is_of(&self, model: &Model, device: &ComputeDevice, ropes: &LayerRopes) -> bool {
        let (known, ropes) = (self.ropes.layers(), ropes.layers());
        let plane = |arena: &KvArena| Arc::as_ptr(arena.k_plane().storage).cast::<()>();
        self.revision == model.revision
            && self.keys == device.keys
            && plane(&self.arena) == plane(&device.arenas[0])
            && known.len() == ropes.len()
            && known.iter().zip(ropes).all(|(a, b)| Arc::ptr_eq(a, b))
    }
}

impl DecodeMemory {
    /// Creates memory for at most `graphs` graphs. With 0, every step runs operation by operation.
    pub fn new(graphs: usize) -> Self {
        Self { pass: PassMemory::default(), graphs: GraphCache::new(graphs), scene: None }
    }

    /// Returns the maximum number of graphs.
    pub fn most(&self) -> usize {
        self.graphs.most()
    }

    /// Counts the steps that the graph cache has run, by how they ran.
    pub fn counts(&self) -> GraphCounts {
        self.graphs.counts()
    }

    /// Drops the graphs if they refer to another model, arena, key form or rotary embedding.
    fn turn_to(&mut self, model: &Model, device: &ComputeDevice, ropes: &LayerRopes) {
        if self.scene.as_ref().is_some_and(|scene| scene.is_of(model, device, ropes)) {
            return;
        }
        self.graphs.clear();
        let (revision, ropes) = (model.revision, ropes.clone());
        self.scene = Some(Scene { revision, ropes, arena: device.arenas[0].clone(), keys: device.keys });
    }
}

impl Default for DecodeMemory {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Model {
    /// Runs a decode step, like [`forward`](Self::forward), but reuses `memory`, reads the logits into the
    /// memory of `logits`, and may use graphs. It is meant for sequences that request logits for all their
    /// tokens.
    ///
    /// If the [dense steps](crate::dense::Dense::joins_captures) and the stream can be captured, a later step
    /// of the same kind, with other tokens, positions, slots and segments, replays a graph. The results are
    /// bit for bit the same as without the graph. Steps are padded to a power-of-two number of rows. The
    /// following kinds of step run operation by operation: the first step of each kind, steps that read
    /// results on the host (routed experts), steps without logits for some tokens, and steps over several
    /// groups of layers, whose slots and segments a graph cannot hold.
    ///
    /// # Errors
    /// Returns the errors of [`begin`](Self::begin) and of the backend.
    pub fn decode<'b>(
        &self,
        device: &ComputeDevice,
        ropes: &LayerRopes,
        batch: impl Into<StepBatch<'b>>,
        memory: &mut DecodeMemory,
        mut logits: Vec<f32>,
    ) -> Result<Forward> {
        let batch = batch.into();
        let captures = memory.most() > 0 && self.dense.joins_captures() && device.arenas.len() == 1;
        if captures {
            check_vocabulary(batch.inputs, self.config.vocab_size)?;
            memory.pass.rows.fill(batch)?;
        }
        let rows = &memory.pass.rows;
        if !captures || rows.is_empty() || !rows.all_wanted() {
            return self.begin(device, ropes, batch, &mut memory.pass)?.end_into(logits, &mut ());
        }
        memory.turn_to(self, device, ropes);
        let (count, inputs) = (memory.pass.rows.len(), memory.pass.rows.padded());
        let DecodeMemory { pass, graphs, .. } = memory;
        let (rows, border) = pass.ready(self, device)?;
        let (dense, key) =
            (self.dense.as_ref(), GraphKey::of(&inputs, device.arenas[0].layout().shape().format));
        let mut record = || -> kvcore::Result<Activation> {
            let mut step = || {
                border.follow(device.stream)?;
                let x = self.embed(rows.tokens())?;
                let mut pass = Pass::new(self, device, ropes, rows, border, x)?;
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
        let flops = self.step_flops(count, visible(&inputs.work));
        // Drops the only other handle to the segments, so the next step can refill them in place.
        drop(inputs);
        rows.release();
        logits.truncate(count * self.config.vocab_size);
        Ok(Forward { flops, logits: Some(LogitRows::new(logits, self.config.vocab_size)) })
    }
}
