//! The merge of parts, and the kernel's argument as declared in `attend_merge.cu`.

use bytemuck::{Pod, Zeroable};
use kvcore::{Attend, Result};

use super::args::RowsArg;
use super::tiling::{THREADS, grid};
use crate::kernels::places::element_kind;
use crate::module::{CudaKernel, Module};
use crate::queue::{Launch, PlanChunk};

const MERGE: CudaKernel = CudaKernel { module: Module::AttendMerge, name: "attend_merge", shared: SHARED };

/// The number of columns that a thread block sums at once.
const COLUMNS: usize = 128;

/// The size of the shared memory in bytes. Its layout matches `MergeShared`: the weight and index of one part
/// per thread, and one sum per column and warp.
const SHARED: u32 = (8 * THREADS + 4 * COLUMNS * THREADS / 32) as u32;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MergeArgs {
    out: RowsArg,
    lse: RowsArg,
    sums: u64,
    values: u64,
    rows: u64,
    ranges: u64,
    lists: u64,
    groups: u64,
    count: u32,
    heads: u32,
    v_dim: u32,
    out_kind: u32,
}

/// Returns the launch that merges a chunk's parts. Its grid is empty if the chunk has no parts.
pub(super) fn launch(
    op: &Attend,
    chunk: &PlanChunk,
    plan: u64,
    (sums, values): (u64, u64),
) -> Result<Launch> {
    let heads = op.q.shape()[1];
    let args = MergeArgs {
        out: RowsArg::new(&op.out),
        lse: RowsArg::optional(op.lse.as_ref()),
        sums,
        values,
        rows: plan + chunk.merged,
        ranges: plan + chunk.ranges,
        lists: plan + chunk.lists,
        groups: plan + chunk.shared.groups,
        count: chunk.merged_rows as u32,
        heads: heads as u32,
        v_dim: op.arena.layout().shape().v_dim as u32,
        out_kind: element_kind(op.out.dtype()),
    };
    Ok(Launch::new(MERGE, grid(chunk.merged_rows * heads)?, THREADS as u32, SHARED, &args))
}
