//! The attention mass of tokens, one row and one head at a time.

use kvcore::{AttendMass, Result, TensorView};

use super::attend::{ReferenceInputs, with_inputs};
use crate::memory::{Access, ByteSpan};

pub(crate) fn attend_mass(op: &AttendMass) -> Result<()> {
    let lse = op.attend.lse.as_ref().map(log_sum_exps).transpose()?.unwrap_or_default();
    let weights = with_inputs(&op.attend, op.q_latent.as_ref(), |inputs| weights(op, inputs, &lse))?;
    let span = ByteSpan::of(&op.sums)?;
    let mut access = Access::new(&[], &[&span])?;
    let mut sums = access.parts().write(&span)?.elements::<f32>()?;
    let at = op.sums.offset();
    sums[at..at + weights.len()].iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
    Ok(())
}

/// Returns log-sum-exps as `[rows, heads]`.
fn log_sum_exps(view: &TensorView) -> Result<Vec<f32>> {
    let span = ByteSpan::of(view)?;
    let access = Access::new(&[&span], &[])?;
    let (values, shape, strides) = (access.read(&span)?.elements::<f32>()?, view.shape(), view.strides());
    let one = |i: usize| {
        let at = view.offset() + i / shape[1] * strides[0] + i % shape[1] * strides[1];
        values[at..at + 1][0]
    };
    Ok((0..shape[0] * shape[1]).map(one).collect())
}

/// Returns each token's weights, summed over the entry's rows and all query heads.
fn weights(op: &AttendMass, inputs: &ReferenceInputs<'_>, lse: &[f32]) -> Result<Vec<f32>> {
    let (mut sums, heads) = (vec![0.0; op.sums.len()], op.attend.q.shape()[1]);
    let Some(entry) = op.rows() else { return Ok(sums) };
    for row in entry.rows.clone() {
        let mut seen = inputs.op.seen(entry, row);
        seen.pop();
        let first = seen.iter().scan(0, |next, (segment, _)| {
            let first = *next;
            *next += segment.len;
            Some(first)
        });
        let first: Vec<usize> = first.collect();
        for head in 0..heads {
            let lse = lse[row * heads + head];
            inputs.logits(row, head, &seen, |run, token, logit, _| {
                // A row whose logits are all −∞ has no weights.
                sums[first[run] + token] += if lse == f32::NEG_INFINITY { 0.0 } else { (logit - lse).exp() };
            })?;
        }
    }
    Ok(sums)
}
