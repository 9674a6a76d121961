//! The element types of stored matrices, and the sizes of their blocks.

use std::fmt;

/// The element type of a stored matrix. Blocks have ggml's formats and consist of consecutive elements of a
/// row.
///
/// ```
/// use kvbackend_cpu::dense::StoredType;
/// assert_eq!((StoredType::Q8_0.block_elements(), StoredType::Q8_0.block_bytes()), (32, 34));
/// assert_eq!(StoredType::Q4_1.row_bytes(576), Some(360));
/// assert_eq!(StoredType::Q4_1.row_bytes(577), None, "rows consist of whole blocks");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoredType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of an f32.
    BF16,
    /// ggml's `Q8_0`: 32 elements in 34 bytes, an f16 scale and 32 signed bytes. Each element is its byte
    /// times the scale.
    Q8_0,
    /// ggml's `Q4_K`: 256 elements in 144 bytes. A block has two f16 factors, `d` for the scales and `m` for
    /// the minima; 12 bytes with a 6-bit scale and a 6-bit minimum for each of the eight groups of 32
    /// elements; and 128 bytes with two 4-bit elements each. An element is `d · scale · q − m · minimum`.
    Q4K,
    /// ggml's `Q4_0`: 32 elements in 18 bytes.
    Q4_0,
    /// ggml's `IQ4_NL`: 32 elements in 18 bytes, which are indices into a table of 16 values.
    Iq4Nl,
    /// ggml's `Q4_1`: 32 elements in 20 bytes.
    Q4_1,
    /// ggml's `Q5_0`: 32 elements in 22 bytes.
    Q5_0,
    /// ggml's `Q5_1`: 32 elements in 24 bytes.
    Q5_1,
    /// ggml's `Q2_K`: 256 elements in 84 bytes.
    Q2K,
    /// ggml's `Q3_K`: 256 elements in 110 bytes.
    Q3K,
    /// ggml's `Q5_K`: 256 elements in 176 bytes.
    Q5K,
    /// ggml's `Q6_K`: 256 elements in 210 bytes.
    Q6K,
}

impl StoredType {
    /// All element types.
    pub const ALL: [Self; 14] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Iq4Nl,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Returns the number of elements per block: 1 for types without blocks.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Iq4Nl | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the number of bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Returns the number of elements that share a factor: 1 for types without blocks.
    pub(super) const fn group_elements(self) -> usize {
        match self {
            Self::Q2K | Self::Q3K | Self::Q6K => 16,
            Self::F32 | Self::F16 | Self::BF16 => 1,
            _ => 32,
        }
    }

    /// Returns whether groups of elements have a minimum in addition to their scale.
    pub(super) const fn has_minima(self) -> bool {
        matches!(self, Self::Q4_1 | Self::Q5_1 | Self::Q2K | Self::Q4K | Self::Q5K)
    }

    /// Returns whether the type stores elements in blocks that share a scale.
    pub const fn is_blocks(self) -> bool {
        self.block_elements() > 1
    }

    /// Returns the size of a row of `width` elements in bytes, or `None` if the row does not consist of whole
    /// blocks or the size overflows.
    pub const fn row_bytes(self, width: usize) -> Option<usize> {
        if !width.is_multiple_of(self.block_elements()) {
            return None;
        }
        (width / self.block_elements()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Iq4Nl => "IQ4_NL",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        })
    }
}
