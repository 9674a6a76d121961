//! Scatter and gather: copies of rows to slots and from slots.

use kvcore::{Gather, Result, RowRotation, Scatter, TensorView};

use super::angles::{AngleRows, SentAngles};
use super::captured::CapturedRows;
use super::geometry::RowNumbers;
use super::matrix::PlaneMatrix;
use super::plans::{ByAddress, PlanKey, SlotsKey, StepWork};
use super::sent::SentTensor;
use crate::library::Serves;
use crate::memory::on_device;
use crate::operators::Tensor;

/// An operation's slots, except the slots of padding rows.
struct RowSlots {
    key: SlotsKey,
    /// The indices of the rows to move, or `None` for all rows.
    rows: Option<Vec<usize>>,
}

impl RowSlots {
    /// Drops padding rows. If several rows are written to the same slot, keeps the last one.
    fn new(key: SlotsKey) -> Self {
        let slots = &key.slots.0;
        let mut rows: Vec<usize> = (0..slots.len()).filter(|&row| slots[row] >= 0).collect();
        if key.written && !slots.windows(2).all(|pair| pair[0] < pair[1]) {
            rows.sort_by_key(|&row| (slots[row], std::cmp::Reverse(row)));
            rows.dedup_by_key(|&mut row| slots[row]);
            rows.sort_unstable();
        }
        let rows = (rows.len() < slots.len()).then_some(rows);
        Self { key, rows }
    }

    fn len(&self) -> usize {
        self.rows.as_ref().map_or(self.key.slots.0.len(), Vec::len)
    }

    /// Returns the indices of the rows to move.
    fn rows(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.len()).map(|i| self.rows.as_ref().map_or(i, |rows| rows[i]))
    }

    /// Returns the matrix rows of the slots in a plane.
    fn places(&self, work: &mut StepWork<'_, '_>, plane: &PlaneMatrix) -> Result<RowNumbers> {
        RowNumbers::make(plane.geometries(), |geometry| {
            let slots = self.rows().map(|row| self.key.slots.0[row] as usize);
            let key = PlanKey::Places(self.key.clone(), geometry);
            let send = |work: &mut StepWork<'_, '_>| SentTensor::index(work, &geometry.by_slot(slots));
            Ok(work.shared(key, send)?.tensor)
        })
    }

    /// Returns the indices of the rows to move, as a tensor on the device.
    fn numbers(&self, work: &mut StepWork<'_, '_>) -> Result<Tensor> {
        let numbers = self.rows().map(|row| row as i32);
        let send = |work: &mut StepWork<'_, '_>| SentTensor::index(work, &numbers.collect::<Vec<_>>());
        Ok(work.shared(PlanKey::Rows(self.key.clone()), send)?.tensor)
    }

    /// Returns the angles of the rows to move.
    fn angles(&self, work: &mut StepWork<'_, '_>, rotation: &RowRotation) -> Result<AngleRows> {
        let RowRotation { rope, positions } = rotation;
        let key = PlanKey::SlotPositions {
            slots: self.key.clone(),
            rope: ByAddress::of(rope),
            positions: ByAddress::of(positions),
        };
        let send = |work: &mut StepWork<'_, '_>| {
            let positions: Vec<i64> = self.rows().map(|row| positions[row]).collect();
            SentAngles::send(work, rope, &positions, rope.attention_factor())
        };
        Ok(work.shared(key, send)?.all())
    }
}

pub(super) fn scatter(work: &mut StepWork<'_, '_>, op: &Scatter) -> Result<()> {
    let planes = PlaneMatrix::both(&op.arena, op.layer)?;
    for view in [&op.k, &op.v] {
        on_device("rows to scatter", view.storage())?;
    }
    if work.captured_step().is_some() {
        // The check at capture has verified that the slots belong to the step.
        return scatter_captured(work, op, &planes);
    }
    let slots = RowSlots::new(SlotsKey::written(op.slots.mapping()));
    if slots.len() == 0 {
        return Ok(());
    }
    let angles = op.rotation.as_ref().map(|rotation| slots.angles(work, rotation)).transpose()?;
    let rows = [
        rows_to_put(work, &slots, &planes[0], &op.k, angles.as_ref())?,
        rows_to_put(work, &slots, &planes[1], &op.v, None)?,
    ];
    let places = slots.places(work, &planes[0])?;
    if put_both(work, &planes, &rows, &places)? {
        return Ok(());
    }
    planes[0].write(work, &places, &rows[0])?;
    let places = slots.places(work, &planes[1])?;
    planes[1].write(work, &places, &rows[1])
}

// Decision: docs/decisions/backend-ascend.md#fused-operators-are-used-where-they-fit
/// Writes keys and values with the fused operator if the operator accepts them. Returns whether the rows were
/// written.
fn put_both(
    work: &mut StepWork<'_, '_>,
    planes: &[PlaneMatrix; 2],
    rows: &[Tensor; 2],
    places: &RowNumbers,
) -> Result<bool> {
    let [k, v] = planes;
    let (Some(keys), Some(values)) = (k.pages(), v.pages()) else { return Ok(false) };
    let alike = keys.dtype() == values.dtype() && keys.dims()[..3] == values.dims()[..3];
    if !alike || k.geometry.heads_lie_apart() || !work.npu().fuses(Serves::FusedScatter) {
        return Ok(false);
    }
    let rows = [k.rounded(work, &rows[0])?, v.rounded(work, &rows[1])?];
    // In this layout, a matrix row is a slot.
    work.put_paged([&rows[0], &rows[1]], [&keys, &values], &places.rows)?;
    Ok(true)
}

/// Enqueues a scatter for which each replay provides the slots.
fn scatter_captured(work: &mut StepWork<'_, '_>, op: &Scatter, planes: &[PlaneMatrix; 2]) -> Result<()> {
    let step = CapturedRows { count: op.slots.len() };
    if step.count == 0 {
        return Ok(());
    }
    let rotation = op.rotation.as_ref();
    let angles = rotation.map(|rotation| step.angles(work, &rotation.rope)).transpose()?;
    let chosen = step.numbers(work)?;
    for (plane, view, angles) in [(&planes[0], &op.k, angles.as_ref()), (&planes[1], &op.v, None)] {
        let rows = chosen_rows(work, plane, &Tensor::of(view)?, &chosen)?;
        let rows = rotated(work, rows, angles, step.count)?;
        let places = RowNumbers::make(plane.geometries(), |geometry| step.places(work, geometry))?;
        plane.write(work, &places, &rows)?;
    }
    Ok(())
}

/// Returns the rows of K or V with the given indices, as a dense tensor `[rows, heads, dim]`.
fn chosen_rows(
    work: &mut StepWork<'_, '_>,
    plane: &PlaneMatrix,
    rows: &Tensor,
    numbers: &Tensor,
) -> Result<Tensor> {
    let (count, heads, dim) = (numbers.dim(0), plane.geometry.heads, plane.geometry.dim);
    let all = work.dense_in(rows.dtype(), rows)?.reshaped(&[rows.dim(0), heads * dim]);
    let chosen = work.temporary(rows.dtype(), &[count, heads * dim])?;
    work.take_rows(&all, numbers, &chosen)?;
    Ok(chosen.reshaped(&[count, heads, dim]))
}

/// Returns the rows in f32, each rotated by its own angles, or unchanged if there are no angles.
fn rotated(
    work: &mut StepWork<'_, '_>,
    rows: Tensor,
    angles: Option<&AngleRows>,
    count: usize,
) -> Result<Tensor> {
    let Some(angles) = angles else { return Ok(rows) };
    let rotated = work.in_f32(&rows)?;
    angles.rotate(work, &rotated, &[count, 1])?;
    Ok(rotated)
}

/// Returns the rows of K or V to write, rotated by `angles` if given.
fn rows_to_put(
    work: &mut StepWork<'_, '_>,
    slots: &RowSlots,
    plane: &PlaneMatrix,
    view: &TensorView,
    angles: Option<&AngleRows>,
) -> Result<Tensor> {
    let mut rows = Tensor::of(view)?;
    if slots.rows.is_some() {
        let numbers = slots.numbers(work)?;
        rows = chosen_rows(work, plane, &rows, &numbers)?;
    }
    rotated(work, rows, angles, slots.len())
}

pub(super) fn gather(work: &mut StepWork<'_, '_>, op: &Gather) -> Result<()> {
    let planes = PlaneMatrix::both(&op.arena, op.layer)?;
    for view in [&op.k, &op.v] {
        on_device("rows to gather", view.storage())?;
    }
    let slots = RowSlots::new(SlotsKey::read(&op.slots));
    if slots.len() == 0 {
        return Ok(());
    }
    let angles = match &op.rotation {
        None => None,
        Some(rotation) => Some(work.angles_of_distance(&rotation.rope, rotation.delta)?.all()),
    };
    take(work, &slots, &planes[0], &op.k, angles.as_ref())?;
    take(work, &slots, &planes[1], &op.v, None)
}

/// Reads rows of K or V from their slots, and rotates all of them by `angles`, if given.
fn take(
    work: &mut StepWork<'_, '_>,
    slots: &RowSlots,
    plane: &PlaneMatrix,
    view: &TensorView,
    angles: Option<&AngleRows>,
) -> Result<()> {
    let out = Tensor::of(view)?;
    let (count, width) = (slots.len(), plane.geometry.heads * plane.geometry.dim);
    let places = slots.places(work, plane)?;
    if angles.is_none() && slots.rows.is_none() && out.is_dense() {
        return plane.read_into(work, &places, &out);
    }
    let rows = plane.read(work, &places)?;
    let rows = rotated(work, rows, angles, 1)?;
    let mut rows = work.dense_in(out.dtype(), &rows)?;
    if slots.rows.is_some() {
        // Padding rows must stay unchanged, so only the other rows of the output are overwritten.
        let all = work.dense_in(out.dtype(), &out)?;
        let numbers = slots.numbers(work)?;
        let matrix = all.reshaped(&[out.dim(0), width]);
        work.put_rows(&matrix, &numbers, &rows.reshaped(&[count, width]))?;
        if out.is_dense() {
            return Ok(());
        }
        rows = all;
    }
    work.convert(&rows, &out)
}
