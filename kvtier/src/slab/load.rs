//! Loads records, and checks everything before it is used.

use std::io;
use std::time::Instant;

use super::write::spans;
use super::{Shared, Slab};
use crate::io::{Direction, IoRequest, PAGE, Pages, RunFault, run};
use crate::record::{CellRun, Header, PayloadFault, RecordId};

/// The buffers of a record that was found.
pub type Found = Vec<Vec<u8>>;

/// The reason why a record was not loaded.
#[derive(Debug)]
pub enum Missed {
    /// No record has this key.
    Absent,
    /// The record with this key has other tokens, another stored start or another label.
    Differs,
    /// The bytes on the disk are not those that were written. The record is removed.
    Damaged,
    /// The disk had not answered at the deadline.
    Late,
    /// The disk refused. The record is removed.
    Failed(io::Error),
}

impl std::fmt::Display for Missed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Absent => f.write_str("it is not on the disk"),
            Self::Differs => f.write_str("the record on the disk belongs to other tokens or another format"),
            Self::Damaged => f.write_str("the record on the disk is damaged"),
            Self::Late => f.write_str("the disk did not answer in time"),
            Self::Failed(error) => write!(f, "the disk failed: {error}"),
        }
    }
}

impl Slab {
    /// Loads a record. After `deadline`, the call gives up, and the disk goes on with memory of its own.
    ///
    /// # Errors
    /// Returns the reason if there is no such record, or if it must not be used.
    pub fn load(&self, id: &RecordId, deadline: Instant) -> Result<Found, Missed> {
        let shared = &*self.shared;
        let Some(place) = shared.begin_load(id) else {
            shared.count(|counts| counts.misses += 1);
            return Err(Missed::Absent);
        };
        let loaded = shared.read(&place, id, deadline);
        let mut state = shared.state.lock();
        if let Some(entry) = state.get_mut(&id.key).filter(|entry| entry.sequence == place.sequence) {
            entry.readers -= 1;
        }
        match loaded {
            Err(Missed::Damaged | Missed::Failed(_)) => state.quarantine(&id.key, place.sequence),
            Err(Missed::Differs) => state.doubt(&id.key, place.sequence),
            Ok(_) | Err(Missed::Absent | Missed::Late) => {}
        }
        drop(state);
        shared.count(|counts| match &loaded {
            Ok(_) => counts.hits += 1,
            Err(missed) => {
                counts.misses += 1;
                match missed {
                    Missed::Absent => {}
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

/// A record that is being read.
struct Place {
    sequence: u64,
    payload: usize,
    runs: Vec<CellRun>,
}

impl Shared {
    fn begin_load(&self, id: &RecordId) -> Option<Place> {
        let mut state = self.state.lock();
        let entry = state.touch(&id.key)?;
        entry.readers += 1;
        Some(Place { sequence: entry.sequence, payload: entry.payload, runs: entry.runs.clone() })
    }

    /// Reads a record's header and payload together.
    fn read(&self, place: &Place, id: &RecordId, deadline: Instant) -> Result<Found, Missed> {
        let header = (self.geometry.cell_offset(place.runs[0].start), 1);
        let spans = std::iter::once(header).chain(spans(self, &place.runs, place.payload));
        let request =
            |(offset, count)| IoRequest { direction: Direction::Read, offset, pages: self.io.pages(count) };
        let pages = run(self.io.as_ref(), spans.map(request).collect(), Some(deadline));
        let pages = pages.map_err(|fault| match fault {
            RunFault::Late => Missed::Late,
            RunFault::Failed(error) => Missed::Failed(error),
        })?;
        let (head, rest) = pages.split_first().ok_or(Missed::Damaged)?;
        let header = Header::read(&head.bytes()[..PAGE]).ok_or(Missed::Damaged)?;
        if header.sequence != place.sequence || header.payload_len() != Some(place.payload) {
            return Err(Missed::Damaged);
        }
        header.read_payload(id, rest.iter().map(Pages::bytes)).map_err(|fault| match fault {
            PayloadFault::Damaged => Missed::Damaged,
            PayloadFault::Differs => Missed::Differs,
        })
    }
}
