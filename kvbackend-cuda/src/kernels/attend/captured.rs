//! Plans in a graph: each replay divides its own work anew, as a call outside of the graph would, and writes the records
//! to places that the capture has fixed.
//!
//! Each list of records has room for about twice as many as the captured work has. The grids are those of the room.
//! Records that are not there are marked, and the blocks that find them end at once.

use std::sync::Arc;

use kvcore::device::capture::without_work;
use kvcore::{Attend, AttendWork, Error, Result, TensorView};

use super::division::records;
use super::records::{MergedRow, TaskRecord};
use super::tiling::Tiling;
use crate::device::Device;
use crate::queue::capture::uncapturable;
use crate::queue::{AttendPlan, AttendPlanKey, Lowering, PlanChunk, StepList};

/// Places of some lists in the order of a plan with one chunk.
const ROWS: usize = 0;
const GROUPS: usize = 3;
const TASKS: usize = 5;
const MERGED: usize = 6;

/// The division of a captured call.
struct GraphPlan {
    device: Arc<Device>,
    /// The call, without its work.
    op: Attend,
    latent: Option<TensorView>,
    tiling: Tiling,
    key: AttendPlanKey,
    /// Bytes of each list of records.
    room: Vec<usize>,
    /// Number of parts that the scratch has room for.
    parts: usize,
}

/// Returns the room of each list, for lists of these bytes.
fn room(lists: &[usize], rows: usize) -> Vec<usize> {
    let of = |(list, &bytes): (usize, &usize)| match list {
        ROWS | GROUPS => bytes,
        MERGED => rows * size_of::<MergedRow>(),
        _ => 2 * bytes + 256,
    };
    lists.iter().enumerate().map(of).map(|bytes: usize| bytes.next_multiple_of(16)).collect()
}

/// Returns the plan of a call that is being captured, without records: a replay writes them.
pub(super) fn plan(
    to: &mut Lowering<'_>,
    op: &Attend,
    latent: Option<&TensorView>,
    tiling: &Tiling,
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
    /// Returns the records for some work, each list at its place.
    ///
    /// # Errors
    /// Returns [`Error::GraphOutgrown`] if the records do not fit or if the work asks for another kernel.
    fn records(&self, work: &Arc<AttendWork>) -> Result<Vec<u8>> {
        let outgrown = || Error::GraphOutgrown { what: "segments" };
        let op = Attend { work: Arc::clone(work), ..self.op.clone() };
        if Tiling::of(&self.device.facts, &op, self.latent.as_ref())? != self.tiling {
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
