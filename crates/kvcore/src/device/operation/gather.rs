//! Gather: cache slots into contiguous rows.

use std::sync::Arc;

use super::{check_rows, check_slots, slot_bytes, writable};
use crate::base::{Error, KvFormat, Result, Rope};
use crate::device::{KvArena, TensorView};

/// A move of keys by a distance, always from the stored original.
#[derive(Debug, Clone)]
pub struct Rotation {
    /// The layer's rotary embedding.
    pub rope: Arc<Rope>,
    /// Positions to move by: used minus stored.
    pub delta: i64,
}

impl Rotation {
    /// Checks the distance against the table and the keys' dimension.
    pub(super) fn check(&self, k_dim: usize) -> Result<()> {
        if self.rope.config().rotary_dim > k_dim {
            return Err(Error::range("rotary_dim", self.rope.config().rotary_dim, k_dim + 1));
        }
        self.rope.table([self.delta]).map(drop)
    }
}

/// Reads slot `slots[i]` of one layer into row `i` of `k` and `v`.
///
/// A negative slot leaves its row as it is. Outputs of a dense arena have its element type; outputs of
/// a quantised one have any of [`DType::COMPUTE`](crate::DType::COMPUTE) and are dequantised, rotated
/// in f32 and rounded once.
#[derive(Debug, Clone)]
pub struct Gather {
    /// Source.
    pub arena: KvArena,
    /// Layer read.
    pub layer: usize,
    /// One slot per row, or negative.
    pub slots: Arc<[i64]>,
    /// Keys `[rows, k_heads, k_dim]`.
    pub k: TensorView,
    /// Values `[rows, v_heads, v_dim]`.
    pub v: TensorView,
    /// Rotates the keys on the way.
    pub rotation: Option<Rotation>,
}

impl Gather {
    /// Checks shapes, types and slots.
    pub fn check(&self) -> Result<()> {
        self.arena.check_layer(self.layer)?;
        check_rows(&self.arena, self.slots.len(), &self.k, &self.v)?;
        let s = self.arena.layout().shape();
        if let KvFormat::Dense(expected) = s.format {
            for view in [&self.k, &self.v] {
                if view.dtype() != expected {
                    return Err(Error::DTypeMismatch { what: "gathered rows", expected, got: view.dtype() });
                }
            }
        }
        writable("gathered K rows", &self.k)?;
        writable("gathered V rows", &self.v)?;
        if let Some(rotation) = &self.rotation {
            rotation.check(s.k_dim)?;
        }
        check_slots(&self.arena, &self.slots)
    }

    /// Bytes read from the cache.
    pub fn bytes(&self) -> usize {
        slot_bytes(&self.arena, &self.slots)
    }
}
