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
    /// used at another position, the query is rotated to compensate for the difference, up to rounding.
    #[default]
    Rotated,
    /// Keys as the model projected them. The reader rotates each key to the position where it is used. A key
    /// used at any position is therefore bit-identical to the key of a fresh prefill at that position (in
    /// f32, and in any format compared with a prefill that stores unrotated keys). Reading costs one rotation
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
                what: format!("key form {other:?} (rotated and unrotated are)"),
            }),
        }
    }
}
