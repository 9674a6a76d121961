//! The file in which registered documents outlive the server.
//!
//! ```text
//! PUT ─► check ─► append a line, fdatasync ─► library ─► answer
//! start ─► read all lines ─► write the needed ones beside ─► fsync ─► rename ─► fsync the folder
//! ```
//!
//! - **What was answered is in the file.** A change is answered after its line has been synced.
//! - **What was refused is not.** The rest of a line that could not be written is cut off before the next one.
//! - **A crash leaves at most one torn line, the last one.** It was never answered. At the start, it is moved to a file
//!   beside the journal, whose name ends with `.torn`.
//! - **Nothing is cut off before it is elsewhere.** A torn line is on the disk in its own file before the journal loses it.
//! - **One server uses a file**, by a lock on a second file beside it, because the journal itself is replaced.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::warn;

mod disk;
mod entries;
mod line;
#[cfg(test)]
#[cfg(unix)]
mod power;

use disk::{FileIdentity, JournalFile};
use entries::{Entries, Span};
pub(crate) use line::{Change, Registration};
use line::{FirstLine, LineFault};

use crate::error::{Error, Result};
use crate::leisure::Place;

/// The size in bytes up to which a file is not written again for the lines that are no longer needed.
const SMALL: u64 = 1 << 20;

/// The number of bytes that a replacement is written in at once, at least.
const WRITTEN_AT_ONCE: usize = 1 << 16;

/// The most bytes of a first line.
const FIRST_LINE: u64 = 4096;

/// An open journal.
///
/// # Drop behaviour
/// Closes the file and gives up its lock.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: JournalFile,
    /// The bytes of the file that are whole lines.
    length: u64,
    /// True if the file may have more bytes, which a write or a crash has left.
    has_rest: bool,
    /// True if the folder may still name the file before this one after a crash.
    is_renamed: bool,
    /// The open file, with the bytes that this journal has left in it.
    left: FileIdentity,
    entries: Entries,
    /// The size from which the file is written again if half of it is not needed.
    compact_from: u64,
    _lock: Lock,
}

impl Journal {
    /// Opens a journal, or creates one.
    ///
    /// # Errors
    /// Returns [`Error::DocumentsInUse`] if another server uses the file, [`Error::DocumentsVersion`] and
    /// [`Error::NoDocuments`] for a file of another version or kind, [`Error::DocumentsLine`] for a damaged line other
    /// than the last one, and [`Error::Documents`] if the file cannot be read or created.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |source| Error::Documents { path: path.to_owned(), source };
        // A link stays a link when the file is replaced.
        let path = &behind_links(path);
        // Opening a pipe would wait for its writer.
        if fs::metadata(path).is_ok_and(|data| !data.is_file()) {
            return Err(Error::NoDocuments { path: path.clone() });
        }
        // Before anything is changed, in case the path is somebody else's file.
        if let Ok(file) = File::open(path) {
            let mut line = Vec::new();
            BufReader::new(file).take(FIRST_LINE).read_until(b'\n', &mut line).map_err(failed)?;
            FirstLine::check(&line, path)?;
        }
        let lock = lock(path)?;
        let file = JournalFile::open(path).map_err(failed)?;
        let left = file.identity().map_err(failed)?;
        let mut journal = Self {
            path: path.clone(),
            file,
            length: 0,
            has_rest: false,
            // The process before may have ended just after a replacement.
            is_renamed: true,
            left,
            entries: Entries::default(),
            compact_from: SMALL,
            _lock: lock,
        };
        if left.bytes == 0 {
            journal.compact().map_err(failed)?;
            return Ok(journal);
        }
        journal.read_lines()?;
        if journal.has_rest || journal.needed() < journal.length {
            journal.try_to_compact();
        }
        Ok(journal)
    }

    /// Reads all lines.
    fn read_lines(&mut self) -> Result<()> {
        let path = self.path.clone();
        let failed = |source| Error::Documents { path: path.clone(), source };
        let mut reader = BufReader::with_capacity(1 << 16, self.file.reader());
        let mut line = Vec::new();
        (&mut reader).take(FIRST_LINE).read_until(b'\n', &mut line).map_err(failed)?;
        FirstLine::check(&line, &path)?;
        // An editor may have left out the last end, which is written again.
        let mut missing = u64::from(!line.ends_with(b"\n"));
        self.length = line.len() as u64 + missing;
        for number in 2.. {
            line.clear();
            let bytes = reader.read_until(b'\n', &mut line).map_err(failed)? as u64;
            if bytes == 0 {
                break;
            }
            match Change::read(&line) {
                Ok(change) => {
                    missing = u64::from(!line.ends_with(b"\n"));
                    let span = Span { start: self.length, bytes: bytes + missing };
                    self.entries.apply(&change, span);
                    self.length += span.bytes;
                }
                Err(LineFault::Damaged(reason)) if reader.fill_buf().map_err(failed)?.is_empty() => {
                    let torn = beside(&path, "torn");
                    write_private(&torn, &line).map_err(failed)?;
                    warn!(
                        path = %path.display(),
                        line = number,
                        reason,
                        moved_to = %torn.display(),
                        "the last line of the registered documents was being written when the server ended, and is not used"
                    );
                    self.has_rest = true;
                    break;
                }
                Err(fault) => {
                    return Err(Error::DocumentsLine { path, line: number, reason: fault.reason() });
                }
            }
        }
        if missing > 0 {
            // Before the next line, whose end may reach the disk first.
            let mut write = || {
                self.check(self.left)?;
                self.file.write_at(self.length - missing, b"\n")?;
                self.file.sync()
            };
            write().map_err(failed)?;
            self.left.bytes = self.length;
        }
        Ok(())
    }

    /// Calls a function with all documents, in the order in which they were registered, or with the newest ones first.
    ///
    /// # Errors
    /// Returns [`Error::Documents`] if the file cannot be read.
    pub(crate) fn for_each(
        &mut self,
        newest_first: bool,
        mut work: impl FnMut(Registration<'static>),
    ) -> Result<()> {
        let mut spans = self.entries.in_order();
        if newest_first {
            spans.reverse();
        }
        for span in spans {
            let changed = |fault: LineFault| io::Error::new(io::ErrorKind::InvalidData, fault.reason());
            let change = self
                .file
                .read_at(span.start, span.bytes)
                .and_then(|line| Change::read(&line).map_err(changed));
            match change.map_err(|source| Error::Documents { path: self.path.clone(), source })? {
                Change::Registered(document) => work(document),
                Change::Removed { .. } => {}
            }
        }
        Ok(())
    }

    /// Writes a change to the file, and returns when it is on the disk. If it fails, the journal is unchanged.
    ///
    /// # Errors
    /// Returns the error from the system.
    pub(crate) fn append(&mut self, change: &Change<'_>) -> io::Result<()> {
        let line = change.written()?;
        self.check(self.left)?;
        self.write_line(line.as_bytes())?;
        let span = Span { start: self.length, bytes: line.len() as u64 };
        self.length += span.bytes;
        self.entries.apply(change, span);
        Ok(())
    }

    /// Returns an error unless the path leads to this file. Somebody else may have replaced it, cut it or made it longer.
    /// A change would lose what they have written, and what this server writes behind it or into a file without a name.
    fn check(&self, expected: FileIdentity) -> io::Result<()> {
        let path = self.path.display();
        let reason = match FileIdentity::of(&self.path) {
            Ok(found) if found == expected => return Ok(()),
            Ok(_) => format!("somebody has changed {path}"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => format!("somebody has removed {path}"),
            Err(error) => {
                return Err(io::Error::new(error.kind(), format!("cannot look at {path}: {error}")));
            }
        };
        let reason = format!("{reason} while this server uses it; restart the server to read it again");
        Err(io::Error::new(io::ErrorKind::InvalidData, reason))
    }

    fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        self.mend()?;
        let mut whole = self.left;
        whole.bytes = self.length + line.len() as u64;
        self.write(line)
            // Somebody may have given the path to another file during the write.
            .and_then(|()| self.check(whole))
            .inspect_err(|_| self.take_back(whole.bytes))?;
        self.left = whole;
        Ok(())
    }

    /// Cuts off a line that was refused, and would end at `end`.
    fn take_back(&mut self, end: u64) {
        let bytes = self.file.len().unwrap_or(self.length);
        if !(self.length..=end).contains(&bytes) {
            // Somebody else has cut the file or made it longer. It stays as they have left it.
            return;
        }
        (self.has_rest, self.left.bytes) = (true, bytes);
        // Nothing else waits for this: the next change tries again.
        if let Err(error) = self.mend() {
            warn!(%error, "cannot cut off a change of the registered documents that was not written whole");
        }
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        self.file.write_at(self.length, line)?;
        self.file.sync()
    }

    /// Removes what a failed write has left, and makes the last replacement of the file last.
    fn mend(&mut self) -> io::Result<()> {
        if self.has_rest {
            self.file.set_len(self.length)?;
            self.left.bytes = self.length;
            self.file.sync()?;
            self.has_rest = false;
        }
        if self.is_renamed {
            disk::sync_folder(&self.path)?;
            self.is_renamed = false;
        }
        Ok(())
    }

    /// Returns whether the file has a document, which may have more of them than the limits allow to load.
    pub(crate) fn has(&self, place: &Place) -> bool {
        self.entries.has(place)
    }

    /// Forgets documents that have expired at `now`, in milliseconds since 1970. Their lines are no longer needed.
    pub(crate) fn expire(&mut self, now: u64) {
        self.entries.expire(now);
    }

    /// Returns the bytes of the system prompts of a tenant's documents other than this one.
    pub(crate) fn system_bytes_beside(&self, place: &Place) -> usize {
        self.entries.system_bytes_beside(place)
    }

    /// Writes the file again without the lines that are no longer needed, if it is large and they are more than half of it.
    /// If that fails, the journal goes on with its file.
    pub(crate) fn compact_if_due(&mut self) {
        if self.length >= self.compact_from && self.length / 2 > self.needed() {
            self.try_to_compact();
        }
    }

    /// Returns the bytes of a file with the needed lines alone.
    fn needed(&self) -> u64 {
        FirstLine::written().len() as u64 + self.entries.bytes()
    }

    fn try_to_compact(&mut self) {
        match self.compact() {
            Ok(()) => self.compact_from = SMALL,
            Err(error) => {
                warn!(
                    path = %self.path.display(),
                    %error,
                    "cannot write the registered documents again without the lines that are no longer needed{}",
                    advice(&error)
                );
                self.compact_from = self.length + SMALL;
            }
        }
    }

    /// Replaces the file by one with the needed lines alone.
    fn compact(&mut self) -> io::Result<()> {
        self.check(self.left)?;
        let path = beside(&self.path, "new");
        let written = self.write_needed(&path).and_then(|file| {
            let left = file.identity()?;
            // Writing takes time, in which somebody may have changed the file.
            self.check(self.left)?;
            disk::rename(&path, &self.path).map(|()| (file, left))
        });
        let (file, left) = written.inspect_err(|_| {
            // What remains of it is written over the next time.
            let _ = disk::remove(&path);
        })?;
        (self.file, self.left) = (file, left);
        self.length = self.needed();
        self.has_rest = false;
        self.is_renamed = true;
        self.entries.move_together(FirstLine::written().len() as u64);
        self.mend()
    }

    /// Writes a file with the needed lines, and syncs it.
    fn write_needed(&mut self, path: &Path) -> io::Result<JournalFile> {
        let mut file = JournalFile::create(path)?;
        let mut lines = FirstLine::written().into_bytes();
        let mut length = 0;
        for span in self.entries.in_order() {
            let line = self.file.read_at(span.start, span.bytes)?;
            // Somebody may have changed the file under this server.
            Change::read(&line)
                .map_err(|fault| io::Error::new(io::ErrorKind::InvalidData, fault.reason()))?;
            lines.extend(line);
            if lines.len() >= WRITTEN_AT_ONCE {
                file.write_at(length, &lines)?;
                length += lines.len() as u64;
                lines.clear();
            }
        }
        file.write_at(length, &lines)?;
        file.sync()?;
        Ok(file)
    }
}

impl Entries {
    /// Applies a change, which stands in these bytes of the file.
    fn apply(&mut self, change: &Change<'_>, span: Span) {
        match change {
            Change::Registered(document) => self.register(document, span),
            Change::Removed { tenant, id } => {
                self.forget(&(tenant.as_deref().map(Arc::from), id.clone().into_owned()));
            }
        }
    }
}

/// Returns what helps if a file cannot be written again for this reason.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; free some space",
        _ => "",
    }
}

/// Writes a file that only its owner can read. It is on the disk when this function returns.
fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = JournalFile::create(path)?;
    file.write_at(0, bytes)?;
    file.sync()?;
    disk::sync_folder(path)
}

/// Returns the path behind links, also behind one that leads to no file yet.
fn behind_links(path: &Path) -> PathBuf {
    /// The most links that the system follows.
    const LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        match (path.canonicalize(), fs::read_link(&path)) {
            (Ok(whole), _) => return whole,
            (Err(_), Ok(target)) => path = path.with_file_name("").join(target),
            (Err(_), Err(_)) => break,
        }
    }
    path
}

/// Returns the path of a file beside the journal.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(ending);
    path.with_file_name(name)
}

/// A lock on a file until it is dropped.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    /// Unlocks the file. Closing it is not enough: a process that is starting holds a copy of the descriptor, and with
    /// it the lock, until it runs its program.
    fn drop(&mut self) {
        // A file that cannot be unlocked is unlocked when it is closed.
        let _ = self.0.unlock();
    }
}

/// Locks a journal for this server, by a file beside it.
fn lock(path: &Path) -> Result<Lock> {
    let failed = |source| Error::Documents { path: path.to_owned(), source };
    let file = disk::private(OpenOptions::new().write(true).create(true)).open(beside(path, "lock"));
    let file = file.map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(Lock(file)),
        Err(TryLockError::WouldBlock) => Err(Error::DocumentsInUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

#[cfg(test)]
mod tests;
