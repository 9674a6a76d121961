//! Lists of a captured step, which each replay makes again: they keep the lengths of the capture, whatever
//! the step.
//!
//! A row of padding has no slot, and operators write every row they are given. Another row with a slot takes
//! the place of such a row: both write the same bytes to the same place.

use std::collections::HashMap;
use std::sync::Arc;

use kvcore::{Error, Result, Rope, StepInputs};

use super::angles::{AngleRows, cosines_and_sines};
use super::geometry::RowGeometry;
use super::plans::{ByAddress, PlanKey, StepWork};
use crate::bindings::types as sys;
use crate::operators::Tensor;

// Decision: docs/decisions/backend-ascend.md#a-row-of-padding-stands-for-another-row
/// Rows that are written, one for each row of the step.
pub(super) struct WrittenRows {
    /// The row that is written in place of each row.
    pub(super) rows: Vec<usize>,
    /// Where each of them is written.
    pub(super) places: Vec<usize>,
}

impl WrittenRows {
    /// Chooses rows by the place of each, below 0 for padding. Of several rows for one place, the last is
    /// written.
    ///
    /// # Errors
    /// Returns [`Error::GraphOutgrown`] if no row has a place.
    pub(super) fn new(places: &[i64]) -> Result<Self> {
        let valid = places.iter().enumerate().filter(|(_, place)| **place >= 0);
        let last: HashMap<i64, usize> = valid.clone().map(|(row, &place)| (place, row)).collect();
        let Some((_, &fallback)) = valid.clone().next() else {
            return Err(Error::GraphOutgrown { what: "rows, of which none is written" });
        };
        let place = |&place: &i64| if place < 0 { fallback } else { place };
        let (rows, places) = places.iter().map(place).map(|place| (last[&place], place as usize)).unzip();
        Ok(Self { rows, places })
    }

    /// Returns the rows as operators take them.
    pub(super) fn numbers(&self) -> Vec<i32> {
        self.rows.iter().map(|&row| row as i32).collect()
    }
}

/// Returns the bytes of a list.
fn to_bytes<T: bytemuck::NoUninit>(list: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(list).to_vec()
}

/// Returns the address of a list that the layers of a captured step share.
fn replayed(
    work: &mut StepWork<'_, '_>,
    key: PlanKey,
    bytes: usize,
    make: impl Fn(&StepInputs) -> Result<Vec<u8>> + Send + Sync + 'static,
) -> Result<u64> {
    work.shared(key, |work| work.replayed_list(bytes, Box::new(make)))
}

/// The rows of a captured scatter.
#[derive(Debug, Clone, Copy)]
pub(super) struct CapturedRows {
    pub(super) count: usize,
}

impl CapturedRows {
    /// Returns the numbers of the rows that are written.
    pub(super) fn numbers(self, work: &mut StepWork<'_, '_>) -> Result<Tensor> {
        let make = |step: &StepInputs| Ok(to_bytes(&WrittenRows::new(&step.slots)?.numbers()));
        let at = replayed(work, PlanKey::CapturedRows { count: self.count }, 4 * self.count, make)?;
        Ok(Tensor::dense(at, sys::ACL_INT32, &[self.count]))
    }

    /// Returns the numbers of their places in the matrix of a plane.
    pub(super) fn places(self, work: &mut StepWork<'_, '_>, geometry: RowGeometry) -> Result<Tensor> {
        let len = self.count * geometry.rows_of_slot();
        let make = move |step: &StepInputs| {
            let places = WrittenRows::new(&step.slots)?.places;
            Ok(to_bytes(&geometry.by_slot(places.into_iter())))
        };
        let at = replayed(work, PlanKey::CapturedPlaces(geometry), 4 * len, make)?;
        Ok(Tensor::dense(at, sys::ACL_INT32, &[len]))
    }

    /// Returns the angles of the rows that are written.
    pub(super) fn angles(self, work: &mut StepWork<'_, '_>, rope: &Arc<Rope>) -> Result<AngleRows> {
        angles(work, rope, self.count, true)
    }
}

/// Returns the angles of the positions of a step with `count` rows, or of the rows that its scatters write.
pub(super) fn angles(
    work: &mut StepWork<'_, '_>,
    rope: &Arc<Rope>,
    count: usize,
    written: bool,
) -> Result<AngleRows> {
    let half = rope.config().rotary_dim / 2;
    let (pairing, held) = (rope.pairing(), Arc::clone(rope));
    let make = move |step: &StepInputs| {
        let positions = if written {
            let rows = WrittenRows::new(&step.slots)?.rows;
            rows.into_iter().map(|row| step.positions[row]).collect()
        } else {
            step.positions.to_vec()
        };
        let (cos, sin) = cosines_and_sines(&held, &positions, held.attention_factor())?;
        Ok(to_bytes(&[cos, sin].concat()))
    };
    let key = PlanKey::CapturedPositions { rope: ByAddress::of(rope), count, written };
    let at = replayed(work, key, 8 * count * half, make)?;
    let rows = |at| Tensor::dense(at, sys::ACL_FLOAT, &[count, half]);
    Ok(AngleRows { cos: rows(at), sin: rows(at + (4 * count * half) as u64), pairing })
}
