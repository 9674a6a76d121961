//! The ranks of a group that live in this process: they fail together, and the last one to leave waits a moment.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvcore::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::member::{Member, Pauses};

/// The longest time that the last rank of this process waits for all to have left. Ranks of other processes may stay.
const MOMENT: Duration = Duration::from_secs(1);

pub(super) struct Group {
    limit: Duration,
    /// Ranks of this process, with their numbers.
    members: Vec<(usize, Member)>,
    /// The first failure. It is final.
    failed: Mutex<Option<Error>>,
    presence: Arc<Presence>,
}

/// The numbers of ranks of this process that have not left, and of those that are about to.
#[derive(Default)]
struct Presence {
    counts: Mutex<(usize, usize)>,
    changed: Condvar,
}

impl Group {
    /// Waits until all members have joined.
    pub(super) fn new(members: Vec<(usize, Member)>, limit: Duration) -> Result<Arc<Self>> {
        let presence = Arc::new(Presence::default());
        presence.counts.lock().0 = members.len();
        let group = Self { limit, members, failed: Mutex::default(), presence };
        (0..group.members.len()).try_for_each(|place| group.settle(place, &"the start of the group"))?;
        Ok(Arc::new(group))
    }

    pub(super) fn member(&self, place: usize) -> &Member {
        &self.members[place].1
    }

    /// Fails the group, unless it has failed already, and ends the work of its ranks. Returns the failure.
    pub(super) fn fail(&self, error: Error) -> Error {
        let mut failed = self.failed.lock();
        if let Some(first) = &*failed {
            return first.clone();
        }
        *failed = Some(error.clone());
        drop(failed);
        self.members.iter().for_each(|(_, member)| member.abort());
        error
    }

    /// Returns the failure of a group that a rank has found gone.
    pub(super) fn gone(&self, place: usize) -> Error {
        self.failed.lock().clone().unwrap_or(Error::RankLeft(self.members[place].0))
    }

    /// Returns whether NCCL has done on the host what a member asked for. Never blocks.
    pub(super) fn is_ready(&self, place: usize) -> Result<bool> {
        if let Some(error) = &*self.failed.lock() {
            return Err(error.clone());
        }
        let ready = self.member(place).is_ready().ok_or_else(|| self.gone(place))?;
        ready.map_err(|error| self.fail(error))
    }

    /// Returns the failure of the group, if it has failed. Never blocks.
    pub(super) fn check(&self, place: usize) -> Result<()> {
        self.is_ready(place).map(drop)
    }

    /// Waits until NCCL has done on the host what a member asked for.
    pub(super) fn settle(&self, place: usize, call: &dyn fmt::Display) -> Result<()> {
        self.poll(place, call, || self.is_ready(place))
    }

    /// Asks until the answer is yes, no longer than the time-out, which fails the group.
    pub(super) fn poll(
        &self,
        place: usize,
        call: &dyn fmt::Display,
        done: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let pauses = Pauses::new();
        while !done()? {
            if pauses.elapsed() >= self.limit {
                let (rank, call, limit) = (self.members[place].0, call.to_string(), self.limit);
                return Err(self.fail(Error::RanksTimedOut { rank, call, limit }));
            }
            pauses.next();
        }
        Ok(())
    }

    // Decision: docs/decisions/backend-cuda.md#a-rank-leaves-on-a-thread-of-its-own
    /// Lets a member leave, on a thread of its own. The last member of this process waits a moment for all.
    pub(super) fn leave(self: &Arc<Self>, place: usize) {
        let presence = Arc::clone(&self.presence);
        if self.failed.lock().is_none() {
            presence.counts.lock().1 += 1;
            let (group, of_thread) = (Arc::clone(self), Arc::clone(&presence));
            let leaves = move || {
                group.member(place).leave(group.limit);
                // With the last rank, its device goes too.
                drop(group);
                of_thread.gone();
            };
            if std::thread::Builder::new().name("nccl-leave".to_owned()).spawn(leaves).is_err() {
                self.member(place).abort();
                presence.gone();
            }
        }
        let mut counts = presence.counts.lock();
        counts.0 -= 1;
        if counts.0 == 0 {
            presence.changed.wait_while_for(&mut counts, |counts| counts.1 > 0, MOMENT);
        }
    }
}

impl Presence {
    fn gone(&self) {
        self.counts.lock().1 -= 1;
        self.changed.notify_all();
    }
}
