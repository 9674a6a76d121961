//! One pass over a batch, layer by layer. A layer has four steps: project, store, attend, finish.

use std::sync::Arc;

use kvcore::{BatchRows, LayerRopes, Selection, SequenceInput, StepBatch};

use super::attention::{self, FreshKv, FreshQueries, LayerAttention};
use super::groups::LayerPlace;
use super::mass::{AttentionMass, Observation};
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
    /// The number of floating-point operations: two for each multiplication in matrix products and attention.
    /// Norms, rotations and other small operations are not counted.
    pub flops: u64,
}

/// The rows of a pass that stopped before its last layer. Some of these rows may continue later.
#[derive(Debug)]
pub struct KeptRows {
    /// The residual stream, `[rows, hidden_size]`.
    x: Activation,
    /// The index of the next layer to run.
    layer: usize,
    /// The projections in the next layer, if they have been computed.
    projected: Option<Projected>,
}

/// The rows of a batch that continue after a pass has stopped before its last layer.
#[derive(Debug)]
pub struct Narrowed {
    /// The indices of the rows in the batch, ascending within each sequence.
    pub rows: Vec<u32>,
    /// The sequences that these rows now form. The total number of their tokens equals the number of
    /// rows.
    pub batch: Vec<SequenceInput>,
}

/// The memory of a pass: its rows, and the border between the dense steps and the device. Passes of one model
/// on one device may reuse it, one at a time, so that decode steps do not allocate rows.
#[derive(Debug, Default)]
pub struct PassMemory {
    pub(super) rows: BatchRows,
    border: Option<Box<dyn Border>>,
}

/// A pass over a batch of sequences, which writes the sequences' keys and values to the device's arenas.
///
/// [`Model::forward`] runs a whole pass. To choose in the middle of a pass which rows continue, run it in
/// parts:
///
/// ```text
/// begin ─► run_to(layer) ─► fresh ─► keep        resume ─► end
/// ```
///
/// To choose the tokens that rows attend to, run the pass layer by layer: [`queries`](Self::queries),
/// [`select`](Self::select), `run_to`. To find out which tokens a sequence attends to, let the pass
/// [`observe`](Self::observe) the sequence.
#[derive(Debug)]
pub struct Pass<'a> {
    model: &'a Model,
    device: &'a ComputeDevice<'a>,
    ropes: &'a LayerRopes,
    rows: &'a mut BatchRows,
    border: &'a mut dyn Border,
    /// The rows' residual stream, `[rows, hidden_size]`.
    x: Activation,
    /// The index of the next layer to run.
    layer: usize,
    /// The projections in the next layer, if [`fresh`](Self::fresh) or [`queries`](Self::queries) has
    /// computed them.
    projected: Option<Projected>,
    /// The queries in the next layer, if [`queries`](Self::queries) has read them.
    queries: Option<FreshQueries>,
    /// The sequences whose attention is summed.
    observed: Option<Observation<'a>>,
    /// The sequences' selections for the next layer, if [`select`](Self::select) has set them.
    selections: Option<Vec<Option<Selection>>>,
    flops: u64,
}

impl Model {
    /// Runs a pass over a batch of sequences, and writes their keys and values to the device's arenas. If
    /// the batch has no tokens, does nothing and returns no logits.
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
        let x = self.embed(rows.tokens())?;
        Pass::new(self, device, ropes, rows, border, x)
    }

    /// Continues a stopped pass with some of its rows. The sequences of these rows may have other slots and
    /// segments than before.
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::OutOfRange`] if the pass does not have one of the rows.
    /// - Returns [`kvcore::Error::Mismatch`] if there are no rows, or if the number of tokens differs from
    ///   the number of rows.
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
            let what = "tokens of the continued rows, one for each";
            return Err(kvcore::Error::mismatch(what, expected, got).into());
        }
        let before = kept.x.rows();
        if let Some(&row) = narrowed.rows.iter().find(|&&row| row as usize >= before) {
            let (what, value, limit) = ("continued row", i128::from(row), before as i128);
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
    /// Returns the rows, and a border that is large enough for them.
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
    /// Creates a pass over the rows, starting at the first layer.
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
            let what = "rotary embeddings, one per layer";
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
            observed: None,
            selections: None,
            flops: 0,
        })
    }

    /// Runs the remaining layers before `layer`.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if the model has no layer with this index,
    /// [`Error::Cancelled`] if the observer stops the pass, and the errors of the backend.
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

    /// Returns the queries of all rows in the next layer.
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

    /// Starting with the next layer, sums the attention that the sequences in `masses` pay to earlier
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
        let rows = self.rows.len();
        self.observed = (!masses.is_empty())
            .then(|| Observation::new(self.model, self.device, masses, rows))
            .transpose()?;
        Ok(())
    }

    /// Limits the tokens that rows attend to in the next layer: one selection per sequence, in batch order,
    /// or `None` for all tokens. A sequence with a selection must request logits for all its rows, because
    /// rows without logits do not attend in the last layer.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Mismatch`] unless there is one entry per sequence. If a selection is not in
    /// order or does not match its sequence's rows, running the layer returns
    /// [`kvcore::Error::InvalidSelection`].
    pub fn select(&mut self, selections: Vec<Option<Selection>>) -> Result<()> {
        let (expected, got) = (self.rows.work().batch().len(), selections.len());
        if expected != got {
            return Err(kvcore::Error::mismatch("selections, one per sequence", expected, got).into());
        }
        self.selections = Some(selections);
        Ok(())
    }

    /// Stops the pass before the next layer. Returns its rows, some of which can [continue](Model::resume)
    /// later, and the number of floating-point operations so far.
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
        let observed = self.observed.as_ref().is_some_and(|observed| observed.includes(self.layer));
        if observed {
            // The observed rows need queries even in the last layer, so the queries of all rows are
            // computed.
            self.projected = Some(self.projected_rows()?);
        }
        // In the last layer, only rows whose logits are wanted continue. All other rows only store their
        // KV.
        let wanted =
            if self.layer + 1 == layers { Wanted::of(self.rows, self.place().group, dense)? } else { None };
        let (all_rows, mut projected) = match self.projected.take() {
            Some(projected) => (true, projected),
            None => (false, self.project(wanted.as_ref())?),
        };
        let layer = self.attention();
        attention::store(self.border, self.device, &layer, self.rows, &projected)?;
        let joined = observed && wanted.is_none() && self.attends_as_observed();
        if observed && !joined {
            self.observe_alone(&projected)?;
        }
        if let Some(wanted) = &wanted {
            self.x = dense.select(&self.x, &wanted.index)?;
            if all_rows {
                projected = projected.asking(dense, &wanted.index)?;
            }
        }
        self.attend_and_finish(&projected, wanted.as_ref(), joined)?;
        self.queries = None;
        self.layer += 1;
        if observer.layer(self.layer, layers).is_break() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Returns true if the next layer's ordinary attention yields the weights to sum, so the observed
    /// sequences need no separate attention computation.
    fn attends_as_observed(&self) -> bool {
        let work = self.rows.work_in(self.place().group);
        self.selections.is_none() && self.observed.as_ref().is_some_and(|observed| observed.is_plain(work))
    }

    /// Adds the next layer's attention weights to the observed sequences' sums, by computing attention for
    /// only these sequences' rows. The layer's keys must have been stored, and `projected` must contain the
    /// queries of all rows.
    fn observe_alone(&mut self, projected: &Projected) -> Result<()> {
        let layer = self.attention();
        let Some(observed) = &mut self.observed else { return Ok(()) };
        let group = layer.place.group;
        let work = observed.alone(group, self.rows.work_in(group));
        observed.count(self.model, layer.index, &work);
        attention::observe(self.border, self.device, &layer, projected, &work, observed)
    }

    /// Returns the keys, values and queries of all rows in the next layer.
    fn projected_rows(&mut self) -> Result<Projected> {
        match self.projected.take() {
            Some(projected) => Ok(projected),
            None => self.project(None),
        }
    }

    /// Returns the keys and values of all rows, and the queries of the `wanted` rows, or of all rows if
    /// `wanted` is `None`.
    fn project(&mut self, wanted: Option<&Wanted>) -> Result<Projected> {
        let rows = self.rows.len();
        let asking = wanted.map_or(rows, |wanted| wanted.work.rows().len());
        self.flops += self.model.projection_flops(rows, asking);
        let (layer, dense) = (&self.model.layers[self.layer], self.model.dense.as_ref());
        let index = wanted.map(|wanted| &wanted.index);
        self.device.profiler.span("projections", || layer.project(dense, &self.x, index))
    }

    /// Runs the next layer's attention and everything after it. If `joined` is true, also adds the attention
    /// weights to the observed sequences' sums.
    fn attend_and_finish(
        &mut self,
        projected: &Projected,
        wanted: Option<&Wanted>,
        joined: bool,
    ) -> Result<()> {
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
        let observed = self.observed.as_mut().filter(|_| joined);
        let attention = attention::attend(self.border, self.device, &layer, projected, work, observed)?;
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

    /// Returns the arena of the next layer's keys and values, and the layer's index in this arena.
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
