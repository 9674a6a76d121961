//! BLAKE3 of inputs that are one full block, under a key, without the set-up for longer inputs: sixteen
//! tokens are 64 bytes, and so are most cache blocks.
//!
//! The compression function is not part of `blake3`'s documented interface, hence the dependency on one
//! minor version of it; a test compares with `blake3::keyed_hash`.

use blake3::platform::{Platform, le_bytes_from_words_32, words_from_le_bytes_32};

/// Tokens that fill an input block.
pub(super) const TOKENS: usize = 16;

/// Flags of an input that is one chunk of one block: chunk start, chunk end, root, keyed.
const FLAGS: u8 = 1 | 2 | 8 | 16;

/// A chain of keyed hashes, each the key of the next. It stays in words: going through bytes would
/// take longer than the rest of the overhead together.
pub(super) struct Chain {
    state: [u32; 8],
    platform: Platform,
}

impl Chain {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Self { state: words_from_le_bytes_32(key), platform: Platform::detect() }
    }

    /// The hash of [`TOKENS`] tokens, little-endian, under the hash before.
    pub(super) fn next(&mut self, tokens: &[u32]) -> [u8; 32] {
        let mut block = [0; 64];
        for (slot, token) in block.chunks_exact_mut(4).zip(tokens) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        self.platform.compress_in_place(&mut self.state, &block, 64, 0, FLAGS);
        le_bytes_from_words_32(&self.state)
    }
}
