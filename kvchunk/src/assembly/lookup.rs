//! The trait for looking up a prompt's parts, and its implementation for this process's caches.

use kvcore::{BlockKey, KvPool};

use crate::cache::{Acquired, ChunkCacheManager, PieceHold, SystemFound, TenantId};
use crate::error::Result;
use crate::hash::ChunkPiece;
use crate::prefix::PrefixFill;

/// A piece that a lookup has found and holds.
#[derive(Debug)]
pub(crate) struct FoundPiece {
    pub(crate) hold: PieceHold,
    /// True if the piece is exact in every cache that is used for the prompt; see [`PieceHold::is_exact`].
    pub(crate) exact: bool,
}

/// A lookup of a prompt's parts: in this process only ([`LocalLookup`]), also in other replicas
/// ([`ReplicaLookup`](crate::replica::ReplicaLookup)), or on all ranks of a model
/// ([`RankLookup`](crate::ranks::RankLookup)).
///
/// - An assembler calls the methods in the order in which they are declared. It calls
///   [`acquire`](Self::acquire) for each piece that [`hold`](Self::hold) did not find.
/// - All pieces found are held before any piece is acquired, so a prompt never evicts its own pieces.
/// - A hold is not a hit yet. The assembler [counts](ChunkCacheManager::count_hit) the holds that it uses.
pub(crate) trait PromptLookup {
    /// Finds or allocates the system prompt's blocks, under the same chain of keys as an ordinary prompt that
    /// starts with these tokens. If `wait` is true and another request is computing the system prompt,
    /// returns a waiter instead.
    fn fill_system(&self, tokens: &[u32], wait: bool) -> Result<SystemFound>;

    /// Looks up pieces, and holds the pieces that are found. The result has the same shape as `pieces`, which
    /// contains one list of pieces per chunk.
    fn hold(&self, pieces: &[Vec<ChunkPiece<'_>>]) -> Result<Vec<Vec<Option<FoundPiece>>>>;

    /// Acquires a piece that was not held, and counts the outcome.
    fn acquire(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired;

    /// Ends the lookup, and returns its result. With several ranks, the lookup fails if it fails on any rank.
    fn conclude(&self, result: Result<()>) -> Result<()> {
        result
    }
}

/// The lookup in the caches of this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LocalLookup<'a> {
    /// The chunk cache, or `None` if no chunks are looked up.
    pub(crate) chunks: Option<&'a ChunkCacheManager>,
    pub(crate) tenant: TenantId,
    pub(crate) main: &'a KvPool,
    /// The root of the system prompt's keys, or `None` if system prompts are neither looked up nor kept.
    pub(crate) system_root: Option<BlockKey>,
}

impl LocalLookup<'_> {
    /// Finds or allocates the system prompt's blocks, even if another request is computing the same system
    /// prompt.
    pub(crate) fn fill_alone(&self, tokens: &[u32]) -> Result<PrefixFill> {
        PrefixFill::new(self.main, self.system_root, tokens)
    }

    /// Holds the pieces that are stored and awake.
    pub(crate) fn held(&self, pieces: &[Vec<ChunkPiece<'_>>]) -> Vec<Vec<Option<FoundPiece>>> {
        let found = |piece: &ChunkPiece<'_>| {
            let hold = self.chunks?.hold(piece)?;
            Some(FoundPiece { exact: hold.is_exact(), hold })
        };
        pieces.iter().map(|pieces| pieces.iter().map(found).collect()).collect()
    }
}

impl PromptLookup for LocalLookup<'_> {
    fn fill_system(&self, tokens: &[u32], wait: bool) -> Result<SystemFound> {
        match (self.chunks, self.system_root) {
            (Some(cache), Some(root)) if wait => cache.fill_system(self.main, root, tokens),
            _ => Ok(self.fill_alone(tokens)?.into()),
        }
    }

    fn hold(&self, pieces: &[Vec<ChunkPiece<'_>>]) -> Result<Vec<Vec<Option<FoundPiece>>>> {
        Ok(self.held(pieces))
    }

    fn acquire(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        let acquire = |cache: &ChunkCacheManager| cache.acquire(self.tenant, piece, stored_start);
        self.chunks.map_or(Acquired::NoRoom, acquire)
    }
}
