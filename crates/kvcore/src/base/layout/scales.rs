//! Where the scales of a quantised plane lie: a further buffer role of the same blocks.

use super::{KvShape, PlaneStrides};
use crate::base::{DType, KvFormat, Result, ScaleScope, product};

/// The scales of K or of V.
///
/// Integer formats have `per_row` f16 scales in each head's row, laid out like the rows themselves:
/// they belong to a block and go with it. fp8 has static f32 scales, one per layer or per layer and
/// head; their strides of blocks and tokens are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScaleLayout {
    /// Type of a scale.
    pub dtype: DType,
    /// Strides in scales.
    pub strides: PlaneStrides,
    /// Consecutive scales of one head's row.
    pub per_row: usize,
    /// Bytes that the storage of the scales must have.
    pub bytes: usize,
}

impl ScaleLayout {
    /// Whether scales belong to the arena and not to its blocks.
    pub fn is_static(&self) -> bool {
        self.strides.block == 0
    }

    /// The scales of a plane of `heads` rows of `dim` elements; none for dense formats.
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

    /// Bytes of the scales of one row that go with its block.
    pub(super) fn row_bytes(&self) -> usize {
        if self.is_static() { 0 } else { self.per_row * self.dtype.bits() / 8 }
    }
}
