//! Rotates rows in place (RoPE).

use kvcore::{ApplyRope, Result};

use super::Rotator;
use crate::element::{Element, dispatch};
use crate::memory::{Access, ByteSpan};

pub(crate) fn rope(op: &ApplyRope) -> Result<()> {
    dispatch!(op.rows.dtype(), T => rope_rows::<T>(op))
}

fn rope_rows<T: Element>(op: &ApplyRope) -> Result<()> {
    let span = ByteSpan::of(&op.rows)?;
    let mut access = Access::new(&[], &[&span])?;
    let mut rows = access.parts().write(&span)?.elements::<T>()?;
    let (shape, strides) = (op.rows.shape(), op.rows.strides());
    let mut rotator = Rotator::new(&op.rope, op.positions.iter().copied())?;
    for (row, &position) in op.positions.iter().enumerate() {
        for head in 0..shape[1] {
            let at = op.rows.offset() + row * strides[0] + head * strides[1];
            rotator.rotate_elements(&mut rows[at..at + shape[2]], position, op.rope.attention_factor());
        }
    }
    Ok(())
}
