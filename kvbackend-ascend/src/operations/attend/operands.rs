//! The tensors and matrix products of an attention operation.

use kvcore::{Attend, Result, TensorView};

use crate::bindings::types as sys;
use crate::memory::on_device;
use crate::operations::matrix::PlaneMatrix;
use crate::operators::Tensor;
use crate::queue::Work;

/// The tensors of one layer's attention.
pub(super) struct AttentionOperands<'a> {
    pub(super) op: &'a Attend,
    pub(super) q: Tensor,
    pub(super) latent: Option<Tensor>,
    pub(super) out: Tensor,
    pub(super) lse: Option<Tensor>,
    pub(super) planes: [PlaneMatrix; 2],
    pub(super) heads: usize,
}

impl<'a> AttentionOperands<'a> {
    pub(super) fn new(op: &'a Attend, latent: Option<&TensorView>) -> Result<Self> {
        for view in [Some(&op.q), latent, Some(&op.out), op.lse.as_ref()].into_iter().flatten() {
            on_device("operands of attention", view.storage())?;
        }
        Ok(Self {
            planes: PlaneMatrix::both(&op.arena, op.layer)?,
            q: Tensor::of(&op.q)?,
            latent: latent.map(Tensor::of).transpose()?,
            out: Tensor::of(&op.out)?,
            lse: op.lse.as_ref().map(Tensor::of).transpose()?,
            heads: op.q.shape()[1],
            op,
        })
    }

    /// Scales the logits, and caps them if the operation has a soft cap.
    pub(super) fn scale(&self, work: &mut Work<'_>, scores: &Tensor) -> Result<()> {
        let scale = self.op.scale;
        match self.op.softcap {
            None if scale == 1.0 => Ok(()),
            None => work.scale(scores, scale, scores),
            Some(cap) => {
                work.scale(scores, scale / cap, scores)?;
                work.tanh(scores, scores)?;
                work.scale(scores, cap, scores)
            }
        }
    }
}

/// Returns the products of queries `[heads, rows, dim]` with keys `[kv_heads, tokens, dim]`, as `[heads,
/// rows, tokens]`.
pub(super) fn products(work: &mut Work<'_>, q: &Tensor, k: &Tensor) -> Result<Tensor> {
    let (heads, rows) = (q.dim(0), q.dim(1));
    let (kv_heads, tokens, dim) = (k.dim(0), k.dim(1), k.dim(2));
    let each = heads / kv_heads * rows;
    let scores = work.temporary(sys::ACL_FLOAT, &[kv_heads, each, tokens])?;
    work.multiply(&q.reshaped(&[kv_heads, each, dim]), &k.permuted(&[0, 2, 1]), &scores)?;
    Ok(scores.reshaped(&[heads, rows, tokens]))
}
