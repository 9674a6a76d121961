//! Runs, which are the tokens that each tile of rows sees, and tasks, which are the runs that a workgroup
//! reads.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvcore::{Attend, AttendRows, BlockId, KeyForm, QueryRow, Segment};
use smallvec::SmallVec;

use super::tiling::Tiling;
use super::window::{PlaneWindows, WindowKey};

/// The number of workgroups that keep a device busy.
const BUSY: usize = 512;

/// Runs with fewer tokens than this are not divided any further.
const SHORT: usize = 256;

/// The maximum number of words in the record of a task, of a run, or of a run's row.
const RECORD: usize = 8;

/// Consecutive rows of one entry.
pub(super) struct RowTile {
    pub(super) rows: Range<usize>,
    /// The merge groups with at least one run: each group's index and its tasks.
    groups: Vec<(usize, Vec<RunTask>)>,
}

impl RowTile {
    pub(super) fn tasks(&self) -> impl Iterator<Item = &RunTask> + Clone {
        self.groups.iter().flat_map(|(_, tasks)| tasks)
    }

    /// Estimates the number of words in the tile's records and lists, for attention and for the merge. `rows`
    /// is the maximum number of rows per workgroup.
    pub(super) fn words(&self, rows: usize) -> usize {
        let of = |run: &SeenRun| {
            let listed = match &run.tokens {
                TokenPlaces::Blocks(blocks) => blocks.len(),
                TokenPlaces::Slots(slots) => 2 * slots.len(),
            };
            listed + RECORD + RECORD * rows
        };
        let tasks: usize = self.tasks().map(|task| RECORD + task.runs.iter().map(of).sum::<usize>()).sum();
        tasks + self.rows.len() * (RECORD + 2 * self.tasks().count())
    }

    /// Returns the tasks with their merge groups, in the order of the groups.
    pub(super) fn grouped(&self) -> impl Iterator<Item = (usize, &RunTask)> {
        self.groups.iter().flat_map(|(group, tasks)| tasks.iter().map(move |task| (*group, task)))
    }
}

/// Runs that one workgroup reads one after another, all in the same windows.
pub(super) struct RunTask {
    pub(super) rows: Range<usize>,
    pub(super) window: WindowKey,
    pub(super) runs: Vec<SeenRun>,
}

/// The locations of a run's tokens.
#[derive(Clone)]
pub(super) enum TokenPlaces {
    /// The tokens are in the blocks of a segment.
    Blocks(Arc<[BlockId]>),
    /// The tokens are at the given slots, each listed with the token's index in the segment. Used for
    /// selected tokens.
    Slots(Arc<[(u32, u32)]>),
}

impl TokenPlaces {
    /// Returns the index of the block that stores a token.
    fn block(&self, token: usize, block_size: usize) -> usize {
        match self {
            Self::Blocks(blocks) => blocks[token / block_size].index(),
            Self::Slots(slots) => slots[token].0 as usize / block_size,
        }
    }
}

/// The tokens of one segment that a tile sees.
#[derive(Clone)]
pub(super) struct SeenRun {
    pub(super) tokens: TokenPlaces,
    pub(super) range: Range<usize>,
    pub(super) logit_scale: f32,
    /// The position of the segment's first token.
    pub(super) position: i32,
    /// For each row of the tile: the part of the range that it sees, and the position by which its query is
    /// rotated.
    pub(super) rows: SmallVec<[(Range<usize>, i32); 4]>,
}

impl SeenRun {
    /// Returns the part of the run that is inside `range`.
    fn cut(&self, range: Range<usize>) -> Self {
        let inside = |row: &Range<usize>| {
            row.start.clamp(range.start, range.end)..row.end.clamp(range.start, range.end)
        };
        let rows = self.rows.iter().map(|(row, turn)| (inside(row), *turn)).collect();
        Self { range, rows, ..self.clone() }
    }
}

/// A merge group's index, and a run of one of its segments.
type GroupedRun = (usize, SeenRun);

/// Returns a call's tiles, in the order of its entries and rows. A tile has at most about `most` parts. A
/// part is a task's result for one row and all heads.
pub(super) fn tiles(op: &Attend, tiling: &Tiling, planes: &PlaneWindows, most: usize) -> Vec<RowTile> {
    let mut seen: Vec<(Range<usize>, Vec<GroupedRun>)> = Vec::new();
    for entry in op.work.batch() {
        let step = if entry.selection.is_some() { 1 } else { tiling.rows };
        for start in entry.rows.clone().step_by(step) {
            let rows = start..(start + step).min(entry.rows.end);
            let runs = match &entry.selection {
                Some(_) => selected(op, entry, start),
                None => visible(op, entry, &rows),
            };
            seen.push((rows, runs));
        }
    }
    let workgroups = seen.len() * tiling.units;
    let cuts =
        BUSY.div_ceil(workgroups.max(1)).min(most / tiling.rows / 2 / op.work.groups().len().max(1)).max(1);
    let tile = |(rows, runs): (Range<usize>, Vec<GroupedRun>)| {
        let groups = (0..op.work.groups().len()).filter_map(|group| {
            let runs: Vec<&SeenRun> = runs.iter().filter(|run| run.0 == group).map(|run| &run.1).collect();
            (!runs.is_empty()).then(|| (group, tasks(op, &rows, &runs, cuts, planes)))
        });
        RowTile { groups: groups.collect(), rows }
    };
    seen.into_iter().map(tile).collect()
}

/// Returns the tokens of an entry's segments that the rows of a tile see, as runs with their merge groups.
fn visible(op: &Attend, entry: &AttendRows, rows: &Range<usize>) -> Vec<GroupedRun> {
    let run = |segment: &Segment| {
        let rows: SmallVec<[_; 4]> = op.work.rows()[rows.clone()]
            .iter()
            .map(|&row| (op.visible(segment, row), turn(op, segment, row)))
            .collect();
        let seen = rows.iter().map(|row| &row.0).filter(|range| !range.is_empty());
        let start = seen.clone().map(|range| range.start).min()?;
        let end = seen.map(|range| range.end).max()?;
        let tokens = TokenPlaces::Blocks(Arc::clone(&segment.blocks));
        Some((segment.merge_group, made(segment, tokens, start..end, rows)))
    };
    entry.segments.iter().filter_map(run).collect()
}

fn made(
    segment: &Segment,
    tokens: TokenPlaces,
    range: Range<usize>,
    rows: SmallVec<[(Range<usize>, i32); 4]>,
) -> SeenRun {
    SeenRun { tokens, range, logit_scale: segment.logit_scale, position: segment.position(0) as i32, rows }
}

/// Returns the position by which a row's query is rotated for a segment's keys.
fn turn(op: &Attend, segment: &Segment, row: QueryRow) -> i32 {
    let moved = if op.keys == KeyForm::Rotated { segment.position_offset } else { 0 };
    row.position.saturating_sub(moved) as i32
}

/// Returns the selected tokens that one row sees, as runs with their merge groups.
fn selected(op: &Attend, entry: &AttendRows, row: usize) -> Vec<GroupedRun> {
    let block_size = op.arena.layout().shape().block_size;
    let runs = op.seen(entry, row);
    let mut made_runs: Vec<GroupedRun> = Vec::new();
    for segment in entry.segments.iter() {
        let of_segment = runs.iter().filter(|(other, _)| std::ptr::eq(*other, segment));
        let slots: Arc<[(u32, u32)]> = of_segment
            .flat_map(|(_, tokens)| tokens.clone())
            .map(|token| {
                let slot = segment.blocks[token / block_size].index() * block_size + token % block_size;
                (slot as u32, token as u32)
            })
            .collect();
        if !slots.is_empty() {
            let range = 0..slots.len();
            let rows = SmallVec::from_iter([(range.clone(), turn(op, segment, op.work.rows()[row]))]);
            made_runs.push((segment.merge_group, made(segment, TokenPlaces::Slots(slots), range, rows)));
        }
    }
    made_runs
}

/// Divides runs into about `cuts` tasks, and makes separate tasks for each window.
fn tasks(
    op: &Attend,
    rows: &Range<usize>,
    runs: &[&SeenRun],
    cuts: usize,
    planes: &PlaneWindows,
) -> Vec<RunTask> {
    let block_size = op.arena.layout().shape().block_size;
    let total: usize = runs.iter().map(|run| run.range.len()).sum();
    let most = total.div_ceil(cuts).max(SHORT);
    // The tasks of each window, and the number of tokens that the window's last task still has room for.
    let mut windows: BTreeMap<WindowKey, (Vec<RunTask>, usize)> = BTreeMap::new();
    for run in runs {
        let key = |token: usize| planes.key(run.tokens.block(token, block_size));
        let mut at = run.range.start;
        while at < run.range.end {
            let window = key(at);
            let (tasks, room) = windows.entry(window).or_default();
            if *room == 0 {
                tasks.push(RunTask { rows: rows.clone(), window, runs: Vec::new() });
                *room = most;
            }
            let mut end = run.range.end.min(at + *room);
            if !planes.are_one() {
                end = (at..end).find(|&token| key(token) != window).unwrap_or(end);
            }
            if let Some(task) = tasks.last_mut() {
                task.runs.push(run.cut(at..end));
            }
            *room -= end - at;
            at = end;
        }
    }
    windows.into_values().flat_map(|(tasks, _)| tasks).collect()
}

/// Returns the tasks of an attention mass, each with the index of its first token across all segments. A task
/// is a tile of the tokens before the entry's own segment, with a run for each tile of rows. All of its
/// tokens are in the same windows.
pub(super) fn tasks_by_token(
    op: &Attend,
    entry: &AttendRows,
    tiling: &Tiling,
    planes: &PlaneWindows,
) -> Vec<(RunTask, u32)> {
    let block_size = op.arena.layout().shape().block_size;
    let (mut tasks, mut before) = (Vec::new(), 0);
    for segment in &entry.segments[..entry.segments.len().saturating_sub(1)] {
        let rows = entry.rows.clone().step_by(tiling.rows);
        let rows = rows.map(|start| start..(start + tiling.rows).min(entry.rows.end));
        let runs: Vec<SeenRun> = rows
            .map(|rows| {
                let blocks = TokenPlaces::Blocks(Arc::clone(&segment.blocks));
                let rows = op.work.rows()[rows].iter();
                let rows = rows.map(|&row| (op.visible(segment, row), turn(op, segment, row))).collect();
                made(segment, blocks, 0..segment.len, rows)
            })
            .collect();
        let key = |token: usize| planes.key(segment.blocks[token / block_size].index());
        let mut at = 0;
        while at < segment.len && !runs.is_empty() {
            let window = key(at);
            let mut end = segment.len.min(at + tiling.tokens);
            if !planes.are_one() {
                end = (at..end).find(|&token| key(token) != window).unwrap_or(end);
            }
            let runs = runs.iter().map(|run| run.cut(at..end)).collect();
            tasks.push((RunTask { rows: entry.rows.clone(), window, runs }, (before + at) as u32));
            at = end;
        }
        before += segment.len;
    }
    tasks
}

/// Returns each task with the index of its first part, in the order of tiles and tasks.
pub(super) fn first_parts(tiles: &[RowTile]) -> impl Iterator<Item = (&RunTask, u32)> {
    let mut next = 0;
    tiles.iter().flat_map(RowTile::tasks).map(move |task| {
        let first = next;
        next += task.rows.len() as u32;
        (task, first)
    })
}
