//! Keyed BLAKE3 for inputs of exactly one BLAKE3 block, without the set-up for longer inputs. Sixteen tokens,
//! the usual size of a cache block, are 64 bytes and fill one such block.
//!
//! The compression function is not part of the documented interface of `blake3`, so this crate depends on one
//! minor version of `blake3`. A test compares the results with `blake3::keyed_hash`.

use blake3::platform::{Platform, le_bytes_from_words_32, words_from_le_bytes_32};

/// Number of tokens that fill one input block.
pub(super) const TOKENS: usize = 16;

/// The flags for an input of a single chunk with a single block: chunk start, chunk end, root, keyed.
const FLAGS: u8 = 1 | 2 | 8 | 16;

// Decision: docs/decisions/paging.md#block-keys-call-blake3s-compression-function
/// A chain of keyed hashes, in which each hash is the key of the next one. The state is stored in words,
/// because converting it to bytes would take longer than all other overhead.
pub(super) struct HashChain {
    state: [u32; 8],
    platform: Platform,
}

impl HashChain {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Self { state: words_from_le_bytes_32(key), platform: Platform::detect() }
    }

    /// Returns the hash of [`TOKENS`] tokens, little-endian, keyed by the previous hash.
    pub(super) fn next(&mut self, tokens: &[u32]) -> [u8; 32] {
        let mut block = [0; 64];
        for (slot, token) in block.chunks_exact_mut(4).zip(tokens) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        self.platform.compress_in_place(&mut self.state, &block, 64, 0, FLAGS);
        le_bytes_from_words_32(&self.state)
    }
}
