//! Attention with rows side by side: one set of operators for all rows, regardless of their segments.
//!
//! Batches of decoding sequences run this way, and so do captured steps: a replay may have different blocks,
//! lengths, offsets and segments, as long as each row's tokens fit into the captured capacity.

use kvcore::Result;

use super::lists::RoomLists;
use super::operands::{AttentionOperands, products};
use super::room::has_room;
use super::softmax::{FLOOR, Partial, TINY};
use crate::bindings::types as sys;
use crate::errors::uncapturable;
use crate::operations::plans::StepWork;
use crate::operators::Tensor;
use crate::queue::Work;

/// Returns whether computing rows side by side needs fewer operators, and not much more work, than computing
/// one entry after another. This is true if there are several entries of similar lengths, each with a single
/// row and no selection, and their tokens may be gathered at once.
pub(super) fn suits(operands: &AttentionOperands<'_>) -> bool {
    let batch = operands.op.work.batch();
    let lengths =
        || batch.iter().map(|entry| entry.segments.iter().map(|segment| segment.len).sum::<usize>());
    let (longest, all) = (lengths().max().unwrap_or(0), lengths().sum::<usize>());
    let rows = operands.q.dim(0);
    batch.len() > 1
        && batch.iter().all(|entry| entry.rows.len() == 1 && entry.selection.is_none())
        && rows * longest <= 2 * all
        && has_room(rows, longest, &operands.planes)
}

/// Computes all rows side by side.
pub(super) fn attend(work: &mut StepWork<'_, '_>, operands: &AttentionOperands<'_>) -> Result<()> {
    let AttentionOperands { op, q, latent, out, lse, planes, heads } = operands;
    let lists = RoomLists::of(work, op, planes)?;
    let (rows, tokens, heads) = (lists.room.rows, lists.room.tokens, *heads);
    let k = lists.gathered(work, planes, 0)?;
    let v = lists.gathered(work, planes, 1)?;
    if let Some(angles) = lists.angles(lists.layout.key_angles, lists.room.angles) {
        let which = lists.numbers(lists.layout.which, rows * tokens);
        angles.spread(work, &which)?.rotate(work, &k, &[rows, 1, tokens])?;
    }
    let q = work.in_f32(q)?;
    if let Some(angles) = lists.angles(lists.layout.query_angles, rows) {
        angles.rotate(work, &q, &[rows, 1])?;
    }
    let all_heads = rows * heads;
    let k = k.reshaped(&[rows * planes[0].geometry.heads, tokens, k.dim(3)]);
    let v = v.reshaped(&[rows * planes[1].geometry.heads, tokens, v.dim(3)]);
    let scores = products(work, &q.reshaped(&[all_heads, 1, q.dim(2)]), &k)?;
    if let Some(latent) = latent {
        let latent = work.in_f32(latent)?;
        let latent = latent.reshaped(&[all_heads, 1, latent.dim(2)]);
        let of_latents = products(work, &latent, &v)?;
        work.add(&scores, &of_latents, &scores)?;
    }
    let by_row = scores.reshaped(&[rows, heads, tokens]);
    work.mul(&by_row, &lists.of_tokens(lists.layout.factors), &by_row)?;
    operands.scale(work, &by_row)?;
    let (floor, tiny) = (work.number(FLOOR)?, work.number(TINY)?);
    let several = lists.room.groups.len() > 1;
    let mut merged: Option<Partial> = None;
    for (&mask, &scale) in lists.layout.masks.iter().zip(&lists.room.groups) {
        // The softmax of a group overwrites its logits.
        let logits = if several { work.temporary(sys::ACL_FLOAT, &by_row.dims())? } else { by_row.clone() };
        work.add(&by_row, &lists.of_tokens(mask), &logits)?;
        let mut group = Partial::of(work, &logits.reshaped(&[all_heads, 1, tokens]), None, &v, &floor)?;
        if several || scale != 1.0 {
            group = group.into_one(work, scale, &floor, &tiny)?;
        }
        merged = Some(match merged {
            None => group,
            Some(before) => before.merged(work, &group)?,
        });
    }
    // The operation's check has verified that every segment has a merge group.
    let Some(partial) = merged else { return Err(uncapturable("attention without merge groups")) };
    let values = partial.values(work, &tiny)?;
    let values = values.reshaped(&[rows, heads * v.dim(2)]);
    put(work, &lists, &values, out)?;
    if let Some(lse) = lse {
        let sums = partial.lse(work)?.reshaped(&[rows, heads]);
        put(work, &lists, &sums, lse)?;
    }
    Ok(())
}

/// Writes the rows that have a result, and leaves all other rows of `out` unchanged.
fn put(work: &mut Work<'_>, lists: &RoomLists, x: &Tensor, out: &Tensor) -> Result<()> {
    let (rows, width) = (x.dim(0), x.dim(1));
    let chosen = work.temporary(sys::ACL_FLOAT, &[rows, width])?;
    work.take_rows(x, &lists.numbers(lists.layout.chosen, rows), &chosen)?;
    let rounded = work.dense_in(out.dtype(), &chosen)?;
    let places = lists.numbers(lists.layout.places, rows);
    let dense = work.dense_in(out.dtype(), out)?;
    work.put_rows(&dense.reshaped(&[rows, width]), &places, &rounded)?;
    if out.is_dense() { Ok(()) } else { work.convert(&dense, out) }
}
