//! Lookup on all ranks: the local lookup, with an agreement after each step.

use super::{RankAgreement, shortest, together};
use crate::assembly::{FoundPiece, LocalLookup, PromptLookup};
use crate::cache::{Acquired, SystemFound};
use crate::error::Result;
use crate::hash::ChunkPiece;
use crate::prefix::PrefixFill;

/// One rank's lookup, which finds only the parts that all ranks find.
///
/// If this rank has a piece that another rank lacks, this rank releases its hold, and all ranks recompute the
/// piece. The stored copy stays in this rank's cache.
#[derive(Debug)]
pub(crate) struct RankLookup<'a> {
    pub(crate) local: LocalLookup<'a>,
    pub(crate) ranks: &'a dyn RankAgreement,
}

impl PromptLookup for RankLookup<'_> {
    /// Uses only the part of the system prompt that is cached on all ranks. All ranks compute the rest in the
    /// same pass and keep it. Never waits for another request.
    fn fill_system(&self, tokens: &[u32], _wait: bool) -> Result<SystemFound> {
        let filled = self.local.fill_alone(tokens);
        let cached = filled.as_ref().map_or(0, PrefixFill::cached);
        let shared = shortest(self.ranks, cached, tokens.len())?;
        let filled = filled.and_then(|mut filled| {
            filled.take_at_most(shared)?;
            Ok(filled)
        });
        together(self.ranks, filled).map(SystemFound::from)
    }

    /// Holds the pieces that all ranks hold. If a piece is asleep on this rank, it is woken first. A piece
    /// counts as exact if it is exact on all ranks.
    fn hold(&self, pieces: &[Vec<ChunkPiece<'_>>]) -> Result<Vec<Vec<Option<FoundPiece>>>> {
        let mut all = self.local.held(pieces);
        let Some(cache) = self.local.chunks else { return Ok(all) };
        for (piece, found) in pieces.iter().flatten().zip(all.iter_mut().flatten()) {
            if found.is_none() {
                let woken = cache.wake_and_hold(piece);
                *found = woken.map(|hold| FoundPiece { exact: hold.is_exact(), hold });
            }
        }
        // The first half of the flags marks pieces that are held here, the second half pieces that are exact.
        let here = all.iter().flatten().map(Option::is_some);
        let exact = all.iter().flatten().map(|found| found.as_ref().is_none_or(|found| found.exact));
        let mut flags: Vec<bool> = here.chain(exact).collect();
        self.ranks.agree(&mut flags)?;
        let (here, exact) = flags.split_at(flags.len() / 2);
        for ((found, here), &exact) in all.iter_mut().flatten().zip(here).zip(exact) {
            *found = found.take().filter(|_| *here).map(|found| FoundPiece { exact, ..found });
        }
        Ok(all)
    }

    /// Reserves room for a piece that all ranks compute in the same pass. A rank therefore never waits for
    /// another request, and never uses a piece that was stored after [`hold`](PromptLookup::hold) looked for
    /// it; such a piece is computed only for this request.
    fn acquire(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        let reserved =
            self.local.chunks.and_then(|cache| cache.reserve(self.local.tenant, piece, stored_start));
        reserved.map_or(Acquired::NoRoom, Acquired::Compute)
    }

    fn conclude(&self, result: Result<()>) -> Result<()> {
        together(self.ranks, result)
    }
}
