//! The element types of keys, values, rows and stored codes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::{Error, Result, product};

/// The type of one stored element.
///
/// Kernels compute with the types in [`COMPUTE`](Self::COMPUTE). Quantised caches store `I8`, `I4` and the
/// two 8-bit floats; see [`KvFormat`](crate::KvFormat). `U8` is for plain bytes.
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
    /// OCP 8-bit float with 4 exponent bits, without infinity.
    F8E4M3,
    /// OCP 8-bit float with 5 exponent bits.
    F8E5M2,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 4-bit integer. Two elements share a byte; the first one is in the low half.
    I4,
}

impl DType {
    /// All element types.
    pub const ALL: [Self; 8] =
        [Self::F32, Self::F16, Self::BF16, Self::F8E4M3, Self::F8E5M2, Self::I8, Self::U8, Self::I4];

    /// The element types that every kernel accepts for its rows, in the order that test suites use.
    pub const COMPUTE: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// Returns the number of bits per element.
    pub const fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::BF16 => 16,
            Self::F8E4M3 | Self::F8E5M2 | Self::I8 | Self::U8 => 8,
            Self::I4 => 4,
        }
    }

    /// Returns the number of bytes that `count` elements take. A partial last byte counts as a whole byte.
    ///
    /// ```
    /// use kvcore::DType;
    /// assert_eq!(DType::BF16.bytes_for(10)?, 20);
    /// assert_eq!(DType::I4.bytes_for(5)?, 3);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Overflow`] if the number of bits does not fit in an `isize`.
    pub fn bytes_for(self, count: usize) -> Result<usize> {
        Ok(product("bits of elements", &[count, self.bits()])?.div_ceil(8))
    }

    /// Returns the alignment of one element in bytes, at least 1.
    pub const fn align(self) -> usize {
        self.bits().div_ceil(8)
    }

    /// Returns whether kernels compute with rows of this type; see [`COMPUTE`](Self::COMPUTE).
    pub fn is_compute(self) -> bool {
        Self::COMPUTE.contains(&self)
    }

    /// Returns the type's name in configs and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I4 => "i4",
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
            what: format!("element type {s:?}; use one of {}", Self::ALL.map(Self::name).join(", ")),
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
    fn elements_smaller_than_a_byte_are_packed() {
        assert_eq!((DType::I4.bytes_for(7), DType::I4.bytes_for(8)), (Ok(4), Ok(4)));
        assert_eq!(DType::ALL.map(DType::align), [4, 2, 2, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn byte_counts_that_overflow_are_errors() {
        assert!(matches!(DType::F32.bytes_for(usize::MAX / 2), Err(Error::Overflow { .. })));
        assert!(matches!(DType::I4.bytes_for(usize::MAX), Err(Error::Overflow { .. })));
    }
}
