//! The precision in which rows are multiplied by a matrix.

use std::fmt;
use std::str::FromStr;

use kvcore::Error;

use super::StoredType;
use crate::NAME;

/// The precision in which [`Products`](super::Products) multiplies rows by a stored matrix.
///
/// ```
/// use kvbackend_cpu::dense::ComputeType;
/// assert_eq!("int8".parse(), Ok(ComputeType::Int8));
/// assert_eq!(ComputeType::default().to_string(), "exact");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ComputeType {
    /// Rows and matrix elements are multiplied in f32. Only products and their sums are rounded.
    #[default]
    Exact,
    /// For matrices in bf16, rows are rounded to bf16, as models in bf16 do elsewhere. Products are summed in f32. Other
    /// matrices are multiplied as in [`Exact`](Self::Exact).
    Bf16,
    /// For matrices in ggml blocks, rows are rounded to blocks of 32 signed bytes, as ggml rounds them to `Q8_0`. Other
    /// matrices are multiplied as in [`Exact`](Self::Exact).
    Int8,
}

impl ComputeType {
    /// All compute types.
    pub const ALL: [Self; 3] = [Self::Exact, Self::Bf16, Self::Int8];

    /// Returns whether rows are rounded before they are multiplied by a matrix of a type.
    pub fn rounds_for(self, dtype: StoredType) -> bool {
        match self {
            Self::Exact => false,
            Self::Bf16 => dtype == StoredType::BF16,
            Self::Int8 => dtype.is_blocks(),
        }
    }
}

impl fmt::Display for ComputeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        })
    }
}

impl FromStr for ComputeType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|compute| compute.to_string() == s).ok_or_else(|| Error::Unsupported {
            backend: NAME,
            what: format!("compute type {s:?}; use exact, bf16 or int8"),
        })
    }
}
