//! The runs of tokens that a tile of rows attends to, and the tasks that read them.

use std::ops::Range;

use kvcore::{Attend, AttendRows};

use super::records::RunRecord;
use super::tiling::KernelTiling;

/// Tasks with fewer tokens than this are not split any further.
const SHORT: usize = 256;

/// Consecutive rows of one entry.
pub(super) struct QueryTile {
    pub(super) rows: Range<usize>,
    /// The merge groups with at least one run: each group's index and its tasks.
    pub(super) groups: Vec<(usize, Vec<TileTask>)>,
}

impl QueryTile {
    /// Returns the number of tasks in all groups.
    pub(super) fn tasks(&self) -> usize {
        self.groups.iter().map(|(_, tasks)| tasks.len()).sum()
    }
}

/// Runs of one merge group that a thread block reads one after another.
#[derive(Default)]
pub(super) struct TileTask {
    pub(super) runs: Vec<RunRecord>,
    pub(super) tokens: usize,
}

/// A merge group's index, and a run of one of its segments.
type GroupRun = (usize, RunRecord);

/// A call's tiles, and the lists of selected tokens that their runs refer to. Each entry of a list consists
/// of a block index and a token's index in its segment.
pub(super) struct CallTiles {
    pub(super) tiles: Vec<QueryTile>,
    pub(super) lists: Vec<u32>,
}

impl CallTiles {
    /// Divides a call into tiles, in the order of its entries and rows. `tables` contains the offset of
    /// each segment's block list, and the lists of selected tokens start at offset `first_list`. Splits a
    /// tile's tokens in each merge group into tasks of limited length. The limit is at least [`SHORT`], and
    /// is otherwise chosen so that the call has about `busy` thread blocks. If `busy` is `None`, nothing is
    /// split.
    pub(super) fn of(
        op: &Attend,
        tiling: &KernelTiling,
        tables: &[u32],
        first_list: usize,
        busy: Option<usize>,
    ) -> Self {
        let (mut lists, mut seen, mut first_segment) = (Vec::new(), Vec::new(), 0);
        for entry in op.work.batch() {
            let step = if entry.selection.is_some() { 1 } else { tiling.rows };
            for start in entry.rows.clone().step_by(step) {
                let rows = start..(start + step).min(entry.rows.end);
                let runs = match &entry.selection {
                    Some(_) => selected(op, entry, start, first_segment, (first_list, &mut lists)),
                    None => visible(op, entry, &rows, (first_segment, tables)),
                };
                seen.push((rows, runs));
            }
            first_segment += entry.segments.len();
        }
        let all: usize = seen.iter().flat_map(|(_, runs)| runs).map(|(_, run)| tokens(run)).sum();
        let share =
            |busy: usize| (all * tiling.units).div_ceil(busy).max(SHORT).next_multiple_of(tiling.tokens);
        let most = busy.map_or(usize::MAX, share);
        let tile = |(rows, runs): (Range<usize>, Vec<GroupRun>)| {
            let groups = (0..op.work.groups().len()).filter_map(|group| {
                let of_group = runs.iter().filter(|run| run.0 == group).map(|run| run.1);
                let tasks = tasks(of_group, most);
                (!tasks.is_empty()).then_some((group, tasks))
            });
            QueryTile { groups: groups.collect(), rows }
        };
        Self { tiles: seen.into_iter().map(tile).collect(), lists }
    }
}

fn tokens(run: &RunRecord) -> usize {
    (run.end - run.first) as usize
}

/// Returns the runs of tokens that at least one row of a tile attends to, with their merge groups. The
/// segments' indices start at `first`.
fn visible(
    op: &Attend,
    entry: &AttendRows,
    rows: &Range<usize>,
    (first, tables): (usize, &[u32]),
) -> Vec<GroupRun> {
    let mut runs = Vec::new();
    for ((segment, number), &table) in entry.segments.iter().zip(first..).zip(&tables[first..]) {
        let seen = op.work.rows()[rows.clone()].iter().map(|&row| op.visible(segment, row));
        let seen = seen.filter(|range| !range.is_empty());
        let span = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        if let Some(span) = span {
            runs.push((segment.merge_group, RunRecord::of_segment(segment, number as u32, span, table)));
        }
    }
    runs
}

/// Returns the runs of selected tokens that one row attends to, with their merge groups. Appends the tokens
/// to `lists`, which start at offset `first_list` in the tables.
fn selected(
    op: &Attend,
    entry: &AttendRows,
    row: usize,
    first: usize,
    (first_list, lists): (usize, &mut Vec<u32>),
) -> Vec<GroupRun> {
    let block_size = op.arena.layout().shape().block_size;
    let seen = op.seen(entry, row);
    let (mut runs, mut left) = (Vec::new(), &seen[..]);
    for (segment, number) in entry.segments.iter().zip(first..) {
        let of_segment = left.iter().take_while(|(other, _)| std::ptr::eq(*other, segment)).count();
        let (here, rest) = left.split_at(of_segment);
        left = rest;
        let before = lists.len();
        for token in here.iter().flat_map(|(_, tokens)| tokens.clone()) {
            lists.extend([segment.blocks[token / block_size].index() as u32, token as u32]);
        }
        let (count, list) = ((lists.len() - before) / 2, (first_list + before) as u32);
        if count > 0 {
            runs.push((segment.merge_group, RunRecord::of_list(segment, number as u32, count, list)));
        }
    }
    runs
}

/// Splits a group's runs into tasks of at most `most` tokens.
fn tasks(runs: impl Iterator<Item = RunRecord>, most: usize) -> Vec<TileTask> {
    let mut tasks: Vec<TileTask> = Vec::new();
    for run in runs {
        let mut at = run.first;
        while at < run.end {
            if tasks.last().is_none_or(|task| task.tokens >= most) {
                tasks.push(TileTask::default());
            }
            let Some(task) = tasks.last_mut() else { break };
            let room = u32::try_from(most - task.tokens).unwrap_or(u32::MAX);
            let end = run.end.min(at.saturating_add(room));
            task.runs.push(run.part(at, end));
            task.tokens += (end - at) as usize;
            at = end;
        }
    }
    tasks
}

#[cfg(test)]
mod tests {
    use kvcore::Segment;

    use super::*;

    #[test]
    fn runs_are_cut_where_a_task_is_full() {
        let segment = Segment::new([].into(), 0, 0, 0);
        let run = |number, first, end| RunRecord::of_segment(&segment, number, first..end, 0);
        let cut = tasks([run(0, 10, 40), run(1, 0, 5), run(2, 3, 100)].into_iter(), 64);
        let runs: Vec<_> = cut.iter().map(|task| task.runs.clone()).collect();
        assert_eq!(
            runs,
            [vec![run(0, 10, 40), run(1, 0, 5), run(2, 3, 32)], vec![run(2, 32, 96)], vec![run(2, 96, 100)]]
        );
        assert_eq!(cut.iter().map(|task| task.tokens).collect::<Vec<_>>(), [64, 64, 4]);
        assert_eq!(tasks([run(0, 0, 1000)].into_iter(), usize::MAX).len(), 1);
    }
}
