//! Scatter and gather: copies of rows to slots and from slots.

use std::sync::Arc;

use kvcore::{Gather, KvFormat, KvPlane, Result, Scatter, TensorView};
use smallvec::smallvec;

use super::convert::{Conversion, ConversionTurn, RowEnd, scale_strides};
use super::copy::{Copy, place};
use super::places::{RowAxis, RowItems, RowPlace, byte_of};
use crate::device::GpuDevice;
use crate::memory;
use crate::queue::Dispatch;

/// A tensor's rows, and their slots in one plane.
struct SlotRows<'a> {
    plane: KvPlane<'a>,
    rows: &'a TensorView,
    layer: usize,
    block_size: usize,
    /// Pairs of row index and slot.
    slots: &'a [(usize, usize)],
}

impl SlotRows<'_> {
    /// Returns, for each pair, the offsets of the row, of the slot, and of the slot's scales, in elements.
    fn places(&self) -> impl Iterator<Item = [usize; 3]> {
        let scales = scale_strides(&self.plane);
        self.slots.iter().map(move |&(row, slot)| {
            let (block, token) = (slot / self.block_size, slot % self.block_size);
            [
                self.rows.offset() + row * self.rows.strides()[0],
                self.plane.strides.at(self.layer, block, token, 0),
                scales.at(self.layer, block, token, 0),
            ]
        })
    }

    /// Returns the strides between heads in rows, in slots and in scales.
    fn head(&self) -> [usize; 3] {
        [self.rows.strides()[1], self.plane.strides.head, scale_strides(&self.plane).head]
    }

    /// Copies rows to slots bit for bit if `forth` is true, otherwise slots to rows.
    fn copy(&self, device: &Arc<GpuDevice>, forth: bool) -> Result<Vec<Dispatch>> {
        let dtype = self.rows.dtype();
        let ends = |[row, slot, _]: [usize; 3]| {
            let (row, slot) = (byte_of(dtype, row), byte_of(dtype, slot));
            if forth { place(row, slot) } else { place(slot, row) }
        };
        let items: Vec<RowPlace> = self.places().map(ends).collect();
        let axes = smallvec![RowAxis { n: self.plane.heads, strides: ends(self.head()) }];
        let rows = memory::of(device, self.rows.storage())?.buffer()?;
        let slots = memory::of(device, self.plane.storage)?.buffer()?;
        let (source, dest) = if forth { (rows, slots) } else { (slots, rows) };
        let rows = RowItems { numbers: vec![0; items.len()], items, axes };
        Copy { source, dest, rows, row: byte_of(dtype, self.plane.dim) }.dispatches(device)
    }

    fn convert(
        &self,
        device: &Arc<GpuDevice>,
        forth: bool,
        turn: Option<ConversionTurn<'_>>,
        position: impl Fn(usize) -> i64,
    ) -> Result<Vec<Dispatch>> {
        let ends = |places: [usize; 3]| {
            let [row, slot, scale] = places.map(|at| at as u64);
            if forth { [row, slot, 0, scale] } else { [slot, row, scale, 0] }
        };
        let items: Vec<RowPlace> = self.places().map(ends).collect();
        let axes = smallvec![RowAxis { n: self.plane.heads, strides: ends(self.head()) }];
        let numbers = self.slots.iter().map(|&(row, _)| position(row) as i32).collect();
        let (rows, slots) = (RowEnd::view(device, self.rows)?, RowEnd::plane(device, &self.plane)?);
        let (source, dest) = if forth { (rows, slots) } else { (slots, rows) };
        let conversion =
            Conversion { source, dest, dim: self.plane.dim, rows: RowItems { items, numbers, axes }, turn };
        conversion.dispatches(device)
    }
}

/// Returns the pairs of row index and slot, without padding rows.
fn used(slots: &[i64]) -> Vec<(usize, usize)> {
    let used = slots.iter().enumerate().filter(|(_, slot)| **slot >= 0);
    used.map(|(row, &slot)| (row, slot as usize)).collect()
}

/// Returns the same pairs as [`used`], but only the last row of each slot, because rows written to one slot
/// at the same time would mix.
fn unique(slots: &[i64]) -> Vec<(usize, usize)> {
    let mut used = used(slots);
    if used.windows(2).any(|pair| pair[0].1 >= pair[1].1) {
        used.sort_by_key(|&(row, slot)| (slot, std::cmp::Reverse(row)));
        used.dedup_by_key(|pair| pair.1);
    }
    used
}

pub(crate) fn scatter(device: &Arc<GpuDevice>, op: &Scatter) -> Result<Vec<Dispatch>> {
    let slots = unique(&op.slots);
    let block_size = op.arena.layout().shape().block_size;
    let mut work = Vec::new();
    for (plane, rows, rotation) in
        [(op.arena.k_plane(), &op.k, op.rotation.as_ref()), (op.arena.v_plane(), &op.v, None)]
    {
        let movement = SlotRows { plane, rows, layer: op.layer, block_size, slots: &slots };
        work.extend(if plane.format == KvFormat::Dense(rows.dtype()) && rotation.is_none() {
            movement.copy(device, true)?
        } else {
            let turn = rotation.map(|r| ConversionTurn { rope: &r.rope, factor: r.rope.attention_factor() });
            movement.convert(device, true, turn, |row| rotation.map_or(0, |r| r.positions[row]))?
        });
    }
    Ok(work)
}

pub(crate) fn gather(device: &Arc<GpuDevice>, op: &Gather) -> Result<Vec<Dispatch>> {
    let slots = used(&op.slots);
    let block_size = op.arena.layout().shape().block_size;
    let mut work = Vec::new();
    for (plane, rows, rotation) in
        [(op.arena.k_plane(), &op.k, op.rotation.as_ref()), (op.arena.v_plane(), &op.v, None)]
    {
        let movement = SlotRows { plane, rows, layer: op.layer, block_size, slots: &slots };
        work.extend(if plane.format == KvFormat::Dense(rows.dtype()) && rotation.is_none() {
            movement.copy(device, false)?
        } else {
            let turn = rotation.map(|r| ConversionTurn { rope: &r.rope, factor: 1.0 });
            movement.convert(device, false, turn, |_| rotation.map_or(0, |r| r.delta))?
        });
    }
    Ok(work)
}
