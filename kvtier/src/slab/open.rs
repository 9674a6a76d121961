//! Opens a slab's file: reads the newest checkpoint, and finds the records that were written after it.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvcore::BlockKey;

use super::geometry::Geometry;
use super::state::SlabState;
use super::table::{Listed, Table};
use super::{Lock, Slab, SlabConfig};
use crate::error::{Error, Result};
use crate::io::{Direction, DiskIo, FileIo, IoRequest, PAGE, Pages, RunFault, Watched, run};
use crate::record::{CellRun, Header};

/// The number of headers that are read at once.
const HEADERS: usize = 256;

/// Opens or creates the files of a folder: that of the records, and the lock, which it takes. If the system has not
/// answered at the deadline, gives up: a thread closes the files when it has.
pub(super) fn files_within(folder: &Path, config: SlabConfig) -> Result<(FileIo, Lock)> {
    let (since, name) = (Instant::now(), folder.to_owned());
    let left = || config.write_deadline.saturating_sub(since.elapsed());
    within("cannot open", folder, left, move || {
        if name.exists() && !name.is_dir() {
            return Err(Error::NotAFolder { path: name });
        }
        fs::create_dir_all(&name).map_err(Error::at("cannot create the folder", &name))?;
        let lock = lock(&name)?;
        let path = name.join(Slab::FILE);
        let io = FileIo::open(&path, config.io).map_err(Error::at("cannot open", &path))?;
        Ok((io, lock))
    })
}

/// Locks the folder for this process, by a file of its own.
fn lock(folder: &Path) -> Result<Lock> {
    let path = folder.join("lock");
    // Opening a pipe would wait for its reader.
    if fs::metadata(&path).is_ok_and(|data| !data.is_file()) {
        return Err(Error::NotAFile { path });
    }
    let file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(Error::at("cannot open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(Lock(Some(file))),
        Err(fs::TryLockError::WouldBlock) => Err(Error::InUse { path: folder.to_owned() }),
        Err(fs::TryLockError::Error(error)) => Err(Error::at("cannot lock", &path)(error)),
    }
}

/// Opens or creates the file of a slab, as [`opened`] does. If the disk has not ended a request at its deadline,
/// gives up: a thread holds the file and its lock until the disk has answered.
pub(super) fn open_within(
    io: &Arc<Watched>,
    path: &Path,
    scope: BlockKey,
    config: SlabConfig,
    lock: &Arc<Lock>,
) -> Result<(Geometry, SlabState)> {
    let (file, lock, name) = (Arc::clone(io), Arc::clone(lock), path.to_owned());
    let left = || {
        let waited = io.oldest().map(|since| since.elapsed());
        config.write_deadline.saturating_sub(waited.unwrap_or_default())
    };
    within("cannot read", path, left, move || {
        let opened = opened(&file, &name, scope, config);
        drop((file, lock));
        opened
    })
}

/// Does `work` on a thread, and returns its result. Gives up as soon as no time is left: the thread goes on, and
/// drops its result.
fn within<T: Send + 'static>(
    action: &'static str,
    path: &Path,
    left: impl Fn() -> Duration,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (ends, ended) = mpsc::channel();
    let work = move || {
        // Nobody listens if the disk was late.
        let _ = ends.send(work());
    };
    let thread = std::thread::Builder::new().name("kvtier-open".to_owned()).spawn(work);
    let thread = thread.map_err(Error::at("cannot start a thread that opens", path))?;
    loop {
        let left = left();
        if left.is_zero() {
            let late = io::Error::new(io::ErrorKind::TimedOut, "the disk does not answer");
            return Err(Error::at(action, path)(late));
        }
        match ended.recv_timeout(left) {
            Ok(result) => return result,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                // Only a panic ends the thread without an answer.
                let panic = thread.join().err().unwrap_or_else(|| Box::new("the thread ended"));
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// Opens or creates the file of a slab: keeps what fits the settings, or creates the file anew.
fn opened(io: &Watched, path: &Path, scope: BlockKey, config: SlabConfig) -> Result<(Geometry, SlabState)> {
    let wanted = Geometry::within(config.limit, config.cell_bytes)?;
    let known = geometry(io).map_err(Error::at("cannot read", path))?;
    let size = io.size().map_err(Error::at("cannot read", path))?;
    // A file that was cut short has lost cells, so it is created anew.
    let known = known.filter(|known| known.file_bytes() <= size);
    // Tables have room for a few times the first size. A file that is still much smaller than its limit is
    // not worth keeping.
    let kept = known.and_then(|known| known.grown(config.limit));
    let kept = kept.filter(|kept| 2 * kept.file_bytes() >= wanted.file_bytes());
    let geometry = kept.unwrap_or(wanted);
    // Nothing is given up before there is room for what replaces it.
    let grown = if geometry.file_bytes() > size { io.resize(geometry.file_bytes()) } else { Ok(()) };
    if let Err(full) = grown {
        // What was reserved before the disk was full is of no use. The first error is the one to report.
        let _ = io.resize(size);
        return Err(Error::at("cannot reserve the disk tier's limit in", path)(full));
    }
    let emptied = if kept.is_some() { Ok(()) } else { io.resize(0) };
    let resized = emptied.and_then(|()| io.resize(geometry.file_bytes()));
    resized.map_err(Error::at("cannot reserve the disk tier's limit in", path))?;
    let prepare = if kept.is_none() { format } else { superblock };
    prepare(io, geometry).map_err(Error::at("cannot write", path))?;
    let state = SlabState::new(geometry, config.policy, Some(scope));
    let state = restore(io, geometry, state).map_err(Error::at("cannot read", path))?;
    Ok((geometry, state))
}

/// Reads `count` pages.
fn read(io: &dyn DiskIo, offset: u64, count: usize) -> io::Result<Pages> {
    let request = IoRequest { direction: Direction::Read, offset, pages: Pages::new(count) };
    Ok(all(run(io, vec![request], None))?.remove(0))
}

/// Writes pages.
pub(super) fn write(io: &dyn DiskIo, offset: u64, pages: Pages) -> io::Result<()> {
    let request = IoRequest { direction: Direction::Write, offset, pages };
    all(run(io, vec![request], None)).map(drop)
}

/// Returns the memory of requests without a deadline.
fn all(ended: Result<Vec<Pages>, RunFault>) -> io::Result<Vec<Pages>> {
    ended.map_err(|fault| match fault {
        RunFault::Failed(error) => error,
        RunFault::Late => io::ErrorKind::TimedOut.into(),
    })
}

/// Reads the superblock, or returns `None` if the file has none of this version.
pub(super) fn geometry(io: &dyn DiskIo) -> io::Result<Option<Geometry>> {
    match read(io, 0, 1) {
        Ok(pages) => Ok(Geometry::read(pages.bytes())),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes the superblock, and erases both tables.
pub(super) fn format(io: &dyn DiskIo, geometry: Geometry) -> io::Result<()> {
    for table in [0, 1] {
        write(io, geometry.table_offset(table), Pages::new(1))?;
    }
    superblock(io, geometry)
}

/// Writes the superblock.
pub(super) fn superblock(io: &dyn DiskIo, geometry: Geometry) -> io::Result<()> {
    let mut page = Pages::new(1);
    geometry.write(page.bytes_mut());
    write(io, 0, page)?;
    io.sync()
}

/// Restores the state of a slab from its newest intact checkpoint and the headers that are newer, into a state
/// without records.
pub(super) fn restore(io: &dyn DiskIo, geometry: Geometry, mut state: SlabState) -> io::Result<SlabState> {
    let mut newest = None::<Table>;
    for table in [0, 1] {
        let table = read_table(io, geometry, table)?;
        newest = newest.into_iter().chain(table).max_by_key(|table| table.generation);
    }
    let table = newest.unwrap_or_default();
    let (open, since) = (table.open.clone(), table.sequence);
    state.restore(table);
    let cells: HashSet<u32> = open.iter().copied().filter(|&run| geometry.has(run)).flat_map(each).collect();
    let mut found = headers(io, geometry, &cells)?;
    // Only what was written since the checkpoint can be in its open cells.
    found.retain(|header| {
        header.sequence > since
            && header.runs.iter().copied().flat_map(each).all(|cell| cells.contains(&cell))
    });
    found.sort_by_key(|header| header.sequence);
    for header in found {
        if let Some(payload) = header.payload_len() {
            let Header { key, scope, sequence, note, created, identity, runs, .. } = header;
            let uses = 0;
            state.adopt(Listed { key, scope, sequence, payload, note, created, identity, uses, runs });
        }
    }
    state.remove_orphans(|_| false);
    state.restored();
    Ok(state)
}

/// Returns the cells of a run.
fn each(run: CellRun) -> std::ops::Range<u32> {
    run.start..run.start.saturating_add(run.count)
}

/// Reads one of the two tables, or returns `None` if it is not intact.
fn read_table(io: &dyn DiskIo, geometry: Geometry, table: u64) -> io::Result<Option<Table>> {
    let offset = geometry.table_offset(table);
    let head = read(io, offset, 1)?;
    let Some((len, _)) = Table::head(head.bytes()) else { return Ok(None) };
    let count = len.div_ceil(PAGE);
    if count > geometry.table_pages as usize {
        return Ok(None);
    }
    Ok(Table::read(read(io, offset, count)?.bytes()))
}

/// Reads the first page of each cell, and returns the headers among them that start with their own cell.
fn headers(io: &dyn DiskIo, geometry: Geometry, cells: &HashSet<u32>) -> io::Result<Vec<Header>> {
    let mut cells: Vec<u32> = cells.iter().copied().collect();
    cells.sort_unstable();
    let mut found = Vec::new();
    for some in cells.chunks(HEADERS) {
        let request = |&cell: &u32| IoRequest {
            direction: Direction::Read,
            offset: geometry.cell_offset(cell),
            pages: Pages::new(1),
        };
        let pages = all(run(io, some.iter().map(request).collect(), None))?;
        let read = pages.iter().zip(some).filter_map(|(page, &cell)| {
            Header::read(page.bytes())
                .filter(|header| header.runs.first().is_some_and(|run| run.start == cell))
        });
        found.extend(read);
    }
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_system_that_does_not_answer_is_an_error() {
        let (go_on, waits) = mpsc::channel::<()>();
        let (dropped, ended) = mpsc::channel::<()>();
        let since = Instant::now();
        let left = || Duration::from_millis(50).saturating_sub(since.elapsed());
        let late = within("cannot open", Path::new("folder"), left, move || {
            waits.recv().unwrap();
            Ok(dropped)
        });
        let late = late.unwrap_err().to_string();
        assert!(late.contains("cannot open folder: the disk does not answer"), "{late}");
        // The thread drops what it has opened as soon as the system answers.
        go_on.send(()).unwrap();
        assert_eq!(ended.recv(), Err(mpsc::RecvError));
        let answer = within("cannot open", Path::new("folder"), || Duration::from_secs(20), || Ok(7));
        assert_eq!(answer.unwrap(), 7);
    }
}
