//! Parcels: the contents of chunks on their way from one replica to another.

use std::sync::Arc;

use kvcore::{BlockKey, KeyForm, KvShape};
use xxhash_rust::xxh3::Xxh3;

use super::ReplicaDevice;
use crate::cache::PieceHold;
use crate::error::{Error, Result};
use crate::hash::ChunkPiece;

// Decision: docs/decisions/chunks.md#a-received-chunk-is-checked-not-trusted
/// The contents of a piece on their way to another replica: whole blocks of all layers, with every property
/// that must be checked before they are used.
///
/// The fields are public for transports that serialise them. The digest detects damage, but proves nothing
/// about the sender. Replicas trust each other, like ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ChunkParcel {
    /// The piece's key.
    pub key: BlockKey,
    /// The piece's tokens.
    pub tokens: Arc<[u32]>,
    /// The position that the first key was rotated to.
    pub stored_start: i64,
    /// The shape of the blocks. `num_blocks` is the number of blocks in this piece.
    pub shape: KvShape,
    /// The form in which keys are stored.
    pub keys: KeyForm,
    /// The bytes of K and of V, each followed by its scales if there are any. Static scales have the sender's
    /// values.
    pub buffers: Vec<Vec<u8>>,
    /// The xxh3 digest over the tokens and the buffers.
    pub digest: u64,
}

impl ChunkParcel {
    /// Creates a parcel from a chunk whose bytes have been read.
    pub(super) fn seal(
        device: &ReplicaDevice,
        chunk: &PieceHold,
        tokens: Arc<[u32]>,
        buffers: Vec<Vec<u8>>,
    ) -> Self {
        let hash = chunk.chunk_hash();
        let shape = device.shape_of(hash.num_blocks);
        let digest = digest(&tokens, &buffers);
        let (key, stored_start, keys) = (hash.key, chunk.cached_position_start(), device.keys);
        Self { key, tokens, stored_start, shape, keys, buffers, digest }
    }

    /// Checks that the parcel is the requested piece, has the local layout, and is undamaged.
    pub(super) fn check(
        &self,
        device: &ReplicaDevice,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
    ) -> Result<()> {
        let hash = piece.hash();
        agree([
            ("key", self.key == hash.key),
            ("tokens", *self.tokens == *piece.tokens()),
            ("position of the first key", self.stored_start == stored_start),
            ("shape of blocks", self.shape == device.shape_of(hash.num_blocks)),
            ("form of keys", self.keys == device.keys),
        ])?;
        if digest(&self.tokens, &self.buffers) == self.digest {
            Ok(())
        } else {
            Err(Error::Damaged("its digest differs from the sender's".to_owned()))
        }
    }
}

/// Checks that every property of a remote chunk agrees with the requested piece. The error names the first
/// property that differs.
pub(super) fn agree(properties: impl IntoIterator<Item = (&'static str, bool)>) -> Result<()> {
    match properties.into_iter().find(|(_, agree)| !agree) {
        None => Ok(()),
        Some((what, _)) => Err(Error::ReplicaDiffers { what }),
    }
}

fn digest(tokens: &[u32], buffers: &[Vec<u8>]) -> u64 {
    let mut digest = Xxh3::new();
    for token in tokens {
        digest.update(&token.to_le_bytes());
    }
    for buffer in buffers {
        digest.update(&(buffer.len() as u64).to_le_bytes());
        digest.update(buffer);
    }
    digest.digest()
}
