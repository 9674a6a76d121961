//! The storage formats of keys and values.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::Fp8Kind;
use crate::base::{DType, Error, Result};

/// The default number of elements that share a scale in integer formats.
const DEFAULT_GROUP: usize = 32;

/// The part of an fp8 cache that shares one static scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleScope {
    /// All of K, or all of V, in one layer.
    PerTensor,
    /// One head of K or of V in one layer.
    PerHead,
}

/// The storage format of the elements of K and V.
///
/// On the command line and in configs, a format is one word: `f32`, `f16`, `bf16`, `int8` or `int8:GROUP`,
/// `int4` or `int4:GROUP`, `fp8-e4m3`, `fp8-e5m2`. Both fp8 formats accept the suffix `:head`, for one scale
/// per head.
///
/// ```
/// use kvcore::{DType, KvFormat};
/// assert_eq!("int8".parse(), Ok(KvFormat::Int8 { group: 32 }));
/// assert_eq!(KvFormat::from(DType::BF16).to_string(), "bf16");
/// assert_eq!(KvFormat::Int4 { group: 64 }.storage_dtype(), DType::I4);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum KvFormat {
    /// Unquantised elements of one of the types in [`DType::COMPUTE`].
    Dense(DType),
    /// Signed bytes, with one f16 scale for each `group` consecutive elements of a head's row.
    Int8 {
        /// Number of elements that share a scale. Must divide `k_dim` and `v_dim`.
        group: usize,
    },
    /// Signed 4-bit integers, with scales as in [`Int8`](Self::Int8).
    Int4 {
        /// Number of elements that share a scale. Must be even, and must divide `k_dim` and `v_dim`.
        group: usize,
    },
    /// 8-bit floats with static f32 scales.
    Fp8 {
        /// The kind of 8-bit float.
        kind: Fp8Kind,
        /// The part of the cache that shares a scale.
        scales: ScaleScope,
    },
}

impl KvFormat {
    /// The names of all quantised formats, as returned by [`name`](Self::name).
    pub const QUANTIZED: [&str; 4] = ["int8", "int4", "fp8-e4m3", "fp8-e5m2"];

    /// Returns the element type of the stored codes.
    pub const fn storage_dtype(self) -> DType {
        match self {
            Self::Dense(dtype) => dtype,
            Self::Int8 { .. } => DType::I8,
            Self::Int4 { .. } => DType::I4,
            Self::Fp8 { kind: Fp8Kind::E4M3, .. } => DType::F8E4M3,
            Self::Fp8 { kind: Fp8Kind::E5M2, .. } => DType::F8E5M2,
        }
    }

    /// Returns whether elements are stored as codes with scales.
    pub const fn is_quantized(self) -> bool {
        !matches!(self, Self::Dense(_))
    }

    /// Returns the name of the format without its group or scope. Backends list these names in their
    /// capabilities.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dense(dtype) => dtype.name(),
            Self::Int8 { .. } => "int8",
            Self::Int4 { .. } => "int4",
            Self::Fp8 { kind: Fp8Kind::E4M3, .. } => "fp8-e4m3",
            Self::Fp8 { kind: Fp8Kind::E5M2, .. } => "fp8-e5m2",
        }
    }

    /// Checks that rows of `dim` elements can be stored in this format.
    ///
    /// # Errors
    /// Returns [`Error::InvalidFormat`] for a dense type that kernels cannot compute with, [`Error::Zero`] if
    /// the group is 0, and [`Error::NotMultiple`] if the group does not divide `dim` or is odd for int4.
    pub(crate) fn check_dim(self, what: &'static str, dim: usize) -> Result<()> {
        match self {
            Self::Dense(dtype) if !dtype.is_compute() => Err(Error::InvalidFormat {
                format: self,
                reason: "kernels cannot compute with it".to_owned(),
            }),
            Self::Int8 { group: 0 } | Self::Int4 { group: 0 } => Err(Error::Zero { what: "group" }),
            Self::Int4 { group } if group % 2 == 1 => {
                Err(Error::NotMultiple { what: "group of int4", value: group, of: 2 })
            }
            Self::Int8 { group } | Self::Int4 { group } if !dim.is_multiple_of(group) => {
                Err(Error::NotMultiple { what, value: dim, of: group })
            }
            _ => Ok(()),
        }
    }
}

impl From<DType> for KvFormat {
    fn from(dtype: DType) -> Self {
        Self::Dense(dtype)
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Int8 { group } | Self::Int4 { group } => write!(f, ":{group}"),
            Self::Fp8 { scales: ScaleScope::PerHead, .. } => f.write_str(":head"),
            _ => Ok(()),
        }
    }
}

impl FromStr for KvFormat {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let unknown = || Error::Unsupported {
            backend: "kvcore",
            what: format!(
                "KV format {s:?}; use f32, f16, bf16, int8[:GROUP], int4[:GROUP], fp8-e4m3[:head] or fp8-e5m2[:head]"
            ),
        };
        let (name, option) = s.split_once(':').map_or((s, None), |(name, option)| (name, Some(option)));
        let group = || match option {
            None => Ok(DEFAULT_GROUP),
            Some(text) => match text.parse() {
                Ok(0) => Err(Error::Zero { what: "group" }),
                parsed => parsed.map_err(|_| unknown()),
            },
        };
        let scales = || match option {
            None => Ok(ScaleScope::PerTensor),
            Some("head") => Ok(ScaleScope::PerHead),
            Some(_) => Err(unknown()),
        };
        match name {
            "int8" => Ok(Self::Int8 { group: group()? }),
            "int4" => Ok(Self::Int4 { group: group()? }),
            "fp8-e4m3" => Ok(Self::Fp8 { kind: Fp8Kind::E4M3, scales: scales()? }),
            "fp8-e5m2" => Ok(Self::Fp8 { kind: Fp8Kind::E5M2, scales: scales()? }),
            _ => match s.parse::<DType>() {
                Ok(dtype) if dtype.is_compute() => Ok(Self::Dense(dtype)),
                _ => Err(unknown()),
            },
        }
    }
}

impl TryFrom<String> for KvFormat {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<KvFormat> for String {
    fn from(format: KvFormat) -> Self {
        format.to_string()
    }
}
