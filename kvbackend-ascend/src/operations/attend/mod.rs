//! Attention: through CANN's fused operator if it gives the same result, otherwise composed of f32 operators.
//!
//! ```text
//!   for each entry:   keys and values of its tokens, gathered once            IndexSelect, Cast
//!                     keys rotated to the positions at which they are used    IndexSelect, Mul, Add, Sub
//!   for each tile of rows: queries rotated to their positions                 Mul, Add, Sub
//!   and each merge group:
//!     scores, factors, mask                                                   BatchMatMul, Mul, Add
//!     maximum m, sum l of exponentials, weighted values o                     Amax, Exp, ReduceSum, BatchMatMul
//!   partial results (m, l, o) of groups are merged by their log-sum-exps
//! ```
//!
//! A row that sees none of a group's tokens has m = −10³⁰, l = 0 and o = 0 in that group.

use kvcore::{Attend, Result, TensorView};

use super::plans::StepWork;

mod entries;
mod fused;
pub(super) mod lists;
mod mass;
mod operands;
mod plan;
mod room;
mod side_by_side;
mod softmax;

pub(super) use mass::attend_mass;

use entries::Entries;
use operands::AttentionOperands;

// Decision: docs/decisions/backend-ascend.md#keys-are-rotated-as-they-are-read
pub(super) fn attend(work: &mut StepWork<'_, '_>, op: &Attend, latent: Option<&TensorView>) -> Result<()> {
    let operands = AttentionOperands::new(op, latent)?;
    if operands.out.is_empty() {
        return Ok(());
    }
    // The check at capture has verified that the work belongs to the step.
    if work.captured_step().is_some() {
        return side_by_side::attend(work, &operands);
    }
    if fused::attend(work, &operands)? {
        return Ok(());
    }
    if side_by_side::suits(&operands) {
        return side_by_side::attend(work, &operands);
    }
    let plan = plan::plan(work, op, &operands.planes)?;
    let angles = op.rope.as_ref().map(|rope| plan::angles(work, &plan, rope, op)).transpose()?;
    Entries { operands: &operands, plan: &plan, angles: angles.as_deref() }.attend(work)
}
