//! The threads that write records.
//!
//! Records are written in batches: first the payload of each record, then its header, and one sync for all of them. Only
//! then are they found. If no cells are open, a thread evicts records and writes a checkpoint first. If that opens no cells, it waits
//! for the batches of other threads, and tries again.

use std::collections::VecDeque;
use std::io;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::RwLockWriteGuard;

use super::flight::Taken;
use super::geometry::Geometry;
use super::memory::Kept;
use super::open::write;
use super::queue::batch_record;
use super::spares::TAIL;
use super::state::NoCells;
use super::table::Listed;
use super::{Group, Shared, SlabStep};
use crate::buffer::RecordBuffer;
use crate::digest::PayloadDigest;
use crate::io::{DiskIo, PAGE, Pages, Piece, Window, WriteGroup};
use crate::record::{CellRun, Header, Record, RecordNote};

/// The largest request in bytes. The last one of a record may have [a page](TAIL) more.
pub(super) const REQUEST: usize = 512 << 10;

/// A record with its place.
struct Placed {
    record: Record,
    /// The lengths of the buffers, which leave the record when it is written.
    lens: Vec<usize>,
    payload: usize,
    taken: Taken,
    created: u64,
    /// The digest of the record's identity.
    identity: u64,
    digest: u64,
    /// The buffers for host memory, if it keeps the record.
    copy: Vec<RecordBuffer>,
}

/// Returns the requests that cover a record's cells without its header, as offsets and page counts. The payload lies in
/// parts of memory with these page counts, and no request covers more than one of them. The last request of a part may
/// be `longer` than others by this number of pages.
pub(super) fn spans(
    geometry: Geometry,
    runs: &[CellRun],
    parts: impl IntoIterator<Item = usize>,
    longer: usize,
) -> Vec<(u64, usize)> {
    let mut places = runs.iter().enumerate().map(|(index, run)| {
        let header = usize::from(index == 0);
        let pages = run.count as usize * geometry.cell_pages as usize - header;
        (geometry.cell_offset(run.start) + (header * PAGE) as u64, pages)
    });
    let (mut offset, mut room) = (0, 0);
    let mut spans = Vec::new();
    for mut left in parts {
        while left > 0 {
            if room == 0 {
                let Some(next) = places.next() else { return spans };
                (offset, room) = next;
                continue;
            }
            let count = left.min(room);
            let count = if count <= REQUEST / PAGE + longer { count } else { REQUEST / PAGE };
            spans.push((offset, count));
            offset += (count * PAGE) as u64;
            (left, room) = (left - count, room - count);
        }
    }
    spans
}

/// Moves bytes to the first pages behind the last piece, if they are unused memory. Returns false if they are not.
fn append(pieces: &mut Vec<Piece>, unused: &mut Vec<Piece>, bytes: &[u8]) -> bool {
    let pages = bytes.len().div_ceil(PAGE);
    let follows = |rest: &mut Piece| {
        rest.pages() >= pages && pieces.last().is_some_and(|last| last.is_followed_by(rest))
    };
    let Some(rest) = unused.pop_if(follows) else { return false };
    let (mut tail, rest) = rest.split(pages);
    fill(tail.bytes_mut(), bytes);
    Piece::push(pieces, tail);
    unused.push(rest);
    true
}

/// Fills memory with bytes, followed by zeros.
fn fill(memory: &mut [u8], bytes: &[u8]) {
    let (filled, zeros) = memory.split_at_mut(bytes.len());
    filled.copy_from_slice(bytes);
    zeros.fill(0);
}

/// Returns the time in seconds since 1970.
fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Shared {
    /// Writes batches until the slab is closed and nothing is left to write. Several threads do so at once: one
    /// goes on while another one waits for the disk.
    pub(super) fn write_batches(&self) {
        loop {
            // One thread at a time, so that the numbers of the writes follow the order of the stores.
            let placing = self.placing.lock();
            let Some((number, batch)) = self.next_batch() else { return };
            let mut placed = Vec::new();
            let mut writing = self.writing.read();
            for record in batch {
                if self.queue.lock().is_given_up(number) {
                    break;
                }
                let payload = record.payload_len();
                let mut taken = self.state.lock().take(&record.note, payload);
                if matches!(taken, Err(NoCells::Closed)) {
                    taken = self.open_cells(&record.note, payload);
                }
                if matches!(taken, Err(NoCells::Closed | NoCells::InUse)) {
                    // Once nothing is being written, everything that nobody reads can leave.
                    self.write_batch(number, std::mem::take(&mut placed));
                    drop(writing);
                    let alone = self.writing.write();
                    taken = self.open_cells(&record.note, payload);
                    writing = RwLockWriteGuard::downgrade(alone);
                }
                match taken {
                    Ok(taken) => {
                        let (created, identity) = (seconds(), record.id.digest());
                        let lens = record.buffers.iter().map(|buffer| buffer.len()).collect();
                        let copy = Vec::new();
                        placed.push(Placed {
                            record,
                            lens,
                            payload,
                            taken,
                            created,
                            identity,
                            digest: 0,
                            copy,
                        });
                    }
                    Err(reason) => self.drop_record(number, &record, reason),
                }
            }
            drop(placing);
            self.write_batch(number, placed);
            drop(writing);
            self.queue.lock().end_batch(number);
            self.queue_changed.notify_all();
        }
    }

    /// Drops a record of a batch that gets no cells.
    fn drop_record(&self, number: u64, record: &Record, reason: NoCells) {
        let mut queue = self.queue.lock();
        let is_kept = queue.settle(number, &[batch_record(record)]);
        self.count(|counts| match reason {
            NoCells::Refused => counts.write_errors += 1,
            // What was given up is counted already.
            NoCells::Closed | NoCells::InUse | NoCells::NoRoom => counts.stores_dropped += u64::from(is_kept),
        });
    }

    /// Takes cells for a payload, if necessary after a checkpoint that opens some. The caller takes cells for nothing else
    /// in the meantime.
    fn open_cells(&self, note: &RecordNote, payload: usize) -> Result<Taken, NoCells> {
        let taken = self.state.lock().take(note, payload);
        if !matches!(taken, Err(NoCells::Closed)) {
            return taken;
        }
        if !self.state.lock().make_room(note, payload) {
            return Err(NoCells::Closed);
        }
        self.checkpoint(payload).map_err(|_| NoCells::Refused)?;
        self.state.lock().take(note, payload)
    }

    /// Writes the last checkpoint, after the threads that write have ended.
    pub(super) fn close(&self) {
        if self.checkpoint(0).is_err() {
            self.count(|counts| counts.write_errors += 1);
        }
    }

    /// Writes records and syncs. If that succeeds, and the batch has not been given up in the meantime, the records
    /// are found.
    fn write_batch(&self, number: u64, mut batch: Vec<Placed>) {
        if batch.is_empty() {
            return;
        }
        let (mut used, since) = (Vec::new(), Instant::now());
        let written = self.write_records(number, &mut batch, &mut used).and_then(|()| self.io.sync());
        self.times.took(SlabStep::Write, since.elapsed());
        let records: Vec<_> = batch.iter().map(|placed| (placed.record.id.key, placed.payload)).collect();
        let mut state = self.state.lock();
        // Both are locked, so that a record is always waiting or stored until it is dropped.
        let mut queue = self.queue.lock();
        let is_kept = queue.settle(number, &records);
        let mut orphans = 0;
        for Placed { record, payload, taken, created, identity, copy, .. } in batch {
            let note = record.note;
            // The parent may have left while this record was written.
            let is_orphan = !state.has_parent(&note) && !queue.waits(note.parent);
            orphans += u64::from(is_orphan && is_kept);
            if written.is_ok() && is_kept && !is_orphan {
                let (key, scope, uses, Taken { sequence, runs, .. }) = (record.id.key, self.scope, 0, taken);
                state.insert(Listed { key, scope, sequence, payload, note, created, identity, uses, runs });
                let left = self.memory.keep(Kept { id: record.id, parent: note.parent, buffers: copy });
                used.extend(left.into_iter().filter_map(RecordBuffer::into_piece));
            } else {
                state.give_back(Group::Own(note.account), taken);
            }
            used.extend(record.buffers.into_iter().filter_map(RecordBuffer::into_piece));
        }
        if written.is_err() || !is_kept {
            // Children that another thread has written before.
            state.remove_orphans(|parent| queue.waits(parent));
        }
        // Before anybody learns that nothing waits any more.
        self.count(|counts| {
            counts.stores_dropped += orphans;
            counts.write_errors += u64::from(written.is_err() && is_kept);
        });
        drop((state, queue));
        self.spares.give(used);
        self.queue_changed.notify_all();
    }

    /// Writes the payload of each record, and its header as soon as the payload is there. Goes on with the next payload
    /// in the meantime. Returns once the disk has ended everything. Adds memory that is no longer needed to `used`.
    fn write_records(&self, number: u64, batch: &mut [Placed], used: &mut Vec<Piece>) -> io::Result<()> {
        let is_given_up = || self.queue.lock().is_given_up(number);
        let window = Window::new(&*self.io);
        let headers = window.group();
        let start_header = |payload: &WriteGroup, placed: &Placed| {
            if window.wait_for(payload) && !is_given_up() {
                window.write(
                    &headers,
                    self.geometry.cell_offset(placed.taken.runs[0].start),
                    self.header(placed),
                );
            }
        };
        let mut payloads: VecDeque<(WriteGroup, usize)> = VecDeque::new();
        for index in 0..batch.len() {
            if is_given_up() {
                break;
            }
            payloads.push_back((self.start_payload(&window, &mut batch[index], used), index));
            let ended = payloads.iter().take_while(|(payload, _)| payload.has_ended()).count();
            for (payload, index) in payloads.drain(..ended) {
                start_header(&payload, &batch[index]);
            }
        }
        for (payload, index) in payloads {
            start_header(&payload, &batch[index]);
        }
        let (written, pieces) = window.finish();
        used.extend(pieces);
        if is_given_up() { Err(io::ErrorKind::TimedOut.into()) } else { written }
    }

    /// Starts to write a payload, and computes its digest. Returns the writes. Memory that a disk can write is not copied.
    fn start_payload(&self, window: &Window<'_>, placed: &mut Placed, used: &mut Vec<Piece>) -> WriteGroup {
        placed.copy = self.copy_of(&placed.record);
        let Placed { record, payload: bytes, taken, digest, .. } = placed;
        let writes = window.group();
        let mut computed = PayloadDigest::new();
        if record.fills_pages() {
            record.buffers.iter().for_each(|buffer| computed.add_buffer(buffer.digest()));
        }
        let Some((mut pieces, mut unused)) = record.take_pieces() else {
            let mut spans = spans(self.geometry, &taken.runs, [bytes.div_ceil(PAGE)], 0).into_iter();
            let mut offset = 0;
            *digest = record.write_payload(|full| {
                if let Some(full) = full {
                    window.write(&writes, offset, full);
                }
                let (next, count) = spans.next()?;
                offset = next;
                Some(window.pages(count))
            });
            return writes;
        };
        let mut tail = Vec::with_capacity(record.id.payload_len());
        record.id.each_part(|part| tail.extend_from_slice(part));
        computed.add_bytes(&tail);
        *digest = computed.value();
        // In a request of its own, the tail of a record of 2 MiB takes the disk a twelfth of the record's time.
        let mut rest = if append(&mut pieces, &mut unused, &tail) { &[][..] } else { &tail[..] };
        used.extend(unused);
        let parts = pieces.iter().map(Piece::pages).chain([rest.len().div_ceil(PAGE)]);
        let mut spans = spans(self.geometry, &taken.runs, parts, TAIL).into_iter();
        for mut piece in pieces {
            while piece.pages() > 0
                && let Some((offset, count)) = spans.next()
            {
                let (now, others) = piece.split(count);
                window.wait_for_turn();
                window.write(&writes, offset, Pages::of(now));
                piece = others;
            }
        }
        for (offset, count) in spans {
            let mut pages = window.pages(count);
            let (now, others) = rest.split_at(rest.len().min(count * PAGE));
            fill(pages.bytes_mut(), now);
            window.write(&writes, offset, pages);
            rest = others;
        }
        writes
    }

    /// Returns a copy of a record's buffers for host memory, or nothing if it has no room for them.
    fn copy_of(&self, record: &Record) -> Vec<RecordBuffer> {
        let lens: Vec<usize> = record.buffers.iter().map(|buffer| buffer.len()).collect();
        if !self.memory.has_room_for(lens.iter().sum()) {
            return Vec::new();
        }
        let mut copy = self.spares.buffers(&lens);
        copy.iter_mut().zip(&record.buffers).for_each(|(to, from)| to.copy_from_slice(from));
        copy
    }

    /// Returns the page with the header of a record.
    fn header(&self, placed: &Placed) -> Pages {
        let Placed { record, lens, taken, created, identity, digest, .. } = placed;
        let Taken { sequence, runs, .. } = taken;
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
            buffers: lens.clone(),
            digest: *digest,
            identity: *identity,
            runs: runs.clone(),
        };
        header.write(page.bytes_mut());
        page
    }

    /// Writes a checkpoint that opens cells for a payload. The caller guarantees that nobody takes cells in the meantime.
    fn checkpoint(&self, payload: usize) -> io::Result<()> {
        let next = self.state.lock().checkpoint(payload);
        let offset = self.geometry.table_offset(next.table.generation);
        let written = write(&*self.io, offset, next.table.pages()).and_then(|()| self.io.sync());
        let mut state = self.state.lock();
        match &written {
            Ok(()) => state.opened(&next),
            Err(_) => state.not_opened(),
        }
        written
    }
}
