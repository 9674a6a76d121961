//! Keys as strings of 64 hexadecimal digits, for JSON and for messages to routers.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::BlockKey;

impl BlockKey {
    /// Returns the key's bytes as hexadecimal digits.
    ///
    /// ```
    /// use kvcore::BlockKey;
    /// assert_eq!(BlockKey::from_bytes([0xa5; 32]).to_hex(), "a5".repeat(32));
    /// ```
    pub fn to_hex(&self) -> String {
        let digit = |nibble: u8| char::from_digit(u32::from(nibble), 16).unwrap_or('0');
        self.as_bytes().iter().flat_map(|&byte| [digit(byte >> 4), digit(byte & 15)]).collect()
    }

    /// Parses the output of [`to_hex`](Self::to_hex). Returns `None` if `text` is not 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self::from_bytes(bytes))
    }
}

impl Serialize for BlockKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_hex())
    }
}

impl<'de> Deserialize<'de> for BlockKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::from_hex(&text).ok_or_else(|| D::Error::custom("a key is 64 hexadecimal digits"))
    }
}
