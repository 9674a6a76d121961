//! Content keys: 256-bit chained hashes of everything that a block's bytes depend on.
//!
//! The bytes of a cached block depend on the model, the rotary specification, the element type, the tenant,
//! the preceding tokens and the block's own tokens. The block's key covers exactly these inputs, so two
//! contexts with the same key have the same bytes. With 256 bits of a keyed cryptographic hash, neither
//! accidental nor deliberate collisions are feasible.

use std::fmt;

mod compress;
mod hex;
mod prompt;
mod scheme;
mod scope;
mod vllm;

pub use prompt::PromptKeys;
pub use scheme::KeyScheme;
pub use scope::{KeyScope, ScopeEncoder};
pub use vllm::{VllmChain, VllmExtras};

/// The 256-bit key of a block or of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey([u8; 32]);

impl BlockKey {
    /// Creates the key with the given bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of the key.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the first 64 bits of the key, for hash tables. These bits need no further hashing, because the
    /// key is a uniform digest.
    pub(crate) fn word(&self) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(word)
    }

    /// Returns the key of `tokens` as a continuation of this key's tokens: the BLAKE3 hash of `tokens`, keyed
    /// by this key.
    ///
    /// The hash covers the input's length, so a partial block never has the key of a full block.
    ///
    /// ```
    /// use kvcore::{BlockKey, KeyScope};
    /// let root = KeyScope::new("my-model", b"weights digest").root();
    /// let ab = root.child(&[1, 2]);
    /// assert_ne!(ab, root.child(&[2, 1]));
    /// assert_ne!(ab.child(&[3]), root.child(&[1, 2, 3]));
    /// ```
    #[must_use]
    pub fn child(&self, tokens: &[u32]) -> Self {
        if tokens.len() == compress::TOKENS {
            return Self(compress::HashChain::new(&self.0).next(tokens));
        }
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        if cfg!(target_endian = "little") {
            // The whole input is hashed in one call, so that BLAKE3 can hash several chunks in parallel.
            return Self(*hasher.update(bytemuck::cast_slice(tokens)).finalize().as_bytes());
        }
        let mut bytes = [0u8; 64 * 4];
        for part in tokens.chunks(64) {
            for (slot, token) in bytes.chunks_exact_mut(4).zip(part) {
                slot.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..part.len() * 4]);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Derives a key for another purpose. No chain of tokens starting at this key can produce the derived
    /// key.
    #[must_use]
    pub fn derive(&self, purpose: &'static str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(purpose);
        hasher.update(&self.0);
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the keys of the consecutive blocks of `tokens`, including the key of a partial last block. A
    /// block size of 0 counts as 1.
    pub fn chain(&self, tokens: &[u32], block_size: usize) -> Vec<Self> {
        let block_size = block_size.max(1);
        let mut keys = Vec::with_capacity(tokens.len().div_ceil(block_size));
        let mut rest = tokens;
        if block_size == compress::TOKENS {
            let mut chain = compress::HashChain::new(&self.0);
            let full = tokens.chunks_exact(block_size);
            rest = full.remainder();
            keys.extend(full.map(|block| Self(chain.next(block))));
        }
        for block in rest.chunks(block_size) {
            keys.push(keys.last().unwrap_or(self).child(block));
        }
        keys
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({self})")
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_depends_on_everything_before() {
        let root = KeyScope::new("m", b"w").root();
        let tokens: Vec<u32> = (0..40).collect();
        let chain = root.chain(&tokens, 16);
        assert_eq!(chain.len(), 3);
        let mut other = tokens.clone();
        other[0] = 99;
        let changed = root.chain(&other, 16);
        assert!(chain.iter().zip(&changed).all(|(a, b)| a != b));
        assert_eq!(chain[..2], root.chain(&tokens[..32], 16)[..]);
        assert_ne!(chain[2], root.chain(&tokens[..39], 16)[2], "a partial block is not a longer one");
    }

    #[test]
    fn long_parts_are_hashed_whole() {
        let root = KeyScope::new("m", b"w").root();
        let tokens: Vec<u32> = (0..200).collect();
        for at in [0, 63, 64, 199] {
            let mut other = tokens.clone();
            other[at] += 1;
            assert_ne!(root.child(&tokens), root.child(&other));
        }
    }

    #[test]
    fn a_block_of_sixteen_tokens_is_hashed_as_any_other() {
        let root = KeyScope::new("m", b"w").root();
        let tokens: Vec<u32> = (0..16).map(|i| i * 0x0101_4321).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        let expected = blake3::keyed_hash(root.as_bytes(), &bytes);
        assert_eq!(root.child(&tokens).0, *expected.as_bytes());
        let long: Vec<u32> = (0..70).collect();
        let chain = root.chain(&long, 16);
        let one_by_one = long.chunks(16).scan(root, |key, block| {
            *key = key.child(block);
            Some(*key)
        });
        assert_eq!(chain, one_by_one.collect::<Vec<_>>());
    }

    #[test]
    fn purposes_are_separate() {
        let root = KeyScope::new("m", b"w").root();
        assert_ne!(root.derive("kvchunk chunk v1"), root.derive("kvchunk system v1"));
    }
}
