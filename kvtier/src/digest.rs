//! The digest of a record's payload.

use xxhash_rust::xxh3::Xxh3;

/// The digest of a payload: it covers the digests of the buffers, followed by the bytes behind the buffers. Digests of
/// buffers are computed wherever the bytes pass by anyway.
pub(crate) struct PayloadDigest(Xxh3);

impl PayloadDigest {
    /// Creates the digest of nothing.
    pub(crate) fn new() -> Self {
        Self(Xxh3::new())
    }

    /// Appends the digest of a buffer.
    pub(crate) fn add_buffer(&mut self, digest: u64) {
        self.0.update(&digest.to_le_bytes());
    }

    /// Appends bytes behind the buffers.
    pub(crate) fn add_bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digest so far.
    pub(crate) fn value(&self) -> u64 {
        self.0.digest()
    }
}
