//! Plans: the division of a step's attention into tasks and merges, with its records on the device. Layers that share an
//! [`AttendWork`](kvcore::AttendWork) share its plans.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use bytemuck::Pod;
use kvcore::{Attend, Counters, Error, Result, TensorView};

use super::records::{
    ABSENT, DIRECT, GroupRange, MergedRow, RowRecord, RunRecord, SegmentRecord, TaskRecord,
};
use super::runs::{RowTile, RunTask, Tiles};
use super::tiling::Tiling;
use crate::stream::{Lowering, Upload};

mod captured;

pub(crate) use captured::GraphPlan;

/// Most bytes of scratch for parts, unless one tile needs more or the output lies where the queries do.
const SCRATCH: usize = 256 << 20;

/// Number of plans that a stream keeps. Few suffice, because the layers of a model differ at most in their window.
const KEPT: usize = 4;

/// All that a plan depends on. Layers with equal keys share a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PlanKey {
    /// The identity of the work, [`AttendWork::id`](kvcore::AttendWork::id).
    work: u64,
    window: Option<usize>,
    /// Query heads of a block, blocks for all heads, rows of a block, tokens of a tile, and blocks at the same time.
    tiling: [usize; 5],
    block_size: usize,
    part_bytes: usize,
    /// Whether the output lies where queries do, so that nothing may be written before all queries are read.
    over_queries: bool,
}

/// Places of records that all chunks share, in bytes from the start of the plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared {
    pub(super) rows: u64,
    pub(super) segments: u64,
    pub(super) tables: u64,
    pub(super) groups: u64,
}

/// Tiles whose parts fit in the scratch.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) shared: Shared,
    pub(super) runs: u64,
    pub(super) tasks: u64,
    pub(super) task_count: usize,
    pub(super) merged: u64,
    pub(super) merged_rows: usize,
    pub(super) ranges: u64,
    pub(super) lists: u64,
    /// Number of parts, each of one row and all heads.
    pub(super) parts: usize,
}

/// The division of a call, and its records on the device.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) chunks: Vec<Chunk>,
    /// Address of the records.
    pub(super) address: u64,
    /// Memory of the records, unless a graph owns it.
    pub(super) upload: Option<Arc<Upload>>,
}

/// The plans of a stream's last calls.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    kept: [Option<(PlanKey, Arc<Plan>)>; KEPT],
    /// The place of the plan that is replaced next.
    next: usize,
}

/// Returns the bytes of values of a part of one row and all heads.
pub(super) fn part_bytes(op: &Attend) -> usize {
    op.q.shape()[1] * op.arena.layout().shape().v_dim * size_of::<f32>()
}

/// Returns the plan of a call, and makes it on first use.
pub(super) fn of(
    to: &mut Lowering<'_>,
    op: &Attend,
    latent: Option<&TensorView>,
    tiling: &Tiling,
) -> Result<Arc<Plan>> {
    let latent_over = latent.map_or(Ok(false), |latent| latent.overlaps(&op.out))?;
    let key = PlanKey {
        work: op.work.id(),
        window: op.window,
        tiling: [tiling.heads, tiling.units, tiling.rows, tiling.tokens, tiling.resident],
        block_size: op.arena.layout().shape().block_size,
        part_bytes: part_bytes(op),
        over_queries: latent_over || op.q.overlaps(&op.out)?,
    };
    if let Some((_, plan)) = to.plans().kept.iter().flatten().find(|(known, _)| *known == key) {
        return Ok(Arc::clone(plan));
    }
    let plan = Arc::new(if to.recording().is_some() {
        captured::plan(to, op, latent, tiling, key)?
    } else {
        let (bytes, chunks) = records(op, tiling, &key, to.device().facts.multiprocessors as usize, None)?;
        let upload = to.send(&bytes.all)?;
        Counters::add(&to.device().counters.plan_bytes, bytes.all.len());
        Plan { chunks, address: upload.address(), upload: Some(upload) }
    });
    let plans = to.plans();
    plans.kept[plans.next] = Some((key, Arc::clone(&plan)));
    plans.next = (plans.next + 1) % KEPT;
    Ok(plan)
}

/// Records that are gathered for one upload.
#[derive(Default)]
struct Bytes<'a> {
    all: Vec<u8>,
    /// Bytes of each list of records, in the order in which they were added.
    lists: Vec<usize>,
    /// Room of each list, if the places are fixed. The rest is filled with records that are marked as absent.
    room: Option<&'a [usize]>,
}

impl Bytes<'_> {
    /// Adds records and returns their place, a multiple of 16.
    fn add<T: Pod>(&mut self, records: &[T]) -> u64 {
        self.all.resize(self.all.len().next_multiple_of(16), 0);
        let place = self.all.len();
        self.all.extend_from_slice(bytemuck::cast_slice(records));
        if let Some(room) = self.room.and_then(|room| room.get(self.lists.len())) {
            self.all.resize(self.all.len().max(place + room), ABSENT);
        }
        self.lists.push(size_of_val(records));
        place as u64
    }
}

fn records<'a>(
    op: &Attend,
    tiling: &Tiling,
    key: &PlanKey,
    multiprocessors: usize,
    room: Option<&'a [usize]>,
) -> Result<(Bytes<'a>, Vec<Chunk>)> {
    let mut tables = Tables::default();
    let (mut segments, mut places) = (Vec::new(), Vec::new());
    for segment in op.work.batch().iter().flat_map(|entry| entry.segments.iter()) {
        segments.push(SegmentRecord::new(segment));
        places.push(tables.place(segment, key));
    }
    let divide = |busy| Tiles::of(op, tiling, &places, tables.words.len(), busy);
    let mut divided = divide(Some(multiprocessors * tiling.resident));
    if key.over_queries && parts_of(&divided.tiles) * key.part_bytes > SCRATCH {
        // All parts lie in the scratch at the same time.
        divided = divide(None);
    }
    tables.words.extend(&divided.lists);
    let too_many = |_| Error::Overflow { what: "tokens of a step's attention" };
    u32::try_from(tables.words.len().max(op.work.rows().len())).map_err(too_many)?;

    let mut bytes = Bytes { room, ..Bytes::default() };
    let rows: Vec<_> = op.work.rows().iter().map(|&row| RowRecord::new(row)).collect();
    let groups: Vec<_> = op.work.groups().iter().map(|group| group.lse_scale).collect();
    let shared = Shared {
        rows: bytes.add(&rows),
        segments: bytes.add(&segments),
        tables: bytes.add(&tables.words),
        groups: bytes.add(&groups),
    };
    let most = if key.over_queries { usize::MAX } else { SCRATCH / key.part_bytes };
    let chunks = chunks(&divided.tiles, most, key.over_queries);
    let chunks =
        chunks.into_iter().map(|tiles| chunk(op, tiles, key.over_queries, shared, &mut bytes)).collect();
    Ok((bytes, chunks))
}

/// Lists of blocks. Each list is stored once.
#[derive(Default)]
struct Tables {
    words: Vec<u32>,
    known: HashMap<(usize, usize), u32>,
}

impl Tables {
    /// Returns the place of a segment's blocks, as many as its tokens lie in.
    fn place(&mut self, segment: &kvcore::Segment, key: &PlanKey) -> u32 {
        let count = segment.len.div_ceil(key.block_size);
        let words = &mut self.words;
        *self.known.entry((segment.blocks.as_ptr() as usize, count)).or_insert_with(|| {
            let place = words.len() as u32;
            words.extend(segment.blocks[..count].iter().map(|block| block.index() as u32));
            place
        })
    }
}

/// Returns whether the only task of a tile writes the output, so that there is nothing to merge.
fn is_direct(tile: &RowTile, over_queries: bool) -> bool {
    !over_queries && tile.tasks() <= 1
}

fn parts(tile: &RowTile, over_queries: bool) -> usize {
    if is_direct(tile, over_queries) { 0 } else { tile.tasks() * tile.rows.len() }
}

fn parts_of(tiles: &[RowTile]) -> usize {
    tiles.iter().map(|tile| parts(tile, true)).sum()
}

/// Divides tiles into chunks of at most `most` parts, or of one tile.
fn chunks(tiles: &[RowTile], most: usize, over_queries: bool) -> Vec<&[RowTile]> {
    let (mut chunks, mut start, mut sum) = (Vec::new(), 0, 0usize);
    for (i, tile) in tiles.iter().enumerate() {
        let more = parts(tile, over_queries);
        if i > start && sum + more > most {
            chunks.push(&tiles[start..i]);
            (start, sum) = (i, 0);
        }
        sum += more;
    }
    if start < tiles.len() {
        chunks.push(&tiles[start..]);
    }
    chunks
}

/// Makes the records of a chunk of tiles. Long tasks come first, so that none begins when the others end.
fn chunk(op: &Attend, tiles: &[RowTile], over_queries: bool, shared: Shared, bytes: &mut Bytes<'_>) -> Chunk {
    let (mut tasks, mut merged, mut ranges) = (Vec::new(), Vec::new(), Vec::new());
    let (mut lists, mut part): (Vec<u32>, u32) = (Vec::new(), 0);
    let nothing = RunTask::default();
    for tile in tiles {
        let record = |part, lse_scale| TaskRecord {
            row: tile.rows.start as u32,
            rows: tile.rows.len() as u32,
            run: 0,
            runs: 0,
            part,
            lse_scale,
        };
        if is_direct(tile, over_queries) {
            let only = tile.groups.first().and_then(|(group, tasks)| Some((*group, tasks.first()?)));
            let factor = only.map_or(1.0, |(group, _)| op.work.groups()[group].lse_scale);
            tasks.push((record(DIRECT, factor), only.map_or(&nothing, |(_, task)| task)));
            continue;
        }
        let (first_range, mut listed) = (ranges.len() as u32, Vec::new());
        for (group, of_group) in &tile.groups {
            let begin = listed.len() as u32;
            for task in of_group {
                tasks.push((record(part, 1.0), task));
                listed.push(part);
                part += tile.rows.len() as u32;
            }
            ranges.push(GroupRange { begin, end: listed.len() as u32, group: *group as u32, pad: 0 });
        }
        for (i, row) in (0..).zip(tile.rows.clone()) {
            let list = lists.len() as u32;
            merged.push(MergedRow {
                row: row as u32,
                list,
                range: first_range,
                ranges: tile.groups.len() as u32,
            });
            lists.extend(listed.iter().map(|part| part + i));
        }
    }
    tasks.sort_by_key(|(_, task)| Reverse(task.tokens));
    let mut runs: Vec<RunRecord> = Vec::new();
    for (record, task) in &mut tasks {
        (record.run, record.runs) = (runs.len() as u32, task.runs.len() as u32);
        runs.extend(&task.runs);
    }
    let task_count = tasks.len();
    let tasks: Vec<_> = tasks.into_iter().map(|(record, _)| record).collect();
    Chunk {
        shared,
        runs: bytes.add(&runs),
        tasks: bytes.add(&tasks),
        task_count,
        merged: bytes.add(&merged),
        merged_rows: merged.len(),
        ranges: bytes.add(&ranges),
        lists: bytes.add(&lists),
        parts: part as usize,
    }
}
