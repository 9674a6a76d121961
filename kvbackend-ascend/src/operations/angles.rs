//! Rotation angles on the device, as cosines and sines, and the rotation of rows.

use kvcore::{Pairing, Result, Rope};
use smallvec::SmallVec;

use super::sent::SentTensor;
use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::queue::Work;

/// Cosines and sines of the rotation angles: `[rows, rotary_dim / 2]` each, or `[1, rotary_dim / 2]` if all
/// rows share them.
#[derive(Debug)]
pub(super) struct AngleRows {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
    pub(super) pairing: Pairing,
}

/// [`AngleRows`] that the host has sent to the device.
#[derive(Debug, Clone)]
pub(super) struct SentAngles {
    cos: SentTensor,
    sin: SentTensor,
    pairing: Pairing,
}

/// Returns the cosines and sines for the given positions, multiplied by `factor`: `[positions, rotary_dim /
/// 2]` each.
///
/// # Errors
/// Returns [`kvcore::Error::OutOfRange`] if the rope's table does not cover a position.
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

impl SentAngles {
    /// Sends the angles for the given positions to the device. The rope's table must cover these positions.
    pub(super) fn send(work: &mut Work<'_>, rope: &Rope, positions: &[i64], factor: f32) -> Result<Self> {
        let (cos, sin) = cosines_and_sines(rope, positions, factor)?;
        let dims = [positions.len(), rope.config().rotary_dim / 2];
        Ok(Self {
            cos: SentTensor::send(work, &cos, sys::ACL_FLOAT, &dims)?,
            sin: SentTensor::send(work, &sin, sys::ACL_FLOAT, &dims)?,
            pairing: rope.pairing(),
        })
    }

    /// Returns the angles of `count` rows, starting at row `first`.
    pub(super) fn rows(&self, first: usize, count: usize) -> AngleRows {
        let some = |sent: &SentTensor| sent.tensor.sliced(0, first, count);
        AngleRows { cos: some(&self.cos), sin: some(&self.sin), pairing: self.pairing }
    }

    /// Returns the angles of all rows.
    pub(super) fn all(&self) -> AngleRows {
        AngleRows { cos: self.cos.tensor.clone(), sin: self.sin.tensor.clone(), pairing: self.pairing }
    }

    /// Holds the angles' memory until the work is done.
    pub(super) fn hold(&self, work: &mut Work<'_>) {
        self.cos.hold(work);
        self.sin.hold(work);
    }
}

impl AngleRows {
    /// Gathers rows of these angles: row `i` of the result, `[rows, rotary_dim / 2]`, is row `which[i]` of
    /// `self`.
    pub(super) fn spread(&self, work: &mut Work<'_>, which: &Tensor) -> Result<Self> {
        let dims = [which.dim(0), self.cos.dim(1)];
        let mut spread = |table: &Tensor| -> Result<Tensor> {
            let rows = work.temporary(sys::ACL_FLOAT, &dims)?;
            work.take_rows(table, which, &rows)?;
            Ok(rows)
        };
        Ok(Self { cos: spread(&self.cos)?, sin: spread(&self.sin)?, pairing: self.pairing })
    }

    /// Rotates the first `rotary_dim` elements of dense f32 rows `[…, dim]` in place. `outer` is the shape of
    /// the angles without their last axis; along an axis of extent 1, the angles are repeated.
    pub(super) fn rotate(&self, work: &mut Work<'_>, x: &Tensor, outer: &[usize]) -> Result<()> {
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
