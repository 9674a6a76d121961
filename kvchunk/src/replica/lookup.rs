//! The lookup with replicas: a local lookup that fetches missing pieces from other replicas.

use super::ReplicaLink;
use crate::assembly::{FoundPiece, LocalLookup, PromptLookup};
use crate::cache::{Acquired, ChunkCacheManager, SystemFound};
use crate::error::Result;
use crate::hash::ChunkPiece;

/// A lookup that asks other replicas for the pieces that this replica lacks.
#[derive(Debug)]
pub(crate) struct ReplicaLookup<'a> {
    pub(crate) local: LocalLookup<'a>,
    pub(crate) link: &'a ReplicaLink,
}

impl PromptLookup for ReplicaLookup<'_> {
    fn fill_system(&self, tokens: &[u32], wait: bool) -> Result<SystemFound> {
        self.local.fill_system(tokens, wait)
    }

    fn hold(&self, pieces: &[Vec<ChunkPiece<'_>>]) -> Result<Vec<Vec<Option<FoundPiece>>>> {
        self.local.hold(pieces)
    }

    fn acquire(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        let pull = |cache: &ChunkCacheManager| {
            cache.get_chunk_with_remote_lookup(self.local.tenant, piece, stored_start, self.link).acquired
        };
        self.local.chunks.map_or(Acquired::NoRoom, pull)
    }
}
