//! Plans: the tiles of a step's attention, with their records and block lists on the device. Layers with the
//! same [`AttendWork`](kvcore::AttendWork) share its plans.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvcore::{Attend, Counters, Error, KeyForm, Result, TensorView};
use parking_lot::Mutex;
use wgpu::{Buffer, BufferUsages};

use super::records;
use super::runs::{self, RowTile, RunTask, first_parts};
use super::tiling::Tiling;
use super::window::{self, PlaneWindows, WindowKey};
use crate::device::{GpuDevice, NAME};
use crate::kernels::angles::{RopeRows, pairs_of};
use crate::pipeline::Binding;

/// The maximum size of the scratch memory for parts, in bytes.
const SCRATCH: u64 = 64 << 20;

/// The maximum size, in bytes, of a buffer that is kept for reuse by another plan.
const LARGE: u64 = 1 << 20;

/// The number of plans that a stream keeps. A few are enough, because a model's layers differ at most in
/// their window.
const KEPT: usize = 4;

/// Identifies a plan by everything that it depends on. Layers with equal keys share a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
struct WindowedPlanKey {
    /// The ID of the work, [`AttendWork::id`](kvcore::AttendWork::id).
    work: u64,
    window: Option<usize>,
    keys: KeyForm,
    /// The number of rotated pairs, if there is a rotation.
    pairs: Option<usize>,
    tiling: Tiling,
    heads: usize,
    block_size: usize,
    /// The number of blocks per window for each plane, if a layer needs more than one window.
    window_blocks: Option<[usize; 4]>,
    /// The maximum number of rows that can be bound at once.
    rows: usize,
    /// The size of a part's scratch memory, in bytes. A part is a task's result for one row and all heads.
    part_bytes: u64,
    /// The maximum number of parts that fit in the scratch memory.
    parts: u64,
}

/// A chunk of tiles whose parts fit in the scratch memory and whose rows can be bound at once.
pub(super) struct TileChunk {
    /// The range of the tiles' rows, from the first to the last.
    pub(super) rows: Range<usize>,
    /// The number of parts. A part is a task's result for one row and all heads.
    pub(super) parts: u64,
    /// The angles by which queries and keys are rotated, if there is a rotation.
    pub(super) turns: Option<RopeRows>,
    /// The tasks for each combination of windows.
    pub(super) tasks: Vec<WindowTasks>,
    /// The number of rows to merge, and the range of their records in bytes.
    pub(super) merged: (usize, Range<u64>),
    records: Buffer,
}

impl TileChunk {
    /// Binds a range of the chunk's records.
    pub(super) fn records(&self, place: &Range<u64>) -> Binding {
        Binding { buffer: self.records.clone(), offset: place.start, size: place.end - place.start }
    }
}

/// Tasks of `attend.wgsl` that read the same windows.
pub(super) struct WindowTasks {
    pub(super) window: WindowKey,
    pub(super) count: usize,
    /// The range of the tasks' records in the chunk's buffer, in bytes.
    pub(super) records: Range<u64>,
}

/// The division of a call into dispatches, with their records on the device.
pub(crate) struct WindowedPlan {
    pub(super) chunks: Vec<TileChunk>,
    /// The size of a part's scratch memory, in bytes. A part is a task's result for one row and all heads.
    pub(super) part_bytes: u64,
}

/// The plans of a stream's most recent calls.
#[derive(Default)]
pub(crate) struct Plans(Mutex<KeptPlans>);

#[derive(Default)]
struct KeptPlans {
    plans: [Option<(WindowedPlanKey, Arc<WindowedPlan>)>; KEPT],
    /// The index of the plan to replace next.
    next: usize,
}

impl Plans {
    /// Returns the plan for a call, which is created on first use, and the number of bytes that were uploaded
    /// for it.
    pub(super) fn of(
        &self,
        device: &Arc<GpuDevice>,
        op: &Attend,
        latent: Option<&TensorView>,
        (tiling, planes): (&Tiling, &PlaneWindows),
    ) -> Result<(Arc<WindowedPlan>, usize)> {
        let shape = op.arena.layout().shape();
        let heads = op.q.shape()[1];
        // For each head, a part has the weighted sum of the values, the largest score, and the sum of the
        // weights.
        let part_bytes = heads as u64 * 4 * (shape.v_dim as u64 + 2);
        let views = [Some(&op.q), Some(&op.out), latent, op.lse.as_ref()].into_iter().flatten();
        let key = WindowedPlanKey {
            work: op.work.id(),
            window: op.window,
            keys: op.keys,
            pairs: op.rope.as_ref().map(|rope| pairs_of(rope)),
            tiling: *tiling,
            heads,
            block_size: shape.block_size,
            window_blocks: planes.blocks(),
            rows: views.map(|view| window::most_rows(device, view)).min().unwrap_or(usize::MAX),
            part_bytes,
            parts: SCRATCH.min(device.limits.max_storage_buffer_binding_size) / part_bytes,
        };
        let mut kept = self.0.lock();
        if let Some((_, plan)) = kept.plans.iter().flatten().find(|(known, _)| *known == key) {
            return Ok((Arc::clone(plan), 0));
        }
        let place = kept.next;
        kept.next = (place + 1) % KEPT;
        // If nothing else holds the old plan, its work has been submitted, so its buffer can be overwritten.
        let old = kept.plans[place].take().and_then(|(_, plan)| Arc::into_inner(plan));
        let free = old.and_then(|mut plan| plan.chunks.pop()).map(|chunk| chunk.records);
        let (plan, bytes) = make(device, op, &key, planes, free.filter(|free| free.size() <= LARGE))?;
        let plan = Arc::new(plan);
        kept.plans[place] = Some((key, Arc::clone(&plan)));
        Ok((plan, bytes))
    }
}

/// Creates a plan, and stores its records in `free` if they fit. Also returns the size of all records in
/// bytes.
fn make(
    device: &Arc<GpuDevice>,
    op: &Attend,
    key: &WindowedPlanKey,
    planes: &PlaneWindows,
    mut free: Option<Buffer>,
) -> Result<(WindowedPlan, usize)> {
    let tiles = runs::tiles(op, &key.tiling, planes, key.parts as usize);
    let (mut plan, mut bytes) = (WindowedPlan { chunks: Vec::new(), part_bytes: key.part_bytes }, 0);
    for tiles in chunks(device, key, &tiles) {
        let (chunk, uploaded) = chunk(device, op, key, tiles, free.take())?;
        plan.chunks.push(chunk);
        bytes += uploaded;
    }
    Counters::add(&device.counters.plan_bytes, bytes);
    Ok((plan, bytes))
}

/// Creates a chunk of tiles, and stores its records in `free` if they fit. Also returns the records' size in
/// bytes.
fn chunk(
    device: &Arc<GpuDevice>,
    op: &Attend,
    key: &WindowedPlanKey,
    tiles: &[RowTile],
    free: Option<Buffer>,
) -> Result<(TileChunk, usize)> {
    let parts = tiles.iter().flat_map(RowTile::tasks).map(|task| task.rows.len() as u64).sum();
    if parts > key.parts {
        let what = format!(
            "{parts} parts of one row in attention: the device can bind only {} at once; use fewer merge groups",
            key.parts
        );
        return Err(Error::Unsupported { backend: NAME, what });
    }
    let turns = key
        .pairs
        .map(|pairs| {
            RopeRows::of(device, pairs, records::positions(op, tiles.iter().flat_map(RowTile::tasks)))
        })
        .transpose()?;
    let number = |position| turns.as_ref().map_or(0, |turns| turns.number(position));
    let mut by_window: BTreeMap<WindowKey, Vec<(&RunTask, u32)>> = BTreeMap::new();
    for (task, part) in first_parts(tiles) {
        by_window.entry(task.window).or_default().push((task, part));
    }
    let mut words = Words { align: (device.binding_align() / 4) as usize, words: Vec::new() };
    let mut tasks = Vec::new();
    for (window, of_window) in by_window {
        let records = records::of_tasks(&of_window, (key.tiling.rows, key.heads), number);
        tasks.push(WindowTasks { window, count: of_window.len(), records: words.add(device, &records)? });
    }
    let count = tiles.iter().map(|tile| tile.rows.len()).sum();
    let merged = (count, words.add(device, &records::of_merge(op, tiles))?);
    let bytes: &[u8] = bytemuck::cast_slice(&words.words);
    let records = if let Some(free) = free.filter(|free| free.size() >= bytes.len() as u64) {
        free
    } else {
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
        device.buffer("records", bytes.len().next_power_of_two() as u64, usage)?
    };
    device.fill(&records, 0, bytes).map_err(|reason| device.refusal(reason))?;
    Ok((TileChunk { rows: rows_of(tiles), parts, turns, tasks, merged, records }, bytes.len()))
}

/// The records to store in one buffer.
struct Words {
    /// The alignment of each list of records, in words.
    align: usize,
    words: Vec<u32>,
}

impl Words {
    /// Appends a list of records, and returns its range in the buffer, in bytes.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device cannot bind the records at once.
    fn add(&mut self, device: &GpuDevice, records: &[u32]) -> Result<Range<u64>> {
        let (size, most) = (4 * records.len() as u64, device.limits.max_storage_buffer_binding_size);
        if size > most {
            return Err(device.lists_too_long(size));
        }
        self.words.resize(self.words.len().next_multiple_of(self.align), 0);
        let start = 4 * self.words.len() as u64;
        self.words.extend_from_slice(records);
        // A binding must have at least one word.
        if records.is_empty() {
            self.words.push(0);
        }
        Ok(start..4 * self.words.len() as u64)
    }
}

/// Divides tiles into chunks whose parts fit in the scratch memory and whose rows and lists can be bound at
/// once.
fn chunks<'a>(device: &GpuDevice, key: &WindowedPlanKey, tiles: &'a [RowTile]) -> Vec<&'a [RowTile]> {
    let mut chunks = Vec::new();
    // The lists may take half of the largest binding. The other half is for the part of a list that two tiles
    // share.
    let most_words = (device.limits.max_storage_buffer_binding_size / 8) as usize;
    let (mut start, mut parts, mut words, mut rows) = (0, 0, 0, rows_of(&tiles[..tiles.len().min(1)]));
    for (i, tile) in tiles.iter().enumerate() {
        let more: u64 = tile.tasks().map(|task| task.rows.len() as u64).sum();
        let wider = rows.start.min(tile.rows.start)..rows.end.max(tile.rows.end);
        let listed = tile.words(key.tiling.rows);
        let fits = parts + more <= key.parts && words + listed <= most_words && wider.len() <= key.rows;
        if i > start && !fits {
            chunks.push(&tiles[start..i]);
            (start, parts, words, rows) = (i, more, listed, tile.rows.clone());
        } else {
            (parts, words, rows) = (parts + more, words + listed, wider);
        }
    }
    if start < tiles.len() {
        chunks.push(&tiles[start..]);
    }
    chunks
}

/// Returns the range from the first to the last row of the given tiles.
fn rows_of(tiles: &[RowTile]) -> Range<usize> {
    let start = tiles.iter().map(|tile| tile.rows.start).min().unwrap_or(0);
    start..tiles.iter().map(|tile| tile.rows.end).max().unwrap_or(start)
}
