//! One pass over a batch, layer by layer. A layer has four steps: project, store, attend, finish.

use std::sync::Arc;

use kvcore::{BatchRows, LayerRopes, Selection, SequenceInput, StepBatch};

use super::attention::{self, FreshKv, FreshQueries, LayerAttention};
use super::groups::LayerPlace;
use super::mass::AttentionMass;
use super::rows::{Wanted, check_vocabulary, selecting, visible};
use super::{ComputeDevice, LogitRows, Model, Observer};
use crate::dense::{Activation, Border};
use crate::error::{Error, Result};
use crate::layers::Projected;

/// The result of a pass.
#[derive(Debug)]
pub struct Forward {
    /// The requested logits of all sequences, in batch order. `None` if no sequence requested any.
    pub logits: Option<LogitRows>,
    /// The number of floating-point operations: two per multiplication in matrix products and attention.
    /// Norms, rotations and other small work are not counted.
    pub flops: u64,
}

/// The rows of a pass that stopped in the middle. Some of these rows may continue later.
#[derive(Debug)]
pub struct KeptRows {
    /// The residual stream, `[rows, hidden_size]`.
    x: Activation,
    /// The next layer.
    layer: usize,
    /// The projections in that layer, if they have been computed.
    projected: Option<Projected>,
}

/// The rows of a batch that continue in the middle of a pass.
#[derive(Debug)]
pub struct Narrowed {
    /// The indices of the rows in the batch, ascending within each sequence.
    pub rows: Vec<u32>,
    /// The sequences that these rows now form. The total number of their tokens equals the number of
    /// rows.
    pub batch: Vec<SequenceInput>,
}

/// The memory of a pass: its rows, and its border between the dense steps and the device. Passes of one
/// model on one device can take turns using it, so that decode steps do not allocate rows.
#[derive(Debug, Default)]
pub struct PassMemory {
    pub(super) rows: BatchRows,
    border: Option<Box<dyn Border>>,
}

/// A pass over a batch of sequences. Their keys and values are written to the arena.
///
/// [`Model::forward`] runs a whole pass. To choose in the middle of a pass which rows continue, run it in
/// parts:
///
/// ```text
/// begin ─► run_to(layer) ─► fresh ─► keep        resume ─► end
/// ```
///
/// To choose the tokens that rows attend to, run it layer by layer: [`queries`](Self::queries),
/// [`select`](Self::select), `run_to`. To find out which tokens a sequence attends to, let the pass
/// [`observe`](Self::observe) it.
#[derive(Debug)]
pub struct Pass<'a> {
    model: &'a Model,
    device: &'a ComputeDevice<'a>,
    ropes: &'a LayerRopes,
    rows: &'a mut BatchRows,
    border: &'a mut dyn Border,
    /// The rows' residual stream, `[rows, hidden_size]`.
    x: Activation,
    /// The next layer.
    layer: usize,
    /// The projections in the next layer, if [`fresh`](Self::fresh) or [`queries`](Self::queries) has
    /// computed them.
    projected: Option<Projected>,
    /// The queries in the next layer, if [`queries`](Self::queries) has read them.
    queries: Option<FreshQueries>,
    /// The sequences whose attention is summed.
    observed: Vec<&'a mut AttentionMass>,
    /// Each sequence's selection in the next layer, if [`select`](Self::select) has set them.
    selections: Option<Vec<Option<Selection>>>,
    flops: u64,
}

impl Model {
    /// Runs a pass over a batch of sequences. Their keys and values are written to the arena. A batch without
    /// tokens does nothing.
    ///
    /// All sequences must be in the same RoPE regime, and `ropes` must be the result of
    /// [`ropes`](Self::ropes) for their requests.
    ///
    /// # Errors
    /// - Returns [`Error::TokenOutOfVocabulary`] for an unknown token, before anything is computed.
    /// - Returns [`kvcore::Error::Mismatch`] if `ropes` does not have one embedding per layer.
    /// - Returns [`Error::Cancelled`] if the observer stops the pass.
    /// - Returns the errors of the backend.
    pub fn forward<'b>(
        &self,
        device: &ComputeDevice,
        ropes: &LayerRopes,
        batch: impl Into<StepBatch<'b>>,
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        let batch = batch.into();
        if batch.inputs.iter().all(|sequence| sequence.tokens.is_empty()) {
            return Ok(Forward { logits: None, flops: 0 });
        }
        self.begin(device, ropes, batch, &mut PassMemory::default())?.end(observer)
    }

    /// Starts a pass over a batch, in memory that earlier passes may have used.
    ///
    /// # Errors
    /// Returns [`Error::EmptyPrompt`] for a batch without tokens, and the errors of
    /// [`forward`](Self::forward) that concern the batch and the embeddings.
    pub fn begin<'a, 'b>(
        &'a self,
        device: &'a ComputeDevice<'a>,
        ropes: &'a LayerRopes,
        batch: impl Into<StepBatch<'b>>,
        memory: &'a mut PassMemory,
    ) -> Result<Pass<'a>> {
        let batch = batch.into();
        check_vocabulary(batch.inputs, self.config.vocab_size)?;
        memory.rows.fill(batch)?;
        let (rows, border) = memory.ready(self, device)?;
        let x = self.dense.embed(self.embedding.as_ref(), rows.tokens())?;
        Pass::new(self, device, ropes, rows, border, x)
    }

    /// Continues with some rows of a pass that stopped in the middle. From here, their sequences may have
    /// other slots and segments.
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::OutOfRange`] if the pass does not have one of the rows.
    /// - Returns [`kvcore::Error::Mismatch`] if there are no rows, or not one token per row.
    /// - Returns the errors of [`begin`](Self::begin).
    pub fn resume<'a>(
        &'a self,
        device: &'a ComputeDevice<'a>,
        ropes: &'a LayerRopes,
        kept: &KeptRows,
        narrowed: Narrowed,
        memory: &'a mut PassMemory,
    ) -> Result<Pass<'a>> {
        let (expected, got) =
            (narrowed.rows.len(), narrowed.batch.iter().map(|s| s.tokens.len()).sum::<usize>());
        if expected != got || expected == 0 {
            let what = "tokens of the rows that go on, one for each";
            return Err(kvcore::Error::mismatch(what, expected, got).into());
        }
        let before = kept.x.rows();
        if let Some(&row) = narrowed.rows.iter().find(|&&row| row as usize >= before) {
            let (what, value, limit) = ("row that goes on", i128::from(row), before as i128);
            return Err(kvcore::Error::OutOfRange { what, value, limit }.into());
        }
        check_vocabulary(&narrowed.batch, self.config.vocab_size)?;
        memory.rows.fill(&narrowed.batch)?;
        let (rows, border) = memory.ready(self, device)?;
        let (dense, index) = (self.dense.as_ref(), self.dense.index(narrowed.rows)?);
        let x = dense.select(&kept.x, &index)?;
        let projected =
            kept.projected.as_ref().map(|projected| projected.select(dense, &index)).transpose()?;
        Ok(Pass { layer: kept.layer, projected, ..Pass::new(self, device, ropes, rows, border, x)? })
    }
}

impl PassMemory {
    /// Returns the rows and a border that is large enough for them.
    pub(super) fn ready(
        &mut self,
        model: &Model,
        device: &ComputeDevice,
    ) -> Result<(&mut BatchRows, &mut dyn Border)> {
        model.check_arenas(device)?;
        let Self { rows, border } = self;
        let count = rows.len();
        if count == 0 {
            return Err(Error::EmptyPrompt);
        }
        if border.as_ref().is_some_and(|kept| kept.rows() < count) {
            *border = None;
        }
        let border = match border {
            Some(kept) => kept,
            none => none.insert(attention::border(model, device, count)?),
        };
        Ok((rows, border.as_mut()))
    }
}

impl<'a> Pass<'a> {
    /// Starts a pass over the rows.
    pub(super) fn new(
        model: &'a Model,
        device: &'a ComputeDevice<'a>,
        ropes: &'a LayerRopes,
        rows: &'a mut BatchRows,
        border: &'a mut dyn Border,
        x: Activation,
    ) -> Result<Self> {
        let (expected, got) = (model.layers.len(), ropes.layers().len());
        if expected != got {
            let what = "rotary embeddings, one a layer";
            return Err(kvcore::Error::mismatch(what, expected, got).into());
        }
        same_groups(device, rows)?;
        Ok(Self {
            model,
            device,
            ropes,
            rows,
            border,
            x,
            layer: 0,
            projected: None,
            queries: None,
            observed: Vec::new(),
            selections: None,
            flops: 0,
        })
    }

    /// Runs the layers before `layer`.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if the model has no layer `layer`, [`Error::Cancelled`] if the
    /// observer stops the pass, and the errors of the backend.
    pub fn run_to(&mut self, layer: usize, observer: &mut dyn Observer) -> Result<()> {
        let layers = self.model.layers.len();
        if layer >= layers {
            let (what, value, limit) = ("layer to run to", layer as i128, layers as i128);
            return Err(kvcore::Error::OutOfRange { what, value, limit }.into());
        }
        while self.layer < layer {
            self.step(observer)?;
        }
        Ok(())
    }

    /// Returns the keys and values that the next layer would store.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn fresh(&mut self) -> Result<FreshKv> {
        let projected = self.projected_rows()?;
        let layer = self.attention();
        let fresh = attention::fresh(self.border, self.device, &layer, self.rows, &projected)?;
        self.projected = Some(projected);
        Ok(fresh)
    }

    /// Returns the queries that attend in the next layer.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn queries(&mut self) -> Result<&FreshQueries> {
        let queries = if let Some(queries) = self.queries.take() {
            queries
        } else {
            let projected = self.projected_rows()?;
            let layer = self.attention();
            let queries = attention::queries(self.border, self.device, &layer, self.rows, &projected)?;
            self.projected = Some(projected);
            queries
        };
        Ok(self.queries.insert(queries))
    }

    /// Starting with the next layer, sums the attention that some of the batch's sequences pay to earlier
    /// tokens.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] for a sequence that the batch does not have.
    pub fn observe(&mut self, masses: Vec<&'a mut AttentionMass>) -> Result<()> {
        let limit = self.rows.work().batch().len();
        if let Some(mass) = masses.iter().find(|mass| mass.sequence >= limit) {
            let (what, value, limit) = ("sequence to observe", mass.sequence as i128, limit as i128);
            return Err(kvcore::Error::OutOfRange { what, value, limit }.into());
        }
        self.observed = masses;
        Ok(())
    }

    /// Limits the tokens that rows attend to in the next layer: one selection per sequence, in batch order,
    /// or `None` for all tokens. A sequence with a selection must want the logits of all its rows, because
    /// rows without logits do not attend in the last layer.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Mismatch`] unless there is one entry per sequence. Running the layer returns
    /// [`kvcore::Error::InvalidSelection`] if a selection is not in order or does not match its sequence's
    /// rows.
    pub fn select(&mut self, selections: Vec<Option<Selection>>) -> Result<()> {
        let (expected, got) = (self.rows.work().batch().len(), selections.len());
        if expected != got {
            return Err(kvcore::Error::mismatch("selections, one a sequence", expected, got).into());
        }
        self.selections = Some(selections);
        Ok(())
    }

    /// Stops the pass before the next layer. Returns its rows, which can continue later, and the
    /// number of operations so far.
    pub fn keep(self) -> (KeptRows, u64) {
        self.rows.release();
        (KeptRows { x: self.x, layer: self.layer, projected: self.projected }, self.flops)
    }

    /// Runs the remaining layers and the head.
    ///
    /// # Errors
    /// Returns [`Error::Cancelled`] if the observer stops the pass, and the errors of the backend.
    pub fn end(self, observer: &mut dyn Observer) -> Result<Forward> {
        self.end_into(Vec::new(), observer)
    }

    /// Like [`end`](Self::end), but reads the logits into the memory of `logits`.
    ///
    /// # Errors
    /// Returns the errors of [`end`](Self::end).
    pub fn end_into(mut self, mut logits: Vec<f32>, observer: &mut dyn Observer) -> Result<Forward> {
        self.run_all(observer)?;
        self.rows.release();
        let (model, rows) = (self.model, self.x.rows());
        if rows == 0 {
            return Ok(Forward { logits: None, flops: self.flops });
        }
        self.device.profiler.span("head", || model.dense.read(&self.head()?, &mut logits))?;
        let logits = LogitRows::new(logits, model.config.vocab_size);
        Ok(Forward { flops: self.flops + model.head_flops(rows), logits: Some(logits) })
    }

    /// Runs the remaining layers.
    pub(super) fn run_all(&mut self, observer: &mut dyn Observer) -> Result<()> {
        while self.layer < self.model.layers.len() {
            self.step(observer)?;
        }
        Ok(())
    }

    /// Returns the logits of the rows that went through all layers.
    pub(super) fn head(&self) -> Result<Activation> {
        let dense = self.model.dense.as_ref();
        self.model.head.forward(dense, &self.model.norm.forward(dense, &self.x)?)
    }

    /// Runs the next layer.
    fn step(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let (layers, dense) = (self.model.layers.len(), self.model.dense.as_ref());
        let observed = self.observed.iter().any(|mass| self.layer >= mass.first_layer);
        if observed {
            self.queries()?;
        }
        // In the last layer, only rows whose logits are wanted continue. All other rows only store their
        // KV.
        let wanted =
            if self.layer + 1 == layers { Wanted::of(self.rows, self.place().group, dense)? } else { None };
        let projected = match (self.projected.take(), &wanted) {
            (None, wanted) => self.project(wanted.as_ref())?,
            (Some(projected), None) => projected,
            (Some(projected), Some(wanted)) => projected.asking(dense, &wanted.index)?,
        };
        let layer = self.attention();
        attention::store(self.border, self.device, &layer, self.rows, &projected)?;
        if let Some(wanted) = &wanted {
            self.x = dense.select(&self.x, &wanted.index)?;
        }
        self.attend_and_finish(&projected, wanted.as_ref())?;
        if let Some(queries) = self.queries.take().filter(|_| observed) {
            self.device.profiler.span("attention of the question", || self.sum_attention(&queries))?;
        }
        self.layer += 1;
        if observer.layer(self.layer, layers).is_break() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Adds this layer's weights to the observed sequences' sums. The layer's keys must be stored.
    fn sum_attention(&mut self, queries: &FreshQueries) -> Result<()> {
        let work = self.rows.work_in(self.model.place(self.device, self.layer).group);
        let (of, layer) = ((self.model, self.device, self.ropes), self.layer);
        let mut counted = self.observed.iter_mut().filter(|mass| layer >= mass.first_layer);
        counted.try_for_each(|mass| mass.add(of, layer, work, queries))
    }

    /// Returns the keys, values and queries of all rows in the next layer.
    fn projected_rows(&mut self) -> Result<Projected> {
        match self.projected.take() {
            Some(projected) => Ok(projected),
            None => self.project(None),
        }
    }

    /// Returns the keys and values of all rows, and the queries of the rows that continue.
    fn project(&mut self, wanted: Option<&Wanted>) -> Result<Projected> {
        let rows = self.rows.len();
        let asking = wanted.map_or(rows, |wanted| wanted.work.rows().len());
        self.flops += self.model.projection_flops(rows, asking);
        let (layer, dense) = (&self.model.layers[self.layer], self.model.dense.as_ref());
        let index = wanted.map(|wanted| &wanted.index);
        self.device.profiler.span("projections", || layer.project(dense, &self.x, index))
    }

    fn attend_and_finish(&mut self, projected: &Projected, wanted: Option<&Wanted>) -> Result<()> {
        let mut work = wanted.map_or(self.rows.work_in(self.place().group), |wanted| &wanted.work);
        let selected = self.selections.take().map(|selections| Arc::new(selecting(work, selections)));
        if let Some(selected) = &selected {
            work = selected;
        }
        let rows = work.rows().len();
        if rows == 0 {
            return Ok(self.device.stream.synchronize()?);
        }
        let layer = self.attention();
        let attention = attention::attend(self.border, self.device, &layer, projected, work)?;
        self.flops += self.model.attention_flops(visible(work));
        self.flops += self.model.finish_flops(self.layer, rows);
        let (layer, dense) = (&self.model.layers[self.layer], self.model.dense.as_ref());
        let finish = || layer.finish(dense, &self.x, &attention);
        self.x = self.device.profiler.span("feed forward", finish)?;
        Ok(())
    }

    /// Returns the next layer with everything that its attention needs.
    fn attention(&self) -> LayerAttention<'a> {
        let config = &self.model.config;
        let (index, rope) = (self.layer, &self.ropes.layers()[self.layer]);
        let (place, window) = (self.place(), config.layers[index].window);
        LayerAttention { index, place, rope, window, scale: config.softmax_scale }
    }

    /// Returns the place of the next layer's keys and values.
    fn place(&self) -> LayerPlace {
        self.model.place(self.device, self.layer)
    }
}

/// Checks that a batch has slots and segments for each arena.
fn same_groups(device: &ComputeDevice, rows: &BatchRows) -> Result<()> {
    let (expected, got) = (device.arenas.len(), rows.num_groups());
    if expected == got {
        return Ok(());
    }
    Err(kvcore::Error::mismatch("groups of layers in a batch, one for each arena", expected, got).into())
}
