//! The arguments and the records of `merge.wgsl`.

use std::sync::Arc;

use kvcore::{Attend, Result};

use super::plan::{Chunk, Plan, first_parts};
use super::runs::RowTile;
use super::window::rows_window;
use crate::device::Device;
use crate::kernels::convert::kind;
use crate::pipeline::{Binding, Constant, Shader};
use crate::stream::Dispatch;

/// Words of the record of a row.
const RECORD: usize = 3;

pub(super) fn dispatch(
    device: &Arc<Device>,
    op: &Attend,
    plan: &Arc<Plan>,
    chunk: &Chunk,
    scratch: Binding,
) -> Result<Dispatch> {
    let heads = op.q.shape()[1] as u32;
    let (out, out_at) = rows_window(device, &op.out, &chunk.rows)?;
    let (lse, lse_at) = match &op.lse {
        Some(view) => rows_window(device, view, &chunk.rows)?,
        None => (Binding::whole(&device.nothing[0]), [0; 3].into()),
    };
    let constants: [Constant; 3] = [
        ("DEST", f64::from(kind(op.out.dtype()))),
        ("DIM", op.arena.layout().shape().v_dim as f64),
        ("WITH_LSE", f64::from(u8::from(op.lse.is_some()))),
    ];
    device.check_workgroup(op.arena.layout().shape().v_dim)?;
    let pipeline = device.pipelines.get(device, Shader::Merge, &constants, "")?;
    let (count, place) = &chunk.merged;
    let mut args = vec![*count as u32, heads];
    args.extend(out_at.iter().chain(&lse_at));
    args.push((RECORD * count) as u32);
    let bindings = vec![scratch, out, lse, chunk.records(place)];
    let groups = *count as u64 * u64::from(heads);
    Ok(Dispatch { pipeline, args, bindings, groups, plan: Some(Arc::clone(plan)) })
}

/// Returns a record for each row of some tiles, the factors of the merge groups, and the lists of parts.
pub(super) fn records(op: &Attend, tiles: &[RowTile]) -> Vec<u32> {
    let heads = op.q.shape()[1] as u32;
    let groups = RECORD * tiles.iter().map(|tile| tile.rows.len()).sum::<usize>();
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
