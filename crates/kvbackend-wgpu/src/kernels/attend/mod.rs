//! `attend` and `attend_mla`: tiles of queries over parts of the tokens that they see, and after them a
//! merge.
//!
//! The rows of an entry are cut into tiles, the tokens that a tile sees into runs of one segment each, and
//! the runs of a merge group into parts, so that few rows over many tokens still fill the device. Each part
//! of a tile is a task of `attend.wgsl`, which leaves an open softmax; `merge.wgsl` closes the softmaxes.
//! Parts lie in a scratch buffer of limited size: a call with more parts than fit runs in chunks of tiles.

use std::sync::Arc;

use kvcore::{Attend, AttendMla, CopyTensor, Error, MemoryKind, Result, TensorView};

use crate::NAME;
use crate::device::Device;
use crate::kernels::copy;
use crate::memory::WgpuStorage;
use crate::stream::{Dispatch, WgpuStream};

mod merge;
mod records;
mod runs;
mod tiling;
mod window;

use runs::{Task, Tile};
use tiling::Tiling;
use window::PlaneWindows;

/// Most bytes of scratch for parts.
const SCRATCH: u64 = 64 << 20;

pub(crate) fn attend(stream: &WgpuStream, op: &Attend) -> Result<Vec<Dispatch>> {
    run(stream, op, None)
}

pub(crate) fn attend_mla(stream: &WgpuStream, op: &AttendMla) -> Result<Vec<Dispatch>> {
    run(stream, &op.attend, Some(&op.q_latent))
}

fn run(stream: &WgpuStream, op: &Attend, latent: Option<&TensorView>) -> Result<Vec<Dispatch>> {
    let device = stream.device();
    let tiling = Tiling::of(device, op, latent.is_some())?;
    let planes = PlaneWindows::of(device, op)?;
    let heads = op.q.shape()[1] as u64;
    let part_bytes = 4 * (op.arena.layout().shape().v_dim as u64 + 2);
    let most = SCRATCH.min(device.limits.max_storage_buffer_binding_size) / (part_bytes * heads);
    let tiles = runs::tiles(op, &tiling, &planes, most as usize);
    let chunks = chunks(device, op, latent, (&tiles, tiling.rows), most);
    let mut work = Vec::new();
    // The first chunk overwrites queries that lie where results go, so that later chunks need a copy.
    let mut apart = |view: &TensorView| {
        if chunks.len() > 1 && view.overlaps(&op.out)? {
            copied(device, view, &mut work)
        } else {
            Ok(view.clone())
        }
    };
    let latent = latent.map(&mut apart).transpose()?;
    let (op, latent) = (&Attend { q: apart(&op.q)?, ..op.clone() }, latent.as_ref());
    for chunk in chunks {
        // Each task has as many parts as rows, for all heads.
        let parts: u64 = chunk.iter().flat_map(Tile::tasks).map(|task| task.rows.len() as u64).sum();
        if parts > most {
            let what = format!(
                "{parts} parts of one row in attention: the device binds {most} at once; use fewer merge groups"
            );
            return Err(Error::Unsupported { backend: NAME, what });
        }
        let scratch = stream.scratch(parts.max(1) * heads * part_bytes)?;
        work.extend(records::dispatches(device, op, latent, (&tiling, &planes), chunk, &scratch)?);
        work.push(merge::dispatch(device, op, chunk, scratch)?);
    }
    Ok(work)
}

/// Returns a dense copy of a view, which `work` makes.
fn copied(device: &Arc<Device>, view: &TensorView, work: &mut Vec<Dispatch>) -> Result<TensorView> {
    let bytes = view.dtype().bytes_for(view.len())?;
    let storage = Arc::new(WgpuStorage::allocate(device, MemoryKind::Device, bytes)?);
    let dst = TensorView::new(storage, view.dtype(), view.shape())?;
    work.extend(copy::copy_tensor(device, &CopyTensor { src: view.clone(), dst: dst.clone() })?);
    Ok(dst)
}

/// Divides tiles into chunks whose parts fit in the scratch and whose rows can be bound at once. A workgroup
/// has at most `tile_rows` rows.
fn chunks<'a>(
    device: &'a Device,
    op: &'a Attend,
    latent: Option<&'a TensorView>,
    (tiles, tile_rows): (&'a [Tile], usize),
    most: u64,
) -> Vec<&'a [Tile]> {
    let views: Vec<&TensorView> =
        [Some(&op.q), Some(&op.out), latent, op.lse.as_ref()].into_iter().flatten().collect();
    let mut chunks = Vec::new();
    // Half of what can be bound; the other half is for the part of a list that two tiles share.
    let most_words = (device.limits.max_storage_buffer_binding_size / 8) as usize;
    let (mut start, mut parts, mut words, mut rows) = (0, 0, 0, rows_of(&tiles[..tiles.len().min(1)]));
    for (i, tile) in tiles.iter().enumerate() {
        let more: u64 = tile.tasks().map(|task| task.rows.len() as u64).sum();
        let wider = rows.start.min(tile.rows.start)..rows.end.max(tile.rows.end);
        let bound = views.iter().all(|view| window::fits(device, view, &wider));
        let listed = tile.words(tile_rows);
        if i > start && (parts + more > most || words + listed > most_words || !bound) {
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

/// Returns the range that covers all rows of some tiles.
fn rows_of(tiles: &[Tile]) -> std::ops::Range<usize> {
    let start = tiles.iter().map(|tile| tile.rows.start).min().unwrap_or(0);
    start..tiles.iter().map(|tile| tile.rows.end).max().unwrap_or(start)
}

/// Returns each task with the number of its first part, in the order of tiles and tasks.
fn first_parts(tiles: &[Tile]) -> impl Iterator<Item = (&Task, u32)> {
    let mut next = 0;
    tiles.iter().flat_map(Tile::tasks).map(move |task| {
        let first = next;
        next += task.rows.len() as u32;
        (task, first)
    })
}
