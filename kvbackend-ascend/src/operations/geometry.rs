//! The layout of a plane's rows in a matrix, and the row indices for a list of slots or tokens.

use kvcore::Result;

use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::queue::Work;

/// The layout of a plane's rows in a layer's matrix. Strides are in matrix rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowGeometry {
    pub(super) heads: usize,
    pub(super) dim: usize,
    /// The number of heads with separate rows; 1 if a token's heads are contiguous.
    pub(super) apart: usize,
    /// The number of matrix rows per separate head.
    pub(super) parts: usize,
    pub(super) block: usize,
    pub(super) token: usize,
    pub(super) head: usize,
    pub(super) block_size: usize,
}

/// The geometry of a plane, and of its scales if it has scales.
pub(super) type PlaneGeometry = (RowGeometry, Option<RowGeometry>);

/// Row indices into a plane's matrix, and into the matrix of its scales.
#[derive(Debug, Clone)]
pub(super) struct RowNumbers {
    pub(super) rows: Tensor,
    pub(super) scales: Option<Tensor>,
}

impl RowNumbers {
    /// Builds the row indices for the plane, and for its scales if it has scales.
    pub(super) fn make(
        (rows, scales): PlaneGeometry,
        mut make: impl FnMut(RowGeometry) -> Result<Tensor>,
    ) -> Result<Self> {
        Ok(Self { scales: scales.map(&mut make).transpose()?, rows: make(rows)? })
    }
}

impl RowGeometry {
    /// Returns the matrix rows of slots, ordered as `[slots, heads, dim]`.
    pub(super) fn by_slot(&self, slots: impl ExactSizeIterator<Item = usize>) -> Vec<i32> {
        let mut index = Vec::with_capacity(slots.len() * self.rows_of_slot());
        for slot in slots {
            let at = self.at(slot / self.block_size, slot % self.block_size);
            for head in 0..self.apart {
                self.push(&mut index, at + head * self.head);
            }
        }
        index
    }

    /// Returns the matrix rows of tokens, each given by its block and its offset in the block. The order is
    /// `[heads, tokens, dim]` if heads have separate rows or there is only one head, otherwise `[tokens,
    /// heads, dim]`.
    pub(super) fn by_head(&self, tokens: &[(usize, usize)]) -> Vec<i32> {
        let mut index = Vec::with_capacity(tokens.len() * self.rows_of_slot());
        for head in 0..self.apart {
            for &(block, token) in tokens {
                self.push(&mut index, self.at(block, token) + head * self.head);
            }
        }
        index
    }

    /// Returns whether heads have separate rows. If so, [`by_head`](Self::by_head) puts a head's tokens next
    /// to each other.
    pub(super) fn heads_lie_apart(&self) -> bool {
        self.apart > 1
    }

    /// Returns the number of matrix rows per slot.
    pub(super) fn rows_of_slot(&self) -> usize {
        self.apart * self.parts
    }

    /// Returns rows that were read in the order of [`by_head`](Self::by_head), rearranged to `[rows, heads,
    /// tokens, dim]` in f32.
    pub(super) fn on_heads(
        &self,
        work: &mut Work<'_>,
        found: &Tensor,
        (rows, tokens): (usize, usize),
    ) -> Result<Tensor> {
        let (heads, dim) = (self.heads, self.dim);
        if self.apart > 1 || heads == 1 {
            let found = found.reshaped(&[rows, heads, tokens, dim]);
            return if found.dtype() == sys::ACL_FLOAT { Ok(found) } else { work.in_f32(&found) };
        }
        work.in_f32(&found.reshaped(&[rows, tokens, heads, dim]).permuted(&[0, 2, 1, 3]))
    }

    fn at(&self, block: usize, token: usize) -> usize {
        block * self.block + token * self.token
    }

    fn push(&self, index: &mut Vec<i32>, first: usize) {
        // `PlaneMatrix::new` has checked that all row indices fit in 31 bits.
        index.extend((first..first + self.parts).map(|row| row as i32));
    }
}
