//! The lookup with a disk: what a fetch has brought is written to the blocks that are reserved for it.

use kvcore::BlockId;

use super::{TierFetch, TierLink};
use crate::assembly::{FoundPiece, PromptLookup};
use crate::cache::{Acquired, SystemFound};
use crate::error::Result;
use crate::hash::ChunkPiece;

/// A lookup that uses the pieces that a fetch has brought, if the lookup before it did not find them.
pub(crate) struct TierLookup<'a> {
    pub(crate) above: Box<dyn PromptLookup + 'a>,
    pub(crate) link: &'a TierLink,
    pub(crate) fetched: &'a TierFetch,
}

impl PromptLookup for TierLookup<'_> {
    fn fill_system(&self, tokens: &[u32], wait: bool) -> Result<SystemFound> {
        self.above.fill_system(tokens, wait)
    }

    fn hold(&self, pieces: &[Vec<ChunkPiece<'_>>]) -> Result<Vec<Vec<Option<FoundPiece>>>> {
        self.above.hold(pieces)
    }

    fn acquire(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        match self.above.acquire(piece, stored_start) {
            Acquired::Compute(reservation) => {
                let Some(buffers) = self.fetched.take(&piece.hash().key) else {
                    return Acquired::Compute(reservation);
                };
                let blocks = reservation.block_ids().len();
                let written = reservation
                    .write_pairs((0..blocks as u32).map(BlockId))
                    .and_then(|pairs| self.link.device.write(blocks, pairs, &buffers));
                match written {
                    Ok(()) => Acquired::Hit(reservation.store_fetched()),
                    // A piece that cannot be written is computed.
                    Err(_) => Acquired::Compute(reservation),
                }
            }
            acquired => acquired,
        }
    }
}
