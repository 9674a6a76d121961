//! The hash functions for chunk keys.

use kvcore::BlockKey;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::Xxh3;

/// The hash function for chunk keys.
///
/// | algorithm | a hit compares | speed |
/// |---|---|---|
/// | BLAKE3, keyed by the preceding content's hash | the tokens | the fastest collision-resistant one |
/// | SHA-256 | the tokens | slower; for installations that must use it |
/// | xxh3-128 | everything that the hash covers | the fastest, but anyone can produce collisions |
///
/// With xxh3-128, a hit also compares the root key (model, tenant), the mode, the system prompt, the
/// preceding tokens and the piece's own tokens, so that collisions become misses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HashAlgorithm {
    /// BLAKE3, 256 bits.
    #[default]
    Blake3,
    /// SHA-256.
    Sha256,
    /// xxh3, 128 bits, not cryptographic.
    #[serde(rename = "xxh3-128", alias = "xxhash")]
    Xxh3,
}

impl HashAlgorithm {
    /// All algorithms.
    pub const ALL: [Self; 3] = [Self::Blake3, Self::Sha256, Self::Xxh3];

    /// Returns whether it is infeasible to construct two different contents with the same hash.
    pub(crate) fn resists_collisions(self) -> bool {
        self != Self::Xxh3
    }

    /// Returns the hash of `tokens`, chained to `parent`, the hash of the content before them. The hash also
    /// covers the number of tokens.
    pub(crate) fn child(self, parent: &BlockKey, tokens: &[u32]) -> BlockKey {
        let mut bytes = [0; 32];
        match self {
            Self::Blake3 => return parent.child(tokens),
            Self::Sha256 => {
                let mut hasher = Sha256::new();
                hasher.update(parent.as_bytes());
                feed(tokens, |part| hasher.update(part));
                bytes.copy_from_slice(&hasher.finalize());
            }
            Self::Xxh3 => {
                let mut hasher = Xxh3::new();
                hasher.update(parent.as_bytes());
                feed(tokens, |part| hasher.update(part));
                bytes[..16].copy_from_slice(&hasher.digest128().to_le_bytes());
            }
        }
        BlockKey::from_bytes(bytes)
    }
}

/// Passes the number of tokens, followed by the tokens, to `update` as little-endian bytes.
fn feed(tokens: &[u32], mut update: impl FnMut(&[u8])) {
    update(&(tokens.len() as u64).to_le_bytes());
    let mut bytes = [0u8; 256 * 4];
    for part in tokens.chunks(256) {
        for (slot, token) in bytes.chunks_exact_mut(4).zip(part) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        update(&bytes[..part.len() * 4]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_libraries_over_the_canonical_bytes() {
        let parent = BlockKey::from_bytes([7; 32]);
        let tokens: Vec<u32> = (0..1000).collect();
        let mut bytes = vec![7u8; 32];
        bytes.extend(1000u64.to_le_bytes());
        bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
        let sha = HashAlgorithm::Sha256.child(&parent, &tokens);
        assert_eq!(sha.as_bytes()[..], Sha256::digest(&bytes)[..]);
        let xxh3 = HashAlgorithm::Xxh3.child(&parent, &tokens);
        assert_eq!(xxh3.as_bytes()[..16], xxhash_rust::xxh3::xxh3_128(&bytes).to_le_bytes());
        assert_eq!(xxh3.as_bytes()[16..], [0; 16]);
    }
}
