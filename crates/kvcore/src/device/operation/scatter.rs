//! Scatter: new K and V rows into the slots that a slot mapping names.

use std::sync::Arc;

use super::entry::Storages;
use super::{check_rows, check_slots, slot_bytes};
use crate::base::{DType, Error, KvFormat, Result};
use crate::device::{KvArena, TensorView};

/// Writes row `i` of `k` and `v` to slot `slots[i]` of one layer.
///
/// A negative slot is padding: its row is skipped. Rows of a dense arena have its element type, or
/// f32, in which case they are rounded to nearest even on the way; rows of a quantised arena have any
/// of [`DType::COMPUTE`] and are quantised. If a slot occurs twice, one of the rows wins, unspecified
/// which.
#[derive(Debug, Clone)]
pub struct Scatter {
    /// Destination.
    pub arena: KvArena,
    /// Layer written.
    pub layer: usize,
    /// New keys `[rows, k_heads, k_dim]`; any strides with a dense last axis.
    pub k: TensorView,
    /// New values `[rows, v_heads, v_dim]`.
    pub v: TensorView,
    /// One slot per row: `block * block_size + offset`, or negative.
    pub slots: Arc<[i64]>,
}

impl Scatter {
    /// Checks shapes, types and slots; backends call it before they launch anything.
    pub fn check(&self) -> Result<()> {
        self.arena.check_layer(self.layer)?;
        check_rows(&self.arena, self.slots.len(), &self.k, &self.v)?;
        if let KvFormat::Dense(expected) = self.arena.layout().shape().format {
            for view in [&self.k, &self.v] {
                if view.dtype() != expected && view.dtype() != DType::F32 {
                    return Err(Error::DTypeMismatch {
                        what: "rows to scatter",
                        expected,
                        got: view.dtype(),
                    });
                }
            }
        }
        check_slots(&self.arena, &self.slots)
    }

    /// Bytes that land in the cache.
    pub fn bytes(&self) -> usize {
        slot_bytes(&self.arena, &self.slots)
    }

    /// Names the memory that the operation touches.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        storages.arena(&self.arena);
        storages.view(&self.k);
        storages.view(&self.v);
    }
}
