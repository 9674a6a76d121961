//! The record of a piece: its contents, and everything that must match before they are used.
//!
//! A record is the same on every carrier. On a disk, its first page is a header:
//!
//! ```text
//!   page 0     magic, version, sequence number, key, scope, stored start, lengths, digest, note, places, checksum
//!   page 1…    the buffers, the label and the tokens, one after another; the last page is filled with zeros
//! ```
//!
//! All numbers are little-endian. The checksum covers the header, and the digest covers everything after it. Buffers
//! come first, so that a disk can read and write their pages without a copy.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use kvcore::BlockKey;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::buffer::RecordBuffer;
use crate::digest::PayloadDigest;
use crate::io::{PAGE, Pages, Piece};

/// The identity of a record: a reader names it, and a record with another identity is never used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordId {
    /// The key, which covers everything that the contents depend on.
    pub key: BlockKey,
    /// The tokens.
    pub tokens: Arc<[u32]>,
    /// The position that the first key was rotated to.
    pub stored_start: i64,
    /// The layout of the buffers in words, such as the shape, the format and the form of keys. A record with
    /// another label is never read as this one's.
    pub label: Arc<str>,
}

impl RecordId {
    /// Returns a digest of everything but the key. Records with the same key and another digest differ.
    pub(crate) fn digest(&self) -> u64 {
        let mut digest = Xxh3::new();
        digest.update(&self.stored_start.to_le_bytes());
        digest.update(&(self.label.len() as u64).to_le_bytes());
        digest.update(self.label.as_bytes());
        for token in &*self.tokens {
            digest.update(&token.to_le_bytes());
        }
        digest.digest()
    }

    /// Returns the number of bytes of the label and the tokens.
    pub(crate) fn payload_len(&self) -> usize {
        self.label.len() + 4 * self.tokens.len()
    }

    /// Calls a function with the bytes of the label and the tokens, one part after another.
    pub(crate) fn each_part(&self, mut part: impl FnMut(&[u8])) {
        part(self.label.as_bytes());
        for tokens in self.tokens.chunks(1024) {
            let mut bytes = [0; 4096];
            for (slot, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                slot.copy_from_slice(&token.to_le_bytes());
            }
            part(&bytes[..4 * tokens.len()]);
        }
    }
}

/// The contents of a piece, with its identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The identity.
    pub id: RecordId,
    /// What a carrier knows about the record without reading its contents.
    pub note: RecordNote,
    /// The buffers: K and V, each followed by its scales if there are any.
    pub buffers: Vec<RecordBuffer>,
}

/// The account of a tenant: a number that follows from a key of the tenant, and does not tell the tenant's name.
/// Prints as hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct AccountId(u64);

impl AccountId {
    /// The account of the default tenant.
    pub const DEFAULT: Self = Self(0);

    /// Returns the account of the tenant whose keys derive from `root`.
    pub fn of(root: &BlockKey) -> Self {
        let digest = xxh3_64(root.derive("kvtier account v1").as_bytes());
        Self(digest.max(1))
    }

    /// Returns the account that files contain as this number.
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the number that files contain.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }
}

impl fmt::Display for AccountId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What a carrier knows about a record without reading its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecordNote {
    /// The key of the record without which this one cannot be found, such as the block before it in a prompt.
    /// It stays at least as long as this record.
    pub parent: Option<BlockKey>,
    /// The time that computing the contents took, or zero if it is not known.
    pub cost: Duration,
    /// A digest of the tokens that does not depend on the model or on other tokens, which tells why another
    /// key was not found; see [`text_of`](Self::text_of). `None` if others must not learn that these tokens
    /// are stored.
    pub text: Option<NonZeroU64>,
    /// The account of the tenant that the record belongs to.
    pub account: AccountId,
}

impl RecordNote {
    /// Returns the digest of a record's tokens.
    pub fn text_of(tokens: &[u32]) -> Option<NonZeroU64> {
        let mut digest = Xxh3::new();
        for token in tokens {
            digest.update(&token.to_le_bytes());
        }
        NonZeroU64::new(digest.digest().max(1))
    }

    /// Returns the cost in nanoseconds, as files contain it.
    pub(crate) fn nanoseconds(&self) -> u64 {
        self.cost.as_nanos().min(u128::from(u64::MAX)) as u64
    }

    /// Returns the note that files contain as these numbers. A parent of zeros is none.
    pub(crate) fn of_file(parent: BlockKey, nanoseconds: u64, text: u64, account: u64) -> Self {
        Self {
            parent: (*parent.as_bytes() != [0; 32]).then_some(parent),
            cost: Duration::from_nanos(nanoseconds),
            text: NonZeroU64::new(text),
            account: AccountId::from_bits(account),
        }
    }

    /// Returns the parent's bytes, as files contain them.
    pub(crate) fn parent_bytes(&self) -> [u8; 32] {
        self.parent.map_or([0; 32], |parent| *parent.as_bytes())
    }
}

impl Record {
    /// Creates a record with an empty note.
    pub fn new(id: RecordId, buffers: Vec<impl Into<RecordBuffer>>) -> Self {
        Self { id, note: RecordNote::default(), buffers: buffers.into_iter().map(Into::into).collect() }
    }

    /// Returns the number of bytes that follow the header.
    pub(crate) fn payload_len(&self) -> usize {
        self.id.payload_len() + self.buffers.iter().map(|buffer| buffer.len()).sum::<usize>()
    }

    /// Returns whether a disk can write the memory of the buffers as it is.
    pub(crate) fn fills_pages(&self) -> bool {
        !self.buffers.is_empty() && self.buffers.iter().all(RecordBuffer::fills_pages)
    }

    /// Takes the memory of the buffers if a disk can write it as it is: whole pages, of which none is used in part.
    /// Returns it in order, followed by memory behind the ends of buffers.
    pub(crate) fn take_pieces(&mut self) -> Option<(Vec<Piece>, Vec<Piece>)> {
        if !self.fills_pages() {
            return None;
        }
        let (mut pieces, mut unused): (Vec<Piece>, Vec<Piece>) = (Vec::new(), Vec::new());
        for buffer in self.buffers.drain(..) {
            let pages = buffer.len() / PAGE;
            let (piece, rest) = buffer.into_piece()?.split(pages);
            unused.extend(Some(rest).filter(|rest| rest.pages() > 0));
            Piece::push(&mut pieces, piece);
        }
        Some((pieces, unused))
    }

    /// Writes the payload to pieces of memory, one after another, and fills the rest of the last one with zeros.
    /// `next` takes a piece that is full, and returns the next one. Returns the digest of the payload.
    pub(crate) fn write_payload(&self, next: impl FnMut(Option<Pages>) -> Option<Pages>) -> u64 {
        let mut out = Scattered { next, now: None, filled: 0 };
        let mut digest = PayloadDigest::new();
        for buffer in &self.buffers {
            let mut computed = Xxh3::new();
            let known = buffer.known_digest();
            for step in buffer.chunks(STEP) {
                if known.is_none() {
                    computed.update(step);
                }
                out.put(step);
            }
            digest.add_buffer(known.unwrap_or_else(|| computed.digest()));
        }
        self.id.each_part(|bytes| {
            digest.add_bytes(bytes);
            out.put(bytes);
        });
        out.end();
        digest.value()
    }
}

/// The number of bytes that are digested and then copied, so that the copy finds them in the processor's first
/// cache. The other order, or a larger number, takes longer.
const STEP: usize = 16 << 10;

/// Memory in pieces, filled from the start.
struct Scattered<F> {
    next: F,
    now: Option<Pages>,
    /// The number of bytes of the piece that have been filled.
    filled: usize,
}

impl<F: FnMut(Option<Pages>) -> Option<Pages>> Scattered<F> {
    fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.now.as_ref().is_none_or(|now| self.filled == now.bytes().len()) {
                self.now = (self.next)(self.now.take());
                self.filled = 0;
            }
            let Some(now) = &mut self.now else { return };
            let room = &mut now.bytes_mut()[self.filled..];
            let (head, tail) = bytes.split_at(bytes.len().min(room.len()));
            room[..head.len()].copy_from_slice(head);
            self.filled += head.len();
            bytes = tail;
        }
    }

    fn end(mut self) {
        if let Some(mut now) = self.now.take() {
            now.bytes_mut()[self.filled..].fill(0);
            (self.next)(Some(now));
        }
    }
}

/// The first bytes of every header.
const MAGIC: [u8; 8] = *b"KVRECORD";

/// The version of the header and of the payload. A record of another version is never read.
const VERSION: u32 = 4;

/// The length of the fields in front of the lists.
const FIXED: usize = 192;

/// The decoded header of a record on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// The number of this write. A larger number is a later write.
    pub(crate) sequence: u64,
    pub(crate) key: BlockKey,
    /// The key of the model, tokenizer and format that wrote the record.
    pub(crate) scope: BlockKey,
    pub(crate) note: RecordNote,
    /// The time of the write, in seconds since 1970.
    pub(crate) created: u64,
    pub(crate) stored_start: i64,
    pub(crate) tokens: usize,
    pub(crate) label: usize,
    /// The lengths of the buffers.
    pub(crate) buffers: Vec<usize>,
    /// The digest of the payload.
    pub(crate) digest: u64,
    /// The [digest](RecordId::digest) of the identity.
    pub(crate) identity: u64,
    /// The cells of the record in order; the first one starts with this header.
    pub(crate) runs: Vec<CellRun>,
}

/// Cells that follow one another in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CellRun {
    pub(crate) start: u32,
    pub(crate) count: u32,
}

impl Header {
    /// The number of buffers and runs that a header can list.
    pub(crate) const MOST_LISTED: usize = (PAGE - FIXED - 8) / 8;

    /// Writes the header to a page.
    pub(crate) fn write(&self, page: &mut [u8]) {
        page.fill(0);
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            page[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&(self.label as u32).to_le_bytes());
        put(&self.sequence.to_le_bytes());
        put(self.key.as_bytes());
        put(self.scope.as_bytes());
        put(&self.stored_start.to_le_bytes());
        put(&(self.tokens as u64).to_le_bytes());
        put(&self.digest.to_le_bytes());
        put(&(self.buffers.len() as u32).to_le_bytes());
        put(&(self.runs.len() as u32).to_le_bytes());
        put(&self.identity.to_le_bytes());
        put(&self.note.nanoseconds().to_le_bytes());
        put(&self.note.text.map_or(0, NonZeroU64::get).to_le_bytes());
        put(&self.note.parent_bytes());
        put(&self.note.account.bits().to_le_bytes());
        put(&self.created.to_le_bytes());
        for &buffer in &self.buffers {
            put(&(buffer as u64).to_le_bytes());
        }
        for run in &self.runs {
            put(&run.start.to_le_bytes());
            put(&run.count.to_le_bytes());
        }
        let checksum = xxh3_64(&page[..PAGE - 8]);
        page[PAGE - 8..].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Returns whether a page is the start of a header, of any version and perhaps damaged.
    pub(crate) fn starts(page: &[u8]) -> bool {
        page.starts_with(&MAGIC)
    }

    /// Reads a header, or returns `None` if the page is not one of this version or is damaged.
    pub(crate) fn read(page: &[u8]) -> Option<Self> {
        let (body, checksum) = page.get(..PAGE)?.split_at(PAGE - 8);
        if body[..8] != MAGIC || checksum != xxh3_64(body).to_le_bytes() {
            return None;
        }
        let mut at = 8;
        let mut take = |len: usize| {
            let bytes = body.get(at..at + len);
            at += len;
            bytes
        };
        let word = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
        let half = |bytes: &[u8]| bytes.try_into().map(u32::from_le_bytes).ok();
        if half(take(4)?)? != VERSION {
            return None;
        }
        let label = half(take(4)?)? as usize;
        let sequence = word(take(8)?)?;
        let key = BlockKey::from_bytes(take(32)?.try_into().ok()?);
        let scope = BlockKey::from_bytes(take(32)?.try_into().ok()?);
        let stored_start = word(take(8)?)? as i64;
        let tokens = word(take(8)?)? as usize;
        let digest = word(take(8)?)?;
        let buffers = half(take(4)?)? as usize;
        let runs = half(take(4)?)? as usize;
        let identity = word(take(8)?)?;
        let (cost, text) = (word(take(8)?)?, word(take(8)?)?);
        let parent = BlockKey::from_bytes(take(32)?.try_into().ok()?);
        let note = RecordNote::of_file(parent, cost, text, word(take(8)?)?);
        let created = word(take(8)?)?;
        if buffers.checked_add(runs)? > Self::MOST_LISTED {
            return None;
        }
        let buffers = (0..buffers).map(|_| Some(word(take(8)?)? as usize)).collect::<Option<Vec<_>>>()?;
        let run = |_| Some(CellRun { start: half(take(4)?)?, count: half(take(4)?)? });
        let runs = (0..runs).map(run).collect::<Option<Vec<_>>>()?;
        Some(Self {
            sequence,
            key,
            scope,
            note,
            created,
            stored_start,
            tokens,
            label,
            buffers,
            digest,
            identity,
            runs,
        })
    }

    /// Returns the number of bytes that follow the header, or `None` if the lengths are absurd.
    pub(crate) fn payload_len(&self) -> Option<usize> {
        let fixed = self.tokens.checked_mul(4)?.checked_add(self.label)?;
        self.buffers.iter().try_fold(fixed, |sum, &len| sum.checked_add(len))
    }

    /// Reads the payload from pieces of memory. Returns the buffers if the digest matches and the payload has
    /// the identity `id`. `memory` returns buffers of these lengths, whose contents are replaced.
    pub(crate) fn read_payload<'a>(
        &self,
        id: &RecordId,
        from: impl Iterator<Item = &'a [u8]>,
        memory: impl FnOnce(&[usize]) -> Vec<RecordBuffer>,
    ) -> Result<Vec<RecordBuffer>, PayloadFault> {
        let payload = self.payload(from, memory).ok_or(PayloadFault::Damaged)?;
        self.compare(id, &[payload.label, payload.tokens].concat())?;
        Ok(payload.buffers)
    }

    /// Checks a payload: the digest, and the identity against `id`. The payload consists of `body`, and of the pieces of
    /// memory that begin with the label.
    pub(crate) fn check_payload<'a>(
        &self,
        id: &RecordId,
        body: &[u8],
        tail: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), PayloadFault> {
        let mut rest =
            self.payload_len().and_then(|len| len.checked_sub(body.len())).ok_or(PayloadFault::Damaged)?;
        let mut read = Vec::with_capacity(rest);
        for piece in tail {
            read.extend_from_slice(&piece[..rest.min(piece.len())]);
            rest -= rest.min(piece.len());
        }
        let mut digest = PayloadDigest::new();
        let mut buffers = body;
        for &len in &self.buffers {
            let buffer = buffers.split_off(..len).ok_or(PayloadFault::Damaged)?;
            digest.add_buffer(xxh3_64(buffer));
        }
        digest.add_bytes(buffers);
        digest.add_bytes(&read);
        if rest > 0 || digest.value() != self.digest {
            return Err(PayloadFault::Damaged);
        }
        self.compare(id, &read)
    }

    /// Compares everything but the buffers. `tail` contains the label and the tokens.
    fn compare(&self, id: &RecordId, tail: &[u8]) -> Result<(), PayloadFault> {
        let mut rest = tail;
        let mut same = self.key == id.key
            && self.stored_start == id.stored_start
            && (self.label, self.tokens) == (id.label.len(), id.tokens.len());
        id.each_part(|part| match rest.strip_prefix(part) {
            Some(others) => rest = others,
            None => same = false,
        });
        if same && rest.is_empty() { Ok(()) } else { Err(PayloadFault::Differs) }
    }

    /// Reads the record whose payload this is, if the payload is undamaged.
    pub(crate) fn read_record(&self, payload: &[u8]) -> Option<Record> {
        let Payload { buffers, label, tokens } =
            self.payload(std::iter::once(payload), RecordBuffer::zeroed)?;
        let (tokens, _) = tokens.as_chunks::<4>();
        let id = RecordId {
            key: self.key,
            tokens: tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
            stored_start: self.stored_start,
            label: String::from_utf8(label).ok()?.into(),
        };
        Some(Record { note: self.note, ..Record::new(id, buffers) })
    }

    /// Returns the label if the payload in pieces of memory is undamaged.
    pub(crate) fn read_label<'a>(&self, from: impl Iterator<Item = &'a [u8]>) -> Option<String> {
        String::from_utf8(self.payload(from, RecordBuffer::zeroed)?.label).ok()
    }

    /// Reads the payload from pieces of memory, if its digest matches.
    fn payload<'a>(
        &self,
        from: impl Iterator<Item = &'a [u8]>,
        memory: impl FnOnce(&[usize]) -> Vec<RecordBuffer>,
    ) -> Option<Payload> {
        let mut source = Gathered { rest: from, now: &[] };
        let mut buffers = memory(&self.buffers);
        let mut digest = PayloadDigest::new();
        for buffer in &mut buffers {
            buffer.fill_runs(STEP, |_, step| source.fill(step).ok_or(())).ok()?;
            digest.add_buffer(buffer.digest());
        }
        let mut behind = |len| {
            let mut bytes = vec![0; len];
            source.fill(&mut bytes)?;
            digest.add_bytes(&bytes);
            Some(bytes)
        };
        let (label, tokens) = (behind(self.label)?, behind(self.tokens.checked_mul(4)?)?);
        (digest.value() == self.digest).then_some(Payload { buffers, label, tokens })
    }
}

/// The payload of a record.
struct Payload {
    buffers: Vec<RecordBuffer>,
    label: Vec<u8>,
    tokens: Vec<u8>,
}

/// The reason why a payload is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PayloadFault {
    /// The bytes are not those that were written.
    Damaged,
    /// It is another record's payload.
    Differs,
}

/// Memory in pieces, read from the start.
struct Gathered<'a, I> {
    rest: I,
    now: &'a [u8],
}

impl<'a, I: Iterator<Item = &'a [u8]>> Gathered<'a, I> {
    /// Fills memory with the next bytes. Returns `None` if there are too few.
    fn fill(&mut self, mut out: &mut [u8]) -> Option<()> {
        while !out.is_empty() {
            if self.now.is_empty() {
                self.now = self.rest.next()?;
            }
            let count = out.len().min(self.now.len());
            let (head, tail) = self.now.split_at(count);
            let (filled, rest) = out.split_at_mut(count);
            filled.copy_from_slice(head);
            (self.now, out) = (tail, rest);
        }
        Some(())
    }
}
