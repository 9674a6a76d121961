//! `attend_mass`: each thread block handles a tile of tokens, and loops over all rows. A second kernel then
//! adds up the sums of all heads, always in the same order.

use bytemuck::{Pod, Zeroable};
use kvcore::{AttendMass, Counters, Error, Result};

use super::args::{AttendArgs, AttendCall};
use super::division::{BlockTables, RecordBytes};
use super::records::{DIRECT, RowRecord, RunRecord, SegmentRecord, TaskRecord};
use super::tiling::{self, KernelTiling, THREADS, grid};
use crate::module::{CudaKernel, Module};
use crate::queue::{Launch, Lowering, PlanChunk, SharedPlaces};

/// The kernel that adds up each token's sums from all units. A unit is one thread block's share of the
/// heads.
const ADD: CudaKernel = CudaKernel { module: Module::AttendMass, name: "attend_mass_add", shared: 0 };

/// The argument of both kernels, as declared in `attend_mass.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MassArgs {
    attend: AttendArgs,
    units_sums: u64,
    sums: u64,
    tokens: u32,
    /// The number of rows that a block processes at once.
    rows: u32,
}

pub(crate) fn attend_mass(to: &mut Lowering<'_>, mass: &AttendMass) -> Result<()> {
    let op = &mass.attend;
    let tokens = mass.sums.len();
    if mass.rows().is_none_or(|entry| entry.rows.is_empty()) || tokens == 0 {
        return Ok(());
    }
    let tiling = tiling::plain(&to.device().facts, op, mass.q_latent.is_some())?;
    let (bytes, chunk) = records(mass, &tiling)?;
    Counters::add(&to.device().counters.plan_bytes, bytes.len());
    let plan = to.upload(&bytes)?;
    let units_sums = to.scratch(4 * tiling.units * tokens)?;
    let call = AttendCall { op, latent: mass.q_latent.as_ref(), tiling: &tiling };
    let attend = call.args(to, &chunk, plan, (0, 0))?;
    let sums = mass.sums.storage().address() + 4 * mass.sums.offset() as u64;
    let args = MassArgs { attend, units_sums, sums, tokens: tokens as u32, rows: tiling.rows as u32 };
    let kernel = CudaKernel { module: Module::AttendMass, name: "attend_mass", ..tiling.kernel };
    let blocks = grid(chunk.task_count * tiling.units)?;
    to.launch(Launch::new(kernel, blocks, THREADS as u32, tiling.shared, &args));
    to.launch(Launch::new(ADD, grid(tokens.div_ceil(THREADS))?, THREADS as u32, 0, &args));
    Ok(())
}

/// Returns the records of an attention mass, and their offsets. Each tile of tokens has one task with one
/// run. The task's part index is the index of its first token, counted across all segments.
fn records(mass: &AttendMass, tiling: &KernelTiling) -> Result<(Vec<u8>, PlanChunk)> {
    let op = &mass.attend;
    let (mut tables, mut segments) = (BlockTables::default(), Vec::new());
    let (mut runs, mut tasks, mut before) = (Vec::new(), Vec::new(), 0);
    if let Some(entry) = mass.rows() {
        let block_size = op.arena.layout().shape().block_size;
        let seen = &entry.segments[..entry.segments.len().saturating_sub(1)];
        for (segment, number) in seen.iter().zip(0..) {
            segments.push(SegmentRecord::new(segment));
            let table = tables.place(segment, block_size);
            for start in (0..segment.len).step_by(tiling.tokens) {
                let end = (start + tiling.tokens).min(segment.len);
                tasks.push(TaskRecord {
                    row: entry.rows.start as u32,
                    rows: entry.rows.len() as u32,
                    run: runs.len() as u32,
                    runs: 1,
                    part: (before + start) as u32,
                    lse_scale: 1.0,
                });
                runs.push(RunRecord::of_segment(segment, number, start..end, table));
            }
            before += segment.len;
        }
    }
    let most = tables.words.len().max(op.work.rows().len()).max(before);
    if u32::try_from(most).is_ok_and(|most| most < DIRECT) {
        let mut bytes = RecordBytes::default();
        let rows: Vec<_> = op.work.rows().iter().map(|&row| RowRecord::new(row)).collect();
        let (rows, segments) = (bytes.add(&rows), bytes.add(&segments));
        let shared = SharedPlaces { rows, segments, tables: bytes.add(&tables.words), groups: 0 };
        let (task_count, runs, tasks) = (tasks.len(), bytes.add(&runs), bytes.add(&tasks));
        let nothing = (0, 0, 0, 0);
        let (merged, merged_rows, ranges, lists) = nothing;
        let chunk =
            PlanChunk { shared, runs, tasks, task_count, merged, merged_rows, ranges, lists, parts: 0 };
        return Ok((bytes.all, chunk));
    }
    Err(Error::Overflow { what: "tokens of an attention mass" })
}
