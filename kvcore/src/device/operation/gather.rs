//! Gather: reads cache slots into contiguous rows.

use std::sync::Arc;

use super::entry::Storages;
use super::{apart, check_rotary, check_rows, check_slots, slot_bytes, writable};
use crate::base::{Error, KvFormat, Result, Rope};
use crate::device::{KvArena, TensorView};

/// A rotation of keys by a distance in positions, always applied to the original stored keys.
#[derive(Debug, Clone)]
pub struct Rotation {
    /// The layer's rotary embedding.
    pub rope: Arc<Rope>,
    /// Distance in positions: the position of use minus the stored position.
    pub delta: i64,
}

impl Rotation {
    /// Checks that the rotary embedding covers the distance, and that its rotary dimension is at most
    /// `k_dim`.
    pub(super) fn check(&self, k_dim: usize) -> Result<()> {
        check_rotary(&self.rope, k_dim)?;
        self.rope.table([self.delta]).map(drop)
    }
}

/// Reads slot `slots[i]` of one layer into row `i` of `k` and `v`.
///
/// A row with a negative slot is left unchanged. Rows read from a dense arena must have the arena's element
/// type. Rows read from a quantised arena may have any of the types in
/// [`DType::COMPUTE`](crate::DType::COMPUTE): the codes are dequantised, the keys are rotated in f32, and the
/// results are rounded once.
#[derive(Debug, Clone)]
pub struct Gather {
    /// Arena to read from.
    pub arena: KvArena,
    /// Layer index.
    pub layer: usize,
    /// One slot per row. Rows with a negative slot are skipped.
    pub slots: Arc<[i64]>,
    /// Rows for the keys, `[rows, k_heads, k_dim]`.
    pub k: TensorView,
    /// Rows for the values, `[rows, v_heads, v_dim]`.
    pub v: TensorView,
    /// Rotation to apply to the keys, or `None` to read them as stored.
    pub rotation: Option<Rotation>,
}

impl Gather {
    /// Creates a gather that reads keys as stored. A struct literal that ends in `..Gather::new(…)` stays
    /// valid when a field is added.
    pub fn new(arena: &KvArena, layer: usize, slots: &Arc<[i64]>, k: TensorView, v: TensorView) -> Self {
        Self { arena: arena.clone(), layer, slots: Arc::clone(slots), k, v, rotation: None }
    }

    /// Checks shapes, types, slots and the rotation, and that the rows of keys and of values are separate.
    pub fn check(&self) -> Result<()> {
        self.arena.check_layer(self.layer)?;
        check_rows(&self.arena, self.slots.len(), &self.k, &self.v)?;
        let s = self.arena.layout().shape();
        for (what, view) in [("gathered K rows", &self.k), ("gathered V rows", &self.v)] {
            match s.format {
                KvFormat::Dense(expected) if view.dtype() != expected => {
                    return Err(Error::mismatch("gathered rows", expected, view.dtype()));
                }
                _ => writable(what, view)?,
            }
        }
        apart("gathered K rows and V rows", &self.k, &self.v)?;
        self.rotation.as_ref().map_or(Ok(()), |rotation| rotation.check(s.k_dim))?;
        check_slots(&self.arena, &self.slots)
    }

    /// Returns the number of bytes read from the cache.
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
