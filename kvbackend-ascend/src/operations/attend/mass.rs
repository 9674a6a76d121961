//! The attention mass of tokens (their softmax weights, summed over rows and heads), composed of f32
//! operators.
//!
//! ```text
//!   keys of all seen tokens, and latents, gathered once                       IndexSelect, Cast
//!   for each tile of rows: scores, factors, mask, as in attention             BatchMatMul, Mul, Add
//!     weights: exponentials of the scores minus the log-sum-exps              Sub, Exp
//!     sums over heads and rows: products with ones                            BatchMatMul
//!     added to the sums of each segment's tokens                              Add
//! ```

use std::ops::Range;
use std::sync::Arc;

use kvcore::{Attend, AttendMass, AttendRows, AttendWork, Result, Segment};

use super::entries::{Entries, SCORES};
use super::operands::AttentionOperands;
use super::plan;
use super::softmax::FLOOR;
use crate::bindings::types as sys;
use crate::memory::on_device;
use crate::operations::plans::StepWork;
use crate::operators::Tensor;
use crate::queue::Work;

pub(in crate::operations) fn attend_mass(work: &mut StepWork<'_, '_>, mass: &AttendMass) -> Result<()> {
    on_device("sums of attention", mass.sums.storage())?;
    let Some(entry) = mass.rows().filter(|entry| !entry.rows.is_empty()) else { return Ok(()) };
    if mass.sums.is_empty() {
        return Ok(());
    }
    // Only the tokens before the rows' own tokens count. They form one merge group, so that their plan has a
    // single run.
    let before = &entry.segments[..entry.segments.len() - 1];
    let before: Vec<Segment> =
        before.iter().map(|segment| Segment { merge_group: 0, ..segment.clone() }).collect();
    let entry = AttendRows::new(entry.rows.clone(), before);
    let alone = AttendWork::new(mass.attend.work.rows().to_vec(), [entry.clone()]);
    let op = &Attend { work: Arc::new(alone), ..mass.attend.clone() };
    let operands = AttentionOperands::new(op, mass.q_latent.as_ref())?;
    let plan = plan::plan(work, op, &operands.planes)?;
    let angles = op.rope.as_ref().map(|rope| plan::angles(work, &plan, rope, op)).transpose()?;
    let entries = Entries { operands: &operands, plan: &plan, angles: angles.as_deref() };
    let parts = parts(op, &entry);
    let (Some(planned), Some(lse)) = (plan.entries.first(), &operands.lse) else { return Ok(()) };
    // Rows that see none of the tokens have no run.
    let Some(run) = planned.runs.first() else { return Ok(()) };
    let mark = work.mark();
    let kv = entries.read(work, (0, 0), run, operands.latent.is_some())?;
    let sums = Tensor::of(&mass.sums)?;
    let (floor, heads) = (work.number(FLOOR)?, operands.heads);
    let most = (SCORES / (heads * run.tokens).max(1)).max(1);
    for first in (0..planned.rows.len()).step_by(most) {
        let count = most.min(planned.rows.len() - first);
        let mark = work.mark();
        let (q, latent) = entries.queries(work, (0, planned), (first, count))?;
        let scores = entries.scores(work, &q, latent.as_ref(), &kv, run)?;
        if let Some(mask) = &run.mask {
            work.add(&scores, &mask.sliced(1, first, count), &scores)?;
        }
        let lse = lse.sliced(0, planned.rows.start + first, count).permuted(&[1, 0]);
        let lse = work.in_f32(&lse)?.reshaped(&[heads, count, 1]);
        // Raise −∞ to a finite number, because the difference of two infinities is NaN.
        work.maximum(&lse, &floor, &lse)?;
        work.sub(&scores, &lse, &scores)?;
        work.exp(&scores, &scores)?;
        let weights = summed(work, &scores.reshaped(&[1, heads * count, run.tokens]))?;
        for (to, from) in &parts {
            let to = sums.sliced(0, *to, from.len());
            work.add(&to, &weights.sliced(0, from.start, from.len()), &to)?;
        }
        work.free_since(mark);
    }
    work.free_since(mark);
    Ok(())
}

/// Returns the sums `[columns]` over the rows of `[1, rows, columns]`.
fn summed(work: &mut StepWork<'_, '_>, x: &Tensor) -> Result<Tensor> {
    let (rows, columns) = (x.dim(1), x.dim(2));
    let (ones, one) = (work.temporary(sys::ACL_FLOAT, &[1, 1, rows])?, work.number(1.0)?);
    work.zero(&ones)?;
    work.add(&ones, &one, &ones)?;
    let sums = work.temporary(sys::ACL_FLOAT, &[1, 1, columns])?;
    Work::multiply(work, &ones, x, &sums)?;
    Ok(sums.reshaped(&[columns]))
}

/// Returns one pair for each segment that the rows see: the index of the first visible token's sum, and the
/// range of the visible tokens in the plan's run.
fn parts(op: &Attend, entry: &AttendRows) -> Vec<(usize, Range<usize>)> {
    let (mut parts, mut before, mut listed) = (Vec::new(), 0, 0);
    for segment in entry.segments.iter() {
        let rows = op.work.rows()[entry.rows.clone()].iter();
        let seen = rows.map(|&row| op.visible(segment, row)).filter(|seen| !seen.is_empty());
        if let Some(seen) = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) {
            parts.push((before + seen.start, listed..listed + seen.len()));
            listed += seen.len();
        }
        before += segment.len;
    }
    parts
}
