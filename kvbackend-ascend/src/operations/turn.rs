//! Rotations of rows in f32, by the angles of each row or of all.

use std::sync::Arc;

use kvcore::{ApplyRope, Pairing, Result, Rope};
use smallvec::{SmallVec, smallvec};

use super::captured::positions;
use super::places::on_device;
use super::plans::{ListKey, Sent};
use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::stream::Work;

/// Cosines and sines of rows on the device, `[rows, rotary_dim / 2]` each, or `[1, …]` for all rows.
#[derive(Debug)]
pub(super) struct Angles {
    cos: Sent,
    sin: Sent,
    pairing: Pairing,
}

/// Returns cosines and sines of positions times a factor, `[positions, rotary_dim / 2]` each.
///
/// # Errors
/// Returns [`kvcore::Error::OutOfRange`] for a position that the table cannot hold.
pub(super) fn cosines_and_sines(rope: &Rope, positions: &[i64], factor: f32) -> Result<(Vec<f32>, Vec<f32>)> {
    let table = rope.table(positions.iter().copied())?;
    let half = rope.config().rotary_dim / 2;
    let (mut cos, mut sin) = (Vec::with_capacity(positions.len() * half), Vec::new());
    let mut row = vec![0.0; half];
    for &position in positions {
        cos.extend(table.at(position, &mut row).iter().map(|x| x * factor));
        sin.extend(row.iter().map(|x| x * factor));
    }
    Ok((cos, sin))
}

impl Angles {
    /// Sends up the angles of positions. The table must hold them, which the operation's check has seen to.
    pub(super) fn send(work: &mut Work<'_>, rope: &Rope, positions: &[i64], factor: f32) -> Result<Self> {
        let (cos, sin) = cosines_and_sines(rope, positions, factor)?;
        let dims = [positions.len(), rope.config().rotary_dim / 2];
        Ok(Self {
            cos: Sent::send(work, &cos, sys::ACL_FLOAT, &dims)?,
            sin: Sent::send(work, &sin, sys::ACL_FLOAT, &dims)?,
            pairing: rope.pairing(),
        })
    }

    /// Returns the angles of one distance for all rows, sent up once.
    pub(super) fn of_distance(work: &mut Work<'_>, rope: &Arc<Rope>, delta: i64) -> Result<Arc<Self>> {
        let key: ListKey = smallvec![1, Arc::as_ptr(rope) as u64, delta as u64];
        if let Some(known) = work.plans().get::<Self>(&key) {
            known.hold(work);
            return Ok(known);
        }
        let made = Arc::new(Self::send(work, rope, &[delta], 1.0)?);
        work.plans().keep(key, Box::new(Arc::clone(rope)), &made);
        Ok(made)
    }

    /// Returns the angles of some of the rows.
    pub(super) fn rows(&self, first: usize, count: usize) -> Self {
        let some = |sent: &Sent| sent.rows(first, count);
        Self { cos: some(&self.cos), sin: some(&self.sin), pairing: self.pairing }
    }

    /// Holds the angles until the work is done.
    pub(super) fn hold(&self, work: &mut Work<'_>) {
        self.cos.hold(work);
        self.sin.hold(work);
    }

    /// Returns angles `[rows, rotary_dim / 2]`, those of row `i` being number `which[i]`.
    pub(super) fn spread(&self, work: &mut Work<'_>, which: &Tensor) -> Result<Turn> {
        self.on_device().spread(work, which)
    }

    fn on_device(&self) -> Turn {
        let (cos, sin) = (self.cos.tensor.clone(), self.sin.tensor.clone());
        Turn { cos, sin, pairing: self.pairing }
    }

    /// Rotates rows; see [`Turn::turn`].
    pub(super) fn turn(&self, work: &mut Work<'_>, x: &Tensor, outer: &[usize]) -> Result<()> {
        self.on_device().turn(work, x, outer)
    }
}

/// Cosines and sines of rows on the device, as [`Angles`] are, in memory between operators.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
    pub(super) pairing: Pairing,
}

impl Turn {
    /// Returns angles `[rows, rotary_dim / 2]`, those of row `i` being number `which[i]`.
    pub(super) fn spread(&self, work: &mut Work<'_>, which: &Tensor) -> Result<Self> {
        let dims = [which.dim(0), self.cos.dim(1)];
        let mut of = |table: &Tensor| -> Result<Tensor> {
            let rows = work.temporary(sys::ACL_FLOAT, &dims)?;
            work.take_rows(table, which, &rows)?;
            Ok(rows)
        };
        Ok(Self { cos: of(&self.cos)?, sin: of(&self.sin)?, pairing: self.pairing })
    }

    /// Rotates the first elements of dense rows in place, `[…, dim]` in f32. `outer` are the extents of the angles along the
    /// axes before the last: 1 where they repeat.
    pub(super) fn turn(&self, work: &mut Work<'_>, x: &Tensor, outer: &[usize]) -> Result<()> {
        let half = self.cos.dim(1);
        let dims: SmallVec<[usize; 6]> = outer.iter().copied().chain([half]).collect();
        let (cos, sin) = (self.cos.reshaped(&dims), self.sin.reshaped(&dims));
        let last = x.dims().len() - 1;
        let (a, b) = match self.pairing {
            Pairing::HalfSplit => (x.sliced(last, 0, half), x.sliced(last, half, half)),
            Pairing::Interleaved => (x.stepped(last, 0, half, 2), x.stepped(last, 1, half, 2)),
        };
        let dims = a.dims();
        let mut part = || work.temporary(sys::ACL_FLOAT, &dims);
        let (a_cos, a_sin, b_cos, b_sin) = (part()?, part()?, part()?, part()?);
        work.mul(&a, &cos, &a_cos)?;
        work.mul(&b, &sin, &b_sin)?;
        work.mul(&a, &sin, &a_sin)?;
        work.mul(&b, &cos, &b_cos)?;
        work.sub(&a_cos, &b_sin, &a)?;
        work.add(&a_sin, &b_cos, &b)
    }
}

/// Returns the rows in f32, dense and in the given order of axes: a copy.
pub(super) fn in_f32(work: &mut Work<'_>, x: &Tensor) -> Result<Tensor> {
    let copy = work.temporary(sys::ACL_FLOAT, &x.dims())?;
    work.convert(x, &copy)?;
    Ok(copy)
}

pub(super) fn rope(work: &mut Work<'_>, op: &ApplyRope) -> Result<()> {
    on_device("rows to rotate", op.rows.storage())?;
    let rows = Tensor::of(&op.rows)?;
    if rows.is_empty() {
        return Ok(());
    }
    let of_step =
        work.captured_step().filter(|step| step.positions.as_ptr_range() == op.positions.as_ptr_range());
    if of_step.is_some() {
        let (count, turned) = (rows.dim(0), in_f32(work, &rows)?);
        let angles = positions(work, &op.rope, 33, count, |step| Ok(step.positions.to_vec()))?;
        angles.turn(work, &turned, &[count, 1])?;
        return work.convert(&turned, &rows);
    }
    let factor = op.rope.attention_factor();
    let key: ListKey = smallvec![
        2,
        Arc::as_ptr(&op.rope) as u64,
        op.positions.as_ptr() as u64,
        op.positions.len() as u64,
        factor.to_bits().into()
    ];
    let known = work.plans().get::<Angles>(&key);
    let angles = if let Some(known) = known {
        known
    } else {
        let made = Arc::new(Angles::send(work, &op.rope, &op.positions, factor)?);
        work.plans().keep(key, Box::new((Arc::clone(&op.rope), Arc::clone(&op.positions))), &made);
        made
    };
    angles.hold(work);
    let turned = in_f32(work, &rows)?;
    angles.turn(work, &turned, &[rows.dim(0), 1])?;
    work.convert(&turned, &rows)
}
