//! The lists that each replay of a captured step rebuilds. Their lengths are fixed at capture.
//!
//! The operators write every row they get, but a padding row has no slot. Therefore, a row that has a slot
//! replaces the padding row, and is written twice with the same bytes.

use std::collections::HashMap;
use std::sync::Arc;

use kvcore::{Error, Result, Rope, StepInputs};

use super::angles::{AngleRows, cosines_and_sines};
use super::geometry::RowGeometry;
use super::plans::{ByAddress, PlanKey, StepWork};
use crate::bindings::types as sys;
use crate::operators::Tensor;

// Decision: docs/decisions/backend-ascend.md#a-padding-row-repeats-another-row
/// The rows that a captured step writes: one per row of the step.
pub(super) struct WrittenRows {
    /// For each row of the step, the index of the row that is written in its place.
    pub(super) rows: Vec<usize>,
    /// The slot for each of these rows.
    pub(super) places: Vec<usize>,
}

impl WrittenRows {
    /// Chooses the rows from the slot of each row; a negative slot means padding. If several rows have the
    /// same slot, the last one is written.
    ///
    /// # Errors
    /// Returns [`Error::GraphOutgrown`] if no row has a slot.
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

    /// Returns the row indices as 32-bit integers, which the operators expect.
    pub(super) fn numbers(&self) -> Vec<i32> {
        self.rows.iter().map(|&row| row as i32).collect()
    }
}

/// Returns the contents of a list as bytes.
fn to_bytes<T: bytemuck::NoUninit>(list: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(list).to_vec()
}

/// Returns the address of a list that each replay rebuilds and all layers of the captured step share.
fn replayed(
    work: &mut StepWork<'_, '_>,
    key: PlanKey,
    bytes: usize,
    make: impl Fn(&StepInputs) -> Result<Vec<u8>> + Send + Sync + 'static,
) -> Result<u64> {
    work.shared(key, |work| work.replayed_list(bytes, Box::new(make)))
}

/// The rows that a captured scatter writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct CapturedRows {
    pub(super) count: usize,
}

impl CapturedRows {
    /// Returns the indices of the rows to write.
    pub(super) fn numbers(self, work: &mut StepWork<'_, '_>) -> Result<Tensor> {
        let make = |step: &StepInputs| Ok(to_bytes(&WrittenRows::new(&step.slots)?.numbers()));
        let at = replayed(work, PlanKey::CapturedRows { count: self.count }, 4 * self.count, make)?;
        Ok(Tensor::dense(at, sys::ACL_INT32, &[self.count]))
    }

    /// Returns the indices of the matrix rows to write to.
    pub(super) fn places(self, work: &mut StepWork<'_, '_>, geometry: RowGeometry) -> Result<Tensor> {
        let len = self.count * geometry.rows_of_slot();
        let make = move |step: &StepInputs| {
            let places = WrittenRows::new(&step.slots)?.places;
            Ok(to_bytes(&geometry.by_slot(places.into_iter())))
        };
        let at = replayed(work, PlanKey::CapturedPlaces(geometry), 4 * len, make)?;
        Ok(Tensor::dense(at, sys::ACL_INT32, &[len]))
    }

    /// Returns the angles of the rows to write.
    pub(super) fn angles(self, work: &mut StepWork<'_, '_>, rope: &Arc<Rope>) -> Result<AngleRows> {
        angles(work, rope, self.count, true)
    }
}

/// Returns the angles for all `count` positions of a captured step or, if `written` is true, for the rows
/// that its scatters write.
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
