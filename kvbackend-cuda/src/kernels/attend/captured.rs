//! Plans in a graph. Each replay divides its work in the same way as a call outside a graph, and writes the
//! records at the offsets that were fixed at capture.
//!
//! Each list has room for about twice as many records as the captured work has, and the grids cover all of
//! this room. Unused room is filled with absent records; a thread block that reads an absent record ends at
//! once.

use std::sync::Arc;

use kvcore::device::capture::without_work;
use kvcore::{Attend, AttendWork, Error, Result, TensorView};

use super::division::records;
use super::records::{MergedRow, TaskRecord};
use super::tiling::KernelTiling;
use crate::device::CudaDevice;
use crate::queue::capture::uncapturable;
use crate::queue::{AttendPlan, AttendPlanKey, Lowering, PlanChunk, StepList};

// Decision: docs/decisions/backend-cuda.md#a-captured-plan-has-spare-room-and-is-divided-again-per-replay
/// Index of the list of rows in a plan with one chunk.
const ROWS: usize = 0;
/// Index of the list of groups in a plan with one chunk.
const GROUPS: usize = 3;
/// Index of the list of tasks in a plan with one chunk.
const TASKS: usize = 5;
/// Index of the list of merged rows in a plan with one chunk.
const MERGED: usize = 6;

/// A captured attention call, with everything that a replay needs to divide its new work.
struct GraphPlan {
    device: Arc<CudaDevice>,
    /// The captured operation, without its work.
    op: Attend,
    latent: Option<TensorView>,
    tiling: KernelTiling,
    key: AttendPlanKey,
    /// The room for each list of records, in bytes.
    room: Vec<usize>,
    /// The maximum number of parts that fit in the scratch memory.
    parts: usize,
}

/// Returns the room for each list in bytes, computed from the size of its captured records.
fn room(lists: &[usize], rows: usize) -> Vec<usize> {
    let of = |(list, &bytes): (usize, &usize)| match list {
        ROWS | GROUPS => bytes,
        MERGED => rows * size_of::<MergedRow>(),
        _ => 2 * bytes + 256,
    };
    lists.iter().enumerate().map(of).map(|bytes: usize| bytes.next_multiple_of(16)).collect()
}

/// Returns the plan of a captured call. Each replay rewrites the plan's records.
pub(super) fn plan(
    to: &mut Lowering<'_>,
    op: &Attend,
    latent: Option<&TensorView>,
    tiling: &KernelTiling,
    key: AttendPlanKey,
) -> Result<AttendPlan> {
    let multiprocessors = to.device().facts.multiprocessors as usize;
    let (bytes, chunks) = records(op, tiling, &key, multiprocessors, None)?;
    let [PlanChunk { parts, .. }] = chunks[..] else {
        return Err(uncapturable("attention with more parts than fit in memory at the same time, or none"));
    };
    let room = room(&bytes.lists, op.work.rows().len());
    let parts = 2 * parts + 8;
    let (bytes, mut chunks) = records(op, tiling, &key, multiprocessors, Some(&room))?;
    for chunk in &mut chunks {
        chunk.task_count = room[TASKS] / size_of::<TaskRecord>();
        chunk.merged_rows = room[MERGED] / size_of::<MergedRow>();
        chunk.parts = parts;
    }
    let size = bytes.all.len();
    let (device, op) = (Arc::clone(to.device()), without_work(op));
    let plan = GraphPlan { device, op, latent: latent.cloned(), tiling: *tiling, key, room, parts };
    let address = to.input(StepList::Plan(Box::new(move |work| plan.records(work))), size)?;
    Ok(AttendPlan { chunks, address, upload: None })
}

impl GraphPlan {
    /// Returns the records for the given work, with each list at its fixed offset.
    ///
    /// # Errors
    /// Returns [`Error::GraphOutgrown`] if the records do not fit or if the work needs another kernel.
    fn records(&self, work: &Arc<AttendWork>) -> Result<Vec<u8>> {
        let outgrown = || Error::GraphOutgrown { what: "segments" };
        let op = Attend { work: Arc::clone(work), ..self.op.clone() };
        if KernelTiling::of(&self.device.facts, &op, self.latent.as_ref())? != self.tiling {
            return Err(outgrown());
        }
        let multiprocessors = self.device.facts.multiprocessors as usize;
        let (bytes, chunks) = records(&op, &self.tiling, &self.key, multiprocessors, Some(&self.room))?;
        let fits = bytes.lists.len() == self.room.len()
            && bytes.lists.iter().zip(&self.room).all(|(bytes, room)| bytes <= room)
            && chunks.iter().all(|chunk| chunk.parts <= self.parts);
        if fits { Ok(bytes.all) } else { Err(outgrown()) }
    }
}
