//! `attend` and `attend_mla`: attention of query tiles over runs of tokens, followed by a merge for tiles
//! with several parts.
//!
//! An entry's rows are split into tiles. For each tile and merge group, the runs are split into tasks. This
//! keeps the whole device busy even if only a few rows attend to many tokens. A thread block works on one
//! task, for the query heads that share a K and a V head. If a tile has only one task, that task writes the
//! output directly. All other tasks write parts to scratch memory of limited size. If a call's parts do not
//! fit there, the call runs in chunks of tiles.
//!
//! This division is stored on the device as an [`AttendPlan`](crate::queue::AttendPlan), which a step's
//! layers share. Each layer adds the addresses of its keys, values, queries and results.
//!
//! | kernels | pools |
//! |---|---|
//! | `attend_bf16.cu`, `attend_f16.cu` | bf16, f16: tensor cores |
//! | `attend_codes.cu` | fp8, and int8 and int4 with a group size that is a multiple of 16: tensor cores |
//! | `attend_*_latent.cu` | the same pools, for latents and for values of more than 256 columns |
//! | `attend_plain.cu` | all other pools, and keys that are stored unrotated |
//! | `attend_merge.cu` | parts |
//! | `attend_mass.cu` | the attention mass, for all pools |

use std::sync::Arc;

use kvcore::device::queue::Hold;
use kvcore::{Attend, AttendMla, Result, TensorView};

use crate::queue::{Launch, Lowering};

mod args;
mod captured;
mod division;
mod mass;
mod merge;
mod plan;
mod records;
mod runs;
mod tiling;

pub(crate) use mass::attend_mass;

use args::AttendCall;
use tiling::{KernelTiling, THREADS, grid};

pub(crate) fn attend(to: &mut Lowering<'_>, op: &Attend) -> Result<()> {
    run(to, op, None)
}

pub(crate) fn attend_mla(to: &mut Lowering<'_>, op: &AttendMla) -> Result<()> {
    run(to, &op.attend, Some(&op.q_latent))
}

fn run(to: &mut Lowering<'_>, op: &Attend, latent: Option<&TensorView>) -> Result<()> {
    let tiling = KernelTiling::of(&to.device().facts, op, latent)?;
    let plan = plan::of(to, op, latent, &tiling)?;
    if let Some(upload) = &plan.upload {
        to.hold(Hold::Other(Arc::clone(upload) as _));
    }
    let address = plan.address;
    let call = AttendCall { op, latent, tiling: &tiling };
    for chunk in &plan.chunks {
        let scratch = if chunk.parts == 0 { (0, 0) } else { parts(to, op, chunk.parts)? };
        let args = call.args(to, chunk, address, scratch)?;
        let grid = grid(chunk.task_count * tiling.units * tiling.columns)?;
        to.launch(Launch::new(tiling.kernel, grid, THREADS as u32, tiling.shared, &args));
        to.launch(merge::launch(op, chunk, address, scratch)?);
    }
    Ok(())
}

/// Allocates scratch memory for `parts` parts, each of them a task's result for one row and all heads.
/// Returns the address of the sums and the address of the values.
fn parts(to: &mut Lowering<'_>, op: &Attend, parts: usize) -> Result<(u64, u64)> {
    let sums = (parts * op.q.shape()[1] * 8).next_multiple_of(256);
    let scratch = to.scratch(sums + parts * division::part_bytes(op))?;
    Ok((scratch, scratch + sums as u64))
}
