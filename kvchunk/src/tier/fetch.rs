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
    /// The number of bytes that are read, which is 0 if the record is in host memory.
    bytes: usize,
    /// The time to compute the record, or zero if it is not known.
    cost: Duration,
}

impl Planned {
    /// Returns the number of bytes that loads read, and the time to compute what is read, or `None` if it is not known.
    /// Records whose time is not known get the others' time per token.
    fn sum(loads: &mut [Self]) -> (usize, Option<Duration>) {
        let known = loads.iter().filter(|load| !load.cost.is_zero());
        let (tokens, time) = known.fold((0, Duration::ZERO), |(tokens, time), load| {
            (tokens + load.id.tokens.len(), time + load.cost)
        });
        if tokens > 0 {
            for load in loads.iter_mut().filter(|load| load.cost.is_zero()) {
                load.cost = time.mul_f64(load.id.tokens.len() as f64 / tokens as f64);
            }
        }
        let read = loads.iter().filter(|load| load.bytes > 0);
        let (bytes, cost) =
            read.fold((0, Duration::ZERO), |(bytes, cost), load| (bytes + load.bytes, cost + load.cost));
        (bytes, (bytes == 0 || tokens > 0).then_some(cost))
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
        let (mut bytes, mut cost) = Planned::sum(&mut planned);
        let mut records = HashMap::new();
        if bytes > 0 && self.is_slower(bytes, cost) {
            let skipped: Vec<Planned> = planned.extract_if(.., |load| load.bytes > 0).collect();
            self.slab.count_skipped(skipped.len());
            records.extend(skipped.into_iter().map(|load| (load.id.key, Part::Missed(MissReason::Slower))));
            (bytes, cost) = (0, Some(Duration::ZERO));
        }
        let mut staged = None;
        if !planned.is_empty() {
            let keys = planned.iter().map(|load| load.id.key).collect();
            staged = self.staging.take(keys, bytes);
            if staged.is_none() {
                return BeganFetch::Later(self.patience(bytes, cost));
            }
        }
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
            cost,
            bytes,
            staged,
            waits: Arc::clone(&self.waits),
        })
    }

    /// Plans the load of a record that is here.
    fn plan(&self, id: RecordId, listing: Listing) -> Planned {
        let cost = self.prefill.cost_now(id.tokens.len(), listing.note.cost);
        Planned { bytes: if listing.in_memory { 0 } else { listing.bytes }, cost, id }
    }

    /// Returns how long a prompt may wait until it can load `bytes` that take `cost` to compute: as long as the disk
    /// should take for them and for all that others load, or as long as they take to compute if that is shorter, and
    /// a little longer.
    fn patience(&self, bytes: usize, cost: Option<Duration>) -> Duration {
        match (self.rule, cost) {
            (LoadRule::Always(limit), _) => limit,
            (LoadRule::IfFaster, None) => super::PATIENCE,
            (LoadRule::IfFaster, Some(cost)) => {
                let expected = self.slab.expected(bytes + self.staging.bytes());
                expected.unwrap_or_default().min(cost) + cost.mul_f64(MOST_LOST)
            }
        }
    }

    /// Returns whether computing is expected to end before the disk has read `bytes`, and the disk need not be
    /// tried again.
    fn is_slower(&self, bytes: usize, cost: Option<Duration>) -> bool {
        let expected = self.slab.expected(bytes + self.staging.bytes());
        match (self.rule, expected, cost) {
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

    fn load(tokens: usize, bytes: usize, milliseconds: u64) -> Planned {
        let key = BlockKey::from_bytes([tokens as u8; 32]);
        let id = RecordId { key, tokens: vec![0; tokens].into(), stored_start: 0, label: "test".into() };
        Planned { id, bytes, cost: Duration::from_millis(milliseconds) }
    }

    #[test]
    fn unknown_times_follow_from_the_others_and_host_memory_costs_nothing() {
        let mut loads = [load(10, 100, 20), load(30, 300, 0), load(20, 0, 40)];
        assert_eq!(Planned::sum(&mut loads), (400, Some(Duration::from_millis(80))));
        assert_eq!(loads[1].cost, Duration::from_millis(60));
        assert_eq!(Planned::sum(&mut [load(10, 100, 0)]), (100, None));
        assert_eq!(Planned::sum(&mut [load(10, 0, 0)]), (0, Some(Duration::ZERO)));
        assert_eq!(Planned::sum(&mut []), (0, Some(Duration::ZERO)));
    }
}
