//! The threads that write records.
//!
//! Records are written in batches: first all payloads, then all headers, then one sync. Only then are they
//! found. If no cells are open, a thread evicts records and writes a checkpoint first. No other thread has a
//! batch at that time.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use kvcore::BlockKey;
use parking_lot::{RwLockReadGuard, RwLockWriteGuard};

use super::geometry::Geometry;
use super::open::write;
use super::table::Listed;
use super::{Shared, SlabState};
use crate::io::{Direction, IoRequest, PAGE, Pages, Window, run};
use crate::record::{CellRun, Header, Record};

/// The largest request in bytes.
pub(super) const REQUEST: usize = 256 << 10;

/// A record with its place.
struct Placed {
    record: Record,
    runs: Vec<CellRun>,
    sequence: u64,
    created: u64,
    /// The digest of the record's identity.
    identity: u64,
    digest: u64,
}

/// Returns the requests that cover the first `bytes` of a record's cells without its header, as offsets and
/// page counts.
pub(super) fn spans(geometry: Geometry, runs: &[CellRun], payload: usize) -> Vec<(u64, usize)> {
    let mut left = payload.div_ceil(PAGE);
    let mut spans = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let header = usize::from(index == 0);
        let mut offset = geometry.cell_offset(run.start) + (header * PAGE) as u64;
        let mut pages = (run.count as usize * geometry.cell_pages as usize - header).min(left);
        left -= pages;
        while pages > 0 {
            let count = pages.min(REQUEST / PAGE);
            spans.push((offset, count));
            offset += (count * PAGE) as u64;
            pages -= count;
        }
    }
    spans
}

/// Returns the time in seconds since 1970.
fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Shared {
    /// Writes batches until the slab is closed and nothing is left to write. Several threads do so at once: one
    /// copies while another one waits for the disk.
    pub(super) fn write_batches(&self) {
        loop {
            // One thread at a time, so that the numbers of the writes follow the order of the stores.
            let placing = self.placing.lock();
            let Some(batch) = self.next_batch() else { return };
            let keys: Vec<BlockKey> = batch.iter().map(|record| record.id.key).collect();
            let bytes = batch.iter().map(Record::payload_len).sum();
            let mut placed = Vec::new();
            let mut writing = self.writing.read();
            for record in batch {
                let payload = record.payload_len();
                let mut runs = self.state.lock().take(payload);
                if runs.is_none() {
                    // A checkpoint lists written records, and forgets the cells of others.
                    self.write_batch(std::mem::take(&mut placed));
                    drop(writing);
                    (runs, writing) = self.open_cells(payload);
                }
                if let Some(runs) = runs {
                    let mut state = self.state.lock();
                    state.sequence += 1;
                    let (sequence, created, identity) = (state.sequence, seconds(), record.id.digest());
                    placed.push(Placed { record, runs, sequence, created, identity, digest: 0 });
                }
            }
            drop(placing);
            self.write_batch(placed);
            drop(writing);
            self.end_batch(&keys, bytes);
        }
    }

    /// Takes cells for a payload after a checkpoint has opened some. Returns no cells if there is no room, or if
    /// the disk refuses the checkpoint.
    fn open_cells(&self, payload: usize) -> (Option<Vec<CellRun>>, RwLockReadGuard<'_, ()>) {
        // Waits for the batches of other threads, so that the checkpoint lists them.
        let alone = self.writing.write();
        let mut runs = self.state.lock().take(payload);
        if runs.is_none() {
            let room = self.state.lock().make_room(payload);
            if room && self.checkpoint(payload).is_err() {
                self.count(|counts| counts.write_errors += 1);
            } else {
                runs = if room { self.state.lock().take(payload) } else { None };
                if runs.is_none() {
                    self.count(|counts| counts.stores_dropped += 1);
                }
            }
        }
        (runs, RwLockWriteGuard::downgrade(alone))
    }

    /// Writes the last checkpoint, after the threads that write have ended.
    pub(super) fn close(&self) {
        if self.checkpoint(0).is_err() {
            self.count(|counts| counts.write_errors += 1);
        }
    }

    /// Writes the payloads, then the headers, and syncs. If that succeeds, the records are found.
    fn write_batch(&self, mut batch: Vec<Placed>) {
        if batch.is_empty() {
            return;
        }
        let written = self.write_payloads(&mut batch).and_then(|()| self.write_headers(&batch));
        let written = written.and_then(|()| self.io.sync());
        let (mut state, mut orphans) = (self.state.lock(), 0);
        for Placed { record, runs, sequence, created, identity, .. } in &mut batch {
            let (runs, payload, note) = (std::mem::take(runs), record.payload_len(), record.note);
            // The parent may have left while this record was written.
            let is_orphan = !state.has_parent(&note) && !self.waits(note.parent);
            orphans += u64::from(is_orphan);
            if written.is_ok() && !is_orphan {
                let (key, scope) = (record.id.key, self.scope);
                let (sequence, created, identity) = (*sequence, *created, *identity);
                state.insert(Listed { key, scope, sequence, payload, note, created, identity, runs });
            } else {
                state.give_back(runs);
            }
        }
        drop(state);
        self.count(|counts| counts.stores_dropped += orphans);
        if written.is_err() {
            self.count(|counts| counts.write_errors += 1);
        }
    }

    fn write_payloads(&self, batch: &mut [Placed]) -> io::Result<()> {
        let window = Window::new(self.io.as_ref());
        for Placed { record, runs, digest, .. } in batch {
            let mut spans = spans(self.geometry, runs, record.payload_len()).into_iter();
            let mut offset = 0;
            *digest = record.write_payload(|full| {
                if let Some(full) = full {
                    window.write(offset, full);
                }
                let (next, count) = spans.next()?;
                offset = next;
                Some(window.pages(count))
            });
        }
        window.finish()
    }

    fn write_headers(&self, batch: &[Placed]) -> io::Result<()> {
        let request = |placed: &Placed| {
            let Placed { record, runs, sequence, created, identity, digest } = placed;
            let mut page = Pages::new(1);
            let header = Header {
                sequence: *sequence,
                key: record.id.key,
                scope: self.scope,
                note: record.note,
                created: *created,
                stored_start: record.id.stored_start,
                tokens: record.id.tokens.len(),
                label: record.id.label.len(),
                buffers: record.buffers.iter().map(Vec::len).collect(),
                digest: *digest,
                identity: *identity,
                runs: runs.clone(),
            };
            header.write(page.bytes_mut());
            let offset = self.geometry.cell_offset(runs[0].start);
            IoRequest { direction: Direction::Write, offset, pages: page }
        };
        self.run(batch.iter().map(request).collect())
    }

    fn run(&self, requests: Vec<IoRequest>) -> io::Result<()> {
        run(self.io.as_ref(), requests, None).map(drop).map_err(|fault| match fault {
            crate::io::RunFault::Failed(error) => error,
            crate::io::RunFault::Late => io::ErrorKind::TimedOut.into(),
        })
    }

    /// Writes a checkpoint that opens cells for a payload. The caller guarantees that no batch is being written.
    fn checkpoint(&self, payload: usize) -> io::Result<()> {
        let table = self.state.lock().checkpoint(payload);
        write(self.io.as_ref(), self.geometry.table_offset(table.generation), table.pages())?;
        self.io.sync()?;
        SlabState::opened(&mut self.state.lock(), &table);
        Ok(())
    }
}
