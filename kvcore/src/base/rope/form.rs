//! The form in which a cache stores its keys.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::{Error, Result};

// Decision: docs/decisions/device.md#the-form-of-keys-is-an-argument-of-attend
/// The form of cached keys: rotated or not.
///
/// ```
/// use kvcore::KeyForm;
/// assert_eq!("unrotated".parse(), Ok(KeyForm::Unrotated));
/// assert_eq!(KeyForm::default().to_string(), "rotated");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyForm {
    /// Keys rotated to the position where they were stored. Reading them costs nothing extra. If a key is
    /// used at another position, the query is rotated by the difference instead, which gives the same result
    /// up to rounding.
    #[default]
    Rotated,
    /// Keys as the model projected them. The reader rotates each key to the position where it is used. A
    /// reused key is therefore rotated exactly like a key that was computed for that position: the two have
    /// the same bits in f32, and in any other format if both are stored unrotated. Reading costs one rotation
    /// per key. `KVQuant` (Hooper et al., 2024) quantises unrotated keys, because rotation spreads a
    /// channel's outliers over its pair.
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

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "rotated" => Ok(Self::Rotated),
            "unrotated" => Ok(Self::Unrotated),
            other => Err(Error::Unsupported {
                backend: "kvcore",
                what: format!("key form {other:?}; use rotated or unrotated"),
            }),
        }
    }
}
