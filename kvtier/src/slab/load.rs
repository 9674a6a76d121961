//! Loads records without waiting for the disk, and checks everything before it is used.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvcore::BlockKey;
use parking_lot::{Condvar, Mutex};

use super::memory::Kept;
use super::spares::{Spares, TAIL};
use super::write::spans;
use super::{Shared, Slab, SlabStep};
use crate::buffer::RecordBuffer;
use crate::io::{Direction, DiskIo, IoEnd, IoRequest, PAGE, Pages, Piece};
use crate::known::Gone;
use crate::record::{CellRun, Header, PayloadFault, RecordId, RecordNote};

/// A record that was found: a slice of its buffers.
pub struct Found(pub(super) Kept);

impl Deref for Found {
    type Target = [RecordBuffer];

    fn deref(&self) -> &[RecordBuffer] {
        &self.0.buffers
    }
}

impl PartialEq<Vec<RecordBuffer>> for Found {
    fn eq(&self, other: &Vec<RecordBuffer>) -> bool {
        self.0.buffers == *other
    }
}

impl fmt::Debug for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Found").field(&self.0.id).field(&self.0.buffers).finish()
    }
}

/// The reason why a record was not loaded.
#[derive(Debug)]
pub enum Missed {
    /// No record has this key, and none is known that comes close.
    Absent,
    /// The record was here, and has left to make room.
    Evicted,
    /// The same tokens are here for another model, format or tokenizer.
    OtherModel,
    /// The same tokens are here behind another system prompt, in another mode, or at another position.
    OtherContext,
    /// The record with this key has other tokens, another stored start or another label.
    Differs,
    /// The bytes on the disk are not those that were written. The record is removed.
    Damaged,
    /// The disk had not answered when the caller stopped waiting.
    Late,
    /// The disk refused. The record is removed.
    Failed(io::Error),
}

impl fmt::Display for Missed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("it is not on the disk"),
            Self::Evicted => f.write_str("it has left the disk to make room"),
            Self::OtherModel => f.write_str("it is on the disk for another model or format"),
            Self::OtherContext => {
                f.write_str("it is on the disk behind another system prompt or in another mode")
            }
            Self::Differs => f.write_str("the record on the disk belongs to other tokens or another format"),
            Self::Damaged => f.write_str("the record on the disk is damaged"),
            Self::Late => f.write_str("the disk did not answer in time"),
            Self::Failed(error) => write!(f, "the disk failed: {error}"),
        }
    }
}

/// The size and the note of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listing {
    /// The number of bytes that a load reads, apart from the header.
    pub bytes: usize,
    /// What is known about the record.
    pub note: RecordNote,
    /// True if the record is in host memory, too, so that a load reads nothing.
    pub in_memory: bool,
}

impl Slab {
    /// Returns the size and the note of the record with this key. Does not count as a use.
    pub fn peek(&self, key: &BlockKey) -> Option<Listing> {
        let state = self.shared.state.lock();
        let in_memory = self.shared.memory.contains(key);
        state.get(key).map(|entry| Listing { bytes: entry.payload, note: entry.note, in_memory })
    }

    /// Starts to load a record, and returns without waiting for the disk. Records are read in the order of the
    /// calls, a few at a time.
    pub fn begin_load(&self, id: &RecordId) -> Loading {
        let place = self.shared.place(id);
        let here = place.as_ref().ok().and_then(|_| self.shared.memory.take(id));
        let bytes = if here.is_some() { 0 } else { place.as_ref().map_or(0, |place| place.payload) };
        let loading = Arc::new(LoadState {
            shared: Arc::clone(&self.shared),
            id: id.clone(),
            parent: place.as_ref().ok().and_then(|place| place.parent),
            bytes,
            requests: AtomicUsize::new(0),
            answered: AtomicUsize::new(0),
            ended: Mutex::default(),
            changed: Condvar::new(),
        });
        match (place, here) {
            (Ok(place), Some(buffers)) => {
                self.shared.release(&place, id, &Ok(()));
                loading.end(Ok(buffers));
            }
            // Memory that nobody waits for any more belongs to the disk until it answers.
            (Ok(place), None)
                if self.shared.given_up.load(Ordering::Relaxed) > self.shared.config.queue_bytes =>
            {
                self.shared.release(&place, id, &Ok(()));
                loading.end(Err(Missed::Late));
            }
            (Ok(place), None) => {
                self.shared.rates.lock().begin();
                self.shared.turns.enter(PlacedLoad::new(&loading, place));
            }
            (Err(missed), _) => loading.end(Err(missed)),
        }
        Loading(loading)
    }

    /// Loads a record. After `deadline`, the call gives up, and the disk goes on with memory of its own.
    ///
    /// # Errors
    /// Returns the reason if there is no such record, or if it must not be used.
    pub fn load(&self, id: &RecordId, deadline: Instant) -> Result<Found, Missed> {
        let loading = self.begin_load(id);
        loading.wait_until(deadline);
        loading.end()
    }

    /// Counts a miss, and returns why no record with the key of `id` is here. `text` is
    /// [that of its note](RecordNote::text).
    pub fn why_absent(&self, id: &RecordId, text: Option<std::num::NonZeroU64>) -> Missed {
        self.shared.count(|counts| counts.misses += 1);
        let state = self.shared.state.lock();
        match state.known.why_gone(&id.key) {
            Some(Gone::Evicted) => return Missed::Evicted,
            Some(Gone::Damaged) => return Missed::Damaged,
            None => {}
        }
        let others = state.known.keys_of(text);
        let here = |key| state.get(key).is_some_and(|entry| entry.scope == self.shared.scope);
        match others {
            [] => Missed::Absent,
            others if others.iter().any(here) => Missed::OtherContext,
            _ => Missed::OtherModel,
        }
    }
}

/// A record that is being loaded.
///
/// # Drop behaviour
/// Nobody waits for the record any more. The disk goes on with memory of its own. A record that has arrived is
/// [recycled](Slab::recycle).
#[must_use = "dropping it forgets what was loaded"]
pub struct Loading(Arc<LoadState>);

impl Loading {
    /// Returns whether the load has ended. Never blocks.
    pub fn is_over(&self) -> bool {
        self.0.ended.lock().is_over
    }

    /// Returns whether the record has arrived, and can be used. Never blocks.
    pub fn has_arrived(&self) -> bool {
        matches!(self.0.ended.lock().loaded, Some(Ok(_)))
    }

    /// Returns the number of bytes that are read, or 0 if there is no record.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Returns the part of the record that the disk has read so far, from 0 to 1. Never blocks.
    pub fn progress(&self) -> f64 {
        let requests = self.0.requests.load(Ordering::Relaxed);
        if requests == 0 { 0.0 } else { self.0.answered.load(Ordering::Relaxed) as f64 / requests as f64 }
    }

    /// Waits until the load has ended or `deadline` has passed. Returns whether the load has ended.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        let mut ended = self.0.ended.lock();
        while !ended.is_over && !self.0.changed.wait_until(&mut ended, deadline).timed_out() {}
        ended.is_over
    }

    /// Returns the record, and counts a hit or a miss. A load that has not ended is late.
    ///
    /// # Errors
    /// Returns the reason if there is no such record, or if it must not be used.
    pub fn end(self) -> Result<Found, Missed> {
        let loaded = self.0.ended.lock().loaded.take().unwrap_or(Err(Missed::Late));
        let loaded = loaded.map(|buffers| Found(self.0.kept(buffers)));
        self.0.shared.count(|counts| match &loaded {
            Ok(_) => counts.hits += 1,
            Err(missed) => {
                counts.misses += 1;
                match missed {
                    Missed::Absent | Missed::Evicted | Missed::OtherModel | Missed::OtherContext => {}
                    Missed::Differs => counts.differs += 1,
                    Missed::Damaged => counts.damaged += 1,
                    Missed::Late => counts.deadline_exceeded += 1,
                    Missed::Failed(_) => counts.read_errors += 1,
                }
            }
        });
        loaded
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        let mut ended = self.0.ended.lock();
        if !ended.is_over {
            ended.is_given_up = true;
            self.0.shared.given_up.fetch_add(self.0.bytes, Ordering::Relaxed);
        } else if let Some(Ok(unused)) = ended.loaded.take() {
            self.0.shared.keep(self.0.kept(unused));
        }
    }
}

impl fmt::Debug for Loading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loading").field("id", &self.0.id).field("is_over", &self.is_over()).finish()
    }
}

/// The state that a load shares with the disk's threads.
struct LoadState {
    shared: Arc<Shared>,
    id: RecordId,
    /// The record without which nobody can use this one.
    parent: Option<BlockKey>,
    /// The number of bytes that are read.
    bytes: usize,
    /// The number of requests to the disk, once they have been made.
    requests: AtomicUsize,
    /// The number of requests that the disk has answered.
    answered: AtomicUsize,
    ended: Mutex<Ended>,
    changed: Condvar,
}

/// The end of a load.
#[derive(Default)]
struct Ended {
    is_over: bool,
    /// True if nobody waited any longer before the load was over.
    is_given_up: bool,
    loaded: Option<Result<Vec<RecordBuffer>, Missed>>,
}

/// The requests of a load.
struct Reads {
    pages: Vec<Option<Pages>>,
    /// Memory behind the buffers that is not read.
    unused: Option<Piece>,
    left: usize,
    failed: Option<io::Error>,
    /// The load, until it ends.
    load: Option<PlacedLoad>,
}

/// The buffers of a record that was read and checked.
enum Checked {
    /// They are where they have been read to, with these lengths.
    InPlace(Vec<usize>),
    Copied(Vec<RecordBuffer>),
}

/// A load with the place of its record.
pub(super) struct PlacedLoad {
    state: Arc<LoadState>,
    place: Place,
    /// The offsets and the page counts of the requests: the header's, and the payload's.
    spans: Vec<(u64, usize)>,
    /// The number of pages of the buffers if the disk reads them to where they stay, and 0 otherwise.
    body: usize,
}

impl PlacedLoad {
    fn new(state: &Arc<LoadState>, place: Place) -> Self {
        let geometry = state.shared.geometry;
        let header = (geometry.cell_offset(place.runs[0].start), 1);
        let bytes =
            place.payload.checked_sub(state.id.payload_len()).filter(|bytes| bytes.is_multiple_of(PAGE));
        let body = bytes.map_or(0, |bytes| bytes / PAGE);
        let body = if body >= Spares::FEWEST_PAGES { body } else { 0 };
        let parts = [body, place.payload.div_ceil(PAGE) - body];
        let spans: Vec<_> = std::iter::once(header).chain(spans(geometry, &place.runs, parts, 0)).collect();
        state.requests.store(spans.len(), Ordering::Relaxed);
        Self { state: Arc::clone(state), place, spans, body }
    }

    /// Returns the number of requests to the disk.
    pub(super) fn requests(&self) -> usize {
        self.spans.len()
    }

    /// Reads the record's header and payload together. If nobody waits for the record any more, reads nothing.
    pub(super) fn read(self) {
        if self.state.ended.lock().is_given_up {
            return self.end(Err(Missed::Late));
        }
        let io = Arc::clone(&self.state.shared.io);
        let mut unused = self.state.shared.spares.piece(self.body, TAIL);
        let mut left = self.body;
        let mut requests = Vec::with_capacity(self.spans.len());
        for (index, &(offset, count)) in self.spans.iter().enumerate() {
            let piece = unused.take_if(|_| index > 0 && left > 0).map(|piece| piece.split(count));
            let pages = match piece {
                Some((piece, rest)) => {
                    left -= count;
                    unused = Some(rest);
                    Pages::of(piece)
                }
                None => io.pages(count),
            };
            requests.push(IoRequest { direction: Direction::Read, offset, pages });
        }
        let pages = requests.iter().map(|_| None).collect();
        let reads = Reads { pages, unused, left: requests.len(), failed: None, load: Some(self) };
        let reads = Mutex::new(reads);
        io.start(requests, Arc::new(move |end| reads.lock().ended(end)));
    }

    /// Returns the buffers of the record that was read to `pages`, if its bytes and its identity match. `unused` follows the
    /// memory of the buffers.
    fn check(&self, pages: Vec<Pages>, unused: Option<Piece>) -> Result<Vec<RecordBuffer>, Missed> {
        let spares = &self.state.shared.spares;
        let (body, rest): (Vec<Pages>, Vec<Pages>) = pages.into_iter().partition(Pages::is_piece);
        let pieces = body.into_iter().filter_map(Pages::into_piece).chain(unused);
        let body = Piece::join_all(pieces.collect()).pop();
        let read = body.as_ref().and_then(|body| body.bytes().get(..self.body * PAGE)).unwrap_or_default();
        match (self.check_parts(read, &rest), body) {
            (Ok(Checked::InPlace(lens)), Some(body)) => RecordBuffer::divide(body, &lens).map_err(|body| {
                spares.give([body]);
                Missed::Damaged
            }),
            (Ok(Checked::InPlace(_)), None) => Err(Missed::Damaged),
            (Ok(Checked::Copied(buffers)), body) => {
                spares.give(body);
                Ok(buffers)
            }
            (Err(missed), body) => {
                spares.give(body);
                Err(missed)
            }
        }
    }

    /// Checks the parts of a record: what was read to where buffers stay, and the header with the rest of the payload.
    fn check_parts(&self, body: &[u8], rest: &[Pages]) -> Result<Checked, Missed> {
        let Self { state, place, .. } = self;
        let (head, rest) = rest.split_first().ok_or(Missed::Damaged)?;
        let header = Header::read(&head.bytes()[..PAGE]).ok_or(Missed::Damaged)?;
        if header.sequence != place.sequence || header.payload_len() != Some(place.payload) {
            return Err(Missed::Damaged);
        }
        let rest = rest.iter().map(Pages::bytes);
        let missed = |fault| match fault {
            PayloadFault::Damaged => Missed::Damaged,
            PayloadFault::Differs => Missed::Differs,
        };
        // Another record can have this key, and other lengths.
        let is_all = !body.is_empty() && header.buffers.iter().sum::<usize>() == body.len();
        if is_all && RecordBuffer::can_divide(&header.buffers) {
            header.check_payload(&state.id, body, rest).map_err(missed)?;
            return Ok(Checked::InPlace(header.buffers));
        }
        let memory = |lens: &[usize]| state.shared.spares.buffers(lens);
        let buffers = header.read_payload(&state.id, std::iter::once(body).chain(rest), memory);
        buffers.map(Checked::Copied).map_err(missed)
    }

    /// Ends the load, and lets the next one begin.
    fn end(self, loaded: Result<Vec<RecordBuffer>, Missed>) {
        let Self { state, place, spans, .. } = self;
        let read = if loaded.is_ok() { place.payload } else { 0 };
        state.shared.rates.lock().end(read);
        state.shared.times.took(SlabStep::Load, place.since.elapsed());
        state.shared.release(&place, &state.id, &loaded);
        state.end(loaded);
        state.shared.turns.leave(spans.len());
    }
}

impl Reads {
    /// Takes the memory of a request that has ended. After the last one, checks the record.
    fn ended(&mut self, end: IoEnd) {
        self.pages[end.index] = Some(end.pages);
        self.failed = self.failed.take().or(end.result.err());
        self.left -= 1;
        if let Some(load) = &self.load {
            load.state.answered.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(load) = self.load.take_if(|_| self.left == 0) {
            let pages: Vec<Pages> = self.pages.drain(..).flatten().collect();
            // All memory is given back before the next load needs it.
            let loaded = match self.failed.take() {
                Some(error) => {
                    let pieces = pages.into_iter().filter_map(Pages::into_piece).chain(self.unused.take());
                    load.state.shared.spares.give(pieces);
                    Err(Missed::Failed(error))
                }
                None => load.check(pages, self.unused.take()),
            };
            load.end(loaded);
        }
    }
}

impl LoadState {
    fn kept(&self, buffers: Vec<RecordBuffer>) -> Kept {
        Kept { id: self.id.clone(), parent: self.parent, buffers }
    }

    fn end(&self, loaded: Result<Vec<RecordBuffer>, Missed>) {
        let mut ended = self.ended.lock();
        ended.is_over = true;
        if ended.is_given_up {
            self.shared.given_up.fetch_sub(self.bytes, Ordering::Relaxed);
            if let Ok(late) = loaded {
                self.shared.keep(self.kept(late));
            }
        } else {
            ended.loaded = Some(loaded);
        }
        drop(ended);
        self.changed.notify_all();
    }
}

/// A record that is being read.
struct Place {
    sequence: u64,
    payload: usize,
    runs: Vec<CellRun>,
    parent: Option<BlockKey>,
    /// The time when the load was started.
    since: Instant,
}

impl Shared {
    /// Returns the place of a record, which is not evicted until it is [released](Self::release).
    fn place(&self, id: &RecordId) -> Result<Place, Missed> {
        let mut state = self.state.lock();
        let entry = state.hold(&id.key).ok_or(Missed::Absent)?;
        let (sequence, payload, runs) = (entry.sequence, entry.payload, entry.runs.clone());
        Ok(Place { sequence, payload, runs, parent: entry.note.parent, since: Instant::now() })
    }

    /// Ends the reading of a record, which is removed if it cannot be used.
    fn release<T>(&self, place: &Place, id: &RecordId, loaded: &Result<T, Missed>) {
        let mut state = self.state.lock();
        let group = state.release(&id.key, place.sequence);
        match loaded {
            Err(Missed::Damaged | Missed::Failed(_)) => state.quarantine(&id.key, place.sequence),
            Err(Missed::Differs) => state.doubt(&id.key, place.sequence),
            Ok(_) | Err(_) => {}
        }
        if let Some(group) = group {
            state.settle(group);
        }
    }
}
