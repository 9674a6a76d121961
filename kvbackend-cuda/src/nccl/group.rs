//! A group's ranks in this process. They fail together, and the last one to leave waits briefly until the
//! others have finished leaving.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvcore::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::member::{NcclMember, Pauses};

/// The maximum time that the last of this process's ranks to leave waits for the others to finish leaving. It
/// does not wait for ranks in other processes.
const MOMENT: Duration = Duration::from_secs(1);

pub(super) struct NcclGroup {
    limit: Duration,
    /// This process's members, each with its rank.
    members: Vec<(usize, NcclMember)>,
    /// The group's first failure, which is permanent.
    failed: Mutex<Option<Error>>,
    presence: Arc<RanksHere>,
}

/// Two counts of this process's ranks: the ranks that have not left, and the ranks that are leaving.
#[derive(Default)]
struct RanksHere {
    counts: Mutex<(usize, usize)>,
    changed: Condvar,
}

impl NcclGroup {
    /// Creates the group, and waits until all members have joined.
    pub(super) fn new(members: Vec<(usize, NcclMember)>, limit: Duration) -> Result<Arc<Self>> {
        let presence = Arc::new(RanksHere::default());
        presence.counts.lock().0 = members.len();
        let group = Self { limit, members, failed: Mutex::default(), presence };
        (0..group.members.len()).try_for_each(|place| group.settle(place, &"the start of the group"))?;
        Ok(Arc::new(group))
    }

    pub(super) fn member(&self, place: usize) -> &NcclMember {
        &self.members[place].1
    }

    // Decision: docs/decisions/backend-cuda.md#the-ranks-of-a-process-fail-together
    /// Marks the group as failed and aborts the work of this process's ranks, unless the group has failed
    /// already. Returns the group's first failure.
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

    /// Returns the failure that ended the member at index `place`.
    pub(super) fn gone(&self, place: usize) -> Error {
        self.failed.lock().clone().unwrap_or(Error::RankLeft(self.members[place].0))
    }

    /// Returns whether NCCL has finished a member's most recent host call. This function never blocks.
    pub(super) fn is_ready(&self, place: usize) -> Result<bool> {
        if let Some(error) = &*self.failed.lock() {
            return Err(error.clone());
        }
        let ready = self.member(place).is_ready().ok_or_else(|| self.gone(place))?;
        ready.map_err(|error| self.fail(error))
    }

    /// Returns the group's failure as an error, if it has failed. This function never blocks.
    pub(super) fn check(&self, place: usize) -> Result<()> {
        self.is_ready(place).map(drop)
    }

    /// Waits until NCCL has finished a member's most recent host call.
    pub(super) fn settle(&self, place: usize, call: &dyn fmt::Display) -> Result<()> {
        self.poll(place, call, || self.is_ready(place))
    }

    /// Calls `done` repeatedly until it returns true. A time-out fails the group.
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

    // Decision: docs/decisions/backend-cuda.md#a-rank-leaves-on-a-separate-thread
    /// Makes a member leave on a separate thread. The last member of this process to leave waits up to a
    /// second for all such threads to end.
    pub(super) fn leave(self: &Arc<Self>, place: usize) {
        let presence = Arc::clone(&self.presence);
        if self.failed.lock().is_none() {
            presence.counts.lock().1 += 1;
            let (group, of_thread) = (Arc::clone(self), Arc::clone(&presence));
            let leaves = move || {
                group.member(place).leave(group.limit);
                // The last rank's thread also drops the device.
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

impl RanksHere {
    fn gone(&self) {
        self.counts.lock().1 -= 1;
        self.changed.notify_all();
    }
}
