//! In which form keys lie in a cache.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::{Error, Result};

/// Whether cached keys are rotated already.
///
/// ```
/// use kvcore::KeyForm;
/// assert_eq!("unrotated".parse(), Ok(KeyForm::Unrotated));
/// assert_eq!(KeyForm::default().to_string(), "rotated");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyForm {
    /// Rotated to the position where they were stored. Reading costs nothing; used elsewhere, the query
    /// makes up for the difference, to rounding.
    #[default]
    Rotated,
    /// As the model projected them. Whoever reads them rotates them to the position where they are used,
    /// so that a key used anywhere is bit for bit the key of a fresh prefill there (in f32, and in any
    /// format against a prefill that stores them so). Reading costs a rotation per key. `KVQuant` (Hooper
    /// et al., 2024) quantises keys so, because rotation spreads a channel's outliers over its pair.
    Unrotated,
}

impl fmt::Display for KeyForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rotated => "rotated",
            Self::Unrotated => "unrotated",
        })
    }
}

impl FromStr for KeyForm {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "rotated" => Ok(Self::Rotated),
            "unrotated" => Ok(Self::Unrotated),
            _ => Err(Error::InvalidRope(format!("keys are stored rotated or unrotated, not {s:?}"))),
        }
    }
}
