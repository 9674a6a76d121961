//! One pass over a batch, layer by layer.

use candle_core::{Device, Tensor};
use kvcore::{LayerRopes, SequenceInput};

use super::rows::{Rows, Wanted};
use super::staging::{LayerAttention, Staging};
use super::{ComputeDevice, Model, Observer};
use crate::error::{Error, Result};
use crate::layers::Projected;

/// What a pass gives.
#[derive(Debug)]
pub struct Forward {
    /// The logits that were asked for, `[rows, vocab_size]` per sequence in order; sequences that asked for
    /// none have no entry.
    pub logits: Vec<Tensor>,
    /// Floating-point operations, counted: two for each multiplication of a matrix or an attention, none
    /// for norms, rotations and other small change.
    pub flops: u64,
}

/// Keys and values of a layer's rows before they are stored.
#[derive(Debug)]
pub struct FreshKv {
    /// The layer.
    pub layer: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Keys `[rows, k_heads, k_dim]`, rotated to where they are stored.
    pub k: Vec<f32>,
    /// Values `[rows, v_heads, v_dim]`.
    pub v: Vec<f32>,
}

/// What goes on after a checkpoint.
#[derive(Debug)]
pub struct Narrowed {
    /// Rows of the batch that go on, rising within each sequence.
    pub rows: Vec<u32>,
    /// The sequences that they are now: as many tokens in all.
    pub batch: Vec<SequenceInput>,
}

/// A look at keys and values in the middle of a pass, after which fewer rows go on.
pub trait Checkpoint {
    /// The layer at which it is; layers before it compute all rows.
    fn layer(&self) -> usize;

    /// Chooses the rows that go on, from this layer's attention. Everything before is enqueued already.
    ///
    /// # Errors
    /// They end the pass.
    fn narrow(&mut self, fresh: &FreshKv) -> Result<Narrowed>;
}

impl Model {
    /// One pass over a batch of sequences: their keys and values land in the arena.
    ///
    /// All sequences are of one regime: `ropes` is what [`ropes`](Self::ropes) gave for their requests.
    ///
    /// # Errors
    /// [`Error::TokenOutOfVocabulary`] before anything is computed; [`Error::Cancelled`] when the observer stops it;
    /// errors of the backend.
    pub fn forward(
        &self,
        device: &ComputeDevice,
        ropes: &LayerRopes,
        batch: &[SequenceInput],
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        self.forward_checked(device, ropes, batch, None, observer)
    }

    /// The same with a checkpoint, if there is one.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`kvcore::Error::OutOfRange`] for a checkpoint past the last layer,
    /// [`kvcore::Error::Mismatch`] when it gives more or fewer tokens than rows.
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
            // In the last layer only rows whose logits are wanted go on; the others leave their KV.
            let wanted: Option<Wanted> = (index == layers - 1).then(|| rows.wanted()).transpose()?;
            let asking = wanted.as_ref().map(|n| &n.index);
            let projected = match (checked, asking) {
                (Some(projected), Some(asking)) => projected.asking(asking)?,
                (Some(projected), None) => projected,
                (None, asking) => {
                    let asked = wanted.as_ref().map_or(rows.tokens.len(), |n| n.rows.len());
                    flops += self.projection_flops(rows.tokens.len(), asked);
                    device.profiler.span("projections", || layer.project(&x, asking))?
                }
            };
            staging.store(device, &at_layer, &rows, &projected)?;
            let (at, entries) = match &wanted {
                Some(n) => (&n.rows, &n.batch),
                None => (&rows.queries, &rows.batch),
            };
            if at.is_empty() {
                device.stream.synchronize()?;
                advanced(observer, index + 1, layers)?;
                return Ok(Forward { logits: Vec::new(), flops });
            }
            if let Some(n) = &wanted {
                x = x.index_select(&n.index, 0)?;
            }
            let attention = staging.attend(device, &at_layer, &projected, (at, entries), &rows.groups)?;
            flops += self.attention_flops(Rows::visible(at, entries)) + self.finish_flops(index, at.len());
            x = device.profiler.span("feed forward", || layer.finish(&x, &attention))?;
            advanced(observer, index + 1, layers)?;
        }
        device.profiler.span("head", || {
            let logits = self.head.forward(&self.norm.forward(&x)?)?;
            flops += self.head_flops(logits.dim(0)?);
            Ok(Forward { logits: rows.split(&logits)?, flops })
        })
    }

    /// The rows that go on after a checkpoint: what they are, the residual stream, and their projections.
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

/// Says how far a pass is, and asks whether it goes on.
fn advanced(observer: &mut dyn Observer, done: usize, total: usize) -> Result<()> {
    if observer.layer(done, total).is_break() { Err(Error::Cancelled) } else { Ok(()) }
}
