//! The merge of parts, and its argument as `attend_merge.cu` declares it.

use bytemuck::{Pod, Zeroable};
use kvcore::Attend;

use super::args::AttendRows;
use super::plan::Chunk;
use super::tiling::THREADS;
use crate::kernels::kind;
use crate::module::{Kernel, Module};
use crate::stream::Launch;

const MERGE: Kernel = Kernel { module: Module::AttendMerge, name: "attend_merge", shared: 0 };

/// Rows and heads of a block: one for each warp.
const PER_BLOCK: usize = THREADS / 32;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MergeArgs {
    out: AttendRows,
    lse: AttendRows,
    sums: u64,
    values: u64,
    rows: u64,
    lists: u64,
    groups: u64,
    count: u32,
    heads: u32,
    v_dim: u32,
    out_kind: u32,
}

/// Returns the launch that closes the parts of a chunk. Its grid is empty if there are none.
pub(super) fn launch(op: &Attend, chunk: &Chunk, plan: u64, (sums, values): (u64, u64)) -> Launch {
    let heads = op.q.shape()[1];
    let args = MergeArgs {
        out: AttendRows::new(&op.out),
        lse: AttendRows::optional(op.lse.as_ref()),
        sums,
        values,
        rows: plan + chunk.merged,
        lists: plan + chunk.lists,
        groups: plan + chunk.shared.groups,
        count: chunk.merged_rows as u32,
        heads: heads as u32,
        v_dim: op.arena.layout().shape().v_dim as u32,
        out_kind: kind(op.out.dtype()),
    };
    let blocks = (chunk.merged_rows * heads).div_ceil(PER_BLOCK);
    Launch::new(MERGE, [blocks as u32, 1, 1], THREADS as u32, 0, &args)
}
