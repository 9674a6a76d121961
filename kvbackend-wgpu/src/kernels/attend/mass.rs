//! `attend_mass`: each workgroup of `mass.wgsl` handles a tile of tokens, for the query heads that share
//! keys, and loops over all rows. `sums.wgsl` runs before and after `mass.wgsl`: first, it copies the
//! log-sum-exps to the scratch memory; finally, it adds up the sums of all heads, always in the same order.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvcore::{AttendMass, AttendRows, Counters, Result, TensorView};
use wgpu::BufferUsages;

use super::records;
use super::runs::{self, RunTask};
use super::tiling::Tiling;
use super::window::{PlaneWindows, WindowKey, most_rows, rows_window};
use super::{PARAMETERS, WindowedCall};
use crate::device::GpuDevice;
use crate::kernels::angles::{RopeRows, pairs_of};
use crate::memory;
use crate::pipeline::{Binding, Shader};
use crate::queue::{Dispatch, Queue};

/// The number of threads per workgroup of `sums.wgsl`.
const THREADS: usize = 64;

/// The maximum number of words in the records of one dispatch. A single task may need more.
const WORDS: usize = 1 << 20;

pub(crate) fn attend_mass(queue: &Queue, mass: &AttendMass) -> Result<Vec<Dispatch>> {
    let (device, op) = (queue.device(), &mass.attend);
    let (Some(entry), Some(lse)) = (mass.rows(), &op.lse) else { return Ok(Vec::new()) };
    if mass.sums.is_empty() {
        return Ok(Vec::new());
    }
    // The maximum number of rows that can be bound at once.
    let views = [Some(&op.q), mass.q_latent.as_ref(), Some(lse)].into_iter().flatten();
    let most = views.map(|view| most_rows(device, view)).min().unwrap_or(1);
    let mut work = Vec::new();
    for start in entry.rows.clone().step_by(most) {
        let rows = start..start.saturating_add(most).min(entry.rows.end);
        work.extend(add_rows(queue, mass, lse, &AttendRows { rows, ..entry.clone() })?);
    }
    Ok(work)
}

/// Adds the attention weights of `entry`, which contains only as many rows as can be bound at once.
fn add_rows(queue: &Queue, mass: &AttendMass, lse: &TensorView, entry: &AttendRows) -> Result<Vec<Dispatch>> {
    let (device, op) = (queue.device(), &mass.attend);
    // A tiling for the rows of this entry alone would need another pipeline.
    let tiling = Tiling::of(device, op, mass.q_latent.is_some())?;
    let planes = PlaneWindows::of(device, op)?;
    let (heads, tokens) = (op.q.shape()[1], mass.sums.len());
    let sums_at = entry.rows.len() * heads;
    let scratch = queue.scratch(4 * (sums_at + tiling.units * tokens) as u64)?;
    let mut work = vec![sums(device, false, entry.rows.len() * heads, {
        let (binding, at) = rows_window(device, lse, &entry.rows)?;
        let first = at[0].wrapping_add(entry.rows.start as u32 * at[1]);
        (vec![heads as u32, first, at[1], at[2]], [binding, scratch.clone()])
    })?];
    let call = WindowedCall { device, op, latent: mass.q_latent.as_ref(), tiling: &tiling, planes: &planes };
    let tasks = runs::tasks_by_token(op, entry, &tiling, &planes);
    let pairs = op.rope.as_ref().map(|rope| pairs_of(rope));
    let of_tasks = || records::positions(op, tasks.iter().map(|(task, _)| task));
    let turns = pairs.map(|pairs| RopeRows::of(device, pairs, of_tasks())).transpose()?;
    let bound = call.bind(&entry.rows, turns.as_ref(), &scratch)?;
    let latent = mass.q_latent.as_ref().map(TensorView::dtype);
    let pipeline = tiling.pipeline(device, op, latent, Shader::Mass)?;
    let number = |position| turns.as_ref().map_or(0, |turns| turns.number(position));
    let mut by_window: BTreeMap<WindowKey, Vec<(&RunTask, u32)>> = BTreeMap::new();
    for (task, first) in &tasks {
        by_window.entry(task.window).or_default().push((task, *first));
    }
    for (window, of_window) in by_window {
        let words =
            of_window.iter().map(|(task, _)| task.runs.len()).max().unwrap_or(1) * (6 + 3 * tiling.rows);
        for tasks in of_window.chunks((WORDS / words.max(1)).max(1)) {
            let records = records::of_tasks(tasks, (tiling.rows, 1), number);
            let records = uploaded(queue, &records)?;
            let (mut args, bindings) = call.arguments(&bound, window, tasks.len(), records);
            debug_assert_eq!(args.len(), PARAMETERS);
            args.extend([entry.rows.start, sums_at, tokens].map(|word| word as u32));
            let groups = (tasks.len() * tiling.units) as u64;
            work.push(Dispatch { pipeline: Arc::clone(&pipeline), args, bindings, groups, keeps: None });
        }
    }
    let (to, first) = bound_sums(device, &mass.sums)?;
    let args = vec![tiling.units as u32, sums_at as u32, first];
    work.push(sums(device, true, tokens, (args, [scratch, to]))?);
    Ok(work)
}

/// Returns a dispatch of `sums.wgsl` over `count` elements.
fn sums(
    device: &Arc<GpuDevice>,
    add: bool,
    count: usize,
    (args, bindings): (Vec<u32>, [Binding; 2]),
) -> Result<Dispatch> {
    let pipeline = device.pipeline(Shader::Sums, &[("ADD", f64::from(u8::from(add)))], "")?;
    let args = std::iter::once(count as u32).chain(args).collect();
    let (bindings, groups) = (bindings.to_vec(), count.div_ceil(THREADS) as u64);
    Ok(Dispatch { pipeline, args, bindings, groups, keeps: None })
}

/// Binds the sums. Also returns the offset of the first sum in the binding, in elements.
fn bound_sums(device: &Arc<GpuDevice>, view: &TensorView) -> Result<(Binding, u32)> {
    let start = 4 * view.offset() as u64;
    let first = start % device.binding_align();
    let size = first + 4 * view.len() as u64;
    if size > device.binding {
        return Err(device.lists_too_long(size));
    }
    let buffer = memory::of(device, view.storage())?.buffer()?;
    Ok((Binding { buffer, offset: start - first, size }, (first / 4) as u32))
}

/// Binds records in a new buffer.
fn uploaded(queue: &Queue, records: &[u32]) -> Result<Binding> {
    let (device, bytes): (_, &[u8]) = (queue.device(), bytemuck::cast_slice(records));
    if bytes.len() as u64 > device.limits.max_storage_buffer_binding_size {
        return Err(device.lists_too_long(bytes.len() as u64));
    }
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
    let buffer = device.buffer("records", bytes.len() as u64, usage)?;
    device.fill(&buffer, 0, bytes).map_err(|reason| device.refusal(reason))?;
    queue.count_written(bytes.len());
    Counters::add(&device.counters.plan_bytes, bytes.len());
    Ok(Binding::whole(&buffer))
}
