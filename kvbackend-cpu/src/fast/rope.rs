//! Rotates rows in place (RoPE).

use kvcore::{ApplyRope, Result};

use super::locked::with_locked;
use super::rotate::{RotateRows, RotationTable};
use super::{Fast, share};
use crate::memory::ByteSpan;

impl Fast {
    pub(crate) fn rope(&self, op: &ApplyRope) -> Result<()> {
        let table = RotationTable::new(&op.rope, &op.positions)?;
        let (dtype, shape, strides) = (op.rows.dtype(), op.rows.shape(), op.rows.strides());
        let (size, dim, heads) = (dtype.bits() / 8, shape[2], shape[1]);
        // Rows do not overlap, because the operation's check has rejected rows that share elements.
        let parts = self.parts(shape[0], op.rows.len() * size);
        let rows = ByteSpan::of(&op.rows)?;
        with_locked(&[], &[&rows], |locked| {
            let to = locked.target(&rows)?;
            self.workers.run(parts, &|part| {
                let tokens = share(0..shape[0], part, parts).map(|row| {
                    let at = (op.rows.offset() + row * strides[0]) * size;
                    (at, at, op.positions[row])
                });
                // SAFETY: source and destination of a row are equal. The operation's check rejected rows that
                // share elements and a rotary dimension above `dim`, and `share` gives each thread its own
                // rows.
                unsafe {
                    self.level.run(RotateRows {
                        from: to.as_origin(),
                        to,
                        heads,
                        head_strides: (strides[1] * size, strides[1] * size),
                        dim,
                        dtype,
                        table: &table,
                        factor: op.rope.attention_factor(),
                        stream: false,
                        tokens,
                    });
                }
            });
            Ok(())
        })
    }
}
