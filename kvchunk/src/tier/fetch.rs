//! Loads what a prompt misses, while the prompt waits for its turn.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvcore::BlockKey;
use kvtier::{Found, Listing, Loading, RecordId};
use parking_lot::Mutex;

use super::early::Early;
use super::patience::{Awaited, MOST_LOST, gives_up};
use super::staging::Staged;
use super::{LoadRule, MissReason, TierLink};
use crate::metrics::LatencyHistogram;

/// One of so many loads is tried, although it was expected to be slower than computing, because the disk may
/// have become faster.
const TRIED: u64 = 16;

/// A record that a prompt needs.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) id: RecordId,
    pub(super) text: Option<NonZeroU64>,
}

/// The load of a record that is here.
struct Planned {
    id: RecordId,
    /// The record without which nobody can use this one.
    parent: Option<BlockKey>,
    /// The number of bytes of the record.
    bytes: usize,
    /// False if the record is in host memory.
    is_read: bool,
    /// The time to compute the record, or zero if it is not known. For a record that is read, with those in host memory
    /// that are no use without it.
    cost: Duration,
    /// True if the record is in host memory, and no use without one that is read.
    is_behind: bool,
}

/// The sum of a prompt's loads.
#[derive(Debug, Clone, Copy, PartialEq)]
struct LoadSum {
    /// The number of all bytes, and of those that are read.
    bytes: usize,
    read: usize,
    /// The time to compute everything, or `None` if it is not known, and the time to compute what is lost without the disk.
    worth: Option<Duration>,
    cost: Option<Duration>,
}

impl LoadSum {
    fn of(loads: &[Planned]) -> Self {
        let is_known = loads.iter().any(|load| !load.cost.is_zero());
        let sum = |loads: &mut dyn Iterator<Item = &Planned>| {
            loads.fold((0, Duration::ZERO), |(bytes, cost), load| (bytes + load.bytes, cost + load.cost))
        };
        let (bytes, worth) = sum(&mut loads.iter());
        let (read, cost) = sum(&mut loads.iter().filter(|load| load.is_read));
        let known = |cost| (read == 0 || is_known).then_some(cost);
        Self { bytes, read, worth: known(worth), cost: known(cost) }
    }
}

impl Planned {
    /// Completes loads, given in the order in which the prompt needs them: records whose time is not known get the others' time
    /// per token, and records in memory are counted with the one that is read and without which they are no use.
    fn complete(loads: &mut [Self]) {
        let known = loads.iter().filter(|load| !load.cost.is_zero());
        let (tokens, time) = known.fold((0, Duration::ZERO), |(tokens, time), load| {
            (tokens + load.id.tokens.len(), time + load.cost)
        });
        for load in loads.iter_mut().filter(|load| tokens > 0 && load.cost.is_zero()) {
            load.cost = time.mul_f64(load.id.tokens.len() as f64 / tokens as f64);
        }
        let mut places: HashMap<BlockKey, usize> = HashMap::new();
        for place in 0..loads.len() {
            let Planned { id, is_read, cost, parent, .. } = &loads[place];
            let (key, cost) = (id.key, *cost);
            if *is_read {
                places.insert(key, place);
            } else if let Some(&before) = parent.as_ref().and_then(|parent| places.get(parent)) {
                places.insert(key, before);
                loads[before].cost += cost;
                loads[place].cost = Duration::ZERO;
                loads[place].is_behind = true;
            }
        }
    }
}

/// What became of an attempt to load what a prompt misses.
#[derive(Debug)]
pub enum BeganFetch {
    /// Nothing is being loaded. Contains the reasons why parts are not on the disk.
    Nothing(TierFetch),
    /// The records are being loaded.
    Loading(TierFetch),
    /// Other requests are loading some of the records, or use all memory for loads. Try again later, for at most this
    /// long in all: then the prompt is computed sooner.
    Later(Duration),
}

/// The records that a prompt needs, as they arrive from a disk.
///
/// # Drop behaviour
/// Nobody waits for the records any more.
#[derive(Debug)]
pub struct TierFetch {
    pub(super) records: Mutex<HashMap<BlockKey, Part>>,
    /// The records that are being loaded, in the order in which the prompt needs them.
    pub(super) order: Vec<BlockKey>,
    pub(super) early: Early,
    since: Instant,
    rule: LoadRule,
    /// The time to compute everything that is being loaded, or `None` if it is not known.
    cost: Option<Duration>,
    /// The number of bytes that are being loaded.
    bytes: usize,
    /// The memory of the records, given back when this value is dropped.
    staged: Option<Staged>,
    waits: Arc<LatencyHistogram>,
}

/// A record that a prompt needs.
#[derive(Debug)]
pub(super) enum Part {
    /// The record is being loaded. Contains the time to compute it.
    Loading(Loading, Duration),
    Missed(MissReason),
}

impl TierLink {
    /// Starts to load records, given in the order in which the prompt needs them.
    pub(super) fn begin(&self, wanted: Vec<Wanted>) -> BeganFetch {
        // Starting the loads is a part of the wait.
        let since = Instant::now();
        let (mut seen, mut planned, mut absent) = (HashSet::new(), Vec::new(), Vec::new());
        for Wanted { id, text } in wanted.into_iter().filter(|wanted| seen.insert(wanted.id.key)) {
            match self.slab.peek(&id.key) {
                Some(listing) => planned.push(self.plan(id, listing)),
                None => absent.push((id, text)),
            }
        }
        Planned::complete(&mut planned);
        let mut sum = LoadSum::of(&planned);
        let mut skipped = Vec::new();
        if sum.read > 0 && self.is_slower(sum) {
            skipped.extend(planned.extract_if(.., |load| load.is_read || load.is_behind));
            sum = LoadSum::of(&planned);
        }
        let mut staged = None;
        if !planned.is_empty() {
            let keys = planned.iter().map(|load| load.id.key).collect();
            staged = self.staging.take(keys, sum.bytes, sum.read);
            if staged.is_none() {
                return BeganFetch::Later(self.patience(sum));
            }
        }
        self.slab.count_skipped(skipped.len());
        let slower = |load: Planned| (load.id.key, Part::Missed(MissReason::Slower));
        let mut records: HashMap<BlockKey, Part> = skipped.into_iter().map(slower).collect();
        // Misses are counted once, when the attempt is not repeated.
        let missed =
            |(id, text): (RecordId, _)| (id.key, Part::Missed((&self.slab.why_absent(&id, text)).into()));
        records.extend(absent.into_iter().map(missed));
        let order = planned.iter().map(|load| load.id.key).collect();
        let load = |load: Planned| (load.id.key, Part::Loading(self.slab.begin_load(&load.id), load.cost));
        records.extend(planned.into_iter().map(load));
        let began = if staged.is_some() { BeganFetch::Loading } else { BeganFetch::Nothing };
        began(TierFetch {
            records: Mutex::new(records),
            order,
            early: Early::default(),
            since,
            rule: self.rule,
            cost: sum.cost,
            bytes: sum.read,
            staged,
            waits: Arc::clone(&self.waits),
        })
    }

    /// Plans the load of a record that is here.
    fn plan(&self, id: RecordId, listing: Listing) -> Planned {
        let cost = self.prefill.cost_now(id.tokens.len(), listing.note.cost);
        let (parent, bytes, is_read) = (listing.note.parent, listing.bytes, !listing.in_memory);
        Planned { id, parent, bytes, is_read, cost, is_behind: false }
    }

    /// Returns how long a prompt may wait until it can begin with its loads: as long as the disk should take for them and for
    /// all that others load, or as long as everything takes to compute if that is shorter, and a little longer.
    fn patience(&self, sum: LoadSum) -> Duration {
        match (self.rule, sum.worth) {
            (LoadRule::Always(limit), _) => limit,
            (LoadRule::IfFaster, None) => super::PATIENCE,
            (LoadRule::IfFaster, Some(worth)) => {
                let expected = self.slab.expected(sum.read + self.staging.read());
                expected.unwrap_or_default().min(worth) + worth.mul_f64(MOST_LOST)
            }
        }
    }

    /// Returns whether computing is expected to end before the disk has read what is to be read, and the disk need not be
    /// tried again.
    fn is_slower(&self, sum: LoadSum) -> bool {
        let expected = self.slab.expected(sum.read + self.staging.read());
        match (self.rule, expected, sum.cost) {
            (LoadRule::IfFaster, Some(expected), Some(cost)) if expected >= cost => {
                !self.skips.fetch_add(1, Ordering::Relaxed).is_multiple_of(TRIED)
            }
            _ => false,
        }
    }
}

impl TierFetch {
    /// Returns whether the prompt should be looked up now: everything has arrived, or waiting would cost more
    /// than the [rule](LoadRule) allows. Never blocks.
    pub fn is_over(&self) -> bool {
        let records = self.records.lock();
        let awaited = self.order.iter().filter_map(|key| match records.get(key)? {
            Part::Loading(loading, cost) if !loading.is_over() => {
                Some(Awaited { cost: *cost, bytes: loading.bytes(), progress: loading.progress() })
            }
            _ => None,
        });
        let awaited: Vec<Awaited> = awaited.collect();
        if awaited.is_empty() {
            return true;
        }
        let waited = self.since.elapsed();
        match (self.rule, self.cost) {
            (LoadRule::Always(patience), _) => waited >= patience,
            (LoadRule::IfFaster, None) => waited >= super::PATIENCE,
            (LoadRule::IfFaster, Some(cost)) => gives_up(waited, cost, self.bytes, &awaited),
        }
    }

    /// Waits for at most `limit`, or until the next record in the prompt's order has arrived.
    pub fn wait_for(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let records = self.records.lock();
        let next = self.order.iter().find_map(|key| match records.get(key)? {
            Part::Loading(loading, _) if !loading.is_over() => Some(loading),
            _ => None,
        });
        if let Some(loading) = next {
            loading.wait_until(until);
        }
    }

    /// Ends the fetch of a prompt that has been looked up, and records how long that took.
    pub fn finish(self) {
        if self.staged.is_some() {
            self.waits.record(self.since.elapsed());
        }
    }

    /// Removes and returns a record that has arrived. Otherwise, records why there is none.
    pub(super) fn take(&self, key: &BlockKey) -> Option<Found> {
        let mut records = self.records.lock();
        let part = records.get_mut(key)?;
        let Part::Loading(..) = part else { return None };
        // A record that is taken and is computed all the same could not be written to its blocks.
        let Part::Loading(loading, _) = std::mem::replace(part, Part::Missed(MissReason::Failed)) else {
            return None;
        };
        match loading.end() {
            Ok(buffers) => Some(buffers),
            Err(missed) => {
                *part = Part::Missed((&missed).into());
                None
            }
        }
    }

    /// Returns why a record is not used, if the prompt asked for it.
    pub fn reason(&self, key: &BlockKey) -> Option<MissReason> {
        match self.records.lock().get(key)? {
            Part::Loading(..) => None,
            Part::Missed(reason) => Some(*reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: bool = false;
    const DISK: bool = true;

    /// A load of a record in 100 bytes per token. `number` makes its key, and `parent` that of its parent.
    fn load(number: u8, parent: Option<u8>, is_read: bool, tokens: usize, milliseconds: u64) -> Planned {
        let key = |number: u8| BlockKey::from_bytes([number; 32]);
        let id = RecordId {
            key: key(number),
            tokens: vec![0; tokens].into(),
            stored_start: 0,
            label: "test".into(),
        };
        let (parent, cost) = (parent.map(key), Duration::from_millis(milliseconds));
        Planned { id, parent, bytes: 100 * tokens, is_read, cost, is_behind: false }
    }

    /// Returns the bytes, the bytes that are read, and the times in milliseconds.
    fn sum(loads: &mut [Planned]) -> (usize, usize, Option<u128>, Option<u128>) {
        Planned::complete(loads);
        let LoadSum { bytes, read, worth, cost } = LoadSum::of(loads);
        (bytes, read, worth.map(|time| time.as_millis()), cost.map(|time| time.as_millis()))
    }

    #[test]
    fn unknown_times_follow_from_the_others() {
        let mut loads =
            [load(1, None, DISK, 10, 20), load(2, None, DISK, 30, 0), load(3, None, MEMORY, 20, 40)];
        assert_eq!(sum(&mut loads), (6000, 4000, Some(120), Some(80)));
        assert_eq!(loads[1].cost, Duration::from_millis(60));
        assert_eq!(sum(&mut [load(1, None, DISK, 10, 0)]), (1000, 1000, None, None));
        assert_eq!(sum(&mut [load(1, None, MEMORY, 10, 0)]), (1000, 0, Some(0), Some(0)));
        assert_eq!(sum(&mut []), (0, 0, Some(0), Some(0)));
    }

    #[test]
    fn what_is_in_memory_behind_a_record_on_the_disk_counts_with_it() {
        // The head of a chain is on the disk, as is its third block.
        let mut loads = [
            load(1, None, DISK, 10, 10),
            load(2, Some(1), MEMORY, 10, 11),
            load(3, Some(2), DISK, 10, 12),
            load(4, Some(3), MEMORY, 10, 13),
            load(5, Some(4), MEMORY, 10, 14),
            load(6, None, MEMORY, 10, 15),
        ];
        assert_eq!(sum(&mut loads), (6000, 2000, Some(75), Some(60)));
        let each: Vec<_> = loads.iter().map(|load| load.cost.as_millis()).collect();
        assert_eq!(each, [21, 0, 39, 0, 0, 15]);
        let is_behind: Vec<_> = loads.iter().map(|load| load.is_behind).collect();
        assert_eq!(is_behind, [false, true, false, true, true, false]);
        // The head is in memory: it can be used whatever the disk does.
        let mut loads = [load(1, None, MEMORY, 10, 10), load(2, Some(1), DISK, 10, 11)];
        assert_eq!(sum(&mut loads), (2000, 1000, Some(21), Some(11)));
    }
}
