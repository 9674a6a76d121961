//! Scatter: writes new K and V rows to cache slots.

use std::sync::Arc;

use super::entry::Storages;
use super::{check_rotary, check_rows, check_slots, slot_bytes};
use crate::base::{DType, Error, KvFormat, Result, Rope, same};
use crate::device::{KvArena, TensorView, WriteSlots};

/// Writes row `i` of `k` and `v` to slot `slots[i]` of one layer.
///
/// A negative slot is padding: its row is skipped. Rows for a dense arena must have its element type, or f32,
/// which is rounded to nearest even. Rows for a quantised arena may have any of the types in
/// [`DType::COMPUTE`] and are quantised. If a slot occurs twice, it is unspecified which of the two rows the
/// slot contains afterwards.
#[derive(Debug, Clone)]
pub struct Scatter {
    /// Arena to write to.
    pub arena: KvArena,
    /// Layer index.
    pub layer: usize,
    /// New keys `[rows, k_heads, k_dim]`. The last axis must be dense; the other strides may have any value.
    pub k: TensorView,
    /// New values `[rows, v_heads, v_dim]`, with strides as for `k`.
    pub v: TensorView,
    /// One slot per row: `block * block_size + offset`, or negative for padding. The slots must be in blocks
    /// that the caller is filling.
    pub slots: WriteSlots,
    /// Rotation to apply to the keys, computed in f32 and rounded once, or `None` to store the keys as
    /// given.
    pub rotation: Option<RowRotation>,
}

// Decision: docs/decisions/device.md#scatter-rotates-keys-while-it-writes-them
/// A rotation of new rows, each to its own position.
#[derive(Debug, Clone)]
pub struct RowRotation {
    /// The layer's rotary embedding. Its attention factor is applied too.
    pub rope: Arc<Rope>,
    /// One position per row. Positions of padding rows are ignored.
    pub positions: Arc<[i64]>,
}

impl RowRotation {
    fn check(&self, slots: &[i64], k_dim: usize) -> Result<()> {
        same("positions of the rows", slots.len(), self.positions.len())?;
        check_rotary(&self.rope, k_dim)?;
        let used = self.positions.iter().zip(slots).filter(|(_, slot)| **slot >= 0);
        self.rope.table(used.map(|(position, _)| *position)).map(drop)
    }
}

impl Scatter {
    /// Creates a scatter that stores keys as given. A struct literal that ends in `..Scatter::new(…)` stays
    /// valid when a field is added.
    pub fn new(arena: &KvArena, layer: usize, k: TensorView, v: TensorView, slots: &WriteSlots) -> Self {
        Self { arena: arena.clone(), layer, k, v, slots: slots.clone(), rotation: None }
    }

    /// Rotates the key of each row to the row's position before the key is stored.
    #[must_use]
    pub fn rotated(mut self, rope: &Arc<Rope>, positions: &Arc<[i64]>) -> Self {
        self.rotation = Some(RowRotation { rope: Arc::clone(rope), positions: Arc::clone(positions) });
        self
    }

    /// Checks shapes, types, slots, the rotation and the write permit.
    pub fn check(&self) -> Result<()> {
        self.arena.check_layer(self.layer)?;
        check_rows(&self.arena, self.slots.len(), &self.k, &self.v)?;
        if let KvFormat::Dense(expected) = self.arena.layout().shape().format {
            for view in [&self.k, &self.v] {
                // Decision: docs/decisions/device.md#scatter-converts-f32-rows
                if view.dtype() != expected && view.dtype() != DType::F32 {
                    return Err(Error::mismatch("rows to scatter", expected, view.dtype()));
                }
            }
        }
        if let Some(rotation) = &self.rotation {
            rotation.check(&self.slots, self.arena.layout().shape().k_dim)?;
        }
        self.slots.check()?;
        self.slots.check_block_size(self.arena.layout().shape().block_size)?;
        check_slots(&self.arena, &self.slots)
    }

    /// Returns the number of bytes written to the cache.
    pub fn bytes(&self) -> usize {
        slot_bytes(&self.arena, &self.slots)
    }

    /// Adds the memory that the operation touches to `storages`.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        storages.arena(&self.arena);
        storages.view(&self.k);
        storages.view(&self.v);
    }
}
