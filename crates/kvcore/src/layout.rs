//! Where an element of K or V lies: one affine formula with validated strides.

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::error::{Error, Result, product};

/// Order of the two inner axes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockOrder {
    /// `[kv_heads, block_size, dim]`: one head's tokens are contiguous.
    HeadMajor,
    /// `[block_size, kv_heads, dim]`: one token's heads are contiguous; most GPU kernels read this.
    TokenMajor,
}

/// The extents from which a [`KvLayout`] is made.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvShape {
    /// Layers held by this rank.
    pub num_layers: usize,
    /// Physical blocks per layer.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Key/value heads held by this rank.
    pub kv_heads: usize,
    /// Elements per head of K.
    pub k_dim: usize,
    /// Elements per head of V.
    pub v_dim: usize,
    /// Element type.
    pub dtype: DType,
    /// Order of heads and tokens inside a block.
    pub order: BlockOrder,
}

/// Strides of K or of V in elements; the innermost axis (`dim`) has stride 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlaneStrides {
    /// From a layer to the next.
    pub layer: usize,
    /// From a block to the next.
    pub block: usize,
    /// From a head to the next inside a block.
    pub head: usize,
    /// From a token to the next inside a block.
    pub token: usize,
}

/// A validated layout of paged (or static) K and V storage.
///
/// The element `(layer, block, token, head, i)` of K lies at
/// `layer * k.layer + block * k.block + token * k.token + head * k.head + i`. No two elements share
/// an address and every product is checked at construction, so that address arithmetic afterwards
/// cannot overflow.
///
/// ```
/// use kvcore::{BlockOrder, DType, KvLayout, KvShape};
/// let layout = KvLayout::new(KvShape {
///     num_layers: 2, num_blocks: 8, block_size: 16, kv_heads: 4, k_dim: 64, v_dim: 64,
///     dtype: DType::BF16, order: BlockOrder::HeadMajor,
/// })?;
/// assert_eq!(layout.block_bytes(), 2 * 16 * 4 * (64 + 64) * 2);
/// assert_eq!(layout.num_slots(), 8 * 16);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvLayout {
    shape: KvShape,
    k: PlaneStrides,
    v: PlaneStrides,
    k_bytes: usize,
    v_bytes: usize,
    block_bytes: usize,
}

impl KvLayout {
    /// A dense layout of the given shape.
    pub fn new(shape: KvShape) -> Result<Self> {
        let k = dense(&shape, shape.k_dim)?;
        let v = dense(&shape, shape.v_dim)?;
        Self::with_strides(shape, k, v)
    }

    /// A layout with the caller's strides, for memory that somebody else laid out.
    ///
    /// # Errors
    /// [`Error::Zero`] for an empty extent, [`Error::Overflow`], and [`Error::InvalidStrides`] when
    /// two elements would share an address.
    pub fn with_strides(shape: KvShape, k: PlaneStrides, v: PlaneStrides) -> Result<Self> {
        for (what, extent) in [
            ("num_layers", shape.num_layers),
            ("num_blocks", shape.num_blocks),
            ("block_size", shape.block_size),
            ("kv_heads", shape.kv_heads),
            ("k_dim", shape.k_dim),
            ("v_dim", shape.v_dim),
        ] {
            if extent == 0 {
                return Err(Error::Zero { what });
            }
        }
        if u32::try_from(shape.num_blocks).is_err() {
            return Err(Error::range("num_blocks", shape.num_blocks, u32::MAX));
        }
        product("slots", &[shape.num_blocks, shape.block_size])?;
        let k_bytes = shape.dtype.bytes_for(extent("K", &shape, &k, shape.k_dim)?)?;
        let v_bytes = shape.dtype.bytes_for(extent("V", &shape, &v, shape.v_dim)?)?;
        let per_token =
            product("bytes of a token", &[shape.kv_heads, shape.k_dim.saturating_add(shape.v_dim)])?;
        let block_bytes = product(
            "bytes of a block",
            &[shape.num_layers, shape.block_size, per_token, shape.dtype.bits()],
        )? / 8;
        Ok(Self { shape, k, v, k_bytes, v_bytes, block_bytes })
    }

    /// As many blocks as `budget` bytes hold, over all layers, K and V together.
    ///
    /// # Errors
    /// [`Error::NotEnoughMemory`] when the budget does not hold one block.
    pub fn within_budget(shape: &KvShape, budget: usize) -> Result<Self> {
        let block_bytes = Self::new(KvShape { num_blocks: 1, ..shape.clone() })?.block_bytes;
        match budget / block_bytes {
            0 => Err(Error::NotEnoughMemory { budget, block_bytes }),
            num_blocks => Self::new(KvShape { num_blocks, ..shape.clone() }),
        }
    }

    /// The extents.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Strides of K.
    pub fn k_strides(&self) -> PlaneStrides {
        self.k
    }

    /// Strides of V.
    pub fn v_strides(&self) -> PlaneStrides {
        self.v
    }

    /// Bytes that the K storage must have.
    pub fn k_bytes(&self) -> usize {
        self.k_bytes
    }

    /// Bytes that the V storage must have.
    pub fn v_bytes(&self) -> usize {
        self.v_bytes
    }

    /// Bytes of one block's elements over all layers, K and V.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Slots per layer: `num_blocks * block_size`.
    pub fn num_slots(&self) -> usize {
        self.shape.num_blocks * self.shape.block_size
    }

    /// Blocks that `tokens` tokens fill.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.shape.block_size)
    }
}

fn dense(shape: &KvShape, dim: usize) -> Result<PlaneStrides> {
    let (head, token) = match shape.order {
        BlockOrder::HeadMajor => (product("head stride", &[shape.block_size, dim])?, dim),
        BlockOrder::TokenMajor => (dim, product("token stride", &[shape.kv_heads, dim])?),
    };
    let block = product("block stride", &[shape.block_size, shape.kv_heads, dim])?;
    let layer = product("layer stride", &[block, shape.num_blocks])?;
    Ok(PlaneStrides { layer, block, head, token })
}

/// Elements from the first to the last of a plane, after checking that none share an address.
fn extent(what: &'static str, shape: &KvShape, s: &PlaneStrides, dim: usize) -> Result<usize> {
    let mut axes = [
        (s.layer, shape.num_layers, "layer"),
        (s.block, shape.num_blocks, "block"),
        (s.head, shape.kv_heads, "head"),
        (s.token, shape.block_size, "token"),
    ];
    axes.sort_by_key(|&(stride, count, _)| (stride, count));
    let mut covered = dim;
    for (stride, count, axis) in axes {
        if count > 1 {
            if stride < covered {
                return Err(Error::InvalidStrides {
                    what,
                    reason: format!(
                        "the {axis} stride {stride} lies inside {covered} elements already covered"
                    ),
                });
            }
            covered = product("extent of a plane", &[stride, count - 1])?
                .checked_add(covered)
                .ok_or(Error::Overflow { what: "extent of a plane" })?;
        }
    }
    Ok(covered)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> KvShape {
        KvShape {
            num_layers: 2,
            num_blocks: 3,
            block_size: 4,
            kv_heads: 2,
            k_dim: 8,
            v_dim: 6,
            dtype: DType::F16,
            order: BlockOrder::TokenMajor,
        }
    }

    #[test]
    fn every_element_has_its_own_address() {
        for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
            let layout = KvLayout::new(KvShape { order, ..shape() }).unwrap();
            let (s, k) = (layout.shape().clone(), layout.k_strides());
            let mut seen = vec![false; layout.k_bytes() / 2];
            for l in 0..s.num_layers {
                for b in 0..s.num_blocks {
                    for t in 0..s.block_size {
                        for h in 0..s.kv_heads {
                            for i in 0..s.k_dim {
                                let at = l * k.layer + b * k.block + t * k.token + h * k.head + i;
                                assert!(!std::mem::replace(&mut seen[at], true));
                            }
                        }
                    }
                }
            }
            assert!(seen.into_iter().all(|x| x), "dense");
        }
    }

    #[test]
    fn overlapping_strides_are_refused() {
        let good = KvLayout::new(shape()).unwrap();
        let bad = PlaneStrides { block: good.k_strides().block - 1, ..good.k_strides() };
        assert!(matches!(
            KvLayout::with_strides(shape(), bad, good.v_strides()),
            Err(Error::InvalidStrides { what: "K", .. })
        ));
    }

    #[test]
    fn zero_extents_and_overflow_are_errors() {
        assert_eq!(
            KvLayout::new(KvShape { block_size: 0, ..shape() }),
            Err(Error::Zero { what: "block_size" })
        );
        assert!(matches!(
            KvLayout::new(KvShape { num_layers: usize::MAX / 4, ..shape() }),
            Err(Error::Overflow { .. })
        ));
    }

    #[test]
    fn a_budget_is_the_total_over_layers_and_never_exceeded() {
        let one = KvLayout::new(KvShape { num_blocks: 1, ..shape() }).unwrap().block_bytes();
        let layout = KvLayout::within_budget(&shape(), 5 * one + one / 2).unwrap();
        assert_eq!(layout.shape().num_blocks, 5);
        assert!(layout.k_bytes() + layout.v_bytes() <= 5 * one + one / 2);
        assert_eq!(
            KvLayout::within_budget(&shape(), one - 1),
            Err(Error::NotEnoughMemory { budget: one - 1, block_bytes: one })
        );
    }
}
