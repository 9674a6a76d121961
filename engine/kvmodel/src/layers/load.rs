//! Loads weights from their files into an implementation of the dense steps, one by one.

use std::ops::Range;
use std::sync::Arc;

use super::{Linear, RmsNorm};
use crate::dense::{Dense, StoredWeight, Weight, WeightFormat, WeightUse};
use crate::error::Result;
use crate::weights::Weights;

/// Loads a model's weights while the model is being built.
pub(crate) struct Loader<'a> {
    weights: &'a mut Weights,
    dense: &'a dyn Dense,
    format: WeightFormat,
    /// The number to add to each stored norm factor.
    norm_shift: f32,
    /// The memory that all weights loaded so far take, in bytes.
    held: usize,
}

impl<'a> Loader<'a> {
    /// Creates a loader that adds `norm_shift` to each stored norm factor.
    pub(crate) fn new(
        weights: &'a mut Weights,
        dense: &'a dyn Dense,
        format: WeightFormat,
        norm_shift: f32,
    ) -> Self {
        Self { weights, dense, format, norm_shift, held: 0 }
    }

    /// Returns the memory that all weights loaded so far take, in bytes.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    fn counted(&mut self, weight: Arc<dyn Weight>) -> Arc<dyn Weight> {
        self.held += weight.bytes();
        weight
    }

    fn load(&mut self, name: &str, shape: &[usize], purpose: WeightUse) -> Result<Arc<dyn Weight>> {
        let stored = self.weights.take(name, shape)?;
        let weight = self.dense.load(&stored, purpose)?;
        Ok(self.counted(weight))
    }

    /// Loads the embeddings `[vocabulary, width]`.
    pub(crate) fn table(&mut self, name: &str, vocabulary: usize, width: usize) -> Result<Arc<dyn Weight>> {
        self.load(&format!("{name}.weight"), &[vocabulary, width], WeightUse::Table)
    }

    /// Returns the output head, whose matrix is the embedding table.
    pub(crate) fn tied_head(&mut self, table: &Arc<dyn Weight>) -> Result<Linear> {
        let matrix = self.dense.tied_head(table.as_ref(), self.format)?;
        Ok(Linear::new(self.counted(matrix), None))
    }

    /// Loads a norm over `width` elements.
    pub(crate) fn norm(&mut self, name: &str, width: usize, eps: f64) -> Result<RmsNorm> {
        let mut stored = self.weights.take(&format!("{name}.weight"), &[width])?;
        // Decision: docs/decisions/models.md#gemmas-norms-are-shifted-at-load-time
        if self.norm_shift != 0.0 {
            let factors: Vec<f32> = stored.to_f32().iter().map(|x| x + self.norm_shift).collect();
            stored = StoredWeight::of_f32(stored.name(), &[width], &factors)?;
        }
        let weight = self.dense.load(&stored, WeightUse::Vector)?;
        Ok(RmsNorm::new(self.counted(weight), eps))
    }

    /// Loads a projection from `input` to `out` elements, in the model's format.
    pub(crate) fn linear(&mut self, name: &str, out: usize, input: usize, bias: bool) -> Result<Linear> {
        let purpose = WeightUse::Projection(self.format);
        let matrix = self.load(&format!("{name}.weight"), &[out, input], purpose)?;
        let bias =
            if bias { Some(self.load(&format!("{name}.bias"), &[out], WeightUse::Vector)?) } else { None };
        Ok(Linear::new(matrix, bias))
    }

    /// Loads a projection whose weights are not rounded, whatever the model's weight format is.
    pub(crate) fn exact_linear(&mut self, name: &str, out: usize, input: usize) -> Result<Linear> {
        let matrix = self.load(&format!("{name}.weight"), &[out, input], WeightUse::ExactProjection)?;
        Ok(Linear::new(matrix, None))
    }

    /// Loads a vector to host memory, as f32, for use outside the dense steps.
    pub(crate) fn numbers(&mut self, name: &str, width: usize) -> Result<Vec<f32>> {
        let stored = self.weights.take(name, &[width])?;
        let numbers = stored.to_f32();
        self.held += size_of_val(&numbers[..]);
        Ok(numbers)
    }

    /// Removes a stored weight of the given shape and returns it, so that [`by_head`](Self::by_head) can load
    /// parts of it.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<StoredWeight> {
        self.weights.take(&format!("{name}.weight"), shape)
    }

    /// Loads the given rows of each head as one matrix per head.
    pub(crate) fn by_head(
        &mut self,
        stored: &StoredWeight,
        heads: usize,
        rows: Range<usize>,
        purpose: WeightUse,
    ) -> Result<Arc<dyn Weight>> {
        let weight = self.dense.load(&stored.rows_of_heads(heads, rows)?, purpose)?;
        Ok(self.counted(weight))
    }
}
