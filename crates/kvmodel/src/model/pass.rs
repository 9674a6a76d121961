//! One pass over a batch, layer by layer.

use candle_core::{Device, Tensor};
use kvcore::{LayerRopes, SequenceInput};

use super::rows::{Rows, Wanted};
use super::staging::{LayerAttention, Staging};
use super::{ComputeDevice, Model, Observer};
use crate::error::{Error, Result};
use crate::layers::Projected;

/// The result of a pass.
#[derive(Debug)]
pub struct Forward {
    /// The requested logits, `[rows, vocab_size]` per sequence, in order. Sequences that requested none have
    /// no entry.
    pub logits: Vec<Tensor>,
    /// The counted floating-point operations: two for each multiplication of a matrix or of attention, none
    /// for norms, rotations and other small work.
    pub flops: u64,
}

/// The keys and values of a layer's rows before they are stored.
#[derive(Debug)]
pub struct FreshKv {
    /// The layer, from 0.
    pub layer: usize,
    /// The number of rows of the batch.
    pub rows: usize,
    /// The keys `[rows, k_heads, k_dim]`, in the form in which they are stored.
    pub k: Vec<f32>,
    /// The values `[rows, v_heads, v_dim]`.
    pub v: Vec<f32>,
}

/// The rows that go on after a checkpoint.
#[derive(Debug)]
pub struct Narrowed {
    /// The indices of the rows in the batch, ascending within each sequence.
    pub rows: Vec<u32>,
    /// The sequences that these rows form now, with as many tokens in total.
    pub batch: Vec<SequenceInput>,
}

/// A checkpoint in the middle of a pass: it sees keys and values, and chooses the rows that go on.
pub trait Checkpoint {
    /// Returns the layer of the checkpoint. Layers before it compute all rows.
    fn layer(&self) -> usize;

    /// Chooses the rows that go on, from this layer's attention. The work of all earlier layers is enqueued
    /// already.
    ///
    /// # Errors
    /// An error ends the pass.
    fn narrow(&mut self, fresh: &FreshKv) -> Result<Narrowed>;
}

impl Model {
    /// Runs one pass over a batch of sequences. Their keys and values are written to the arena.
    ///
    /// All sequences are of one regime. The caller guarantees that `ropes` came from [`ropes`](Self::ropes)
    /// for their requests.
    ///
    /// # Errors
    /// - Returns [`Error::TokenOutOfVocabulary`] before anything is computed.
    /// - Returns [`kvcore::Error::Mismatch`] if `ropes` does not have one embedding per layer.
    /// - Returns [`Error::Cancelled`] if the observer stops the pass.
    /// - Returns the errors of the backend.
    pub fn forward(
        &self,
        device: &ComputeDevice,
        ropes: &LayerRopes,
        batch: &[SequenceInput],
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        self.forward_checked(device, ropes, batch, None, observer)
    }

    /// Runs one pass as [`forward`](Self::forward) does, with a checkpoint if there is one.
    ///
    /// # Errors
    /// - Returns the errors of [`forward`](Self::forward) and of the checkpoint.
    /// - Returns [`kvcore::Error::OutOfRange`] if the checkpoint is past the last layer, or chooses a row
    ///   that the batch does not have.
    /// - Returns [`kvcore::Error::Mismatch`] if the checkpoint returns no row, or not one token per row.
    pub fn forward_checked(
        &self,
        device: &ComputeDevice,
        ropes: &LayerRopes,
        batch: &[SequenceInput],
        mut checkpoint: Option<&mut dyn Checkpoint>,
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        let (layers, embeddings) = (self.layers.len(), ropes.layers().len());
        if embeddings != layers {
            let what = "rotary embeddings, one a layer";
            return Err(kvcore::Error::Mismatch { what, expected: layers, got: embeddings }.into());
        }
        if let Some(layer) = checkpoint.as_ref().map(|c| c.layer()).filter(|&layer| layer >= layers) {
            let (what, value, limit) = ("layer of a checkpoint", layer as i128, layers as i128);
            return Err(kvcore::Error::OutOfRange { what, value, limit }.into());
        }
        let mut rows = Rows::new(batch, self.config.vocab_size)?;
        if rows.tokens.is_empty() {
            return Ok(Forward { logits: Vec::new(), flops: 0 });
        }
        let count = rows.tokens.len();
        let tokens = Tensor::from_slice(&rows.tokens, count, &Device::Cpu)?;
        let mut x = self.embedding.index_select(&tokens, 0)?;
        let extents = self.kv_extents(device.arena.layout().shape().format);
        let latent = self.config.latent.is_some();
        let mut staging = Staging::new(device.backend, &extents, self.config.heads, latent, count)?;
        let mut flops = 0;
        for (index, (layer, rope)) in self.layers.iter().zip(ropes.layers()).enumerate() {
            let (window, scale) = (self.config.layers[index].window, self.config.softmax_scale);
            let at_layer = LayerAttention { index, rope, window, scale };
            let mut checked = None;
            if let Some(checkpoint) = checkpoint.as_mut().filter(|c| c.layer() == index) {
                let projected = device.profiler.span("projections", || layer.project(&x, None))?;
                flops += self.projection_flops(rows.tokens.len(), rows.tokens.len());
                let fresh = staging.fresh(device, &at_layer, &rows, &projected)?;
                let narrowed = device.profiler.span("checkpoint", || checkpoint.narrow(&fresh))?;
                (rows, x, checked) = self.narrow(&x, &projected, narrowed)?;
            }
            // In the last layer only rows whose logits are wanted go on. The others only leave their KV.
            let wanted: Option<Wanted> = (index == layers - 1).then(|| rows.wanted()).transpose()?;
            let asking = wanted.as_ref().map(|n| &n.index);
            let projected = match (checked, asking) {
                (Some(projected), Some(asking)) => projected.asking(asking)?,
                (Some(projected), None) => projected,
                (None, asking) => {
                    let asked = wanted.as_ref().map_or(rows.tokens.len(), |n| n.work.rows().len());
                    flops += self.projection_flops(rows.tokens.len(), asked);
                    device.profiler.span("projections", || layer.project(&x, asking))?
                }
            };
            staging.store(device, &at_layer, &rows, &projected)?;
            let work = wanted.as_ref().map_or(&rows.work, |wanted| &wanted.work);
            if work.rows().is_empty() {
                device.stream.synchronize()?;
                advanced(observer, index + 1, layers)?;
                return Ok(Forward { logits: Vec::new(), flops });
            }
            if let Some(n) = &wanted {
                x = x.index_select(&n.index, 0)?;
            }
            let attention = staging.attend(device, &at_layer, &projected, work)?;
            flops += self.attention_flops(Rows::visible(work)) + self.finish_flops(index, work.rows().len());
            x = device.profiler.span("feed forward", || layer.finish(&x, &attention))?;
            advanced(observer, index + 1, layers)?;
        }
        device.profiler.span("head", || {
            let logits = self.head.forward(&self.norm.forward(&x)?)?;
            flops += self.head_flops(logits.dim(0)?);
            Ok(Forward { logits: rows.split(&logits)?, flops })
        })
    }

    /// Returns the rows that go on after a checkpoint, with their residual stream and their projections.
    fn narrow(
        &self,
        x: &Tensor,
        projected: &Projected,
        narrowed: Narrowed,
    ) -> Result<(Rows, Tensor, Option<Projected>)> {
        let rows = Rows::new(&narrowed.batch, self.config.vocab_size)?;
        let (expected, got) = (narrowed.rows.len(), rows.tokens.len());
        if expected != got || expected == 0 {
            let what = "tokens after a checkpoint, one for each row that goes on";
            return Err(kvcore::Error::Mismatch { what, expected, got }.into());
        }
        if let Some(&row) = narrowed.rows.iter().find(|&&row| row as usize >= x.dims()[0]) {
            let limit = x.dims()[0] as i128;
            let what = "row that goes on after a checkpoint";
            return Err(Error::from(kvcore::Error::OutOfRange { what, value: i128::from(row), limit }));
        }
        let index = Tensor::from_vec(narrowed.rows, expected, &Device::Cpu)?;
        Ok((rows, x.index_select(&index, 0)?, Some(projected.select(&index)?)))
    }
}

/// Tells the observer how far the pass is. Returns an error if the observer stops it.
fn advanced(observer: &mut dyn Observer, done: usize, total: usize) -> Result<()> {
    if observer.layer(done, total).is_break() { Err(Error::Cancelled) } else { Ok(()) }
}
