//! Reference kernels: the contract of `kvcore::device::operation` as plain loops.
//!
//! Each function assumes that its operation has been checked, and follows the operation's description. All
//! arithmetic is in f32. Elements are rounded only once, when they are stored.

mod attend;
mod convert;
mod copy;
mod foreign;
mod mass;
mod rope;
mod rows;
mod tensor;

pub(crate) use attend::{attend, attend_mla};
pub(crate) use convert::{dequantize, quantize};
pub(crate) use copy::{copy_blocks, rotate_keys, swap_blocks};
pub(crate) use foreign::{load_foreign, save_foreign};
pub(crate) use mass::attend_mass;
pub(crate) use rope::rope;
pub(crate) use rows::{gather, scatter};
pub(crate) use tensor::{Axis, DenseRuns, copy_tensor};

use std::sync::Arc;

use kvcore::{BlockId, Result, Rope, RopeTable, Rotation, rotate_row};

use crate::element::Element;
use crate::plane::RowAt;

/// Returns the positions of all rows of one block in one layer.
fn rows_of_block(
    layer: usize,
    block: BlockId,
    block_size: usize,
    heads: usize,
) -> impl Iterator<Item = RowAt> {
    let block = block.index();
    (0..block_size).flat_map(move |token| (0..heads).map(move |head| RowAt { layer, block, token, head }))
}

/// Rotates rows to various positions, using its own buffers.
struct Rotator<'a> {
    rope: &'a Rope,
    table: Arc<RopeTable>,
    sin: Vec<f32>,
    row: Vec<f32>,
}

impl<'a> Rotator<'a> {
    fn new(rope: &'a Rope, positions: impl IntoIterator<Item = i64>) -> Result<Self> {
        let table = rope.table(positions)?;
        Ok(Self { rope, table, sin: vec![0.0; rope.frequencies().len()], row: Vec::new() })
    }

    /// Creates a rotator for keys that are moved by `rotation.delta` positions.
    fn by(rotation: &'a Rotation) -> Result<Self> {
        Self::new(&rotation.rope, [rotation.delta])
    }

    /// Rotates an f32 row to `position`, and multiplies its rotary elements by `factor`.
    fn rotate(&mut self, row: &mut [f32], position: i64, factor: f32) {
        let cos = self.table.at(position, &mut self.sin);
        rotate_row(row, cos, &self.sin, factor, self.rope.pairing());
    }

    /// Like [`rotate`](Self::rotate), but for a row of any element type. The row is rotated in f32, and only
    /// the rotary elements are rounded.
    fn rotate_elements<T: Element>(&mut self, row: &mut [T], position: i64, factor: f32) {
        let mut wide = std::mem::take(&mut self.row);
        wide.clear();
        wide.extend(row.iter().map(|x| x.to_f32()));
        self.rotate(&mut wide, position, factor);
        let rotated = 2 * self.rope.frequencies().len();
        for (x, &y) in row.iter_mut().zip(&wide[..rotated]) {
            *x = T::from_f32(y);
        }
        self.row = wide;
    }
}
