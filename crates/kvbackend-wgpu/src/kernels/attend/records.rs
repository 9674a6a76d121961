//! The arguments of `attend.wgsl`: its parameters and records, in the order of the shader.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::sync::Arc;

use kvcore::{Attend, KeyForm, Result, TensorView};

use super::runs::{Run, Task, Tile, Tokens};
use super::tiling::Tiling;
use super::window::{PlaneWindows, WindowKey, rows_window};
use super::{first_parts, rows_of};
use crate::device::Device;
use crate::kernels::angles::Turns;
use crate::pipeline::Binding;
use crate::stream::Dispatch;

/// Words of the parameters.
const HEADER: usize = 31;

/// Words of a task.
const TASK: usize = 5;

/// Words of a run before its rows.
const RUN: usize = 6;
const ROW: usize = 3;

/// Returns one run of the kernel for each combination of windows that some task reads.
pub(super) fn dispatches(
    device: &Arc<Device>,
    op: &Attend,
    latent: Option<&TensorView>,
    (tiling, planes): (&Tiling, &PlaneWindows),
    tiles: &[Tile],
    scratch: &Binding,
) -> Result<Vec<Dispatch>> {
    let mut by_window: BTreeMap<WindowKey, Vec<(&Task, u32)>> = BTreeMap::new();
    for (task, part) in first_parts(tiles) {
        by_window.entry(task.window).or_default().push((task, part));
    }
    if by_window.is_empty() {
        return Ok(Vec::new());
    }
    let pipeline = tiling.pipeline(device, op, latent.map(TensorView::dtype))?;
    let (queries, q_at) = rows_window(device, &op.q, &rows_of(tiles))?;
    let (latents, latent_at) = match latent {
        Some(view) => rows_window(device, view, &rows_of(tiles))?,
        None => (Binding::whole(&device.nothing[1]), [0; 3].into()),
    };
    let turns = op.rope.as_ref().map(|rope| Turns::of(device, rope, positions(op, tiles))).transpose()?;
    let (s, softcap) = (op.arena.layout().shape(), op.softcap.unwrap_or(0.0));
    let factor = op.rope.as_ref().map_or(1.0, |rope| rope.attention_factor());
    let mut work = Vec::new();
    for (key, tasks) in by_window {
        let windows: [_; 4] = std::array::from_fn(|i| planes.window(device, i, op.layer, key));
        let mut args = vec![tasks.len() as u32, tiling.units as u32, op.q.shape()[1] as u32];
        args.extend([s.k_heads as u32, s.v_heads as u32]);
        args.extend([op.scale, softcap, factor].map(f32::to_bits));
        args.push(turns.as_ref().map_or(0, |turns| turns.first));
        args.extend(q_at.iter().chain(&latent_at));
        args.extend(windows.iter().flat_map(|(_, place)| place));
        debug_assert_eq!(args.len(), HEADER);
        let number = |position: i32| turns.as_ref().map_or(0, |turns| turns.number(position));
        write_records(&mut args, &tasks, (tiling.rows, op.q.shape()[1]), number);
        let planes = windows.map(|(binding, _)| binding);
        let angles = turns.as_ref().map_or_else(|| Binding::whole(&device.nothing[1]), |t| t.binding.clone());
        let mut bindings = planes.to_vec();
        bindings.extend([queries.clone(), latents.clone(), angles, scratch.clone()]);
        let groups = (tasks.len() * tiling.units) as u64;
        work.push(Dispatch { pipeline: Arc::clone(&pipeline), args, bindings, groups });
    }
    Ok(work)
}

/// Returns every position by which some query or key is rotated.
fn positions<'a>(
    op: &'a Attend,
    tiles: &'a [Tile],
) -> impl Iterator<Item = RangeInclusive<i32>> + Clone + 'a {
    let runs = tiles.iter().flat_map(Tile::tasks).flat_map(|task| &task.runs);
    runs.flat_map(move |run| {
        let seen = run.rows.iter().filter(|(range, _)| !range.is_empty());
        let queries = seen.map(|&(_, turn)| turn..=turn);
        let keys = (op.keys == KeyForm::Unrotated).then(|| {
            let token = |i: usize| match &run.tokens {
                Tokens::Blocks(_) => i as i32,
                Tokens::Slots(slots) => slots[i].1 as i32,
            };
            let at = |i: usize| run.position.saturating_add(token(i));
            at(run.range.start)..=at(run.range.end - 1)
        });
        queries.chain(keys)
    })
}

/// Writes tasks, runs and lists. `number` returns the number by which the kernel knows a position.
fn write_records(
    args: &mut Vec<u32>,
    tasks: &[(&Task, u32)],
    (rows, heads): (usize, usize),
    number: impl Fn(i32) -> i32,
) {
    let run_words = RUN + ROW * rows;
    let runs: usize = tasks.iter().map(|(task, _)| task.runs.len()).sum();
    let first_run = args.len() + TASK * tasks.len();
    let mut lists = Lists { at: first_run + run_words * runs, known: HashMap::new(), words: Vec::new() };
    let mut run_at = first_run;
    for (task, part) in tasks {
        let words = [task.rows.start, task.rows.len(), run_at, task.runs.len()];
        args.extend(words.map(|word| word as u32));
        args.push(part * heads as u32);
        run_at += run_words * task.runs.len();
    }
    for run in tasks.iter().flat_map(|(task, _)| &task.runs) {
        let (list, by_slot) = lists.place(run);
        args.extend([list, by_slot, run.range.start as u32, run.range.end as u32]);
        args.extend([run.logit_scale.to_bits(), first_key(run, &number).cast_unsigned()]);
        for row in 0..rows {
            let (range, turn) = run.rows.get(row).cloned().unwrap_or((0..0, 0));
            args.extend([range.start as u32, range.end as u32, number(turn).cast_unsigned()]);
        }
    }
    args.extend(lists.words);
}

/// Returns the number that token 0 of a run's segment would have.
fn first_key(run: &Run, number: impl Fn(i32) -> i32) -> i32 {
    let token = match &run.tokens {
        Tokens::Blocks(_) => run.range.start as i32,
        Tokens::Slots(slots) => slots[run.range.start].1 as i32,
    };
    number(run.position.saturating_add(token)).wrapping_sub(token)
}

/// Lists of blocks and slots behind the records. Each list is stored once.
struct Lists {
    at: usize,
    known: HashMap<usize, u32>,
    words: Vec<u32>,
}

impl Lists {
    /// Returns the place of a run's list, and 1 for a list of slots or 0 for a list of blocks.
    fn place(&mut self, run: &Run) -> (u32, u32) {
        let next = (self.at + self.words.len()) as u32;
        match &run.tokens {
            Tokens::Blocks(blocks) => {
                let at = *self.known.entry(blocks.as_ptr() as usize).or_insert(next);
                if at == next {
                    self.words.extend(blocks.iter().map(|block| block.index() as u32));
                }
                (at, 0)
            }
            Tokens::Slots(slots) => {
                let at = *self.known.entry(slots.as_ptr() as usize).or_insert(next);
                if at == next {
                    self.words.extend(slots.iter().flat_map(|&(slot, token)| [slot, token]));
                }
                (at, 1)
            }
        }
    }
}
