//! The strides of one plane (K or V), and the check that no two elements share an address.

use super::{BlockOrder, KvShape};
use crate::base::{Error, Result, product};

/// The strides of K, V or their scales, in elements. The innermost axis has stride 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlaneStrides {
    /// Distance between consecutive layers.
    pub layer: usize,
    /// Distance between consecutive blocks.
    pub block: usize,
    /// Distance between consecutive heads inside a block.
    pub head: usize,
    /// Distance between consecutive tokens inside a block.
    pub token: usize,
}

impl PlaneStrides {
    /// Returns the index of the first element of a head's row. The arithmetic cannot overflow for indices
    /// inside a validated layout.
    pub fn at(&self, layer: usize, block: usize, token: usize, head: usize) -> usize {
        layer * self.layer + block * self.block + token * self.token + head * self.head
    }

    /// Creates gapless strides for rows of `dim` elements.
    pub(super) fn dense(shape: &KvShape, heads: usize, dim: usize) -> Result<Self> {
        let (head, token) = match shape.order {
            BlockOrder::HeadMajor => (product("head stride", &[shape.block_size, dim])?, dim),
            BlockOrder::TokenMajor => (dim, product("token stride", &[heads, dim])?),
        };
        let block = product("block stride", &[shape.block_size, heads, dim])?;
        let layer = product("layer stride", &[block, shape.num_blocks])?;
        Ok(Self { layer, block, head, token })
    }

    /// Returns the number of elements spanned by `planes` planes with these strides, each `distance` elements
    /// after the previous one. Checks that no two elements share an address and that every row begins on a
    /// byte boundary; `per_byte` elements share a byte.
    pub(super) fn extent(
        &self,
        what: &'static str,
        shape: &KvShape,
        heads: usize,
        dim: usize,
        per_byte: usize,
        (distance, planes): (usize, usize),
    ) -> Result<usize> {
        let invalid = |reason| Err(Error::InvalidStrides { what, reason });
        let mut axes = [
            (self.layer, shape.num_layers, "layer"),
            (self.block, shape.num_blocks, "block"),
            (self.head, heads, "head"),
            (self.token, shape.block_size, "token"),
            (distance, planes, "plane"),
        ];
        axes.sort_by_key(|&(stride, count, _)| (stride, count));
        let mut covered = dim;
        for (stride, count, axis) in axes.into_iter().filter(|axis| axis.1 > 1) {
            if stride < covered {
                return invalid(format!(
                    "the {axis} stride {stride} is smaller than the {covered} elements that it must skip"
                ));
            }
            if !stride.is_multiple_of(per_byte) {
                return invalid(format!("the {axis} stride {stride} ends inside a byte"));
            }
            covered = product("extent of a plane", &[stride, count - 1])?
                .checked_add(covered)
                .ok_or(Error::Overflow { what: "extent of a plane" })?;
        }
        Ok(covered)
    }
}
