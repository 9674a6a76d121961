//! Divides a step's attention into tasks and merges, and describes them as records for the device.

use std::cmp::Reverse;
use std::collections::HashMap;

use bytemuck::Pod;
use kvcore::{Attend, Error, Result};

use super::records::{
    ABSENT, DIRECT, GroupRange, MergedRow, RowRecord, RunRecord, SegmentRecord, TaskRecord,
};
use super::runs::{CallTiles, QueryTile, TileTask};
use super::tiling::KernelTiling;
use crate::queue::{AttendPlanKey, PlanChunk, SharedPlaces};

/// The maximum scratch memory for parts, in bytes. A single tile may need more, and so may a call whose
/// output overlaps its queries.
const SCRATCH: usize = 256 << 20;

/// Returns the size of a part's values in bytes. A part is a task's result for one row and all heads.
pub(super) fn part_bytes(op: &Attend) -> usize {
    op.q.shape()[1] * op.arena.layout().shape().v_dim * size_of::<f32>()
}

/// The bytes of a plan's records, collected for a single upload.
#[derive(Default)]
pub(super) struct RecordBytes<'a> {
    pub(super) all: Vec<u8>,
    /// Size in bytes of each list of records, in the order in which the lists were added.
    pub(super) lists: Vec<usize>,
    /// The room for each list in bytes, if a capture has fixed the lists' offsets. Unused room is filled with
    /// absent records.
    room: Option<&'a [usize]>,
}

impl RecordBytes<'_> {
    /// Appends a list of records, and returns its offset in bytes, which is a multiple of 16.
    pub(super) fn add<T: Pod>(&mut self, records: &[T]) -> u64 {
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

/// Divides a call into chunks. Returns the records, and for each chunk the offsets of its lists.
pub(super) fn records<'a>(
    op: &Attend,
    tiling: &KernelTiling,
    key: &AttendPlanKey,
    multiprocessors: usize,
    room: Option<&'a [usize]>,
) -> Result<(RecordBytes<'a>, Vec<PlanChunk>)> {
    let mut tables = BlockTables::default();
    let (mut segments, mut places) = (Vec::new(), Vec::new());
    for segment in op.work.batch().iter().flat_map(|entry| entry.segments.iter()) {
        segments.push(SegmentRecord::new(segment));
        places.push(tables.place(segment, key.block_size));
    }
    let divide = |busy| CallTiles::of(op, tiling, &places, tables.words.len(), busy);
    let mut divided = divide(Some(multiprocessors * tiling.resident));
    if key.over_queries && parts_of(&divided.tiles) * key.part_bytes > SCRATCH {
        // If the output overlaps the queries, all parts must be in scratch memory at the same time.
        divided = divide(None);
    }
    tables.words.extend(&divided.lists);
    let too_many = |_| Error::Overflow { what: "tokens of a step's attention" };
    u32::try_from(tables.words.len().max(op.work.rows().len())).map_err(too_many)?;

    let mut bytes = RecordBytes { room, ..RecordBytes::default() };
    let rows: Vec<_> = op.work.rows().iter().map(|&row| RowRecord::new(row)).collect();
    let groups: Vec<_> = op.work.groups().iter().map(|group| group.lse_scale).collect();
    let shared = SharedPlaces {
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

/// The block lists of segments. Each list is stored only once.
#[derive(Default)]
pub(super) struct BlockTables {
    pub(super) words: Vec<u32>,
    known: HashMap<(usize, usize), u32>,
}

impl BlockTables {
    /// Returns the offset of the list of blocks that store a segment's tokens.
    pub(super) fn place(&mut self, segment: &kvcore::Segment, block_size: usize) -> u32 {
        let count = segment.len.div_ceil(block_size);
        let words = &mut self.words;
        *self.known.entry((segment.blocks.as_ptr() as usize, count)).or_insert_with(|| {
            let place = words.len() as u32;
            words.extend(segment.blocks[..count].iter().map(|block| block.index() as u32));
            place
        })
    }
}

/// Returns whether a tile needs no merge: it has at most one task, which may write the output directly
/// because the output does not overlap the queries.
fn is_direct(tile: &QueryTile, over_queries: bool) -> bool {
    !over_queries && tile.tasks() <= 1
}

fn parts(tile: &QueryTile, over_queries: bool) -> usize {
    if is_direct(tile, over_queries) { 0 } else { tile.tasks() * tile.rows.len() }
}

fn parts_of(tiles: &[QueryTile]) -> usize {
    tiles.iter().map(|tile| parts(tile, true)).sum()
}

/// Divides tiles into chunks of at most `most` parts. A tile with more parts gets its own chunk.
fn chunks(tiles: &[QueryTile], most: usize, over_queries: bool) -> Vec<&[QueryTile]> {
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

/// Builds the records for a chunk of tiles. Long tasks come first, because a long task that started last
/// would keep the rest of the device idle.
fn chunk(
    op: &Attend,
    tiles: &[QueryTile],
    over_queries: bool,
    shared: SharedPlaces,
    bytes: &mut RecordBytes<'_>,
) -> PlanChunk {
    let (mut tasks, mut merged, mut ranges) = (Vec::new(), Vec::new(), Vec::new());
    let (mut lists, mut part): (Vec<u32>, u32) = (Vec::new(), 0);
    let nothing = TileTask::default();
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
    PlanChunk {
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
