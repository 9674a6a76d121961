//! `attend` and `attend_mla`: tiles of queries attend to parts of the tokens that they see, and the parts are
//! then merged.
//!
//! An entry's rows are divided into tiles. The tokens that a tile sees are divided into runs, each within one
//! segment, and the runs of a merge group are divided into parts. This keeps the device busy even if only a
//! few rows attend to many tokens. Each part of a tile is a task of `attend.wgsl`, which computes an
//! unnormalised softmax; `merge.wgsl` normalises it. Parts are in a scratch buffer of limited size. If a
//! call's parts do not fit there, the call runs in chunks of tiles.
//!
//! A [`WindowedPlan`] describes this division, and the layers of a step share it. Each layer adds its
//! parameters, such as the offsets of its keys, values, queries and results.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{Attend, AttendMla, CopyTensor, MemoryKind, Result, TensorView};
use smallvec::SmallVec;

use crate::device::GpuDevice;
use crate::kernels::angles::RopeRows;
use crate::kernels::copy;
use crate::memory::WgpuStorage;
use crate::pipeline::{Binding, Shader};
use crate::queue::{Dispatch, Queue};

mod mass;
mod merge;
mod plan;
mod records;
mod runs;
mod tiling;
mod window;

pub(crate) use mass::attend_mass;
pub(crate) use plan::Plans;
use plan::{TileChunk, WindowTasks, WindowedPlan};
use tiling::Tiling;
use window::{PlaneWindows, WindowKey, rows_window};

/// The number of parameter words of `attend.wgsl`.
const PARAMETERS: usize = 31;

pub(crate) fn attend(queue: &Queue, plans: &Plans, op: &Attend) -> Result<Vec<Dispatch>> {
    run(queue, plans, op, None)
}

pub(crate) fn attend_mla(queue: &Queue, plans: &Plans, op: &AttendMla) -> Result<Vec<Dispatch>> {
    run(queue, plans, &op.attend, Some(&op.q_latent))
}

fn run(queue: &Queue, plans: &Plans, op: &Attend, latent: Option<&TensorView>) -> Result<Vec<Dispatch>> {
    let device = queue.device();
    let tiling = Tiling::of(device, op, latent.is_some())?;
    let planes = PlaneWindows::of(device, op)?;
    let (plan, uploaded) = plans.of(device, op, latent, (&tiling, &planes))?;
    queue.count_written(uploaded);
    let mut work = Vec::new();
    // If the queries overlap the output, the first chunk overwrites them, so later chunks need a copy.
    let mut apart = |view: &TensorView| {
        if plan.chunks.len() > 1 && view.overlaps(&op.out)? {
            copied(device, view, &mut work)
        } else {
            Ok(view.clone())
        }
    };
    let latent = latent.map(&mut apart).transpose()?;
    let op = &Attend { q: apart(&op.q)?, ..op.clone() };
    for chunk in &plan.chunks {
        let scratch = queue.scratch(chunk.parts.max(1) * plan.part_bytes)?;
        let call = WindowedCall { device, op, latent: latent.as_ref(), tiling: &tiling, planes: &planes };
        work.extend(call.dispatches(&plan, chunk, &scratch)?);
        work.push(merge::dispatch(device, op, &plan, chunk, scratch)?);
    }
    Ok(work)
}

/// The data that all chunks of a call share.
struct WindowedCall<'a> {
    device: &'a Arc<GpuDevice>,
    op: &'a Attend,
    latent: Option<&'a TensorView>,
    tiling: &'a Tiling,
    planes: &'a PlaneWindows,
}

impl WindowedCall<'_> {
    /// Returns one dispatch of `attend.wgsl` for each combination of windows that tasks read.
    fn dispatches(
        &self,
        plan: &Arc<WindowedPlan>,
        chunk: &TileChunk,
        scratch: &Binding,
    ) -> Result<Vec<Dispatch>> {
        let Self { device, op, latent, tiling, .. } = *self;
        if chunk.tasks.is_empty() {
            return Ok(Vec::new());
        }
        let pipeline = tiling.pipeline(device, op, latent.map(TensorView::dtype), Shader::Attend)?;
        let bound = self.bind(&chunk.rows, chunk.turns.as_ref(), scratch)?;
        let dispatch = |tasks: &WindowTasks| {
            let (args, bindings) =
                self.arguments(&bound, tasks.window, tasks.count, chunk.records(&tasks.records));
            let groups = (tasks.count * tiling.units) as u64;
            let keeps = Some(Arc::clone(plan) as _);
            Dispatch { pipeline: Arc::clone(&pipeline), args, bindings, groups, keeps }
        };
        Ok(chunk.tasks.iter().map(dispatch).collect())
    }

    /// Binds the queries of some rows, their angles, and the scratch memory.
    fn bind(&self, rows: &Range<usize>, turns: Option<&RopeRows>, scratch: &Binding) -> Result<BoundRows> {
        let Self { device, op, latent, .. } = *self;
        let nothing = || Binding::whole(&device.nothing[1]);
        let (queries, q_at) = rows_window(device, &op.q, rows)?;
        let (latents, latent_at) = match latent {
            Some(view) => rows_window(device, view, rows)?,
            None => (nothing(), [0; 3].into()),
        };
        let (angles, first_angle) = match (turns, &op.rope) {
            (Some(turns), Some(rope)) => turns.bind(device, rope)?,
            _ => (nothing(), 0),
        };
        let places = q_at.into_iter().chain(latent_at).collect();
        Ok(BoundRows { first_angle, places, bindings: [queries, latents, angles, scratch.clone()] })
    }

    /// Returns the parameters and bindings of `attend_tile.wgsl` for `count` tasks in the same windows.
    fn arguments(
        &self,
        bound: &BoundRows,
        window: WindowKey,
        count: usize,
        records: Binding,
    ) -> (Vec<u32>, Vec<Binding>) {
        let Self { device, op, tiling, planes, .. } = *self;
        let (s, softcap) = (op.arena.layout().shape(), op.softcap.unwrap_or(0.0));
        let factor = op.rope.as_ref().map_or(1.0, |rope| rope.attention_factor());
        let windows: [_; 4] = std::array::from_fn(|i| planes.window(device, i, op.layer, window));
        let mut args = vec![count as u32, tiling.units as u32, op.q.shape()[1] as u32];
        args.extend([s.k_heads as u32, s.v_heads as u32]);
        args.extend([op.scale, softcap, factor].map(f32::to_bits));
        args.push(bound.first_angle);
        args.extend(&bound.places);
        args.extend(windows.iter().flat_map(|(_, place)| place));
        debug_assert_eq!(args.len(), PARAMETERS);
        let mut bindings = windows.map(|(binding, _)| binding).to_vec();
        bindings.extend(bound.bindings.iter().cloned());
        bindings.push(records);
        (args, bindings)
    }
}

/// The bound rows of a call, which its dispatches share.
struct BoundRows {
    first_angle: u32,
    /// The offset and strides of the queries, followed by the offset and strides of the latent queries.
    places: SmallVec<[u32; 6]>,
    /// Queries, latent queries, angles, and scratch memory.
    bindings: [Binding; 4],
}

/// Returns a dense copy of a view. Adds the dispatches that perform the copy to `work`.
fn copied(device: &Arc<GpuDevice>, view: &TensorView, work: &mut Vec<Dispatch>) -> Result<TensorView> {
    let bytes = view.dtype().bytes_for(view.len())?;
    let storage = Arc::new(WgpuStorage::allocate(device, MemoryKind::Device, bytes)?);
    let dst = TensorView::new(storage, view.dtype(), view.shape())?;
    work.extend(copy::copy_tensor(device, &CopyTensor { src: view.clone(), dst: dst.clone() })?);
    Ok(dst)
}
