//! The state that a group's ranks share: the bytes that they contribute to a collective, messages from one
//! rank to another, and the group's failure.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::call::{CollectiveCall, Payload};

/// The bytes that each rank contributed to a collective call.
pub(super) type RankBytes = Arc<[Vec<u8>]>;

/// A message in transit from one rank to another.
#[derive(Debug)]
pub(super) struct SentBytes {
    pub(super) tensor: Payload,
    pub(super) bytes: Vec<u8>,
}

/// A group of ranks. Each rank can make only one call at a time.
#[derive(Debug)]
pub(super) struct ThreadGroup {
    ranks: usize,
    limit: Duration,
    state: Mutex<GroupState>,
    /// A condition variable that is notified when a rank contributes to a collective call, posts or receives
    /// a message, leaves, or fails.
    changed: Condvar,
}

#[derive(Debug)]
struct GroupState {
    /// The group's first failure, which is never cleared or replaced.
    failed: Option<Error>,
    /// For each rank, true if the rank has left the group. The group fails as soon as a call needs a rank
    /// that has left.
    left: Vec<bool>,
    /// The collective call that at least one rank, but not every rank, has made, or `None` if there is none.
    call: Option<CollectiveCall>,
    /// The bytes contributed to the call under way, by rank.
    brought: Vec<Option<Vec<u8>>>,
    /// Number of collective calls that all ranks have made.
    ended: u64,
    /// The bytes contributed to the most recently completed call. The next call cannot complete until every
    /// rank has made it, so every rank still finds the result of its own call here.
    parts: RankBytes,
    /// Messages that have been posted but not yet received, indexed by `from * ranks + to`.
    mail: Vec<VecDeque<SentBytes>>,
}

impl ThreadGroup {
    pub(super) fn new(ranks: usize, limit: Duration) -> Self {
        let state = GroupState {
            failed: None,
            left: vec![false; ranks],
            call: None,
            brought: vec![None; ranks],
            ended: 0,
            parts: Arc::default(),
            mail: (0..ranks * ranks).map(|_| VecDeque::new()).collect(),
        };
        Self { ranks, limit, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Returns the group's failure as an error, if it has failed.
    pub(super) fn check(&self) -> Result<()> {
        self.state.lock().failed.clone().map_or(Ok(()), Err)
    }

    /// Marks the group as failed, unless it has already failed.
    pub(super) fn fail(&self, error: Error) {
        self.state.lock().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Records that a rank has left.
    pub(super) fn leave(&self, rank: usize) {
        self.state.lock().left[rank] = true;
        self.changed.notify_all();
    }

    /// Waits until all ranks have made the same call, and returns the bytes that each rank contributed.
    pub(super) fn meet(&self, rank: usize, call: CollectiveCall, own: Vec<u8>) -> Result<RankBytes> {
        let mut own = Some(own);
        let mut awaited = None;
        self.wait(rank, call, |state| {
            if let Some(own) = own.take() {
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                let expected = *state.call.get_or_insert(call);
                if expected != call {
                    return Err(differ(rank, call, expected));
                }
                awaited = Some(state.ended + 1);
                state.brought[rank] = Some(own);
                if state.brought.iter().all(Option::is_some) {
                    state.parts = state.brought.iter_mut().filter_map(Option::take).collect();
                    (state.call, state.ended) = (None, state.ended + 1);
                }
                self.changed.notify_all();
            }
            if awaited == Some(state.ended) {
                return Ok(Some(Arc::clone(&state.parts)));
            }
            let absent = (0..self.ranks).find(|&of| state.left[of] && state.brought[of].is_none());
            absent.map_or(Ok(None), |of| Err(Error::RankLeft(of)))
        })
    }

    // Decision: docs/decisions/device.md#a-threads-send-waits-for-the-receive
    /// Posts `sends`, each with the receiving rank, and receives the `expected` messages, each with the
    /// sending rank. Waits until all messages in both lists have been received, and returns the received
    /// bytes in the order of `expected`.
    pub(super) fn exchange(
        &self,
        rank: usize,
        sends: Vec<(usize, SentBytes)>,
        expected: &[(usize, Payload)],
    ) -> Result<Vec<Vec<u8>>> {
        let to: Vec<(usize, Payload)> = sends.iter().map(|(to, message)| (*to, message.tensor)).collect();
        let mut sends = Some(sends);
        let mut taken: Vec<Option<Vec<u8>>> = vec![None; expected.len()];
        let call = match (&to[..], expected) {
            (&[(to, tensor)], []) => CollectiveCall::Send { to, tensor },
            ([], &[(from, tensor)]) => CollectiveCall::Receive { from, tensor },
            _ => CollectiveCall::Exchange,
        };
        self.wait(rank, call, |state| {
            for (to, message) in sends.take().into_iter().flatten() {
                state.mail[rank * self.ranks + to].push_back(message);
                self.changed.notify_all();
            }
            for (taken, &(from, tensor)) in
                taken.iter_mut().zip(expected).filter(|(taken, _)| taken.is_none())
            {
                let mail = &mut state.mail[from * self.ranks + rank];
                // A mismatched message stays in `mail`, so that its sender also fails.
                if let Some(sent) = mail.front().map(|message| message.tensor).filter(|sent| *sent != tensor)
                {
                    let sent = CollectiveCall::Send { to: rank, tensor: sent };
                    return Err(differ(rank, CollectiveCall::Receive { from, tensor }, sent));
                }
                let Some(message) = mail.pop_front() else { continue };
                self.changed.notify_all();
                *taken = Some(message.bytes);
            }
            let missing = taken.iter().zip(expected).filter(|(taken, _)| taken.is_none()).map(|(_, of)| of.0);
            let waiting = |&to: &usize| !state.mail[rank * self.ranks + to].is_empty();
            let untaken = to.iter().map(|of| of.0).filter(waiting);
            let peers: Vec<usize> = missing.chain(untaken).collect();
            if peers.is_empty() {
                return Ok(Some(taken.iter_mut().filter_map(Option::take).collect()));
            }
            if let Some(&gone) = peers.iter().find(|&&peer| state.left[peer]) {
                return Err(Error::RankLeft(gone));
            }
            // A peer that has contributed to a collective call is waiting for this rank to make the same
            // call.
            match (state.call, peers.iter().any(|&peer| state.brought[peer].is_some())) {
                (Some(other), true) => Err(differ(rank, call, other)),
                _ => Ok(None),
            }
        })
    }

    /// Waits until `done` returns a value. If `done` fails or the time limit passes, the whole group fails.
    fn wait<T>(
        &self,
        rank: usize,
        call: CollectiveCall,
        mut done: impl FnMut(&mut GroupState) -> Result<Option<T>>,
    ) -> Result<T> {
        let since = Instant::now();
        let mut state = self.state.lock();
        loop {
            let left = self.limit.saturating_sub(since.elapsed());
            let error = match (done(&mut state), &state.failed) {
                (Ok(Some(value)), _) => return Ok(value),
                (_, Some(error)) => return Err(error.clone()),
                (Err(error), _) => error,
                (Ok(None), _) if left.is_zero() => {
                    Error::RanksTimedOut { rank, call: call.to_string(), limit: self.limit }
                }
                (Ok(None), _) => {
                    self.changed.wait_for(&mut state, left);
                    continue;
                }
            };
            self.changed.notify_all();
            return Err(state.failed.insert(error).clone());
        }
    }
}

fn differ(rank: usize, call: CollectiveCall, other: CollectiveCall) -> Error {
    Error::RanksDiffer { rank, call: call.to_string(), other: other.to_string() }
}
