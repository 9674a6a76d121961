//! State shared by a group's ranks in this process: their failure, their calls, and which of them have left.

use std::collections::HashMap;

use kvcore::{Collective, Error, Result};
use parking_lot::Mutex;

/// State that a group's ranks in this process share.
#[derive(Debug, Default)]
pub(super) struct LocalRanks {
    /// The group's first failure, which is permanent.
    failed: Mutex<Option<Error>>,
    /// The calls of this process's ranks, by rank.
    calls: Mutex<HashMap<usize, Calls>>,
}

/// The calls that one rank has made so far.
#[derive(Debug, Default)]
struct Calls {
    /// The number of calls that involve all ranks.
    of_all: u64,
    /// The number of transfers per peer rank and direction; `true` means a send to that rank.
    transfers: HashMap<(usize, bool), u64>,
    left: bool,
}

impl Calls {
    fn transfers(&self, peer: usize, sends: bool) -> u64 {
        self.transfers.get(&(peer, sends)).copied().unwrap_or_default()
    }
}

impl LocalRanks {
    /// Marks the group as failed, unless it already is. Returns the group's first failure.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.failed.lock().get_or_insert(error).clone()
    }

    /// Returns the group's failure as an error, if it has failed.
    pub(super) fn check(&self) -> Result<()> {
        self.failed.lock().as_ref().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Records that a rank of this process has joined.
    pub(super) fn enter(&self, rank: usize) {
        self.calls.lock().insert(rank, Calls::default());
    }

    /// Records a collective call by a rank.
    pub(super) fn call(&self, rank: usize, collective: Collective<'_>) {
        let mut calls = self.calls.lock();
        let own = calls.entry(rank).or_default();
        match collective {
            Collective::Exchange { sends, receives } => {
                for (transfers, sends) in [(sends, true), (receives, false)] {
                    for (_, peer) in transfers.iter().filter(|(view, _)| !view.is_empty()) {
                        *own.transfers.entry((*peer, sends)).or_default() += 1;
                    }
                }
            }
            _ => own.of_all += 1,
        }
    }

    /// Checks that a rank's calls do not depend on a rank that has left.
    ///
    /// # Errors
    /// Returns [`Error::RankLeft`] if this rank's calls depend on a rank that has left.
    pub(super) fn check_presence(&self, rank: usize) -> Result<()> {
        let calls = self.calls.lock();
        let Some(own) = calls.get(&rank) else { return Ok(()) };
        let needed = |peer: usize, other: &Calls| {
            own.of_all > other.of_all
                || own.transfers(peer, true) > other.transfers(rank, false)
                || own.transfers(peer, false) > other.transfers(rank, true)
        };
        match calls.iter().find(|&(&peer, other)| other.left && needed(peer, other)) {
            Some((&peer, _)) => Err(Error::RankLeft(peer)),
            None => Ok(()),
        }
    }

    /// Records that a rank has left.
    pub(super) fn leave(&self, rank: usize) {
        self.calls.lock().entry(rank).or_default().left = true;
    }
}
