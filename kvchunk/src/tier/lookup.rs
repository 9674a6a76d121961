//! The lookup with a disk: what a fetch has brought is written to the blocks that are reserved for it.

use kvcore::BlockId;
use kvtier::Found;

use super::{TierFetch, TierLink};
use crate::assembly::{FoundPiece, PromptLookup};
use crate::cache::{Acquired, ChunkReservation, SystemFound};
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
        let mut found = self.above.hold(pieces)?;
        // What was put into the cache for this prompt is acquired below, where it was counted already.
        let each = pieces.iter().flatten().zip(found.iter_mut().flatten());
        for (_, found) in each.filter(|(piece, _)| self.fetched.has_piece(&piece.hash().key)) {
            *found = None;
        }
        Ok(found)
    }

    fn acquire(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        let key = piece.hash().key;
        if let Some(piece) = self.fetched.take_piece(&key) {
            return Acquired::Hit(piece);
        }
        match self.above.acquire(piece, stored_start) {
            Acquired::Compute(reservation) => {
                let Some(buffers) = self.fetched.take(&key) else {
                    return Acquired::Compute(reservation);
                };
                match self.link.write_piece(&reservation, buffers) {
                    Ok(()) => Acquired::Hit(reservation.store_fetched()),
                    // A piece that cannot be written is computed.
                    Err(_) => Acquired::Compute(reservation),
                }
            }
            acquired => acquired,
        }
    }
}

impl TierLink {
    /// Writes the contents of a record to the blocks that are reserved for it.
    pub(super) fn write_piece(&self, reservation: &ChunkReservation, buffers: Found) -> Result<()> {
        let blocks = reservation.block_ids().len();
        let pairs = reservation.write_pairs((0..blocks as u32).map(BlockId))?;
        self.device.write(blocks, pairs, &buffers)?;
        self.slab.recycle(buffers);
        Ok(())
    }
}
