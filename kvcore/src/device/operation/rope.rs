//! In-place rotary embedding of rows.

use std::sync::Arc;

use super::entry::Storages;
use super::{check_rotary, computable, innermost_dense, writable};
use crate::base::{Result, Rope, same};
use crate::device::TensorView;

/// Rotates row `i` of `rows` to `positions[i]`, and applies the attention factor.
///
/// Rows of every element type are rotated in f32, and the result is rounded once.
#[derive(Debug, Clone)]
pub struct ApplyRope {
    /// Rows `[rows, heads, dim]`, rotated in place.
    pub rows: TensorView,
    /// One position per row.
    pub positions: Arc<[i64]>,
    /// The layer's rotary embedding.
    pub rope: Arc<Rope>,
}

impl ApplyRope {
    /// Checks shapes and positions. Grows the table of sines and cosines if needed.
    pub fn check(&self) -> Result<()> {
        same("rank of rows [rows, heads, dim]", 3, self.rows.shape().len())?;
        same("number of positions", self.rows.shape()[0], self.positions.len())?;
        computable("rows to rotate", &self.rows)?;
        innermost_dense("rows to rotate", &self.rows)?;
        writable("rows to rotate", &self.rows)?;
        check_rotary(&self.rope, self.rows.shape()[2])?;
        self.rope.table(self.positions.iter().copied()).map(drop)
    }

    /// Adds the memory that the operation touches to `storages`.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        storages.view(&self.rows);
    }

    /// Returns the size of the rows, in bytes.
    pub fn bytes(&self) -> usize {
        self.rows.len() * self.rows.dtype().bits() / 8
    }
}
