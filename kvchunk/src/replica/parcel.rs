//! Parcels: the contents of chunks on their way from one replica to another.

use kvtier::{Record, RecordBuffer, RecordId};
use xxhash_rust::xxh3::Xxh3;

use super::ReplicaDevice;
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
    /// The piece's contents with its identity. Static scales have the sender's values.
    pub record: Record,
    /// The xxh3 digest over the tokens and the buffers.
    pub digest: u64,
}

impl ChunkParcel {
    /// Creates a parcel from a chunk's record.
    pub(super) fn seal(record: Record) -> Self {
        let digest = digest(&record.id.tokens, &record.buffers);
        Self { record, digest }
    }

    /// Checks that the parcel is the requested piece, has the local layout, and is undamaged.
    pub(super) fn check(
        &self,
        device: &ReplicaDevice,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
    ) -> Result<()> {
        let wanted = device.record_id(piece.hash().key, piece.tokens(), stored_start);
        let RecordId { key, tokens, stored_start, label } = &self.record.id;
        agree([
            ("key", *key == wanted.key),
            ("tokens", *tokens == wanted.tokens),
            ("position of the first key", *stored_start == wanted.stored_start),
            ("layout", *label == wanted.label),
        ])?;
        if digest(tokens, &self.record.buffers) == self.digest {
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

fn digest(tokens: &[u32], buffers: &[RecordBuffer]) -> u64 {
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
