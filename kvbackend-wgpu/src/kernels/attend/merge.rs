//! The dispatches of `merge.wgsl`, with their arguments.

use std::sync::Arc;

use kvcore::{Attend, Result};

use super::plan::{TileChunk, WindowedPlan};
use super::records::MERGED;
use super::window::rows_window;
use crate::device::GpuDevice;
use crate::kernels::convert::kind;
use crate::pipeline::{Binding, Constant, Shader};
use crate::queue::Dispatch;

pub(super) fn dispatch(
    device: &Arc<GpuDevice>,
    op: &Attend,
    plan: &Arc<WindowedPlan>,
    chunk: &TileChunk,
    scratch: Binding,
) -> Result<Dispatch> {
    let heads = op.q.shape()[1] as u32;
    let (out, out_at) = rows_window(device, &op.out, &chunk.rows)?;
    let (lse, lse_at) = match &op.lse {
        Some(view) => rows_window(device, view, &chunk.rows)?,
        None => (Binding::whole(&device.nothing[0]), [0; 3].into()),
    };
    let constants: [Constant; 3] = [
        ("DEST", f64::from(kind(op.out.dtype()))),
        ("DIM", op.arena.layout().shape().v_dim as f64),
        ("WITH_LSE", f64::from(u8::from(op.lse.is_some()))),
    ];
    device.check_workgroup(op.arena.layout().shape().v_dim)?;
    let pipeline = device.pipeline(Shader::Merge, &constants, "")?;
    let (count, place) = &chunk.merged;
    let mut args = vec![*count as u32, heads];
    args.extend(out_at.iter().chain(&lse_at));
    args.push((MERGED * count) as u32);
    let bindings = vec![scratch, out, lse, chunk.records(place)];
    let groups = *count as u64 * u64::from(heads);
    Ok(Dispatch { pipeline, args, bindings, groups, keeps: Some(Arc::clone(plan) as _) })
}
