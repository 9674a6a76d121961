//! Keys as text: 64 hexadecimal digits, in JSON and wherever a router reads them.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::BlockKey;

impl BlockKey {
    /// All bytes as hexadecimal digits.
    ///
    /// ```
    /// use kvcore::BlockKey;
    /// assert_eq!(BlockKey::from_bytes([0xa5; 32]).to_hex(), "a5".repeat(32));
    /// ```
    pub fn to_hex(&self) -> String {
        self.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The key that [`to_hex`](Self::to_hex) wrote; `None` if the text is none.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
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
