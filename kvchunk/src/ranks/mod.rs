//! Ranks: the parts of one model, each with its own caches, which compute every prompt together.
//!
//! ```text
//!   RankLookup                      on each rank                        among the ranks
//!     fill_system ──► system prompt: found and allocated   ──► agree: the shortest part that all have
//!     hold        ──► pieces: held, woken if they sleep    ──► agree: held by all, exact for all
//!     acquire     ──► missing pieces: reserved, or computed for the request alone
//!     conclude                                             ──► agree: all have room
//! ```
//!
//! Ranks share one request, and a piece is a hit on all of them or on none. (*Replicas* are whole models;
//! they share only chunks.)

use std::fmt;

use crate::error::{Error, Result};

mod collective;
mod lookup;

pub use collective::CollectiveRank;
pub(crate) use lookup::RankLookup;

// Decision: docs/decisions/chunks.md#ranks-agree-before-anything-is-reserved
/// An agreement between the ranks of a model that is split over several devices or threads. Each rank has a
/// chunk cache for its own part of every key and value.
///
/// The ranks' caches may differ: one rank may have evicted, lost or quantised a piece that another rank still
/// holds. However, all ranks must compute the same tokens in the same pass, so a piece is a hit on all ranks
/// or on none.
///
/// An [`Assembler`](crate::Assembler) asks for an agreement on the system prompt, on the pieces of the
/// prompt, and on whether every rank has room for them. All ranks MUST assemble the same prompts in the same
/// order, with the same settings.
pub trait RankAgreement: fmt::Debug {
    /// Waits for all ranks, and clears every flag that is not set on all of them.
    ///
    /// # Errors
    /// Returns an error if a rank is late, has left, or has asked for something else, such as
    /// [`kvcore::Error::RanksTimedOut`], [`kvcore::Error::RankLeft`] or [`kvcore::Error::RanksDiffer`]. In
    /// that case, no rank can rely on the flags, and the request must end on all ranks.
    fn agree(&self, flags: &mut [bool]) -> Result<()>;
}

/// Returns the smallest `length` of all ranks. No rank's length may exceed `most`.
fn shortest(ranks: &dyn RankAgreement, length: usize, most: usize) -> Result<usize> {
    let mut reached: Vec<bool> = (0..most).map(|at| at < length).collect();
    ranks.agree(&mut reached)?;
    Ok(reached.iter().filter(|&&reached| reached).count())
}

/// Returns `result` if the operation succeeded on all ranks, and an error otherwise, so that no rank
/// continues alone.
fn together<T>(ranks: &dyn RankAgreement, result: Result<T>) -> Result<T> {
    let mut all = [result.is_ok()];
    ranks.agree(&mut all)?;
    if all[0] { result } else { result.and(Err(Error::RankFailed)) }
}
