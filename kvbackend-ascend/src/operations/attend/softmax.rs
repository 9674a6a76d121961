//! Partial softmaxes (maximum, sum of exponentials, weighted sum of values), and their merge.

use kvcore::Result;

use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::queue::Work;

/// The maximum of a row without tokens. It is below every logit, and finite because the difference of two
/// infinities is NaN.
pub(super) const FLOOR: f32 = -1e30;

/// A number that is smaller than every sum of exponentials except 0.
pub(super) const TINY: f32 = 1e-30;

/// A partial softmax over some tokens, for each head and row: `[heads, rows, 1]` and `[heads, rows, dim]`.
#[derive(Debug)]
pub(super) struct Partial {
    max: Tensor,
    sum: Tensor,
    values: Tensor,
}

impl Partial {
    /// Computes the partial softmax of logits `[heads, rows, tokens]` with values `[kv_heads, tokens, dim]`.
    /// Overwrites the logits.
    pub(super) fn of(
        work: &mut Work<'_>,
        scores: &Tensor,
        mask: Option<&Tensor>,
        v: &Tensor,
        floor: &Tensor,
    ) -> Result<Self> {
        let (heads, rows, tokens) = (scores.dim(0), scores.dim(1), scores.dim(2));
        let (kv_heads, dim) = (v.dim(0), v.dim(2));
        if let Some(mask) = mask {
            work.add(scores, mask, scores)?;
        }
        let each = [heads, rows, 1];
        let (max, sum) = (work.temporary(sys::ACL_FLOAT, &each)?, work.temporary(sys::ACL_FLOAT, &each)?);
        work.greatest(scores, &max)?;
        work.maximum(&max, floor, &max)?;
        work.sub(scores, &max, scores)?;
        work.exp(scores, scores)?;
        work.sum(scores, &sum)?;
        let values = work.temporary(sys::ACL_FLOAT, &[heads, rows, dim])?;
        let group = heads / kv_heads * rows;
        work.multiply(
            &scores.reshaped(&[kv_heads, group, tokens]),
            v,
            &values.reshaped(&[kv_heads, group, dim]),
        )?;
        Ok(Self { max, sum, values })
    }

    /// Returns the partial softmax of an empty set of tokens.
    pub(super) fn nothing(
        work: &mut Work<'_>,
        heads: usize,
        rows: usize,
        dim: usize,
        floor: &Tensor,
    ) -> Result<Self> {
        let (each, of_values) = ([heads, rows, 1], [heads, rows, dim]);
        let zeros = |work: &mut Work<'_>, dims: &[usize]| -> Result<Tensor> {
            let zeros = work.temporary(sys::ACL_FLOAT, dims)?;
            work.zero(&zeros)?;
            Ok(zeros)
        };
        let (max, sum, values) = (zeros(work, &each)?, zeros(work, &each)?, zeros(work, &of_values)?);
        work.add(&max, floor, &max)?;
        Ok(Self { max, sum, values })
    }

    /// Merges two partial softmaxes.
    pub(super) fn merged(self, work: &mut Work<'_>, other: &Self) -> Result<Self> {
        let max = work.temporary(sys::ACL_FLOAT, &self.max.dims())?;
        work.maximum(&self.max, &other.max, &max)?;
        for part in [&self, other] {
            let shrink = &part.max;
            work.sub(shrink, &max, shrink)?;
            work.exp(shrink, shrink)?;
            work.mul(&part.sum, shrink, &part.sum)?;
            work.mul(&part.values, shrink, &part.values)?;
        }
        work.add(&self.sum, &other.sum, &self.sum)?;
        work.add(&self.values, &other.values, &self.values)?;
        Ok(Self { max, sum: self.sum, values: self.values })
    }

    /// Replaces all tokens with a single token whose logit is their log-sum-exp times `scale` and whose value
    /// is their attention result. Returns the partial softmax of that token.
    pub(super) fn into_one(
        self,
        work: &mut Work<'_>,
        scale: f32,
        floor: &Tensor,
        tiny: &Tensor,
    ) -> Result<Self> {
        let values = self.values(work, tiny)?;
        let max = self.lse(work)?;
        work.maximum(&max, floor, &max)?;
        work.scale(&max, scale, &max)?;
        // The sum is 1, or 0 for a row without tokens.
        let least = work.temporary(sys::ACL_FLOAT, &self.sum.dims())?;
        work.maximum(&self.sum, tiny, &least)?;
        work.div(&self.sum, &least, &self.sum)?;
        Ok(Self { max, sum: self.sum, values })
    }

    /// Returns the attention result: the weighted mean of the values, or 0 if there are no tokens.
    pub(super) fn values(&self, work: &mut Work<'_>, tiny: &Tensor) -> Result<Tensor> {
        let least = work.temporary(sys::ACL_FLOAT, &self.sum.dims())?;
        work.maximum(&self.sum, tiny, &least)?;
        let result = work.temporary(sys::ACL_FLOAT, &self.values.dims())?;
        work.div(&self.values, &least, &result)?;
        Ok(result)
    }

    /// Returns the log-sum-exp, or −∞ if there are no tokens.
    pub(super) fn lse(&self, work: &mut Work<'_>) -> Result<Tensor> {
        let lse = work.temporary(sys::ACL_FLOAT, &self.sum.dims())?;
        work.log(&self.sum, &lse)?;
        work.add(&lse, &self.max, &lse)?;
        Ok(lse)
    }
}
