//! Element types of keys and values.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, product};

/// The type of one element of K or V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of an [`F32`](Self::F32).
    BF16,
}

impl DType {
    /// All element types, in the order in which suites run them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// Bits of one element.
    pub const fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::BF16 => 16,
        }
    }

    /// Bytes of `count` elements, or [`Error::Overflow`].
    ///
    /// ```
    /// use kvcore::DType;
    /// assert_eq!(DType::BF16.bytes_for(10)?, 20);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    pub fn bytes_for(self, count: usize) -> Result<usize> {
        Ok(product("bytes of elements", &[count, self.bits()])?.div_ceil(8))
    }

    /// Alignment of one element in bytes.
    pub const fn align(self) -> usize {
        self.bits() / 8
    }

    /// The name used in configs and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| Error::Unsupported {
            backend: "kvcore",
            what: format!("element type {s:?} (f32, f16 and bf16 are)"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_refused() {
        for d in DType::ALL {
            assert_eq!(d.name().parse::<DType>(), Ok(d));
        }
        assert!("f64".parse::<DType>().unwrap_err().to_string().contains("f64"));
    }

    #[test]
    fn byte_counts_that_overflow_are_errors() {
        assert!(matches!(DType::F32.bytes_for(usize::MAX / 2), Err(Error::Overflow { .. })));
    }
}
