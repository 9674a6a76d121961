//! Loads what a prompt misses, while the prompt waits for its turn.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvcore::BlockKey;
use kvtier::{Found, Loading, RecordId, RecordNote};
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
        let (mut seen, mut listed, mut absent) = (HashSet::new(), Vec::new(), Vec::new());
        let (mut bytes, mut cost) = (0, Some(Duration::ZERO));
        for Wanted { id, text } in wanted {
            if !seen.insert(id.key) {
                continue;
            }
            let Some(listing) = self.slab.peek(&id.key) else {
                absent.push((id, text));
                continue;
            };
            let takes = self.cost_of(&id, listing.note);
            bytes += listing.bytes;
            cost = cost.zip(takes).map(|(sum, takes)| sum + takes);
            listed.push((id, takes.unwrap_or_default()));
        }
        let mut records = HashMap::new();
        if !listed.is_empty() && self.is_slower(bytes, cost) {
            self.slab.count_skipped(listed.len());
            records.extend(listed.drain(..).map(|(id, _)| (id.key, Part::Missed(MissReason::Slower))));
        }
        let mut staged = None;
        if !listed.is_empty() {
            let keys = listed.iter().map(|(id, _)| id.key).collect();
            staged = self.staging.take(keys, bytes);
            if staged.is_none() {
                return BeganFetch::Later(self.patience(bytes, cost));
            }
        }
        // Misses are counted once, when the attempt is not repeated.
        let missed =
            |(id, text): (RecordId, _)| (id.key, Part::Missed((&self.slab.why_absent(&id, text)).into()));
        records.extend(absent.into_iter().map(missed));
        let order = listed.iter().map(|(id, _)| id.key).collect();
        let load = |(id, takes): (RecordId, _)| (id.key, Part::Loading(self.slab.begin_load(&id), takes));
        records.extend(listed.into_iter().map(load));
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

    /// Returns the time to compute a record, or `None` if it is not known.
    fn cost_of(&self, id: &RecordId, note: RecordNote) -> Option<Duration> {
        Some(self.prefill.cost_now(id.tokens.len(), note.cost)).filter(|cost| !cost.is_zero())
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
