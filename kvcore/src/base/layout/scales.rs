//! The layout of a quantised plane's scales, which have their own buffer.

use super::{KvShape, PlaneStrides};
use crate::base::{DType, KvFormat, Result, ScaleScope, product};

// Decision: docs/decisions/base.md#integer-scales-are-stored-with-their-codes
/// The layout of the scales of K or of V.
///
/// Integer formats have `per_row` f16 scales for each head's row, laid out in the same order as the rows.
/// These scales belong to a block and move with it. fp8 formats have static f32 scales, one per layer or
/// one per layer and head; the block and token strides of static scales are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScaleLayout {
    /// Element type of one scale.
    pub dtype: DType,
    /// Strides, in scales.
    pub strides: PlaneStrides,
    /// Number of scales for each head's row, which are stored consecutively.
    pub per_row: usize,
    /// Required size of the scale storage, in bytes.
    pub bytes: usize,
}

impl ScaleLayout {
    /// Returns whether the scales belong to the whole arena rather than to its blocks.
    pub fn is_static(&self) -> bool {
        self.strides.block == 0
    }

    /// Creates the scale layout for `heads` rows of `dim` elements per token. Returns `None` for dense
    /// formats.
    pub(super) fn new(shape: &KvShape, heads: usize, dim: usize) -> Result<Option<Self>> {
        match shape.format {
            KvFormat::Dense(_) => Ok(None),
            KvFormat::Int8 { group } | KvFormat::Int4 { group } => {
                let (dtype, per_row) = (DType::F16, dim / group);
                let strides = PlaneStrides::dense(shape, heads, per_row)?;
                let bytes = dtype.bytes_for(product("scales", &[strides.layer, shape.num_layers])?)?;
                Ok(Some(Self { dtype, strides, per_row, bytes }))
            }
            KvFormat::Fp8 { scales, .. } => {
                let (layer, head) = match scales {
                    ScaleScope::PerTensor => (1, 0),
                    ScaleScope::PerHead => (heads, 1),
                };
                let (dtype, strides) = (DType::F32, PlaneStrides { layer, block: 0, head, token: 0 });
                let bytes = dtype.bytes_for(product("scales", &[layer, shape.num_layers])?)?;
                Ok(Some(Self { dtype, strides, per_row: 1, bytes }))
            }
        }
    }

    /// Returns the size of a row's scales that move with its block, in bytes. Static scales do not move.
    pub(super) fn row_bytes(&self) -> usize {
        if self.is_static() { 0 } else { self.per_row * self.dtype.bits() / 8 }
    }
}
