//! The records that shaders read, in this order: tasks, runs and token lists for `attend.wgsl`; rows and part
//! lists for `merge.wgsl`.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use kvcore::{Attend, KeyForm};

use super::runs::{RowTile, RunTask, SeenRun, TokenPlaces, first_parts};

/// The number of words per task.
const TASK: usize = 5;

/// The number of words in a run's record before the words for its rows.
const RUN: usize = 6;
const ROW: usize = 3;

/// The number of words in a merged row's record.
pub(super) const MERGED: usize = 3;

/// Returns every position by which a query or key is rotated.
pub(super) fn positions<'a>(
    op: &'a Attend,
    tasks: impl Iterator<Item = &'a RunTask> + Clone + 'a,
) -> impl Iterator<Item = RangeInclusive<i32>> + Clone + 'a {
    let runs = tasks.flat_map(|task| &task.runs);
    runs.flat_map(move |run| {
        let seen = run.rows.iter().filter(|(range, _)| !range.is_empty());
        let queries = seen.map(|&(_, turn)| turn..=turn);
        let keys = (op.keys == KeyForm::Unrotated).then(|| {
            let token = |i: usize| match &run.tokens {
                TokenPlaces::Blocks(_) => i as i32,
                TokenPlaces::Slots(slots) => slots[i].1 as i32,
            };
            let at = |i: usize| run.position.saturating_add(token(i));
            at(run.range.start)..=at(run.range.end - 1)
        });
        queries.chain(keys)
    })
}

/// Returns the records of the given tasks, followed by the records of their runs and by the runs' lists. Each
/// task is paired with the index of its first part. `number` returns the number by which the kernel
/// identifies a position.
pub(super) fn of_tasks(
    tasks: &[(&RunTask, u32)],
    (rows, heads): (usize, usize),
    number: impl Fn(i32) -> i32,
) -> Vec<u32> {
    let run_words = RUN + ROW * rows;
    let runs: usize = tasks.iter().map(|(task, _)| task.runs.len()).sum();
    let first_run = TASK * tasks.len();
    let mut lists = TokenLists { at: first_run + run_words * runs, known: HashMap::new(), words: Vec::new() };
    let mut records = Vec::with_capacity(lists.at);
    let mut run_at = first_run;
    for (task, part) in tasks {
        let words = [task.rows.start, task.rows.len(), run_at, task.runs.len()];
        records.extend(words.map(|word| word as u32));
        records.push(part * heads as u32);
        run_at += run_words * task.runs.len();
    }
    for run in tasks.iter().flat_map(|(task, _)| &task.runs) {
        let (list, by_slot) = lists.place(run);
        records.extend([list, by_slot, run.range.start as u32, run.range.end as u32]);
        records.extend([run.logit_scale.to_bits(), first_key(run, &number).cast_unsigned()]);
        for row in 0..rows {
            let (range, turn) = run.rows.get(row).cloned().unwrap_or((0..0, 0));
            records.extend([range.start as u32, range.end as u32, number(turn).cast_unsigned()]);
        }
    }
    records.extend(lists.words);
    records
}

/// Returns the merge kernel's input: one record for each row of `tiles`, then the factors of the merge
/// groups, then the part lists.
pub(super) fn of_merge(op: &Attend, tiles: &[RowTile]) -> Vec<u32> {
    let heads = op.q.shape()[1] as u32;
    let groups = MERGED * tiles.iter().map(|tile| tile.rows.len()).sum::<usize>();
    let mut parts = first_parts(tiles);
    let (mut records, mut lists) = (Vec::new(), Vec::new());
    for tile in tiles {
        let tasks: Vec<(usize, u32)> =
            tile.grouped().zip(&mut parts).map(|((group, _), (_, part))| (group, part)).collect();
        for (i, row) in tile.rows.clone().enumerate() {
            let list = groups + op.work.groups().len() + lists.len();
            records.extend([row as u32, list as u32, tasks.len() as u32]);
            lists.extend(tasks.iter().flat_map(|&(group, part)| [(part + i as u32) * heads, group as u32]));
        }
    }
    records.extend(op.work.groups().iter().map(|group| group.lse_scale.to_bits()));
    records.extend(lists);
    records
}

/// Returns the kernel's number for the position of a run's first key, minus the index of that key's token in
/// the segment.
fn first_key(run: &SeenRun, number: impl Fn(i32) -> i32) -> i32 {
    let token = match &run.tokens {
        TokenPlaces::Blocks(_) => run.range.start as i32,
        TokenPlaces::Slots(slots) => slots[run.range.start].1 as i32,
    };
    number(run.position.saturating_add(token)).wrapping_sub(token)
}

/// The lists of blocks and slots, which follow the records. Each list is stored only once.
struct TokenLists {
    at: usize,
    known: HashMap<usize, u32>,
    words: Vec<u32>,
}

impl TokenLists {
    /// Returns the word at which a run's list starts, and 1 for a list of slots or 0 for a list of blocks.
    fn place(&mut self, run: &SeenRun) -> (u32, u32) {
        let next = (self.at + self.words.len()) as u32;
        match &run.tokens {
            TokenPlaces::Blocks(blocks) => {
                let at = *self.known.entry(blocks.as_ptr() as usize).or_insert(next);
                if at == next {
                    self.words.extend(blocks.iter().map(|block| block.index() as u32));
                }
                (at, 0)
            }
            TokenPlaces::Slots(slots) => {
                let at = *self.known.entry(slots.as_ptr() as usize).or_insert(next);
                if at == next {
                    self.words.extend(slots.iter().flat_map(|&(slot, token)| [slot, token]));
                }
                (at, 1)
            }
        }
    }
}
