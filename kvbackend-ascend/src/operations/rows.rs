//! Scatter and gather: rows to slots and slots to rows.

use std::sync::Arc;

use kvcore::{Gather, KvArena, Result, RowRotation, Scatter, TensorView};
use smallvec::smallvec;

use super::captured::StepRows;
use super::places::{PlaneRows, RowNumbers, on_device};
use super::plans::{ListKey, ListOwner, Sent};
use super::turn::{Angles, in_f32};
use crate::bindings::types as sys;
use crate::library::Serves;
use crate::operators::Tensor;
use crate::stream::Work;

/// A list of slots, one for each row: which rows have one, and which slots.
struct SlotList<'a> {
    slots: &'a [i64],
    /// Rows that are moved, if not all.
    rows: Option<Vec<usize>>,
}

impl<'a> SlotList<'a> {
    /// Leaves out rows of padding. Of several rows for one slot, `unique` leaves the last.
    fn new(slots: &'a [i64], unique: bool) -> Self {
        let mut rows: Vec<usize> = (0..slots.len()).filter(|&row| slots[row] >= 0).collect();
        if unique && !slots.windows(2).all(|pair| pair[0] < pair[1]) {
            rows.sort_by_key(|&row| (slots[row], std::cmp::Reverse(row)));
            rows.dedup_by_key(|&mut row| slots[row]);
            rows.sort_unstable();
        }
        let rows = (rows.len() < slots.len()).then_some(rows);
        Self { slots, rows }
    }

    fn len(&self) -> usize {
        self.rows.as_ref().map_or(self.slots.len(), Vec::len)
    }

    fn at(&self, i: usize) -> usize {
        self.rows.as_ref().map_or(i, |rows| rows[i])
    }

    /// Returns the key of a list that is made of the slots.
    fn key(&self, what: u64) -> ListKey {
        smallvec![what, self.slots.as_ptr() as u64, self.slots.len() as u64]
    }
}

/// Sends up a list that is made of slots, once for all layers.
fn sent(
    work: &mut Work<'_>,
    key: ListKey,
    owner: impl FnOnce() -> ListOwner,
    list: impl FnOnce() -> Vec<i32>,
) -> Result<Tensor> {
    if let Some(known) = work.plans().get::<Sent>(&key) {
        known.hold(work);
        return Ok(known.tensor.clone());
    }
    let list = list();
    let made = Arc::new(Sent::send(work, &list, sys::ACL_INT32, &[list.len()])?);
    work.plans().keep(key, owner(), &made);
    Ok(made.tensor.clone())
}

/// The movement of an operation: its slots, and what keeps them in their place.
struct Movement<'a, O> {
    slots: SlotList<'a>,
    owner: O,
    kind: u64,
}

impl<O: Fn() -> ListOwner> Movement<'_, O> {
    /// Returns the numbers of the rows in the matrices of a plane.
    fn places(&self, work: &mut Work<'_>, plane: &PlaneRows) -> Result<RowNumbers> {
        let slots = || (0..self.slots.len()).map(|i| self.slots.slots[self.slots.at(i)] as usize);
        plane.numbers(|geometry| {
            let mut key = self.slots.key(self.kind);
            key.extend(geometry.key());
            sent(work, key, &self.owner, || geometry.by_slot(slots()))
        })
    }

    /// Returns the numbers of the rows that are moved.
    fn rows(&self, work: &mut Work<'_>) -> Result<Tensor> {
        let rows = || (0..self.slots.len()).map(|i| self.slots.at(i) as i32).collect();
        sent(work, self.slots.key(self.kind + 1), &self.owner, rows)
    }
}

fn planes(arena: &KvArena, layer: usize) -> Result<[PlaneRows; 2]> {
    let shape = arena.layout().shape();
    let extents = (shape.num_blocks, shape.block_size);
    Ok([PlaneRows::new(&arena.k_plane(), layer, extents)?, PlaneRows::new(&arena.v_plane(), layer, extents)?])
}

pub(super) fn scatter(work: &mut Work<'_>, op: &Scatter) -> Result<()> {
    let planes = planes(&op.arena, op.layer)?;
    for view in [&op.k, &op.v] {
        on_device("rows to scatter", view.storage())?;
    }
    if work.captured_step().is_some() {
        // The check of the capture has seen that the lists are the step's.
        return scatter_captured(work, op, &planes);
    }
    let slots = SlotList::new(&op.slots, true);
    if slots.len() == 0 {
        return Ok(());
    }
    let kept = op.slots.clone();
    let movement = Movement { slots, owner: move || Box::new(kept.clone()) as ListOwner, kind: 10 };
    let angles = match &op.rotation {
        None => None,
        Some(rotation) => Some(angles(work, rotation, &movement)?),
    };
    let rows = [
        rows_to_put(work, &movement, &planes[0], &op.k, angles.as_deref())?,
        rows_to_put(work, &movement, &planes[1], &op.v, None)?,
    ];
    let places = movement.places(work, &planes[0])?;
    if put_both(work, &planes, &rows, &places)? {
        return Ok(());
    }
    planes[0].write(work, &places, &rows[0])?;
    let places = movement.places(work, &planes[1])?;
    planes[1].write(work, &places, &rows[1])
}

/// Writes keys and values by the fused operator. Returns whether it could.
fn put_both(
    work: &mut Work<'_>,
    planes: &[PlaneRows; 2],
    rows: &[Tensor; 2],
    places: &RowNumbers,
) -> Result<bool> {
    let [k, v] = planes;
    let (Some(keys), Some(values)) = (k.pages(), v.pages()) else { return Ok(false) };
    let alike = keys.dtype() == values.dtype() && keys.dims()[..3] == values.dims()[..3];
    if !alike || k.geometry.heads_lie_apart() || !work.device().fuses(Serves::FusedScatter) {
        return Ok(false);
    }
    let rows = [k.rounded(work, &rows[0])?, v.rounded(work, &rows[1])?];
    // Rows of the matrix are slots here.
    work.put_paged([&rows[0], &rows[1]], [&keys, &values], &places.rows)?;
    Ok(true)
}

/// Enqueues a scatter whose slots each replay brings.
fn scatter_captured(work: &mut Work<'_>, op: &Scatter, planes: &[PlaneRows; 2]) -> Result<()> {
    let step = StepRows { count: op.slots.len() };
    if step.count == 0 {
        return Ok(());
    }
    let rotation = op.rotation.as_ref();
    let angles = rotation.map(|rotation| step.angles(work, &rotation.rope)).transpose()?;
    let chosen = step.numbers(work)?;
    for (plane, view, angles) in [(&planes[0], &op.k, angles.as_ref()), (&planes[1], &op.v, None)] {
        let (heads, dim, view) = (plane.geometry.heads, plane.geometry.dim, Tensor::of(view)?);
        let all = dense(work, &view)?.reshaped(&[step.count, heads * dim]);
        let rows = work.temporary(all.dtype(), &[step.count, heads * dim])?;
        work.take_rows(&all, &chosen, &rows)?;
        let mut rows = rows.reshaped(&[step.count, heads, dim]);
        if let Some(angles) = angles {
            rows = in_f32(work, &rows)?;
            angles.turn(work, &rows, &[step.count, 1])?;
        }
        let places = plane.numbers(|geometry| step.places(work, *geometry))?;
        plane.write(work, &places, &rows)?;
    }
    Ok(())
}

/// Returns the angles of the rows that are moved.
fn angles<O: Fn() -> ListOwner>(
    work: &mut Work<'_>,
    rotation: &RowRotation,
    movement: &Movement<'_, O>,
) -> Result<Arc<Angles>> {
    let slots = &movement.slots;
    let mut key = slots.key(12);
    key.extend([Arc::as_ptr(&rotation.rope) as u64, rotation.positions.as_ptr() as u64]);
    if let Some(known) = work.plans().get::<Angles>(&key) {
        known.hold(work);
        return Ok(known);
    }
    let positions: Vec<i64> = (0..slots.len()).map(|i| rotation.positions[slots.at(i)]).collect();
    let factor = rotation.rope.attention_factor();
    let made = Arc::new(Angles::send(work, &rotation.rope, &positions, factor)?);
    let owner = (Arc::clone(&rotation.rope), Arc::clone(&rotation.positions), (movement.owner)());
    work.plans().keep(key, Box::new(owner), &made);
    Ok(made)
}

/// Returns the rows of K or V that are moved, at their place.
fn rows_to_put<O: Fn() -> ListOwner>(
    work: &mut Work<'_>,
    movement: &Movement<'_, O>,
    plane: &PlaneRows,
    view: &TensorView,
    angles: Option<&Angles>,
) -> Result<Tensor> {
    let mut rows = Tensor::of(view)?;
    let (count, heads, dim) = (movement.slots.len(), plane.geometry.heads, plane.geometry.dim);
    if movement.slots.rows.is_some() {
        let all = dense(work, &rows)?.reshaped(&[rows.dim(0), heads * dim]);
        let some = work.temporary(rows.dtype(), &[count, heads * dim])?;
        let index = movement.rows(work)?;
        work.take_rows(&all, &index, &some)?;
        rows = some.reshaped(&[count, heads, dim]);
    }
    if let Some(angles) = angles {
        rows = in_f32(work, &rows)?;
        angles.turn(work, &rows, &[count, 1])?;
    }
    Ok(rows)
}

/// Returns the rows themselves if they are dense, or a dense copy.
fn dense(work: &mut Work<'_>, rows: &Tensor) -> Result<Tensor> {
    if rows.is_dense() {
        return Ok(rows.clone());
    }
    let copy = work.temporary(rows.dtype(), &rows.dims())?;
    work.convert(rows, &copy)?;
    Ok(copy)
}

pub(super) fn gather(work: &mut Work<'_>, op: &Gather) -> Result<()> {
    let planes = planes(&op.arena, op.layer)?;
    for view in [&op.k, &op.v] {
        on_device("rows to gather", view.storage())?;
    }
    let slots = SlotList::new(&op.slots, false);
    if slots.len() == 0 {
        return Ok(());
    }
    let kept = Arc::clone(&op.slots);
    let movement = Movement { slots, owner: move || Box::new(Arc::clone(&kept)) as ListOwner, kind: 14 };
    let angles = match &op.rotation {
        None => None,
        Some(rotation) => Some(Angles::of_distance(work, &rotation.rope, rotation.delta)?),
    };
    take(work, &movement, &planes[0], &op.k, angles.as_deref())?;
    take(work, &movement, &planes[1], &op.v, None)
}

/// Reads rows of K or V from their slots.
fn take<O: Fn() -> ListOwner>(
    work: &mut Work<'_>,
    movement: &Movement<'_, O>,
    plane: &PlaneRows,
    view: &TensorView,
    angles: Option<&Angles>,
) -> Result<()> {
    let out = Tensor::of(view)?;
    let (count, heads, dim) = (movement.slots.len(), plane.geometry.heads, plane.geometry.dim);
    let places = movement.places(work, plane)?;
    if angles.is_none() && movement.slots.rows.is_none() && out.is_dense() {
        return plane.read_into(work, &places, &out);
    }
    let mut rows = plane.read(work, &places)?;
    if let Some(angles) = angles {
        let turned = in_f32(work, &rows)?;
        angles.turn(work, &turned, &[1, 1])?;
        rows = turned;
    }
    if rows.dtype() != out.dtype() {
        let rounded = work.temporary(out.dtype(), &[count, heads, dim])?;
        work.convert(&rows, &rounded)?;
        rows = rounded;
    }
    if movement.slots.rows.is_some() {
        // Rows of padding stay as they are: the others are put among them.
        let all = dense(work, &out)?;
        let index = movement.rows(work)?;
        let matrix = all.reshaped(&[out.dim(0), heads * dim]);
        work.put_rows(&matrix, &index, &rows.reshaped(&[count, heads * dim]))?;
        if out.is_dense() {
            return Ok(());
        }
        rows = all;
    }
    work.convert(&rows, &out)
}
