//! Lists of a captured step, which each replay makes anew: their lengths are those of the capture, whatever the step.
//!
//! A row of padding has no slot, and operators write every row they are given. It stands for a row that has one: both write
//! the same bytes to the same place.

use std::collections::HashMap;
use std::sync::Arc;

use kvcore::{Error, Result, Rope, StepInputs};
use smallvec::smallvec;

use super::places::Geometry;
use super::plans::ListKey;
use super::turn::{Turn, cosines_and_sines};
use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::stream::Work;
use crate::stream::capture::MakeList;

/// Rows that are written, one for each row of the step.
pub(super) struct Chosen {
    /// The row that is written in place of each row.
    pub(super) rows: Vec<usize>,
    /// Where it goes.
    pub(super) places: Vec<usize>,
}

impl Chosen {
    /// Chooses rows by the place of each, below 0 for padding. The last row for a place is the one that is written.
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
pub(super) fn bytes_of<T: bytemuck::NoUninit>(list: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(list).to_vec()
}

/// Returns the address of a list that the layers of a captured step share.
pub(super) fn shared(work: &mut Work<'_>, key: ListKey, bytes: usize, make: MakeList) -> Result<u64> {
    if let Some(known) = work.plans().get::<u64>(&key) {
        return Ok(*known);
    }
    let made = Arc::new(work.replayed_list(bytes, make)?);
    work.plans().keep(key, Box::new(()), &made);
    Ok(*made)
}

/// The rows of a captured scatter.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepRows {
    pub(super) count: usize,
}

impl StepRows {
    /// Returns the numbers of the rows that are written.
    pub(super) fn numbers(self, work: &mut Work<'_>) -> Result<Tensor> {
        let make = |step: &StepInputs| Ok(bytes_of(&Chosen::new(&step.slots)?.numbers()));
        let at = shared(work, smallvec![30, self.count as u64], 4 * self.count, Box::new(make))?;
        Ok(Tensor::dense(at, sys::ACL_INT32, &[self.count]))
    }

    /// Returns the numbers of their places in the matrix of a plane.
    pub(super) fn places(self, work: &mut Work<'_>, geometry: Geometry) -> Result<Tensor> {
        let len = self.count * geometry.rows_of_slot();
        let mut key: ListKey = smallvec![31];
        key.extend(geometry.key());
        let make = move |step: &StepInputs| {
            let places = Chosen::new(&step.slots)?.places;
            Ok(bytes_of(&geometry.by_slot(places.into_iter())))
        };
        let at = shared(work, key, 4 * len, Box::new(make))?;
        Ok(Tensor::dense(at, sys::ACL_INT32, &[len]))
    }

    /// Returns the angles of the rows that are written.
    pub(super) fn angles(self, work: &mut Work<'_>, rope: &Arc<Rope>) -> Result<Turn> {
        positions(work, rope, 32, self.count, |step| {
            let rows = Chosen::new(&step.slots)?.rows;
            Ok(rows.into_iter().map(|row| step.positions[row]).collect())
        })
    }
}

/// Returns the angles of positions of the step.
pub(super) fn positions(
    work: &mut Work<'_>,
    rope: &Arc<Rope>,
    kind: u64,
    count: usize,
    of: impl Fn(&StepInputs) -> Result<Vec<i64>> + Send + Sync + 'static,
) -> Result<Turn> {
    let half = rope.config().rotary_dim / 2;
    let (pairing, owned) = (rope.pairing(), Arc::clone(rope));
    let make = move |step: &StepInputs| {
        let (cos, sin) = cosines_and_sines(&owned, &of(step)?, owned.attention_factor())?;
        Ok(bytes_of(&[cos, sin].concat()))
    };
    let key = smallvec![kind, Arc::as_ptr(rope) as u64, count as u64];
    let at = shared(work, key, 8 * count * half, Box::new(make))?;
    let angles = |at| Tensor::dense(at, sys::ACL_FLOAT, &[count, half]);
    Ok(Turn { cos: angles(at), sin: angles(at + (4 * count * half) as u64), pairing })
}
