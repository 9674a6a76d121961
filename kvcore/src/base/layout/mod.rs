//! Memory layouts of K and V: an affine formula with validated strides gives the address of every element.

use crate::base::{DType, Error, Result, product};

mod plane;
mod runs;
mod scales;
mod shape;

pub use plane::PlaneStrides;
pub use scales::ScaleLayout;
pub use shape::{BlockOrder, KvShape};

/// A validated layout of paged (or static) K and V storage.
///
/// The element `(layer, block, token, head, i)` of K is at `layer * k.layer + block * k.block + token *
/// k.token + head * k.head + i`. The constructor checks that no two elements share an address and that no
/// product overflows, so later address arithmetic cannot overflow. The scales of quantised formats follow the
/// same formula with their own strides.
///
/// ```
/// use kvcore::{BlockOrder, DType, KvFormat, KvLayout, KvShape};
/// let shape = KvShape {
///     num_layers: 2, num_blocks: 8, block_size: 16, k_heads: 4, v_heads: 4, k_dim: 64, v_dim: 64,
///     format: DType::BF16.into(), order: BlockOrder::HeadMajor,
/// };
/// let layout = KvLayout::new(shape.clone())?;
/// assert_eq!(layout.block_bytes(), 2 * 16 * 4 * (64 + 64) * 2);
/// assert_eq!(layout.num_slots(), 8 * 16);
/// let quantised = KvLayout::new(KvShape { format: KvFormat::Int4 { group: 32 }, ..shape })?;
/// assert_eq!(quantised.block_bytes(), 2 * 16 * 4 * (64 + 64) * 9 / 16); // 4 bits and 16 bits per 32
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvLayout {
    shape: KvShape,
    k: PlaneExtent,
    v: PlaneExtent,
    token_bytes: usize,
    block_bytes: usize,
}

/// The layout of K or of V.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PlaneExtent {
    strides: PlaneStrides,
    bytes: usize,
    scales: Option<ScaleLayout>,
    /// Size of one token in one layer, in bytes, including scales that are stored per block.
    token_bytes: usize,
}

impl PlaneExtent {
    fn new(
        what: &'static str,
        shape: &KvShape,
        strides: PlaneStrides,
        heads: usize,
        dim: usize,
    ) -> Result<Self> {
        let dtype = shape.format.storage_dtype();
        let bytes = dtype.bytes_for(strides.extent(what, shape, heads, dim, per_byte(dtype), (0, 1))?)?;
        let scales = ScaleLayout::new(shape, heads, dim)?;
        let row_bytes = dtype
            .bytes_for(dim)?
            .checked_add(scales.map_or(0, |scales| scales.row_bytes()))
            .ok_or(Error::Overflow { what: "bytes of a row" })?;
        let token_bytes = product("bytes of a token", &[heads, row_bytes])?;
        Ok(Self { strides, bytes, scales, token_bytes })
    }
}

fn per_byte(dtype: DType) -> usize {
    (8 / dtype.bits()).max(1)
}

impl KvLayout {
    /// Creates a layout of the given shape, without gaps between elements.
    ///
    /// # Errors
    /// Returns the errors of [`with_strides`](Self::with_strides).
    pub fn new(shape: KvShape) -> Result<Self> {
        let k = PlaneStrides::dense(&shape, shape.k_heads, shape.k_dim)?;
        let v = PlaneStrides::dense(&shape, shape.v_heads, shape.v_dim)?;
        Self::with_strides(shape, k, v)
    }

    /// Creates a layout with the caller's strides, for memory whose layout other code defines. Scales have no
    /// gaps and follow the order of `shape`.
    ///
    /// # Errors
    /// - Returns [`Error::Zero`] if an extent or the group is 0.
    /// - Returns [`Error::TooLarge`] if the number of blocks does not fit in a [`BlockId`](crate::BlockId).
    /// - Returns [`Error::Overflow`] if a size does not fit in the address space.
    /// - Returns [`Error::InvalidFormat`] for a dense type that no kernel computes with.
    /// - Returns [`Error::NotMultiple`] if the group does not divide `k_dim` and `v_dim`, or is odd for int4.
    /// - Returns [`Error::InvalidStrides`] if two elements would share an address, or if a row of 4-bit
    ///   elements would begin inside a byte.
    pub fn with_strides(shape: KvShape, k: PlaneStrides, v: PlaneStrides) -> Result<Self> {
        for (what, extent) in [
            ("num_layers", shape.num_layers),
            ("num_blocks", shape.num_blocks),
            ("block_size", shape.block_size),
            ("k_heads", shape.k_heads),
            ("v_heads", shape.v_heads),
            ("k_dim", shape.k_dim),
            ("v_dim", shape.v_dim),
        ] {
            if extent == 0 {
                return Err(Error::Zero { what });
            }
        }
        if u32::try_from(shape.num_blocks).is_err() {
            return Err(Error::too_large("num_blocks", shape.num_blocks, u32::MAX));
        }
        shape.format.check_dim("k_dim", shape.k_dim)?;
        shape.format.check_dim("v_dim", shape.v_dim)?;
        product("slots", &[shape.num_blocks, shape.block_size])?;
        let k = PlaneExtent::new("K", &shape, k, shape.k_heads, shape.k_dim)?;
        let v = PlaneExtent::new("V", &shape, v, shape.v_heads, shape.v_dim)?;
        let token_bytes =
            k.token_bytes.checked_add(v.token_bytes).ok_or(Error::Overflow { what: "bytes of a token" })?;
        let block_bytes = product("bytes of a block", &[shape.num_layers, shape.block_size, token_bytes])?;
        Ok(Self { shape, k, v, token_bytes, block_bytes })
    }

    /// Returns whether K and V can alternate, per row, head or block, in one piece of memory without sharing
    /// an element. V begins `distance` bytes after K. Both must have equal strides, heads and row lengths.
    pub(crate) fn in_turn(&self, distance: u64) -> bool {
        let (s, dtype) = (&self.shape, self.shape.format.storage_dtype());
        let alike = (s.k_heads, s.k_dim, self.k.strides) == (s.v_heads, s.v_dim, self.v.strides);
        let bytes = (dtype.bits() / 8) as u64;
        let whole = bytes > 0 && distance.is_multiple_of(bytes) && !s.format.is_quantized();
        alike && whole && {
            let distance = usize::try_from(distance / bytes);
            let extent = |distance| self.k.strides.extent("K and V", s, s.k_heads, s.k_dim, 1, (distance, 2));
            distance.is_ok_and(|distance| extent(distance).is_ok())
        }
    }

    /// Creates a layout with as many blocks as fit in `budget` bytes. A block includes K, V and their scales
    /// in all layers. `shape.num_blocks` is ignored.
    ///
    /// ```
    /// use kvcore::{BlockOrder, DType, KvLayout, KvShape};
    /// let shape = KvShape {
    ///     num_layers: 32, num_blocks: 1, block_size: 16, k_heads: 8, v_heads: 8, k_dim: 128, v_dim: 128,
    ///     format: DType::BF16.into(), order: BlockOrder::TokenMajor,
    /// };
    /// let layout = KvLayout::within_budget(&shape, 1 << 30)?; // a block takes 2 MiB
    /// assert_eq!(layout.shape().num_blocks, 512);
    /// assert!(KvLayout::within_budget(&shape, 1 << 20).is_err());
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::NotEnoughMemory`] if the budget is too small for one block, and the errors of
    /// [`new`](Self::new).
    pub fn within_budget(shape: &KvShape, budget: usize) -> Result<Self> {
        let block_bytes = Self::new(KvShape { num_blocks: 1, ..shape.clone() })?.block_bytes;
        match budget / block_bytes {
            0 => Err(Error::NotEnoughMemory { budget, block_bytes }),
            num_blocks => Self::new(KvShape { num_blocks, ..shape.clone() }),
        }
    }

    /// Returns the extents of the layout.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Returns the strides of K.
    pub fn k_strides(&self) -> PlaneStrides {
        self.k.strides
    }

    /// Returns the strides of V.
    pub fn v_strides(&self) -> PlaneStrides {
        self.v.strides
    }

    /// Returns the required size of the K storage, in bytes.
    pub fn k_bytes(&self) -> usize {
        self.k.bytes
    }

    /// Returns the required size of the V storage, in bytes.
    pub fn v_bytes(&self) -> usize {
        self.v.bytes
    }

    /// Returns the layout of K's scales, or `None` for a dense format.
    pub fn k_scales(&self) -> Option<ScaleLayout> {
        self.k.scales
    }

    /// Returns the layout of V's scales, or `None` for a dense format.
    pub fn v_scales(&self) -> Option<ScaleLayout> {
        self.v.scales
    }

    /// Returns the size of one token in one layer, in bytes: K and V, including the scales stored per block.
    pub fn token_bytes(&self) -> usize {
        self.token_bytes
    }

    /// Returns the size of one block in all layers, in bytes: K and V, including the scales stored per block.
    /// Static scales do not belong to a block, so they are not counted.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns the number of slots per layer: `num_blocks * block_size`.
    pub fn num_slots(&self) -> usize {
        self.shape.num_blocks * self.shape.block_size
    }

    /// Returns the number of blocks needed for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.shape.block_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Fp8Kind, KvFormat, ScaleScope};

    fn shape() -> KvShape {
        KvShape {
            num_layers: 2,
            num_blocks: 3,
            block_size: 4,
            k_heads: 2,
            v_heads: 3,
            k_dim: 8,
            v_dim: 6,
            format: DType::F16.into(),
            order: BlockOrder::TokenMajor,
        }
    }

    /// Asserts that no two rows of `len` elements overlap and that the rows together fill `elements`
    /// elements.
    fn tile(s: &KvShape, strides: PlaneStrides, heads: usize, len: usize, elements: usize) {
        let mut seen = vec![false; elements];
        for layer in 0..s.num_layers {
            for block in 0..s.num_blocks {
                for token in 0..s.block_size {
                    for head in 0..heads {
                        for i in 0..len {
                            let at = strides.at(layer, block, token, head) + i;
                            assert!(!std::mem::replace(&mut seen[at], true));
                        }
                    }
                }
            }
        }
        assert!(seen.into_iter().all(|x| x), "no gaps");
    }

    #[test]
    fn every_element_and_every_scale_has_its_own_address() {
        for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
            for format in [DType::F16.into(), KvFormat::Int8 { group: 1 }, KvFormat::Int4 { group: 2 }] {
                let layout = KvLayout::new(KvShape { format, order, ..shape() }).unwrap();
                let (s, bits) = (layout.shape(), format.storage_dtype().bits());
                tile(s, layout.k_strides(), s.k_heads, s.k_dim, layout.k_bytes() * 8 / bits);
                tile(s, layout.v_strides(), s.v_heads, s.v_dim, layout.v_bytes() * 8 / bits);
                for (scales, heads) in [(layout.k_scales(), s.k_heads), (layout.v_scales(), s.v_heads)] {
                    if let Some(scales) = scales {
                        tile(s, scales.strides, heads, scales.per_row, scales.bytes / 2);
                    }
                }
            }
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
    fn keys_and_values_may_lie_in_turn() {
        let shape =
            KvShape { v_heads: shape().k_heads, v_dim: shape().k_dim, format: DType::F16.into(), ..shape() };
        let (heads, dim, size) = (shape.k_heads, shape.k_dim, shape.block_size);
        // Each row holds a token's key, followed by its value.
        let token = 2 * heads * dim;
        let block = size * token;
        let strides = PlaneStrides { layer: block * shape.num_blocks, block, head: 2 * dim, token };
        let layout = KvLayout::with_strides(shape.clone(), strides, strides).unwrap();
        let bytes = 2 * dim as u64;
        assert!(layout.in_turn(bytes));
        assert!(!layout.in_turn(bytes - 2) && !layout.in_turn(bytes + 2), "rows overlap");
        assert!(!layout.in_turn(bytes + 1) && !layout.in_turn(0), "elements overlap");
        // Each block of keys is followed by a block of values.
        let half = size * heads * dim;
        let strides = PlaneStrides {
            layer: 2 * half * shape.num_blocks,
            block: 2 * half,
            head: dim,
            token: heads * dim,
        };
        let layout = KvLayout::with_strides(shape.clone(), strides, strides).unwrap();
        assert!(layout.in_turn(2 * half as u64) && !layout.in_turn(half as u64));
        let dense = KvLayout::new(shape).unwrap();
        assert!(!dense.in_turn(bytes), "no room between rows");
    }

    #[test]
    fn rows_of_four_bit_elements_begin_on_a_byte() {
        let shape = KvShape { format: KvFormat::Int4 { group: 2 }, ..shape() };
        let good = KvLayout::new(shape.clone()).unwrap();
        let odd = PlaneStrides { layer: good.v_strides().layer + 1, ..good.v_strides() };
        assert!(matches!(
            KvLayout::with_strides(shape, good.k_strides(), odd),
            Err(Error::InvalidStrides { what: "V", .. })
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
    fn formats_that_do_not_fit_the_rows_are_refused() {
        let with = |format| KvLayout::new(KvShape { format, ..shape() });
        assert_eq!(with(KvFormat::Int8 { group: 0 }), Err(Error::Zero { what: "group" }));
        assert!(matches!(
            with(KvFormat::Int8 { group: 4 }),
            Err(Error::NotMultiple { what: "v_dim", value: 6, of: 4 })
        ));
        assert!(matches!(
            with(KvFormat::Int8 { group: 3 }),
            Err(Error::NotMultiple { what: "k_dim", value: 8, of: 3 })
        ));
        assert!(matches!(
            with(KvFormat::Int4 { group: 1 }),
            Err(Error::NotMultiple { what: "group of int4", value: 1, of: 2 })
        ));
        let odd = KvShape { format: KvFormat::Int4 { group: 2 }, k_dim: 7, ..shape() };
        assert!(matches!(KvLayout::new(odd), Err(Error::NotMultiple { what: "k_dim", value: 7, of: 2 })));
        assert!(matches!(with(DType::U8.into()), Err(Error::InvalidFormat { .. })));
    }

    #[test]
    fn a_budget_is_the_total_over_layers_and_scales_and_never_exceeded() {
        for format in [DType::F16.into(), KvFormat::Int8 { group: 2 }, KvFormat::Int4 { group: 2 }] {
            let shape = KvShape { format, ..shape() };
            let one = KvLayout::new(KvShape { num_blocks: 1, ..shape.clone() }).unwrap().block_bytes();
            let layout = KvLayout::within_budget(&shape, 5 * one + one / 2).unwrap();
            assert_eq!(layout.shape().num_blocks, 5);
            let scales = [layout.k_scales(), layout.v_scales()].map(|s| s.map_or(0, |s| s.bytes));
            assert_eq!(layout.k_bytes() + layout.v_bytes() + scales[0] + scales[1], 5 * one);
            assert_eq!(
                KvLayout::within_budget(&shape, one - 1),
                Err(Error::NotEnoughMemory { budget: one - 1, block_bytes: one })
            );
        }
    }

    #[test]
    fn static_scales_belong_to_no_block() {
        for (scales, counts) in [(ScaleScope::PerTensor, [1, 1]), (ScaleScope::PerHead, [2, 3])] {
            let format = KvFormat::Fp8 { kind: Fp8Kind::E4M3, scales };
            let layout = KvLayout::new(KvShape { format, ..shape() }).unwrap();
            let (k, v) = (layout.k_scales().unwrap(), layout.v_scales().unwrap());
            assert!(k.is_static() && v.is_static());
            assert_eq!([k.bytes, v.bytes], counts.map(|n| 2 * n * 4));
            assert_eq!(k.strides.at(1, 2, 3, 1), counts[0] + counts[0] / 2);
            assert_eq!(layout.token_bytes(), 2 * 8 + 3 * 6);
        }
    }
}
