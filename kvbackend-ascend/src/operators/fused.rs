//! Fused operators on paged caches: decode attention, and writes of keys and values.

use std::ffi::c_char;
use std::ptr::{null, null_mut};

use kvcore::Result;

use super::tensor::TensorList;
use super::{NumberList, Tensor};
use crate::queue::Work;

/// The limit that lets a row see any number of earlier and later tokens.
const FAR: i64 = 2_147_483_647;

/// The operands of paged attention with one row per sequence.
pub(crate) struct PagedAttention<'a> {
    /// The queries: a dense tensor `[sequences, heads, 1, dim]`.
    pub(crate) q: &'a Tensor,
    /// The keys: a dense tensor `[blocks, block_size, kv_heads · dim]` or `[blocks, kv_heads, block_size,
    /// dim]`.
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    /// The blocks of each sequence, `[sequences, n]`. Entries past a sequence's last block are ignored.
    pub(crate) table: &'a Tensor,
    /// Number of tokens per sequence.
    pub(crate) lengths: &'a [i64],
    pub(crate) kv_heads: usize,
    pub(crate) block_size: usize,
    pub(crate) scale: f32,
    /// The output: a dense tensor `[sequences, heads, 1, dim]`.
    pub(crate) out: &'a Tensor,
    /// The log-sum-exps, `[sequences, heads, 1, 1]` in f32, or any tensor `[1]` if they are not needed.
    pub(crate) lse: &'a Tensor,
}

impl Work<'_> {
    /// Computes `out = softmax(scale · q · kᵀ) · v` for each sequence `i`, over its first `lengths[i]`
    /// tokens.
    pub(crate) fn attend_paged(&mut self, op: &PagedAttention<'_>) -> Result<()> {
        let npu = self.npu();
        let (q, table) = (op.q.handle(npu)?, op.table.handle(npu)?);
        let (out, lse) = (op.out.handle(npu)?, op.lse.handle(npu)?);
        let (k, v) = (TensorList::of(op.k, npu)?, TensorList::of(op.v, npu)?);
        let lengths = NumberList::new(npu, op.lengths)?;
        let mut layout = *b"BNSD\0";
        let layout = layout.as_mut_ptr().cast::<c_char>();
        let with_lse = op.lse.dims().len() > 1;
        self.operator(
            "aclnnFusedInferAttentionScoreV2",
            // SAFETY: the handles are alive, and null stands for an omitted operand. `bytes` and `executor`
            // are valid for writes.
            &|operators, bytes, executor| unsafe {
                operators.aclnnFusedInferAttentionScoreV2GetWorkspaceSize(
                    q.raw(),
                    k.raw(),
                    v.raw(),
                    null(),
                    null(),
                    null(),
                    lengths.raw,
                    null(),
                    null(),
                    null(),
                    null(),
                    null(),
                    null(),
                    null(),
                    table.raw(),
                    null(),
                    null(),
                    null(),
                    null(),
                    null(),
                    null(),
                    null(),
                    null(),
                    null(),
                    op.q.dim(1) as i64,
                    f64::from(op.scale),
                    FAR,
                    FAR,
                    layout,
                    op.kv_heads as i64,
                    0,
                    0,
                    op.block_size as i64,
                    0,
                    with_lse,
                    0,
                    0,
                    out.raw(),
                    lse.raw(),
                    bytes,
                    executor,
                )
            },
            // SAFETY: the executor comes from the first phase, and the workspace has the size that this phase
            // requested.
            &|operators, workspace, bytes, executor, stream| unsafe {
                operators.aclnnFusedInferAttentionScoreV2(workspace, bytes, executor, stream)
            },
        )
    }

    /// Writes rows `[rows, heads, dim]` of keys and values to slots of caches `[blocks, block_size, heads,
    /// dim]`. No slot may occur more than once.
    pub(crate) fn put_paged(
        &mut self,
        rows: [&Tensor; 2],
        caches: [&Tensor; 2],
        slots: &Tensor,
    ) -> Result<()> {
        let npu = self.npu();
        let (key, value, slots) = (rows[0].handle(npu)?, rows[1].handle(npu)?, slots.handle(npu)?);
        let (keys, values) = (caches[0].handle(npu)?, caches[1].handle(npu)?);
        let (mut cache_mode, mut scatter_mode) = (*b"Norm\0", *b"None\0");
        let (cache_mode, scatter_mode) = (cache_mode.as_mut_ptr(), scatter_mode.as_mut_ptr());
        self.operator(
            "aclnnScatterPaKvCache",
            // SAFETY: the handles are alive, and null stands for an omitted operand. `bytes` and `executor`
            // are valid for writes.
            &|operators, bytes, executor| unsafe {
                operators.aclnnScatterPaKvCacheGetWorkspaceSize(
                    key.raw(),
                    keys.raw(),
                    slots.raw(),
                    value.raw(),
                    values.raw(),
                    null_mut(),
                    null_mut(),
                    null_mut(),
                    cache_mode.cast(),
                    scatter_mode.cast(),
                    null_mut(),
                    null_mut(),
                    bytes,
                    executor,
                )
            },
            // SAFETY: the executor comes from the first phase, and the workspace has the size that this phase
            // requested.
            &|operators, workspace, bytes, executor, stream| unsafe {
                operators.aclnnScatterPaKvCache(workspace, bytes, executor, stream)
            },
        )
    }
}
