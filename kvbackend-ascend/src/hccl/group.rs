//! The ranks of a group in this process. They fail together, and record which ranks have left.

use std::collections::HashMap;

use kvcore::{Collective, Error, Result};
use parking_lot::Mutex;

/// State that the ranks of a process share.
#[derive(Debug, Default)]
pub(super) struct LocalRanks {
    /// The first failure. It is final.
    failed: Mutex<Option<Error>>,
    /// The calls of this process's ranks, by rank.
    calls: Mutex<HashMap<usize, Calls>>,
}

/// The calls of one rank so far.
#[derive(Debug, Default)]
struct Calls {
    /// Number of collectives that involve all ranks.
    of_all: u64,
    /// Number of transfers, by the other rank and by direction: true for sends to that rank.
    transfers: HashMap<(usize, bool), u64>,
    left: bool,
}

impl Calls {
    fn transfers(&self, peer: usize, sends: bool) -> u64 {
        self.transfers.get(&(peer, sends)).copied().unwrap_or_default()
    }
}

impl LocalRanks {
    /// Fails the group, unless it has failed already. Returns the first failure.
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

    /// Records a call of a rank.
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
    /// Returns [`Error::RankLeft`] for the rank that has left.
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
