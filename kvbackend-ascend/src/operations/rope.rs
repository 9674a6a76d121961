//! In-place rotation of rows.

use kvcore::{ApplyRope, Result};

use super::angles::SentAngles;
use super::captured;
use super::plans::{ByAddress, PlanKey, StepWork};
use crate::memory::on_device;
use crate::operators::Tensor;

pub(super) fn apply_rope(work: &mut StepWork<'_, '_>, op: &ApplyRope) -> Result<()> {
    on_device("rows to rotate", op.rows.storage())?;
    let rows = Tensor::of(&op.rows)?;
    if rows.is_empty() {
        return Ok(());
    }
    let count = rows.dim(0);
    let of_step =
        work.captured_step().is_some_and(|step| step.positions.as_ptr_range() == op.positions.as_ptr_range());
    let angles = if of_step {
        captured::angles(work, &op.rope, count, false)?
    } else {
        let (rope, positions) = (ByAddress::of(&op.rope), ByAddress::of(&op.positions));
        let send = |work: &mut StepWork<'_, '_>| {
            SentAngles::send(work, &op.rope, &op.positions, op.rope.attention_factor())
        };
        work.shared(PlanKey::Positions { rope, positions }, send)?.all()
    };
    let rotated = work.in_f32(&rows)?;
    angles.rotate(work, &rotated, &[count, 1])?;
    work.convert(&rotated, &rows)
}
