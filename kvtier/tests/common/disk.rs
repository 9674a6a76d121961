//! Disks that fail, hang and remember what they were asked to do, in memory or over a file.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvcore::BlockKey;
use kvtier::io::{Direction, IoEnd, IoRequest, OnEnd, PAGE, Pages};
use kvtier::{DiskIo, FileIo, IoWay, Slab, SlabConfig};
use parking_lot::Mutex;

use super::{scope, ways};

/// The size of the slabs on these disks.
pub(crate) const LIMIT: u64 = 1 << 20;

/// What happened to a disk.
#[derive(Clone)]
pub(crate) enum Event {
    /// A write was started.
    Write { number: usize, offset: u64, bytes: Vec<u8> },
    /// The write with this number ended.
    Ended(usize),
    /// A sync was started. It covers the writes that had ended.
    Sync,
    /// The records with smaller numbers are committed.
    Committed(u32),
}

/// A disk that does what a test asks of it, over another disk.
#[derive(Debug, Clone)]
pub(crate) struct TestDisk {
    below: Arc<dyn DiskIo>,
    state: Arc<Mutex<TestState>>,
}

#[derive(Default)]
pub(crate) struct TestState {
    pub(crate) events: Vec<Event>,
    /// The kind of requests that fail.
    pub(crate) failing: Option<Direction>,
    /// The kind of requests that end short of their last page.
    pub(crate) short: Option<Direction>,
    /// The requests that the disk has not answered, if it hangs.
    hanging: Option<Vec<(usize, IoRequest, OnEnd)>>,
    /// The number of writes and syncs after which all writes and syncs hang.
    pub(crate) hanging_after: Option<usize>,
    /// True if the disk does not answer when it is resized.
    pub(crate) hanging_resize: bool,
    /// True if syncs fail. What was written is on the disk all the same.
    pub(crate) failing_syncs: bool,
    /// The length of writes that fail although others do not.
    pub(crate) failing_length: Option<usize>,
    /// The length of a write that hangs although later ones do not.
    pub(crate) holding: Option<usize>,
    held: Vec<(usize, IoRequest, OnEnd)>,
    /// The ends that the disk has not reported, if it is late.
    late: Option<Vec<(IoEnd, OnEnd)>>,
    writes: usize,
}

impl TestState {
    /// Counts a write or a sync. Returns whether it hangs.
    fn counts(&mut self) -> bool {
        let left = self.hanging_after.as_mut();
        left.is_some_and(|left| {
            let hangs = *left == 0;
            *left = left.saturating_sub(1);
            hangs
        })
    }
}

impl std::fmt::Debug for TestState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} events", self.events.len())
    }
}

impl TestDisk {
    fn over(below: Arc<dyn DiskIo>) -> Self {
        Self { below, state: Arc::default() }
    }

    /// A disk in memory.
    pub(crate) fn in_memory(bytes: Vec<u8>) -> Self {
        Self::over(Arc::new(MemoryDisk(Mutex::new(bytes))))
    }

    /// A file with one way of I/O.
    pub(crate) fn of_file(path: &Path, way: IoWay) -> Self {
        Self::over(Arc::new(FileIo::open(path, Some(way)).unwrap()))
    }

    pub(crate) fn open(&self) -> kvtier::Result<Slab> {
        self.open_with(SlabConfig::default())
    }

    /// Opens a slab of the tests' size that gives up writes after `write_deadline`.
    pub(crate) fn open_within(&self, write_deadline: Duration) -> Slab {
        self.open_with(SlabConfig { write_deadline, ..SlabConfig::default() }).unwrap()
    }

    /// Opens a slab of the tests' size with settings.
    pub(crate) fn open_with(&self, config: SlabConfig) -> kvtier::Result<Slab> {
        self.open_for(scope(), config)
    }

    /// Opens a slab of the tests' size for a model, with settings.
    pub(crate) fn open_for(&self, scope: BlockKey, config: SlabConfig) -> kvtier::Result<Slab> {
        let config = SlabConfig { limit: LIMIT, cell_bytes: 8 << 10, queue_bytes: 4 << 20, ..config };
        Slab::over(Box::new(self.clone()), Path::new("test"), scope, config, None)
    }

    pub(crate) fn state(&self) -> parking_lot::MutexGuard<'_, TestState> {
        self.state.lock()
    }

    /// Stops answering requests, and does not even start them.
    pub(crate) fn hang(&self) {
        self.state().hanging = Some(Vec::new());
    }

    /// Carries out requests, but keeps their ends and their memory.
    pub(crate) fn be_late(&self) {
        self.state().late = Some(Vec::new());
    }

    /// Returns the number of slabs, requests and tests that have this disk.
    pub(crate) fn holders(&self) -> usize {
        Arc::strong_count(&self.state)
    }

    /// Returns the number of requests that the disk has not even started.
    pub(crate) fn unanswered(&self) -> usize {
        self.state().hanging.as_ref().map_or(0, Vec::len)
    }

    /// Returns the number of ends that are kept.
    pub(crate) fn kept(&self) -> usize {
        self.state().late.as_ref().map_or(0, Vec::len)
    }

    /// Returns the number of writes that hang although later ones did not.
    pub(crate) fn held(&self) -> usize {
        self.state().held.len()
    }

    /// Answers the last of the writes that hang although later ones did not.
    pub(crate) fn release(&self) {
        let held = self.state().held.pop();
        if let Some((index, request, on_end)) = held {
            self.start(vec![request], Arc::new(move |end| on_end(IoEnd { index, ..end })));
        }
    }

    /// Returns the bytes of a disk that answers.
    pub(crate) fn image(&self) -> Vec<u8> {
        let pages = Pages::new(self.size().unwrap() as usize / PAGE);
        let (sender, read) = std::sync::mpsc::channel();
        let request = IoRequest { direction: Direction::Read, offset: 0, pages };
        self.below.start(vec![request], Arc::new(move |end| sender.send(end).unwrap()));
        let end = read.recv().unwrap();
        end.result.unwrap();
        end.pages.bytes().to_vec()
    }

    /// Answers the requests that hang, and lets those hang that are started in the meantime.
    pub(crate) fn hang_next(&self) {
        let hanging = self.state().hanging.replace(Vec::new()).unwrap_or_default();
        for (index, request, on_end) in hanging {
            self.below.start(vec![request], Arc::new(move |end| on_end(IoEnd { index, ..end })));
        }
    }

    /// Answers the requests that hang or are late, and later ones.
    pub(crate) fn go_on(&self) {
        let mut state = self.state();
        state.hanging_after = None;
        state.hanging_resize = false;
        let hanging = state.hanging.take().unwrap_or_default();
        drop(state);
        for (index, request, on_end) in hanging {
            self.start(vec![request], Arc::new(move |end| on_end(IoEnd { index, ..end })));
        }
        let late = self.state().late.take().unwrap_or_default();
        for (end, on_end) in late {
            on_end(end);
        }
    }
}

impl DiskIo for TestDisk {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        for (index, request) in requests.into_iter().enumerate() {
            let mut state = self.state();
            let hangs = request.direction == Direction::Write && state.counts();
            if hangs || state.hanging.is_some() && state.hanging_after.is_none() {
                let hanging = state.hanging.get_or_insert_default();
                hanging.push((index, request, Arc::clone(&on_end)));
                continue;
            }
            let len = request.pages.bytes().len();
            if request.direction == Direction::Write && state.holding.take_if(|held| *held == len).is_some() {
                state.held.push((index, request, Arc::clone(&on_end)));
                continue;
            }
            let IoRequest { direction, offset, ref pages } = request;
            let fails = direction == Direction::Write && state.failing_length == Some(len);
            if fails || state.failing == Some(direction) {
                drop(state);
                on_end(IoEnd { index, pages: request.pages, result: Err(io::Error::other("broken")) });
                continue;
            }
            let is_short = state.short == Some(direction);
            let number = state.writes;
            if direction == Direction::Write {
                state.writes += 1;
                state.events.push(Event::Write { number, offset, bytes: pages.bytes().to_vec() });
            }
            drop(state);
            let (state, on_end) = (Arc::clone(&self.state), Arc::clone(&on_end));
            let ended = move |end: IoEnd| {
                let mut end = IoEnd { index, ..end };
                let mut state = state.lock();
                if direction == Direction::Write {
                    state.events.push(Event::Ended(number));
                }
                if is_short {
                    end.result = Err(io::ErrorKind::UnexpectedEof.into());
                    if direction == Direction::Read {
                        let from = end.pages.bytes().len() / 2;
                        end.pages.bytes_mut()[from..].fill(0xee);
                    }
                }
                if let Some(late) = &mut state.late {
                    return late.push((end, Arc::clone(&on_end)));
                }
                drop(state);
                on_end(end);
            };
            self.below.start(vec![request], Arc::new(ended));
        }
    }

    fn pages(&self, count: usize) -> Pages {
        self.below.pages(count)
    }

    fn size(&self) -> io::Result<u64> {
        self.below.size()
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        while self.state().hanging_resize {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.below.resize(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let mut hangs = self.state().counts();
        while hangs {
            std::thread::sleep(Duration::from_millis(1));
            hangs = self.state().hanging_after.is_some();
        }
        if self.state().failing_syncs {
            return Err(io::Error::other("broken"));
        }
        self.state().events.push(Event::Sync);
        self.below.sync()
    }
}

/// A disk in memory.
struct MemoryDisk(Mutex<Vec<u8>>);

impl std::fmt::Debug for MemoryDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MemoryDisk")
    }
}

impl DiskIo for MemoryDisk {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        for (index, IoRequest { direction, offset, mut pages }) in requests.into_iter().enumerate() {
            let mut disk = self.0.lock();
            let start = offset as usize;
            let place = start..start + pages.bytes().len();
            let result = if place.end > disk.len() {
                Err(io::ErrorKind::UnexpectedEof.into())
            } else if direction == Direction::Read {
                pages.bytes_mut().copy_from_slice(&disk[place]);
                Ok(())
            } else {
                disk[place].copy_from_slice(pages.bytes());
                Ok(())
            };
            drop(disk);
            on_end(IoEnd { index, pages, result });
        }
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.lock().len() as u64)
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.0.lock().resize(bytes as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Calls a test with a disk in memory, and with a file in each way of I/O that works here.
pub(crate) fn on_each_disk(test: impl Fn(TestDisk)) {
    test(TestDisk::in_memory(Vec::new()));
    for way in ways() {
        let folder = tempfile::tempdir().unwrap();
        println!("with {way}:");
        test(TestDisk::of_file(&folder.path().join("file"), way));
    }
}

/// Numbers that only depend on a seed.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}
