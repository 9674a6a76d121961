//! A file of records that one process writes and another one reads, such as the cache of one prompt.
//!
//! ```text
//!   header page ─ payload pages     header page ─ payload pages     …
//! ```
//!
//! Headers and payloads are as in a [slab](crate::slab). A file appears under its name when it is complete.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kvcore::BlockKey;

use crate::error::{Error, Result};
use crate::io::{PAGE, Pages};
use crate::record::{Header, Record};

/// The number of pages that are written together.
const WRITTEN: usize = 64;

/// Writes records to a file.
///
/// # Drop behaviour
/// Unless [`finish`](Self::finish) was called, what was written is removed, and an older file of the same name stays.
#[derive(Debug)]
pub struct RecordWriter {
    file: File,
    /// The file under its final name.
    path: PathBuf,
    /// The file as long as it is incomplete; `None` once it has its final name.
    partial: Option<PathBuf>,
    scope: BlockKey,
    records: u64,
    /// The number of bytes that were written.
    bytes: u64,
}

impl RecordWriter {
    /// Starts a file. `scope` is the key of the model, tokenizer and format; see
    /// [`Slab::open`](crate::Slab::open).
    ///
    /// # Errors
    /// - Returns [`Error::NotAFile`] if the path is a folder, a pipe or a device.
    /// - Returns [`Error::File`] if the file system refuses.
    pub fn create(path: &Path, scope: BlockKey) -> Result<Self> {
        if fs::metadata(path).is_ok_and(|data| !data.is_file()) {
            return Err(Error::NotAFile { path: path.to_owned() });
        }
        // A link stays a link.
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        let partial = path.with_file_name(name);
        let file = File::create(&partial).map_err(Error::at("cannot create", &partial))?;
        Ok(Self { file, path: path.to_owned(), partial: Some(partial), scope, records: 0, bytes: 0 })
    }

    /// Writes a record.
    ///
    /// # Errors
    /// Returns [`Error::File`] if the file system refuses, as on a full disk.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        self.try_write(record).map_err(Error::at("cannot write", &self.path))
    }

    fn try_write(&mut self, record: &Record) -> io::Result<()> {
        let start = self.bytes;
        self.file.seek(SeekFrom::Start(start + PAGE as u64))?;
        let payload = record.payload_len();
        let mut left = payload.div_ceil(PAGE);
        let mut written = Ok(());
        let file = &mut self.file;
        let digest = record.write_payload(|full| {
            if let (Some(full), Ok(())) = (full, &written) {
                written = file.write_all(full.bytes());
            }
            let count = left.min(WRITTEN);
            left -= count;
            (count > 0).then(|| Pages::new(count))
        });
        written?;
        let header = Header {
            sequence: self.records,
            key: record.id.key,
            scope: self.scope,
            note: record.note,
            created: 0,
            stored_start: record.id.stored_start,
            tokens: record.id.tokens.len(),
            label: record.id.label.len(),
            buffers: record.buffers.iter().map(|buffer| buffer.len()).collect(),
            digest,
            identity: record.id.digest(),
            runs: Vec::new(),
        };
        let mut page = Pages::new(1);
        header.write(page.bytes_mut());
        self.file.seek(SeekFrom::Start(start))?;
        self.file.write_all(page.bytes())?;
        self.records += 1;
        self.bytes = start + ((1 + payload.div_ceil(PAGE)) * PAGE) as u64;
        Ok(())
    }

    /// Gives the file its name. Returns its size in bytes.
    ///
    /// # Errors
    /// Returns [`Error::File`] if the file system refuses. An older file of the same name stays then.
    pub fn finish(mut self) -> Result<u64> {
        let Some(partial) = &self.partial else { return Ok(self.bytes) };
        self.file.sync_all().map_err(Error::at("cannot write", partial))?;
        fs::rename(partial, &self.path).map_err(Error::at("cannot create", &self.path))?;
        self.partial = None;
        Ok(self.bytes)
    }
}

impl Drop for RecordWriter {
    fn drop(&mut self) {
        if let Some(partial) = self.partial.take() {
            // Nobody else knows the file.
            let _ = fs::remove_file(partial);
        }
    }
}

/// Reads the records of a file, one after another. After an error, nothing more is read.
#[derive(Debug)]
pub struct RecordReader {
    file: File,
    path: PathBuf,
    scope: BlockKey,
    at: u64,
    size: u64,
}

impl RecordReader {
    /// Opens a file that a [`RecordWriter`] has written.
    ///
    /// # Errors
    /// - Returns [`Error::NotAFile`] if the path is a folder, a pipe or a device.
    /// - Returns [`Error::File`] if the file system refuses.
    pub fn open(path: &Path, scope: BlockKey) -> Result<Self> {
        let metadata = fs::metadata(path).map_err(Error::at("cannot open", path))?;
        if !metadata.is_file() {
            return Err(Error::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(Error::at("cannot open", path))?;
        Ok(Self { file, path: path.to_owned(), scope, at: 0, size: metadata.len() })
    }

    /// Reads the next record.
    fn read(&mut self) -> Result<Record> {
        let (path, offset) = (self.path.clone(), self.at);
        let mut page = Pages::new(1);
        let header = if self.fill(&mut page)? { Header::read(page.bytes()) } else { None };
        let header = match header {
            Some(header) => header,
            None if offset == 0 && !Header::starts(page.bytes()) => return Err(Error::NoRecords { path }),
            None => return Err(Error::DamagedFile { path, offset }),
        };
        if header.scope != self.scope {
            return Err(Error::OtherScope { path });
        }
        // A length is checked before memory is allocated for it.
        let left = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX) / PAGE;
        let pages = header.payload_len().map(|len| len.div_ceil(PAGE)).filter(|pages| *pages < left);
        let Some(mut payload) = pages.map(Pages::new) else {
            return Err(Error::DamagedFile { path, offset });
        };
        self.at += (PAGE + payload.bytes().len()) as u64;
        let record = if self.fill(&mut payload)? { header.read_record(payload.bytes()) } else { None };
        record.ok_or(Error::DamagedFile { path, offset })
    }

    /// Fills pages from the file. Returns false if the file ends before.
    fn fill(&mut self, pages: &mut Pages) -> Result<bool> {
        match self.file.read_exact(pages.bytes_mut()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(Error::at("cannot read", &self.path)(error)),
        }
    }
}

impl Iterator for RecordReader {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Result<Record>> {
        if self.at >= self.size {
            return None;
        }
        let read = self.read();
        if read.is_err() {
            self.at = self.size;
        }
        Some(read)
    }
}
